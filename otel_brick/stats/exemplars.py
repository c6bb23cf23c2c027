"""Exemplars: for each metric bucket the last span that fell into it, so that a chart leads to a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..record.batch import LEFT_OPEN
from . import histogram
from .steps import EXPLICIT_UPPER_NS
from .table import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.batch import Batch
    from ..record.descriptors import Registry


class ExemplarTable:
    """One exemplar a bucket.

    Attributes:
        span_id, trace_high, trace_low: uint64, shape (keys, buckets); a span id of 0 stands for no exemplar.
        value_ns, unix_ns: int64, shape (keys, buckets), the duration and when it ended.
    """

    def __init__(self, keys: int, buckets: int) -> None:
        shape = (keys, buckets)
        self.span_id: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self.trace_high: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self.trace_low: NDArray[np.uint64] = np.zeros(shape, np.uint64)
        self.value_ns: NDArray[np.int64] = np.zeros(shape, np.int64)
        self.unix_ns: NDArray[np.int64] = np.zeros(shape, np.int64)

    def grow(self, keys: int) -> None:
        """Make room for this many keys."""
        missing = keys - len(self.span_id)
        if missing > 0:
            extra = ((0, max(missing, len(self.span_id))), (0, 0))
            self.span_id = np.pad(self.span_id, extra)
            self.trace_high = np.pad(self.trace_high, extra)
            self.trace_low = np.pad(self.trace_low, extra)
            self.value_ns = np.pad(self.value_ns, extra)
            self.unix_ns = np.pad(self.unix_ns, extra)


class Exemplars:
    """The exemplars of brick durations, by key of the statistics table, and of step durations, by phase."""

    def __init__(self) -> None:
        self.bricks = ExemplarTable(0, len(histogram.EXPLICIT_UPPER_NS) + 1)
        self.steps = ExemplarTable(PHASES, len(EXPLICIT_UPPER_NS) + 1)

    def add(self, batch: Batch, registry: Registry) -> None:
        """Remember the rows of a batch that will leave as spans, and their steps."""
        parents = [record.parent for record in batch.steps]
        high = np.array([0 if parent is None else parent.trace_id >> 64 for parent in parents], np.uint64)
        low = np.array([0 if parent is None else parent.trace_id & (1 << 64) - 1 for parent in parents], np.uint64)
        phase = np.array([record.phase for record in batch.steps], np.int64)
        brick = registry.descriptor_brick.data[batch.descriptor]
        rows = np.flatnonzero((brick >= 0) & (batch.flags & LEFT_OPEN == 0))
        step = batch.step[rows]
        key = brick[rows] * PHASES + phase[step]
        if len(key):
            self.bricks.grow(int(key.max()) + 1)
            self._add_bricks(batch, rows, key, high, low)
        for number in np.unique(batch.step).tolist():
            self._add_step(batch, int(number), int(high[number]), int(low[number]))

    def _add_bricks(
        self,
        batch: Batch,
        rows: NDArray[np.intp],
        key: NDArray[np.int64],
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
    ) -> None:
        table = self.bricks
        bucket = histogram.explicit_bucket_of(batch.end[rows] - batch.start[rows])
        # Only the last row of each bucket is looked at further; of equal places, numpy keeps what is assigned last.
        last = np.full(table.span_id.size, -1, np.intp)
        last[key * table.span_id.shape[1] + bucket] = rows
        place = np.flatnonzero(last >= 0)
        rows = last[place]
        step = batch.step[rows]
        offset = np.array([record.offset_ns for record in batch.steps], np.int64)[step]
        for column, values in (
            (table.span_id, batch.span_id[rows]),
            (table.trace_high, high[step]),
            (table.trace_low, low[step]),
            (table.value_ns, batch.end[rows] - batch.start[rows]),
            (table.unix_ns, batch.end[rows] + offset),
        ):
            np.reshape(column, -1)[place] = values

    def _add_step(self, batch: Batch, number: int, high: int, low: int) -> None:
        record = batch.steps[number]
        if record.loose or record.parent is None:
            return
        duration = record.wall_ns
        table, place = self.steps, (int(record.phase), int(np.searchsorted(EXPLICIT_UPPER_NS, duration)))
        table.span_id[place] = record.parent.span_id
        table.trace_high[place], table.trace_low[place] = high, low
        table.value_ns[place], table.unix_ns[place] = duration, record.end_ns + record.offset_ns
