"""Placing: rows whose scopes made marks get the times at which the device passed them.

Works on whole columns. A row with both marks known moves to the device's times; what has host times inside it moves
along with it, so that the tree stays a tree. Rows whose marks are not known keep the host's times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..taxonomy import SpanLevel, TimingSource
from .batch import CAPTURED, LAUNCH_SPACING, LEFT_OPEN, OPEN, nearest
from .marks import CAPTURED_MARK, NO_MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .marks import DeviceTimeline
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
    *,
    ended: bool,
) -> None:
    """Move rows, and the ends of their steps, to the device's times; all arrays are changed in place.

    Args:
        step: shape (n,), index into `steps`.
        tokens: shape (n,) each, the marks at the rows' starts and ends.
        times: shape (n,) each, the rows' starts and ends by the host's clock.
        source, flags: shape (n,).
        ended: whether the steps have ended.
    """
    starts, ends = tokens
    flags[(starts == CAPTURED_MARK) | (ends == CAPTURED_MARK)] |= CAPTURED
    count = len(starts)
    overdue = np.array([record.overdue for record in steps], np.bool_)
    last = np.array([record.end_mark if ended else NO_MARK for record in steps], np.int64)
    asked = np.concatenate(
        (np.where(overdue[step], NO_MARK, starts), np.where(overdue[step], NO_MARK, ends), np.where(overdue, -1, last))
    )
    host = np.concatenate((*times, [record.end_ns for record in steps])).astype(np.int64)
    places = timeline.place(asked, host)
    both = places.known[:count] & places.known[count : 2 * count] & (flags & (LEFT_OPEN | OPEN) == 0)
    shift = _causal_shift(places.ns, places.known, host, count, step, len(steps))
    moved = np.flatnonzero(both)
    own_shift = shift[step[moved]]
    times[0][moved] = places.ns[moved] + own_shift
    times[1][moved] = np.maximum(places.ns[count + moved] + own_shift, times[0][moved])
    source[moved] = TimingSource.CudaEvent
    reached = np.where(places.known[2 * count :], places.ns[2 * count :] + shift, _NEVER)
    np.maximum.at(reached, step[moved], times[1][moved])
    for number, record in enumerate(steps):
        if places.known[2 * count + number]:
            record.source = TimingSource.CudaEvent
        elif record.sync_ns and not record.overdue:
            record.source = TimingSource.SyncedHost
        if reached[number] > _NEVER:
            record.timing_error_ns = places.error_ns + float(shift[number])
            if ended:
                record.end_ns = max(record.end_ns, int(reached[number]))
    synced = np.array([record.sync_ns > 0 and not record.overdue for record in steps], np.bool_)
    waited = ~both & synced[step] & (flags & (CAPTURED | LAUNCH_SPACING) == 0) & (ends != NO_MARK)
    source[waited] = TimingSource.SyncedHost
    # An open row's mark is asked for again when it has ended.
    done = np.concatenate((np.where(flags & OPEN, NO_MARK, starts), ends, last))
    late = np.concatenate((overdue[step], overdue[step], overdue))
    for passed in (True, False):
        timeline.release(done[(done >= 0) & (late != passed)].tolist(), passed=passed)


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
    host_start: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
) -> None:
    """Move rows with host times along with the row around them that has device times; in place.

    A kernel without marks of its own only has its launch: it is kept inside what it was launched in.
    """
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
