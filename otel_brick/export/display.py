"""When spans are shown to begin and end: a span lasts as long as what is inside it.

Statistics use the times of rows as they were measured. Of a tree, a reader expects more: no child before its parent
begins, none after it ends. Lanes that outlast their parent, streams that run beside each other and host times inside
device times do not give that by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..taxonomy import TimingSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.batch import Batch


@dataclass(frozen=True, slots=True)
class Shown:
    """The starts and ends of spans, int64 monotonic nanoseconds, shape (len(batch),) each."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]


def shown(batch: Batch) -> Shown:
    """Times for display: a parent is drawn around its children.

    It begins no later than a child that has device times, whose start is not the parent's to say; one that has host
    times begins no earlier than its parent.
    """
    child = np.flatnonzero(batch.parent >= 0)
    parent = batch.parent[child]
    ends = _stretched(batch.end, child, parent)
    on_device = batch.source == TimingSource.CudaEvent
    if not on_device.any():
        return Shown(batch.start, ends)
    early = on_device[child]
    starts = -_stretched(-batch.start, child[early], parent[early])
    while np.any(starts[child] < starts[parent]):
        starts[child] = np.maximum(starts[child], starts[parent])
    begin = np.array([record.start_ns for record in batch.steps], np.int64)[batch.step]
    starts = np.maximum(starts, np.where(on_device, begin, starts))
    return Shown(starts, _stretched(np.maximum(ends, starts), child, parent))


def _stretched(ends: NDArray[np.int64], child: NDArray[np.intp], parent: NDArray[np.int32]) -> NDArray[np.int64]:
    """Ends of which none lies before that of a child."""
    ends = np.copy(ends)
    while np.any(ends[child] > ends[parent]):
        np.maximum.at(ends, parent, ends[child])
    return ends
