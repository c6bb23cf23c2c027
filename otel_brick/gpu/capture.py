"""What instrumentors of CUDA calls share: the lane that a row goes to, and the row around a call.

A row goes to the lane that is current in the calling context, whichever profiler opened it, otherwise to a profiler
that the instrumentor was given. Nothing of ours reaches the caller: what fails here is remembered, and the call made.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..record.descriptors import Descriptor, Launch
from ..record.lane import TAG_MARK, IdleLane, Lane, ShutLane, innermost
from ..record.marks import CAPTURED_MARK, NO_MARK, Mark, no_mark
from ..taxonomy import SpanLevel, SyncMode
from .driver import LEGACY_STREAM, PER_THREAD_STREAM, open_driver, stream_handle
from .kernels import identities

if TYPE_CHECKING:
    from ..record.marks import DeviceTimeline
    from ..record.recorder import Recorder
    from ..record.step import StepRecord

MAX_SITES: Final = 4_096
"""Launch signatures of one kernel that are remembered at a time."""
MAX_STREAMS: Final = 4_096

Failure = Callable[[Any], "type[BaseException] | None"]
"""Tells from what a call returned how it failed; None if it did not."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What rows say of a stream.

    Attributes:
        ordinal: a small number in place of the handle.
        device: CUDA's ordinal of its device, None where that is not known.
    """

    handle: int
    ordinal: int
    device: int | None


class Streams:
    """The streams that launches were seen on, in this process."""

    def __init__(self) -> None:
        self._by_handle: dict[int, StreamInfo] = {}
        self._numbers = itertools.count()

    def of(self, stream: object) -> StreamInfo:
        """What is known of a stream, an object or a handle.

        Raises:
            TypeError: it is no stream.
        """
        handle = stream_handle(stream)
        info = self._by_handle.get(handle)
        if info is None:
            if len(self._by_handle) >= MAX_STREAMS:
                self._by_handle.clear()
            info = self._by_handle[handle] = StreamInfo(handle, next(self._numbers), _device_of(handle))
        return info


def _device_of(handle: int) -> int | None:
    """The device of a stream. A default stream is that of any device, so it has one only where there is only one."""
    driver = open_driver()
    if driver is None:
        return None
    core: Any = driver.core
    with driver.relaxed():
        if handle in (LEGACY_STREAM, PER_THREAD_STREAM):
            error, count = driver.bindings.cuDeviceGetCount()
            return 0 if error == driver.success and count == 1 else None
        try:
            return int(core.Stream.from_handle(handle).device.device_id)
        except Exception:
            return None


streams: Final = Streams()


@dataclass(slots=True)
class Seen:
    """One kernel of one profiler.

    Attributes:
        ref: to the kernel; takes it out of the tables when it goes.
        sites: by launch signature and stream.
    """

    ref: Callable[[], Any]
    sites: dict[Any, int] = field(default_factory=dict[Any, int])


class Launches:
    """What is remembered of launches for one profiler.

    Attributes:
        kernels: by the id of the `Kernel` object, which is kept alive by nobody here.
        now: the profiler's clock.
    """

    __slots__ = ("_marks", "_timeline", "bare_sites", "kernels", "now", "recorder")

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.now = recorder.clock.now
        self.kernels: dict[int, Seen] = {}
        self.bare_sites: dict[Any, int] = {}
        self._timeline: Any = None
        self._marks: dict[int, Mark] = {}

    @classmethod
    def of(cls, recorder: Recorder) -> Launches:
        """Those of a recorder, made at its first launch."""
        found: Launches | None = recorder.captured
        if found is None:
            found = recorder.captured = cls(recorder)
            recorder.describe = found.describe
        return found

    def seen(self, kernel: Any) -> Seen:
        """The entry of a kernel."""
        key = id(kernel)
        entry = self.kernels.get(key)
        if entry is None:
            tables = (self.recorder.launches, self.kernels)

            def forget(_: object) -> None:
                for table in tables:
                    table.pop(key, None)

            entry = self.kernels[key] = Seen(weakref.ref(kernel, forget))
        return entry

    def site(self, launch: Launch, known: dict[Any, int], key: Any) -> int:
        """The site of a launch signature, remembered under a key."""
        registry = self.recorder.registry
        if len(known) >= MAX_SITES:
            known.clear()
        site = registry.bare_site(registry.descriptor(Descriptor(SpanLevel.Kernel, "", launch=launch)))
        known[key] = site
        return site

    def timeline(self, record: StepRecord, stream: Any) -> DeviceTimeline | None:
        """What gives a step its device times; the first launch seen is what switches that on."""
        if record.timeline is None:
            record.timeline = self.recorder.device.look(stream)
        return record.timeline

    def mark(self, timeline: DeviceTimeline, info: StreamInfo) -> Mark:
        """What marks a stream."""
        if timeline is not self._timeline:
            self._timeline = timeline
            self._marks.clear()
        found = self._marks.get(info.handle)
        if found is None:
            found = self._marks[info.handle] = timeline.mark_of(info.handle)
        return found

    def describe(self) -> None:
        """Before rows are resolved: ask what their kernels are; and take device time where that was switched on."""
        device = self.recorder.device
        if device.timeline is None and device.mode is not SyncMode.None_:
            device.look(LEGACY_STREAM)
        identities.describe(self.recorder.losses)


_inside = threading.local()
"""Whether this thread is inside a call that has a row."""


class Capture:
    """Writes rows around calls.

    Attributes:
        open: False once nothing is to be written any more.
        outside: the recorder of rows outside every lane, None for none.
    """

    def __init__(self, outside: Recorder | None) -> None:
        self.open = True
        self.outside = outside
        self._on_close: list[Callable[[], object]] = []

    def when_closed(self, function: Callable[[], object]) -> None:
        """Have a function called by `close`."""
        self._on_close.append(function)

    def close(self) -> None:
        """Write nothing any more, through whatever still calls us."""
        self.open = False
        for function in self._on_close:
            function()

    def lane(self) -> Lane | None:
        """The lane for a row that begins now; None where nobody records."""
        if not self.open or getattr(_inside, "call", False):
            return None
        lane = innermost.get()
        if lane is None or isinstance(lane, IdleLane):
            recorder = self.outside
            lane = None if recorder is None or not recorder.on else recorder.current.get()
        if lane is None or not lane.recorder.on or isinstance(lane, ShutLane):
            return None
        return lane

    def around(
        self,
        lane: Lane,
        site: int,
        info: StreamInfo,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        tags: tuple[int, ...] = (),
        failure: Failure | None = None,
        level: SpanLevel = SpanLevel.Kernel,
        captured: bool = False,
    ) -> Any:
        """Make a call, with a row around it.

        Args:
            info: the stream that the call is about.
            tags: counts of the row.
            failure: for functions that return errors.
            level: bricks are always marked, what is below them where the step's kernels are.
            captured: whether the stream is known to capture a graph.
        """
        recorder = lane.recorder
        try:
            launches = Launches.of(recorder)
            lane = lane.opened()
            timeline = launches.timeline(lane.record, info.handle)
            mark = no_mark
            if captured:
                mark = captured_mark
            elif timeline is not None and (level < SpanLevel.Kernel or lane.record.kernel_marks):
                mark = launches.mark(timeline, info)
            entry = (site, launches.now(), TAG_MARK, mark())
        except Exception as error:
            self.failed(recorder, error)
            recorder.close_if_loose(lane)
            return call(*arguments, **keywords)
        # A call of cuda.core may make one of the driver's by a name that is ours too: that is the same row.
        _inside.call = True
        try:
            result = call(*arguments, **keywords)
        except BaseException as error:
            self._close(lane, entry, mark, tags, type(error), error, level)
            raise
        finally:
            _inside.call = False
        self._close(lane, entry, mark, tags, None if failure is None else failure(result), "", level)
        return result

    def _close(
        self,
        lane: Lane,
        entry: tuple[int, int, int, int],
        mark: Mark,
        tags: tuple[int, ...],
        error: type[BaseException] | None,
        value: object,
        level: SpanLevel,
    ) -> None:
        recorder = lane.recorder
        try:
            end = recorder.clock.now()
            after = mark()
            if level is SpanLevel.Brick and recorder.device.synchronizes(level):
                recorder.device.synchronize(lane.record, after)
                end = recorder.clock.now()
            failed = () if error is None else lane.fail(error, value)
            lane.complete((*entry, ~entry[0], end, TAG_MARK, after, *tags, *failed))
        except Exception as problem:
            self.failed(recorder, problem)
        recorder.close_if_loose(lane)

    def close_failed(self, lane: Lane, site: int, begin_ns: int, error: BaseException) -> None:
        """Write the row of a call that raised."""
        self._close(lane, (site, begin_ns, TAG_MARK, NO_MARK), no_mark, (), type(error), error, SpanLevel.Kernel)

    def failed(self, recorder: Recorder, error: Exception) -> None:
        """Remember that a row could not be written."""
        recorder.losses.remember("a CUDA call could not be recorded", error)


def captured_mark() -> int:
    """The mark of a stream that is known to capture a graph."""
    return CAPTURED_MARK


_failures: dict[str, type[BaseException]] = {}


def driver_failure(result: Any) -> type[BaseException] | None:
    """How a function of `cuda.bindings.driver` failed: a class with the error's name, which is never raised."""
    code = result[0]
    if not int(code):
        return None
    name = str(getattr(code, "name", code))
    found = _failures.get(name)
    if found is None:
        found = _failures[name] = type(name, (RuntimeError,), {"__module__": "builtins"})
    return found


def driver_stream(stream: Any) -> Any:
    """A stream argument of `cuda.bindings.driver` as our other functions take it."""
    return LEGACY_STREAM if stream is None else int(stream) or LEGACY_STREAM
