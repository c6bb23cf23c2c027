"""The verbs of device time: the sync mode, deferred rows and `finalize`, and the epoch that their starts count from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..taxonomy import BrickId, SyncMode
from .deferred import ATTRIBUTIONS, Attribution, Deferred
from .descriptors import count_argument
from .lane import TAG_DEFERRED
from .marks import NO_MARK, no_mark
from .measured import Verbs
from .recorder import Recorder
from .verbs import OMITTED, count_arguments, count_tags

if TYPE_CHECKING:
    from .marks import DeviceTimeline, Mark


class DeviceVerbs(Verbs):
    """What a user calls to say when device time is taken."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._epoch_ns = recorder.clock.now()

    def set_sync_mode(self, mode: SyncMode | str) -> None:
        """Say when device time is taken, for what begins from now on.

        Raises:
            TypeError, ValueError: `mode` is no `SyncMode` and not the value of one.
        """
        self._recorder.device.set_mode(SyncMode.of(mode))

    def sync_mode(self) -> SyncMode:
        """The mode in force; `SyncMode.Deferred` unless another was set."""
        return self._recorder.device.mode

    def reset_epoch(self) -> None:
        """Let `elapsed_ns` count from now; rows that are pending keep the epoch that they were recorded in."""
        self._epoch_ns = self._recorder.clock.now()

    def elapsed_ns(self, *, stream: object = None) -> int:
        """Nanoseconds since the profiler was made or `reset_epoch` was called: the clock of `record_deferred`.

        Where device time is taken, a call also marks the stream, so that a deferred brick that starts at the time
        returned starts at that mark.

        Args:
            stream: the CUDA stream that the work will be queued on; default the profiler's.

        Raises:
            TypeError: `stream` is no stream.
        """
        recorder = self._recorder
        now = recorder.clock.now()
        if self._enabled:
            timeline, mark = self._mark_of(stream)
            if timeline is not None:
                recorder.deferred.begin(mark, now, mark(), timeline)
        return now - self._epoch_ns

    def _mark_of(self, stream: object) -> tuple[DeviceTimeline | None, Mark]:
        device = self._recorder.device
        timeline = device.active if stream is None else device.look(stream)
        if timeline is None:
            return None, no_mark
        return timeline, timeline.default if stream is None else timeline.mark_of(stream)

    def record_deferred(self, brick: BrickId, start_ns: int, elements: int = OMITTED, *, stream: object = None) -> None:
        """Record a known brick whose end only `finalize` will tell.

        On the device a brick begins where `elapsed_ns` returned its start, so call that before the launch, and this
        before or after it. A start of another origin begins at this call, which then belongs before the launch.

        Args:
            start_ns: when the brick began, on the clock of `elapsed_ns`.
            elements: elements processed.
            stream: the CUDA stream that the work is queued on; default the profiler's.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        if not isinstance(brick, BrickId):
            raise TypeError(
                f"brick must be a BrickId, not {type(brick).__name__}; record_deferred_dynamic() takes names"
            )
        self._record_deferred(brick, start_ns, elements, stream)

    def record_deferred_dynamic(
        self, name: str, start_ns: int, elements: int = OMITTED, *, stream: object = None
    ) -> None:
        """The same for a brick by its name, a known or a dynamic one.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        self._record_deferred(name, start_ns, elements, stream)

    def _record_deferred(self, brick: BrickId | str, start_ns: int, elements: int, stream: object) -> None:
        recorder = self._recorder
        start = self._epoch_ns + count_argument("start_ns", start_ns)
        tags = count_tags(*count_arguments(elements, OMITTED, OMITTED))
        site = self._bare_site(brick, argument="name")
        called_ns = recorder.clock.now()
        timeline, mark = self._mark_of(stream)
        token = recorder.deferred.begun(mark, start) if timeline is not None else NO_MARK
        order_ns = called_ns if token == NO_MARK else start
        if token == NO_MARK:
            token = mark()
        of: object = mark
        if timeline is not None and token >= 0:
            of = timeline.stream(token)
        row = Deferred(start, order_ns, of, token)
        lane = recorder.current.get().opened()
        record = lane.record
        with record.lock:
            number = len(record.deferred)
            record.deferred.append(row)
        lane.complete((site, start, ~site, start, *tags, TAG_DEFERRED, number))
        recorder.close_if_loose(lane)
        recorder.deferred.add(row, timeline)

    def has_pending(self) -> bool:
        """Whether deferred rows wait for `finalize`."""
        return bool(len(self._recorder.deferred))

    def pending_count(self) -> int:
        """How many deferred rows wait for `finalize`."""
        return len(self._recorder.deferred)

    def finalize(
        self, end_ns: int | None = None, *, attribution: Attribution = "sequential", wait: bool = True
    ) -> None:
        """Give deferred rows their ends, and wait until every step that has ended can be counted.

        Without `end_ns` the device is asked: the streams in use are waited for, without the interpreter lock, and
        every row gets the time that the device spent on it. Where no device is in use, the end is now. The counting
        itself is left to the worker, or to whoever reads first, so that a call costs no more than the waiting.

        Args:
            end_ns: the end of the last row of each stream, on the clock of `elapsed_ns`; every other row then ends
                where the next one of its stream begins. That is launch spacing, not device time, and reports say so.
            attribution: `"sequential"`, or `"common_end"` to let every row end at `end_ns`, so that rows overlap and
                their sum is more than what has passed, as the Rust `BrickProfiler` counts.
            wait: False to wait for nothing: the worker finalizes what the device is past later.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is finalized then.
        """
        recorder = self._recorder
        if attribution not in ATTRIBUTIONS:
            raise ValueError(f"attribution must be one of {', '.join(ATTRIBUTIONS)}; got {attribution!r}")
        now = recorder.clock.now()
        timeline = recorder.device.timeline
        if end_ns is not None:
            end = self._epoch_ns + count_argument("end_ns", end_ns)
            recorder.deferred.close_at(end, attribution, timeline)
        elif timeline is None or attribution == "common_end":
            recorder.deferred.close_at(now, attribution, timeline)
        else:
            ends = recorder.deferred.close_on_device(now, timeline)
            if wait:
                timeline.wait(ends)
        if timeline is not None and wait and end_ns is None:
            timeline.wait(timeline.frontier())
        recorder.notify(0)
