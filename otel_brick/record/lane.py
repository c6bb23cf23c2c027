"""Lanes: the logs that scopes write to, one for each sequential flow.

A lane is a list of integers read as pairs. `(site, ns)` is an entry, `(~site, ns)` an exit, and a pair whose first
number is one of the `TAG_*` constants says something about the entry or exit before it. Every write is one `extend`,
which is atomic, so that two threads on one lane cannot tear a pair apart. Depth and parents are not written: they
follow from the balance of entries and exits (`resolve.py`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Token

    from numpy.typing import NDArray

    from .recorder import Recorder
    from .step import StepRecord

TAG_LIMIT: Final = -(1 << 40)
"""First numbers below this are tags."""
TAG_ELEMENTS: Final = TAG_LIMIT - 1
TAG_BYTES_READ: Final = TAG_LIMIT - 2
TAG_BYTES_WRITTEN: Final = TAG_LIMIT - 3
TAG_LAYER: Final = TAG_LIMIT - 4
TAG_ERROR: Final = TAG_LIMIT - 5
"""Index into the step's errors."""
TAG_LANE: Final = TAG_LIMIT - 6
"""A lane of this number was opened here."""
TAG_SPAN: Final = TAG_LIMIT - 7
"""The span id, as a signed integer, that the row already has."""
TAG_COMPRESSED: Final = TAG_LIMIT - 8
"""The bytes written are the compressed form of the bytes read."""
TAG_COVERED: Final = TAG_LIMIT - 9
"""Nanoseconds of a still open row that its children in earlier blocks account for."""
TAG_TIMER: Final = TAG_LIMIT - 10
"""Which timer the entry or exit belongs to."""
TAG_ABANDONED: Final = TAG_LIMIT - 11
"""The exit of a timer that was thrown away without being stopped."""
TAG_MARK: Final = TAG_LIMIT - 12
"""The token of the mark on the device's time axis that was made at the entry or exit."""
TAG_DEFERRED: Final = TAG_LIMIT - 13
"""Index into the step's deferred rows: the row's times are found there when it is resolved."""

TAG_SYNCED: Final = TAG_LIMIT - 14
"""The host waited for the device before it wrote the exit."""

innermost: ContextVar[Lane | None] = ContextVar("otel_brick.innermost", default=None)
"""The current lane of the calling context, whichever profiler opened it; for instrumentors, which have no profiler."""

KnownLaunches = dict[int, tuple[Any, ...]]
"""What the capture of kernel launches knows how to write at once, by the id of the kernel."""
NO_LAUNCHES: Final[KnownLaunches] = {}
"""Stays empty: a launch takes the longer way."""

SPILL_LENGTH: Final = 4 * 4_096
"""Integers after which a lane's list becomes an array: 4,096 rows without tags."""


