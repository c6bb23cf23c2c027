"""The device's side of a recorder: its timeline, the sync mode, and the steps that wait for the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..taxonomy import SpanLevel, SyncMode
from .marks import NO_MARK

if TYPE_CHECKING:
    from .marks import DeviceTimeline
    from .recorder import Item
    from .step import StepRecord

LIMIT_S: Final = 30.0
"""How long a step may wait for the device or for `finalize` before it leaves with host times."""
FIRST_POLL_S: Final = 20e-6
LONGEST_POLL_S: Final = 1e-3
FIRST_STEPS: Final = 2
"""Steps whose kernels have marks in any case, when kernel marks are sampled."""

Finder = Callable[[object], "DeviceTimeline | None"]
"""Gives the timeline for a stream, or for None where a framework uses the device already; None where there is none."""


class DeviceSide:
    """Device time of one recorder; without a timeline everything here is idle and rows have host times.

    Attributes:
        timeline: gives device times, None until the program is seen to use a device.
        mode: the sync mode of scopes that begin now.
        kernel_events: `"all"`, `"sampled"` or `"off"`: which kernels have marks of their own.
        find: looks for the timeline; given by whoever knows devices.
        handle_of: gives the integer handle of a stream; raises TypeError for what is none.
        activated: called when the timeline is there, its default stream is another, or the mode has changed.
        limit_s: how long a step may wait.
        now: the recorder's clock.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.timeline: DeviceTimeline | None = None
        self.mode = SyncMode.Deferred
        self.kernel_events = "off"
        self.kernel_interval = 16
        self.limit_s = LIMIT_S
        self.find: Finder = lambda stream: None
        self.handle_of: Callable[[object], int] = _no_stream
        self.activated: Callable[[], object] = lambda: None
        self._held: deque[Item] = deque()
        self._lock = threading.RLock()

    @property
    def active(self) -> DeviceTimeline | None:
        """The timeline if scopes that begin now are to be marked."""
        return None if self.mode is SyncMode.None_ else self.timeline

    def look(self, stream: object = None) -> DeviceTimeline | None:
        """The active timeline, after looking whether the program uses a device by now."""
        if self.timeline is None and self.mode is not SyncMode.None_:
            found = self.find(stream)
            if found is not None:
                with self._lock:
                    if self.timeline is None:
                        self.timeline = found
                self.activated()
        elif stream is None and self.timeline is not None and self.timeline.follow():
            self.activated()
        return self.active

    def set_mode(self, mode: SyncMode) -> None:
        """Use another mode for scopes that begin from now on."""
        self.mode = mode
        self.activated()

    def mark(self) -> int:
        """Mark the default stream."""
        timeline = self.active
        return NO_MARK if timeline is None else timeline.default()

    def synchronizes(self, level: SpanLevel) -> bool:
        """Whether the end of a scope of this level waits for the device."""
        return (self.mode is SyncMode.Immediate and level is SpanLevel.Brick) or (
            self.mode is SyncMode.PerLayer and level is SpanLevel.Layer
        )

    def synchronize(self, record: StepRecord, token: int) -> bool:
        """Wait until the device has passed a mark; the time is the step's cost of its mode. False if that failed."""
        timeline = record.timeline
        if timeline is None or token < 0:
            return False
        begin = self.now()
        record.synced = timeline.wait((token,))
        record.sync_ns += self.now() - begin
        return record.synced

    def marks_kernels(self, index: int) -> bool:
        """Whether the kernels of the step with this index have marks; outside steps the index is -1."""
        if self.kernel_events == "sampled":
            return index >= 0 and (index < FIRST_STEPS or index % self.kernel_interval == 0)
        return self.kernel_events == "all"

    # --- steps that wait ---

    def hold(self, item: Item) -> None:
        """Keep what has ended until the device is past it and its deferred rows are finalized."""
        timeline = item.record.timeline
        item.frontier = () if timeline is None else timeline.frontier()
        item.since_ns = self.now()
        with self._lock:
            self._held.append(item)

    def holds(self) -> bool:
        """Whether anything waits."""
        return bool(self._held)

    def released(self, *, all_of_them: bool = False) -> list[Item]:
        """Remove and return what need not wait any more, in the order of each step; the overdue are marked so."""
        ready: list[Item] = []
        asked: dict[int, bool | None] = {}
        blocked: set[StepRecord] = set()
        kept: list[Item] = []
        with self._lock:
            # Taken out first: a finalizer or signal handler may end a step meanwhile.
            held, self._held = self._held, deque()
            for item in held:
                if item.record not in blocked and self._is_ready(item, asked, all_of_them):
                    ready.append(item)
                else:
                    blocked.add(item.record)
                    kept.append(item)
            self._held.extendleft(reversed(kept))
        return ready

    def _is_ready(self, item: Item, asked: dict[int, bool | None], at_once: bool) -> bool:
        record, timeline = item.record, item.record.timeline
        for token in item.frontier:
            if token not in asked and timeline is not None:
                asked[token] = timeline.passed(token)
        answers = [asked[token] for token in item.frontier if token in asked]
        if None in answers or at_once or self._is_late(item):
            item.overdue = not all(answers)
            return True
        return all(answers) and not _unsettled(record)

    def _is_late(self, item: Item) -> bool:
        return self.now() - item.since_ns > self.limit_s * 1e9

    def wait(self, timeout_s: float) -> bool:
        """Wait until the device is past everything that has ended by now; False if that takes too long."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            waiting = {token: item for item in list(self._held) for token in item.frontier}
        timeline, pause = self.timeline, FIRST_POLL_S
        for token, item in sorted(waiting.items(), key=lambda pair: pair[0]):
            while timeline is not None and timeline.passed(token) is False and not self._is_late(item):
                if time.monotonic() + pause > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
        return True

    def close(self) -> None:
        """Let go of the timeline, once nothing waits for it any more."""
        timeline, self.timeline = self.timeline, None
        self.find = lambda stream: None
        if timeline is not None:
            self.activated()
            timeline.close()

    def restart_in_child(self) -> None:
        """After a fork: the device is the parent's, and its events are not touched."""
        self._lock = threading.RLock()
        self._held.clear()
        timeline, self.timeline = self.timeline, None
        self.find = lambda stream: None
        if timeline is not None:
            timeline.close(forked=True)


def _no_stream(stream: object) -> int:
    raise TypeError(f"stream must be a CUDA stream, not {type(stream).__name__} ({stream!r})")


def _unsettled(record: StepRecord) -> bool:
    """Whether deferred rows of a step wait for `finalize`."""
    deferred, first = record.deferred, record.settled
    while first < len(deferred):
        row = deferred[first]
        if row is not None and not row.settled:
            break
        first += 1
    record.settled = first
    return first < len(deferred)
