"""A batch: the immutable columns of the resolved rows of one or more steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .losses import Losses
    from .step import StepRecord

LEFT_OPEN: Final = 1
"""The row was still open when its step ended: it has a place in the tree but no duration of its own."""
OUT_OF_ORDER: Final = 2
COMPRESSED: Final = 4
CUT: Final = 8
"""The row left its step early, at the step's row limit: statistics only."""
OPEN: Final = 16
"""The row is still open and only holds the place of a parent: no sink counts it."""
CAPTURED: Final = 32
"""The row was recorded while its stream was capturing a graph: host times of work that has not run."""
LAUNCH_SPACING: Final = 64
"""The row ends at the launch of what came next."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Resolved rows, one array per column, all of length n.

    Within a lane, rows stand in the order of their entries, so a parent stands before its children.

    Attributes:
        steps: the records that `step` indexes.
        ended: False for the earlier rows of one step that is still open.
        step: int32, index into `steps`.
        lane: int32, distinguishes the lanes of this batch; `lane_number` gives its number within the step.
        descriptor: int32, index into the registry's descriptors.
        parent: int32, index of the parent row, -1 for the step itself.
        brick_parent: int32, the nearest brick above on the same lane that was closed, -1 for none.
        start, end: int64, monotonic nanoseconds.
        exclusive: int64, nanoseconds not covered by bricks directly below on the same lane; bricks only.
        elements, bytes_read, bytes_written: int64, -1 where not given.
        layer: int32, index of the layer that the row is or lies in, -1 for none.
        source: uint8, a `TimingSource`.
        error: int32, index into the step's errors, -1 for none.
        span_id: uint64, 0 where the row has no id yet.
        flags: uint8, the constants of this module.
        budgets: int64, nanoseconds by the index of a brick's statistics, `NO_BUDGET` for a brick without one; the last
            entry, which is that of rows that are no bricks, too. None where no brick has a budget.
    """

    steps: list[StepRecord]
    ended: bool
    step: NDArray[np.int32]
    lane: NDArray[np.int32]
    lane_number: NDArray[np.int32]
    descriptor: NDArray[np.int32]
    parent: NDArray[np.int32]
    brick_parent: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    exclusive: NDArray[np.int64]
    elements: NDArray[np.int64]
    bytes_read: NDArray[np.int64]
    bytes_written: NDArray[np.int64]
    layer: NDArray[np.int32]
    source: NDArray[np.uint8]
    error: NDArray[np.int32]
    span_id: NDArray[np.uint64]
    flags: NDArray[np.uint8]
    budgets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def with_ids(self, ids: NDArray[np.uint64]) -> Batch:
        """The same rows; those without a span id take theirs from `ids`, shape (n,)."""
        return replace(self, span_id=np.where(self.span_id != 0, self.span_id, ids))

    def only(self, rows: NDArray[np.intp]) -> Batch:
        """The same steps with some of the rows, in ascending order; their parents are the nearest that are left."""
        if len(rows) == len(self):
            return self
        kept = np.zeros(len(self), np.bool_)
        kept[rows] = True
        number = np.append(np.where(kept, np.cumsum(kept, dtype=np.int32) - 1, -1), -1).astype(np.int32)
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        del columns["steps"], columns["ended"], columns["budgets"]
        chosen = {name: column[rows] for name, column in columns.items()}
        above = np.append(nearest(self.parent, kept), np.int32(-1))
        chosen["parent"] = number[above[self.parent[rows]]]
        chosen["brick_parent"] = number[self.brick_parent[rows]]
        return replace(self, **chosen)


def nearest(parent: NDArray[np.int32], stop: NDArray[np.bool_]) -> NDArray[np.int32]:
    """For each row the nearest of itself and its ancestors where `stop` is true, -1 for none."""
    count = len(parent)
    up = np.where(stop, np.arange(count, dtype=np.int32), parent)
    up = np.append(up, np.int32(-1))
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up[:-1]
        up = further


def drop_detail(batch: Batch, rows: NDArray[np.int64], reason: str, losses: Losses) -> None:
    """Count that these rows will not become spans, at their steps and among the losses."""
    counts = np.bincount(batch.step[rows], minlength=len(batch.steps)).tolist()
    for record, count in zip(batch.steps, counts, strict=True):
        if record.recording:
            record.dropped += count
            losses.add(reason, count)
