"""Placing: rows whose scopes made marks get the times at which the device passed them.

Works on whole columns. A row with both marks known moves to the device's times; what has host times inside it moves
along with it, so that the tree stays a tree. Rows whose marks are not known keep the host's times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..taxonomy import SpanLevel, TimingSource
from .batch import CAPTURED, LEFT_OPEN, OPEN, nearest
from .marks import CAPTURED_MARK, NO_MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .losses import Losses
    from .marks import DeviceTimeline, DeviceTimes
    from .step import StepRecord

_NEVER: Final = np.iinfo(np.int64).min


def place_rows(
    timeline: DeviceTimeline,
    steps: Sequence[StepRecord],
    step: NDArray[np.int32],
    tokens: tuple[NDArray[np.int64], NDArray[np.int64]],
    times: tuple[NDArray[np.int64], NDArray[np.int64]],
    source: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    overdue: NDArray[np.bool_],
    losses: Losses,
    *,
    ended: bool,
) -> None:
    """Move rows, and the ends of their steps, to the device's times; all arrays are changed in place.

    Args:
        step: shape (n,), index into `steps`.
        tokens: shape (n,) each, the marks at the rows' starts and ends.
        times: shape (n,) each, the rows' starts and ends by the host's clock.
        source, flags: shape (n,); rows that the host waited for have `TimingSource.SyncedHost` already.
        overdue: shape (steps,), which steps the device did not get past in time: their marks are not asked.
        ended: whether the steps have ended.
    """
    starts, ends = tokens
    flags[(starts == CAPTURED_MARK) | (ends == CAPTURED_MARK)] |= CAPTURED
    count = len(starts)
    late = overdue[step]
    first = np.array([record.start_mark if ended else NO_MARK for record in steps], np.int64)
    last = np.array([record.end_mark if ended else NO_MARK for record in steps], np.int64)
    marks = (starts, ends, last, first)
    lates = (late, late, overdue, overdue)
    asked = np.concatenate([np.where(without, NO_MARK, mark) for mark, without in zip(marks, lates, strict=True)])
    host = np.concatenate((*times, [record.end_ns for record in steps], [record.start_ns for record in steps])).astype(
        np.int64
    )
    places = timeline.place(asked, host)
    losses.add("device_error", int(np.count_nonzero(late & (starts >= 0))))
    # Two marks measure something only if they are of one stream.
    both = places.known[:count] & places.known[count : 2 * count] & (flags & (LEFT_OPEN | OPEN) == 0)
    both &= timeline.streams(starts) == timeline.streams(ends)
    shift = _causal_shift(places.ns, places.known, host, count, step, len(steps))
    moved = np.flatnonzero(both)
    own_shift = shift[step[moved]]
    times[0][moved] = places.ns[moved] + own_shift
    times[1][moved] = np.maximum(places.ns[count + moved] + own_shift, times[0][moved])
    source[moved] = TimingSource.CudaEvent
    _end_steps(timeline, steps, step, asked, places, shift, (moved, times[1][moved]), ended=ended)
    # An open row's mark is asked for again when it has ended.
    done = np.concatenate((np.where(flags & OPEN, NO_MARK, starts), ends, last, first))
    late = np.concatenate(lates)
    for passed in (True, False):
        timeline.release(done[(done >= 0) & (late != passed)].tolist(), passed=passed)


def _end_steps(
    timeline: DeviceTimeline,
    steps: Sequence[StepRecord],
    step: NDArray[np.int32],
    asked: NDArray[np.int64],
    places: DeviceTimes,
    shift: NDArray[np.int64],
    moved: tuple[NDArray[np.intp], NDArray[np.int64]],
    *,
    ended: bool,
) -> None:
    """Say of each step when its work was done, by which clock, on which device, and from when on its time counts."""
    count, more = 2 * len(step), len(steps)
    rows, row_ends = moved
    own, begun = (
        np.where(places.known[at : at + more], places.ns[at : at + more] + shift, _NEVER)
        for at in (count, count + more)
    )
    latest = np.copy(own)
    np.maximum.at(latest, step[rows], row_ends)
    devices = timeline.devices(asked)
    each = np.arange(more, dtype=step.dtype)
    of_step = np.concatenate((step, step, each, each))
    lowest, highest = np.full(len(steps), 1 << 31, np.int64), np.full(len(steps), -1, np.int64)
    marked = np.flatnonzero(devices >= 0)
    np.minimum.at(lowest, of_step[marked], devices[marked])
    np.maximum.at(highest, of_step[marked], devices[marked])
    for number, record in enumerate(steps):
        if own[number] > _NEVER:
            record.source = TimingSource.CudaEvent
        elif record.synced:
            record.source = TimingSource.SyncedHost
        if latest[number] > _NEVER:
            record.timing_error_ns = places.error_ns + float(shift[number])
            if ended:
                record.end_ns = max(record.end_ns, int(latest[number]))
        if lowest[number] == highest[number] and record.device in (-1, int(highest[number])):
            record.device = int(highest[number])
        if begun[number] > _NEVER:
            record.counted_ns = min(int(begun[number]), record.end_ns)


def _causal_shift(
    ns: NDArray[np.int64],
    known: NDArray[np.bool_],
    host: NDArray[np.int64],
    count: int,
    step: NDArray[np.int32],
    steps: int,
) -> NDArray[np.int64]:
    """How far each step's device times lie too early: no work starts on the device before the host has asked for it."""
    shift = np.zeros(steps, np.int64)
    began = np.flatnonzero(known[:count])
    np.maximum.at(shift, step[began], host[began] - ns[began])
    return shift


def carry_along(
    parent: NDArray[np.int32],
    levels: NDArray[np.int64],
    source: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    host_start: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> None:
    """Move rows with host times along with the row around them that has device times; in place.

    A kernel without marks of its own only has its launch: it is kept inside what it was launched in. What was launched
    inside a captured row was captured too.
    """
    captured = flags & CAPTURED != 0
    if captured.any():
        flags[(nearest(parent, captured) >= 0) & (levels >= SpanLevel.Kernel)] |= CAPTURED
    on_device = source == TimingSource.CudaEvent
    if not on_device.any():
        return
    above = nearest(parent, on_device)
    rows = np.flatnonzero(~on_device & (above >= 0))
    around = above[rows]
    shift = start[around] - host_start[around]
    start[rows] += shift
    end[rows] += shift
    kernels = rows[levels[rows] >= SpanLevel.Kernel]
    around = above[kernels]
    start[kernels] = np.clip(start[kernels], start[around], end[around])
    end[kernels] = np.clip(end[kernels], start[kernels], end[around])
