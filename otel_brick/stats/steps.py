"""Statistics of whole steps by phase: how many, how long, how many tokens, and how much of them bricks cover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import semconv
from ..record.batch import LEFT_OPEN, OPEN, Batch
from ..record.intervals import exact_sum, heads_of, union_ns
from . import histogram
from .table import PHASES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.descriptors import Registry

MAX_LANES: Final = 64
"""Lanes of a step that coverage is kept for one by one; the last entry stands for all further ones."""
EXPLICIT_UPPER_NS: Final[NDArray[np.int64]] = np.array(
    [round(bound * 1e9) for bound in semconv.STEP_DURATION_BUCKETS_S], np.int64
)


class StepTable:
    """Sums over steps; bricks outside any step have no part in it.

    Attributes:
        columns: by name, shape (phases,): `count`, `failures`, `wall_ns`, `tokens`, and `union_ns`, the nanoseconds
            of a step in which at least one brick was open on any lane; `sync_ns`, the time that steps waited for the
            device because of their sync mode; `explicit`, shape (phases, 14), counts in the
            explicit metric buckets; `grid`, shape (phases, BUCKETS). Over all phases: `finalize_count`,
            `finalize_ns`, shape (1,), and `finalize_explicit`, shape (20,), the time from a step's end until it was
            counted.
        lane_union_ns, lane_wall_ns: shape (MAX_LANES,), covered time and step time by the lane's number in its step.

    A step that has handed rows over early counts as covered where its own lane is: what its other lanes covered at the
    same time is not known any more.
    """

    def __init__(self) -> None:
        self.columns: dict[str, NDArray[Any]] = {
            name: np.full(PHASES, 0, object) for name in ("wall_ns", "union_ns", "tokens", "sync_ns")
        }
        self.columns |= {name: np.zeros(PHASES, np.int64) for name in ("count", "failures")}
        self.columns["explicit"] = np.zeros((PHASES, len(EXPLICIT_UPPER_NS) + 1), np.int64)
        self.columns["grid"] = np.zeros((PHASES, histogram.BUCKETS), np.int64)
        self.columns["finalize_count"] = np.zeros(1, np.int64)
        self.columns["finalize_ns"] = np.full(1, 0, object)
        self.columns["finalize_explicit"] = np.zeros(len(histogram.EXPLICIT_UPPER_NS) + 1, np.int64)
        self.lane_union_ns: NDArray[np.object_] = np.full(MAX_LANES, 0, object)
        self.lane_wall_ns: NDArray[np.object_] = np.full(MAX_LANES, 0, object)

    def add(self, batch: Batch, registry: Registry, now_ns: int) -> None:
        """Count the steps of a batch and what their bricks cover.

        Args:
            now_ns: monotonic time, for how long the steps have waited since they ended.
        """
        in_step = np.array([not step.loose for step in batch.steps], np.bool_)
        if not in_step.any():
            return
        phase = np.array([step.phase for step in batch.steps], np.int64)
        if batch.ended:
            ends = np.array([step.end_ns for step in batch.steps], np.int64)
            wall = np.array([step.wall_ns for step in batch.steps], np.int64)
            self._add_ended(batch, in_step, phase, wall)
            waited = np.maximum(now_ns - ends[in_step], 0)
            self.columns["finalize_count"] += len(waited)
            self.columns["finalize_ns"] += int(waited.sum())
            np.add.at(self.columns["finalize_explicit"], histogram.explicit_bucket_of(waited), 1)
        self._add_coverage(batch, registry, in_step, phase)

    def _add_ended(
        self,
        batch: Batch,
        in_step: NDArray[np.bool_],
        phase: NDArray[np.int64],
        wall: NDArray[np.int64],
    ) -> None:
        columns = self.columns
        phases, walls = phase[in_step], wall[in_step]
        steps = batch.steps if len(phases) == len(phase) else [step for step in batch.steps if not step.loose]
        tokens = np.array([step.tokens for step in steps], object)
        columns["count"] += np.bincount(phases, minlength=PHASES)
        for step in steps:
            if step.error is not None:
                columns["failures"][step.phase] += 1
            if step.sync_ns:
                columns["sync_ns"][step.phase] += step.sync_ns
        for value in np.unique(phases).tolist():
            columns["wall_ns"][value] += exact_sum(walls[phases == value])
            columns["tokens"][value] += int(tokens[phases == value].sum())
        lanes = np.array([step.lane_count for step in steps], np.int64)
        for number in range(min(int(lanes.max()), MAX_LANES)):
            self.lane_wall_ns[number] += exact_sum(walls[lanes > number])
        np.add.at(columns["explicit"], (phases, np.searchsorted(EXPLICIT_UPPER_NS, walls)), 1)
        np.add.at(columns["grid"], (phases, histogram.bucket_of(walls)), 1)

    def _add_coverage(
        self, batch: Batch, registry: Registry, in_step: NDArray[np.bool_], phase: NDArray[np.int64]
    ) -> None:
        brick = registry.descriptor_brick.data[batch.descriptor]
        rows = np.flatnonzero(
            (brick >= 0) & (batch.brick_parent < 0) & (batch.flags & (LEFT_OPEN | OPEN) == 0) & in_step[batch.step]
        )
        step, end = batch.step[rows], batch.end[rows]
        counted = np.array([record.counted_ns for record in batch.steps], np.int64)
        start = np.minimum(np.maximum(batch.start[rows], counted[step]), end)
        lane, first = batch.lane[rows], heads_of(batch.lane[rows])
        own: Any = slice(None)
        if any(record.handed_over for record in batch.steps):
            shared = np.array([record.handed_over and record.lane_count > 1 for record in batch.steps], np.bool_)
            own = (batch.lane_number[rows] == 0) | ~shared[step]
        steps, covered = union_ns(step[own], start[own], end[own])
        for value in np.unique(phase[steps]).tolist():
            self.columns["union_ns"][value] += exact_sum(covered[phase[steps] == value])
        # Where each step has one lane with bricks, a lane covers what its step does.
        lane_covered = covered if len(first) == len(steps) else union_ns(lane, start, end)[1]
        number = np.minimum(batch.lane_number[rows[first]], MAX_LANES - 1)
        for value in np.unique(number).tolist():
            self.lane_union_ns[value] += exact_sum(lane_covered[number == value])

    def merge(self, other: StepTable) -> None:
        """Add another table to this one."""
        for name, theirs in other.columns.items():
            self.columns[name] += theirs
        self.lane_union_ns += other.lane_union_ns
        self.lane_wall_ns += other.lane_wall_ns

    def total(self, name: str) -> int:
        """A column's sum over all phases."""
        return int(self.columns[name].sum())
