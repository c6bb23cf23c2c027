"""The recorder of one profiler: which lane is current, which steps are open, and what waits to be resolved."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from opentelemetry import trace

from ..taxonomy import Phase, SyncMode
from .clock import Clock
from .deferred import PendingRows
from .descriptors import Registry
from .device import DeviceSide
from .ids import IdSource
from .lane import TAG_MARK, IdleLane, KnownLaunches, Lane, LooseLane, ShutLane, innermost
from .losses import Losses
from .step import StepRecord
from .tracing import Attachments, Tracing, is_exported, reset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..config import Config
    from .handles import Handle

MIN_ROW_LIMIT: Final = 65_536
MIN_MARKED_LIMIT: Final = 16_384
"""The same for a step with marks, of which each row has two and a device a limited number."""


@dataclass(slots=True)
class Ended:
    """A step that has closed; its lanes hold its rows.

    All three kinds of items may wait for the device: since `since_ns`, until it has passed the marks of `frontier`. One
    that is `overdue` has waited long enough, or could not be asked.
    """

    alone: ClassVar[bool] = False

    record: StepRecord
    rows: int
    frontier: tuple[int, ...] = ()
    since_ns: int = 0
    overdue: bool = False


@dataclass(slots=True)
class Part:
    """The earlier rows of a lane whose step is still open but has reached its limit."""

    alone: ClassVar[bool] = True

    lane: Lane
    chunks: list[NDArray[np.int64]]
    rows: int
    frontier: tuple[int, ...] = ()
    since_ns: int = 0
    overdue: bool = False

    @property
    def record(self) -> StepRecord:
        """The open step."""
        return self.lane.record


@dataclass(slots=True)
class Lanes:
    """Whole lanes of a step that is still open but has reached its limit."""

    alone: ClassVar[bool] = True

    record: StepRecord
    lanes: list[Lane]
    rows: int
    frontier: tuple[int, ...] = ()
    since_ns: int = 0
    overdue: bool = False


Item = Ended | Part | Lanes


class Recorder:
    """Owns lanes and step records until they are resolved.

    Attributes:
        current: the lane of the calling context; outside every step, the idle lane.
        row_limit: rows that one open step may hold before it hands them over without span detail.
        handles, on: the handles to switch, and whether they record; `switch_lock` is held by whoever does.
        notify: called with the number of rows now waiting, whenever a step has ended.
        describe: completes descriptors of which more is known by now; called before rows are resolved.
        launches: the kernel launches that may be written at once; emptied when the profiler is switched off.
        captured: what else the capture of kernel launches remembers for this recorder.
    """

    def __init__(self, config: Config, clock: Clock, tracing: Tracing, losses: Losses) -> None:
        self.clock = clock
        self.losses = losses
        self.ids = IdSource()
        self.registry = Registry(self.losses)
        self.attachments = Attachments(self.ids)
        self.device = DeviceSide(clock.now)
        self.device.activated = self._follow_device
        self.deferred = PendingRows(losses)
        self.configure(config, tracing)
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.switch_lock = threading.RLock()
        self.on = False
        self.notify: Callable[[int], None] = lambda rows: None
        self.describe: Callable[[], None] = lambda: None
        self.launches: KnownLaunches = {}
        self.captured: Any = None
        self._idle = IdleLane(self, StepRecord(Phase.Other), 0)
        self.current: ContextVar[Lane] = ContextVar("otel_brick.lane", default=self._idle)
        self.on_fork: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        # Reentrant like all our locks: a finalizer or signal handler may run one of our scopes while we hold it.
        self._lock = threading.RLock()
        self._open: set[StepRecord] = set()
        self._pending: deque[Item] = deque()
        self._pending_rows = 0
        self._indexes = itertools.count()
        self.timer_numbers = itertools.count()
        self.abandoned: deque[tuple[Lane, tuple[int, ...]]] = deque()

    def configure(self, config: Config, tracing: Tracing) -> None:
        """Use another configuration for what is recorded from now on."""
        self.tracing = tracing
        self.attach_context = config.attach_context
        self.device.mode = SyncMode.of(config.sync_mode)
        self.device.kernel_events = config.kernel_events
        self.device.kernel_interval = config.detail_interval
        self.row_limit = max(MIN_ROW_LIMIT, config.max_rows_per_step)
        self._marked_limit = max(MIN_MARKED_LIMIT, config.max_rows_per_step)

    def open_step(self, phase: Phase, tokens: int) -> StepRecord:
        """A new record with its times anchored to the calendar and one lane, not yet current."""
        self.check_process()
        record = StepRecord(phase, index=next(self._indexes), tokens=tokens)
        record.timeline = self.device.look()
        record.kernel_marks = self.device.marks_kernels(record.index)
        if not record.kernel_marks:
            record.launches = self.launches
        record.lanes.append(Lane(self, record, 0))
        record.start_ns = self.clock.now()
        record.offset_ns = self.clock.unix() - record.start_ns
        with self._lock:
            self._open.add(record)
            if record.timeline is None:  # it may have come in between
                record.timeline = self.device.active
        if record.timeline is not None:
            record.start_mark = record.timeline.default()
        return record

    def close_step(self, record: StepRecord) -> None:
        """End a step: its lanes become idle and its rows wait to be resolved."""
        record.end_ns = self.clock.now()
        if record.timeline is not None and not record.loose and not self.is_shut:
            record.end_mark = record.timeline.default()
        with record.lock:
            for lane in record.lanes:
                lane.close()
        if self.is_shut:
            self._discard(record)
        else:
            self._submit(record)

    def limit_of(self, record: StepRecord) -> int:
        """How many rows a step may hold while it is open."""
        return self.row_limit if record.timeline is None else min(self.row_limit, self._marked_limit)

    def open_lane(self, record: StepRecord) -> Lane:
        """A further lane of an open step."""
        with record.lock:
            lane = Lane(self, record, record.lane_count)
            record.lane_count += 1
            record.lanes.append(lane)
        return lane

    @property
    def is_shut(self) -> bool:
        """Whether the profiler is shut down."""
        return isinstance(self._idle, ShutLane)

    def open_loose(self, before: StepRecord) -> Lane:
        """Make a lane for bricks outside any step current; it belongs to the span current now, if that records.

        Args:
            before: the closed record that the flow was in. Its step's span may still be current there and wait for
                the worker to end it, but no longer takes children.
        """
        if self.is_shut:
            return self._idle
        self.check_process()
        record = StepRecord(Phase.Other, loose=True)
        record.timeline = self.device.active
        record.kernel_marks = self.device.marks_kernels(-1)
        span = trace.get_current_span()
        if is_exported(span) and (before.loose or before.parent != span.get_span_context()):
            record.recording = True
            record.parent = span.get_span_context()
            record.tracer = self.tracing.tracer
        lane = LooseLane(self, record, 0)
        record.lanes.append(lane)
        record.start_ns = self.clock.now()
        record.offset_ns = self.clock.unix() - record.start_ns
        with self._lock:
            self._open.add(record)
        lane.token = self.current.set(lane)
        innermost.set(lane)
        return lane

    def close_loose(self, lane: Lane) -> None:
        """End a loose lane, because nothing is open on it any more."""
        self.close_step(lane.record)
        if innermost.get() is lane:
            innermost.set(None)
        if self.current.get() is lane and (lane.token is None or not reset(self.current, lane.token)):
            self.current.set(self._idle)

    def close_if_loose(self, lane: Lane) -> None:
        """End a loose lane on which nothing is open."""
        if isinstance(lane, LooseLane) and lane.depth == 0:
            self.close_loose(lane)

    def submit_partial(self, lane: Lane, chunks: list[NDArray[np.int64]]) -> None:
        """Hand over rows of an open step that has reached its limit."""
        self._hand_over(Part(lane, chunks, sum(map(len, chunks)) // 4))

    def submit_lanes(self, record: StepRecord, lanes: list[Lane], rows: int) -> None:
        """Hand over finished lanes of an open step that has reached its limit."""
        self._hand_over(Lanes(record, lanes, rows))

    def _submit(self, record: StepRecord) -> None:
        with self._lock:
            if record not in self._open:
                return
            self._open.remove(record)
        rows = record.rows + sum(map(len, record.lanes)) // 4
        self._hand_over(Ended(record, rows))

    def _discard(self, record: StepRecord) -> None:
        """End a step that was open when the profiler was shut down, without what it recorded."""
        with self._lock:
            self._open.discard(record)
        self.losses.add("already_shutdown", record.rows + sum(map(len, record.lanes)) // 4)
        for lane in record.lanes:
            self.forget_marks(lane)
        if record.span is not None:
            record.span.end(record.end_ns + record.offset_ns)

    def _hand_over(self, item: Item) -> None:
        if item.record.timeline is not None or item.record.deferred:
            self.device.hold(item)
            self.notify(0)
        else:
            self.notify(self._append(item))

    def _append(self, item: Item) -> int:
        """Let an item wait to be resolved; returns how many rows wait now."""
        with self._lock:
            self._pending.append(item)
            self._pending_rows += item.rows + 1
            return self._pending_rows

    def release_held(self, *, all_of_them: bool = False) -> None:
        """Let what the device is past wait to be resolved."""
        self.deferred.settle(self.device.timeline)
        if all_of_them:
            self.deferred.forget(self.device.timeline)
        for item in self.device.released(all_of_them=all_of_them):
            self._append(item)

    def forget_marks(self, events: Sequence[int]) -> None:
        """Release the marks among events that belong to no row."""
        timeline = self.device.timeline
        if timeline is not None:
            kinds, values = events[0::2], events[1::2]
            tokens = [value for kind, value in zip(kinds, values, strict=True) if kind == TAG_MARK]
            timeline.release(tokens, passed=False)

    def _follow_device(self) -> None:
        """Let open steps and every handle record the way that the device's side asks for now."""
        timeline = self.device.active
        with self.switch_lock:
            if timeline is not None:
                with self._lock:
                    for record in list(self._open):
                        record.timeline = timeline
            for handle in list(self.handles):
                handle.switch(self.on)

    def close_abandoned(self) -> None:
        """Write the exits of timers that were thrown away; on closed lanes they count as left open already."""
        while self.abandoned:
            try:
                lane, exit_ = self.abandoned.popleft()
            except IndexError:  # another thread was quicker
                return
            if not isinstance(lane, IdleLane):
                lane.extend(exit_)

    def take(self, max_rows: int) -> list[Item]:
        """Remove and return what waits, oldest first, until `max_rows` rows are reached.

        A part comes alone: the next block of its lane begins with what the part leaves open.
        """
        taken: list[Item] = []
        rows = 0
        pending = self._pending
        with self._lock:
            while pending and rows < max_rows:
                item = pending[0]
                if item.alone and taken:
                    break
                taken.append(pending.popleft())
                rows += item.rows + 1
                if item.alone:
                    break
            self._pending_rows -= rows
        return taken

    def shut(self) -> None:
        """Close what is open outside steps, and count and drop what arrives from now on."""
        self.close_abandoned()
        with self._lock:
            loose = [record for record in self._open if record.loose]
        for record in loose:
            self.close_step(record)
        self._idle.__class__ = ShutLane

    def check_process(self) -> None:
        """Notice a fork that Python was not told of, as by uWSGI."""
        if os.getpid() != self._pid:
            self.on_fork()

    def restart_in_child(self) -> None:
        """After a fork: forget what the parent recorded and close what it had open."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self.switch_lock = threading.RLock()
        self.losses.restart_in_child()
        self.registry.renew_lock()
        self.tracing.renew_lock()
        self.device.restart_in_child()
        self.deferred = PendingRows(self.losses)
        self._follow_device()
        lost = sum(item.rows for item in self._pending)
        for record in self._open:
            record.lock = threading.RLock()
            record.span = None
            lost += record.rows
            for lane in record.lanes:
                lane.close()
                lost += len(lane) // 4
                lane.clear()
                lane.chunks = []
        self._open.clear()
        self.abandoned.clear()
        self._pending.clear()
        self._pending_rows = 0
        self.losses.add("fork", lost)
