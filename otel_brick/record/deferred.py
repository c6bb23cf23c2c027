"""Deferred rows: bricks whose start alone is known when they are recorded, until `finalize` says where they end.

`record_deferred` writes the row into the lane, so that it has its place in the tree, and remembers a `Deferred`, where
its times are found when the step is resolved. The step waits until then.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from ..taxonomy import TimingSource
from .marks import NO_MARK

if TYPE_CHECKING:
    from .losses import Losses
    from .marks import DeviceTimeline

Attribution = Literal["sequential", "common_end"]
ATTRIBUTIONS: Final = ("sequential", "common_end")
MAX_PENDING: Final = 1 << 16
MAX_BEGUN: Final = 256
"""Marks of starts that no row has asked for yet; beyond it, the oldest are given up."""


@dataclass(slots=True, eq=False)
class Deferred:
    """One deferred row.

    Attributes:
        start_ns, end_ns: monotonic nanoseconds; the end means nothing before the row is `settled`.
        order_ns: about when its mark was made.
        stream: tells rows of one stream from those of others.
        token: the mark at its beginning.
        spacing: its end is the launch of what came next, so that its time is launch spacing.
    """

    start_ns: int
    order_ns: int
    stream: object = None
    token: int = NO_MARK
    end_ns: int = 0
    source: TimingSource = TimingSource.Host
    spacing: bool = False
    settled: bool = False


@dataclass(slots=True)
class Window:
    """What one `finalize` closes: the rows, and the marks that end them where the device tells the time."""

    rows: list[Deferred]
    ends: dict[object, int]
    end_ns: int
    timeline: DeviceTimeline


class PendingRows:
    """The deferred rows of one profiler that `finalize` has not closed yet."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._rows: list[Deferred] = []
        self._windows: list[Window] = []
        self._begun: OrderedDict[tuple[object, int, int], int] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Deferred, timeline: DeviceTimeline | None) -> None:
        """Remember a row; where too many wait, it is closed at its start and counted."""
        with self._lock:
            if len(self._rows) < MAX_PENDING:
                self._rows.append(row)
                return
        self._losses.add("log_full")
        row.end_ns, row.settled = row.start_ns, True
        _release([row], timeline)

    def close_at(self, end_ns: int, attribution: Attribution, timeline: DeviceTimeline | None) -> None:
        """End the rows by the host's clock: each where the next of its stream begins, or all of them at `end_ns`."""
        with self._lock:
            rows, self._rows = self._rows, []
        _release(rows, timeline)
        for group in _by_stream(rows).values():
            self._count_anomalies(group, end_ns)
            ordered = sorted(group, key=lambda row: row.start_ns)
            for row, following in zip(ordered, [*ordered[1:], None], strict=True):
                end = end_ns
                if attribution == "sequential" and following is not None:
                    end = min(following.start_ns, end_ns)
                row.end_ns = max(row.start_ns, end)
                row.spacing = attribution == "sequential"
                row.settled = True
            if attribution == "sequential":
                self._tell_uneven(ordered[-1], ordered[0].start_ns, end_ns)

    def close_on_device(self, end_ns: int, timeline: DeviceTimeline) -> list[int]:
        """End the rows by the device's clock, once it has passed the marks that are made here; returns those."""
        with self._lock:
            rows, self._rows = self._rows, []
        ends = {
            stream: timeline.mark_stream(stream) if isinstance(stream, int) else NO_MARK for stream in _by_stream(rows)
        }
        if rows:
            with self._lock:
                self._windows.append(Window(rows, ends, end_ns, timeline))
        return [token for token in ends.values() if token >= 0]

    def begin(self, stream: object, start_ns: int, token: int, timeline: DeviceTimeline) -> None:
        """Remember the mark that was made together with a start, for the row that will name that start."""
        with self._lock:
            key = (stream, threading.get_ident(), start_ns)
            outdated = [self._begun.pop(key, NO_MARK)]
            self._begun[key] = token
            if len(self._begun) > MAX_BEGUN:
                outdated.append(self._begun.popitem(last=False)[1])
        timeline.release(outdated, passed=False)

    def begun(self, stream: object, start_ns: int) -> int:
        """The mark that this thread made together with a start, once; `NO_MARK` where there was none."""
        with self._lock:
            return self._begun.pop((stream, threading.get_ident(), start_ns), NO_MARK)

    def settle(self, timeline: DeviceTimeline | None) -> None:
        """Give the rows of those windows their times whose ends the device has passed."""
        with self._lock:
            windows, self._windows = self._windows, []
        waiting: list[Window] = []
        for window in windows:
            answers = [window.timeline.passed(token) for token in window.ends.values() if token >= 0]
            if timeline is window.timeline and False in answers:
                waiting.append(window)
                continue
            for stream, group in _by_stream(window.rows).items():
                end = window.ends[stream]
                self._settle(group, end, window.end_ns, window.timeline)
                known = end >= 0 and window.timeline.passed(end) is True
                window.timeline.release([end, *(row.token for row in group)], passed=known)
        with self._lock:
            self._windows = waiting + self._windows

    def _settle(self, group: list[Deferred], end_token: int, end_ns: int, timeline: DeviceTimeline) -> None:
        # Tokens grow with time: each row ends where the next one of its stream begins.
        group.sort(key=lambda row: row.token)
        tokens = [*(row.token for row in group), end_token]
        host = [*(row.order_ns for row in group), end_ns]
        places = timeline.place(np.array(tokens, np.int64), np.array(host, np.int64))
        # No work starts on the device before the host has asked for it.
        early = [row.order_ns - int(places.ns[number]) for number, row in enumerate(group) if places.known[number]]
        shift = max([0, *early])
        for number, row in enumerate(group):
            if places.known[number] and places.known[number + 1]:
                row.start_ns = int(places.ns[number]) + shift
                row.end_ns = max(row.start_ns, int(places.ns[number + 1]) + shift)
                row.source = TimingSource.CudaEvent
            else:
                following = group[number + 1].start_ns if number + 1 < len(group) else end_ns
                row.end_ns, row.spacing = max(row.start_ns, following), True
            row.settled = True

    def forget(self, timeline: DeviceTimeline | None) -> None:
        """Close all rows at their start, at a reset or at the end."""
        with self._lock:
            rows, self._rows = self._rows, []
            windows, self._windows = self._windows, []
            begun, self._begun = self._begun, OrderedDict()
        for window in windows:
            rows += window.rows
        for row in rows:
            row.end_ns, row.settled = row.start_ns, True
        _release(rows, timeline)
        if timeline is not None:
            ends = [token for window in windows for token in window.ends.values()]
            timeline.release([*begun.values(), *ends], passed=False)

    def _count_anomalies(self, group: list[Deferred], end_ns: int) -> None:
        starts = np.array([row.start_ns for row in group], np.int64)
        self._losses.add("clock_anomaly", int(np.count_nonzero(np.diff(starts) <= 0)))
        self._losses.add("clock_anomaly", int(np.count_nonzero(starts > end_ns)))

    def _tell_uneven(self, last: Deferred, start_ns: int, end_ns: int) -> None:
        if 2 * (last.end_ns - last.start_ns) > end_ns - start_ns and last.start_ns > start_ns:
            self._losses.remember(
                "the last deferred row holds more than half of its window: by the host's clock it gets all the time "
                "that the device needed after the last launch; finalize() without end_ns measures on the device"
            )


def _release(rows: list[Deferred], timeline: DeviceTimeline | None) -> None:
    if timeline is not None:
        timeline.release([row.token for row in rows], passed=False)


def _by_stream(rows: list[Deferred]) -> dict[object, list[Deferred]]:
    groups: dict[object, list[Deferred]] = {}
    for row in rows:
        groups.setdefault(row.stream, []).append(row)
    return groups