class Lane(list[int]):
    """The open log of one flow of one step.

    Attributes:
        launches: the launches that may be written to it at once.
    """

    # All lanes have one layout, because closing a lane changes its class.
    __slots__ = ("__weakref__", "carry", "chunks", "depth", "launches", "number", "record", "recorder", "token")

    record: StepRecord
    recorder: Recorder

    def __init__(self, recorder: Recorder, record: StepRecord, number: int) -> None:
        super().__init__()
        self.recorder = recorder
        self.record = record
        self.number = number
        self.launches = record.launches
        self.depth = 0
        self.chunks: list[NDArray[np.int64]] = []
        self.carry: NDArray[np.int64] | None = None
        self.token: Token[Lane] | None = None

    def complete(self, events: Sequence[int]) -> None:
        """Write a row whose entry and exit are both known."""
        self.extend(events)
        if len(self) > SPILL_LENGTH:
            self.spill()

    def opened(self) -> Lane:
        """The lane that a row would be written to."""
        return self

    def mark(self, number: int) -> None:
        """Note that lane `number` begins at whatever is innermost here now."""
        list.extend(self, (TAG_LANE, number))

    def fail(self, error: type[BaseException], value: object) -> tuple[int, ...]:
        """The tag for an exit through an exception; empty when that is no failure."""
        return self.record.fail(error, value)

    def spill(self) -> None:
        """Turn the list into an array, 8 bytes a number; beyond the step's limit hand the arrays over."""
        record = self.record
        with record.lock:
            if record.spilling:
                return
            record.spilling = True
            taken = self[:]
            del self[: len(taken)]
            self.chunks.append(np.array(taken, np.int64))
            record.rows += len(taken) // 4
            record.spilling = False
            chunks = self._beyond_limit()
        if chunks:
            self.recorder.submit_partial(self, chunks)

    def finish(self) -> None:
        """End the flow that the lane belongs to; beyond the step's limit, all such lanes are handed over."""
        record = self.record
        with record.lock:
            record.finished.append(self)
            record.finished_rows += (len(self) + sum(map(len, self.chunks))) // 4
            if record.finished_rows <= self.recorder.limit_of(record):
                return
            lanes, rows = record.finished, record.finished_rows
            record.finished, record.finished_rows = [], 0
            record.handed_over = True
            gone = set(map(id, lanes))
            record.lanes = [lane for lane in record.lanes if id(lane) not in gone]
            for lane in lanes:
                lane.close()
        self.recorder.submit_lanes(record, lanes, rows)

    def close(self) -> None:
        """Take no more rows; what still comes goes elsewhere."""
        self.launches = NO_LAUNCHES
        self.__class__ = IdleLane  # pyright: ignore[reportAttributeAccessIssue]

    def _beyond_limit(self) -> list[NDArray[np.int64]]:
        """Take the arrays out if the step has reached its limit."""
        record = self.record
        if record.rows <= self.recorder.limit_of(record):
            return []
        chunks, self.chunks = self.chunks, []
        record.rows -= sum(map(len, chunks)) // 4
        record.handed_over = True
        return chunks


class LooseLane(Lane):
    """The log of bricks outside any step; it closes itself when its last open scope does."""

    __slots__ = ()

    def extend(self, events: Any) -> None:
        with self.record.lock:
            list.extend(self, events)
            self.depth += 1 if events[0] >= 0 else -1
            closed = self.depth == 0
        if closed:
            self.recorder.close_loose(self)

    def complete(self, events: Sequence[int]) -> None:
        list.extend(self, events)
        if len(self) > SPILL_LENGTH:
            self.spill()


class IdleLane(Lane):
    """Stands where no step is open, and is what every lane turns into when its step closes.

    An entry opens a loose lane; an exit belongs to a scope whose step has closed and is counted.
    """

    __slots__ = ()

    def opened(self) -> Lane:
        return self.recorder.open_loose(self.record)

    def extend(self, events: Any) -> None:
        if events[0] >= 0:
            self.recorder.open_loose(self.record).extend(events)
            return
        if not self.recorder.is_shut:
            self.recorder.losses.add("out_of_order")
        self.recorder.forget_marks(events)

    def complete(self, events: Sequence[int]) -> None:
        lane = self.recorder.open_loose(self.record)
        if isinstance(lane, IdleLane):
            lane.complete(events)
            return
        list.extend(lane, events)
        self.recorder.close_loose(lane)

    def mark(self, number: int) -> None:
        pass

    def fail(self, error: type[BaseException], value: object) -> tuple[int, ...]:
        return ()

    def spill(self) -> None:
        pass

    def finish(self) -> None:
        pass


class ShutLane(IdleLane):
    """The idle lane of a profiler that is shut down: what still arrives is counted and dropped."""

    __slots__ = ()

    def opened(self) -> Lane:
        return self

    def extend(self, events: Any) -> None:
        if events[0] >= 0:
            self.recorder.losses.add("already_shutdown")
        self.recorder.forget_marks(events)

    def complete(self, events: Sequence[int]) -> None:
        self.recorder.losses.add("already_shutdown")
        self.recorder.forget_marks(events)
