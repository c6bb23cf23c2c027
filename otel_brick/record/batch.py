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

    def __len__(self) -> int:
        return len(self.start)

    def without_rows(self) -> Batch:
        """The same steps without any row."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        del columns["steps"], columns["ended"]
        return replace(self, **{name: column[:0].copy() for name, column in columns.items()})


def drop_detail(batch: Batch, rows: NDArray[np.int64], reason: str, losses: Losses) -> None:
    """Count that these rows will not become spans, at their steps and among the losses."""
    counts = np.bincount(batch.step[rows], minlength=len(batch.steps)).tolist()
    for record, count in zip(batch.steps, counts, strict=True):
        if record.recording:
            record.dropped += count
            losses.add(reason, count)
