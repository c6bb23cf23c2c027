"""The pipeline behind the recorder: resolve what has ended, feed the statistics, let a worker export the rest.

Any thread may `collect`; only the worker exports. A read of the statistics therefore never waits for a network, and a
slow exporter costs span detail, which is counted, never statistics or the time of the user's thread.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from .record.batch import drop_detail
from .record.budgets import Budgets
from .record.device import LIMIT_S
from .record.recorder import Ended
from .record.resolve import resolve
from .stats.exemplars import Exemplars
from .stats.steps import StepTable
from .stats.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from .export.detail import DetailPolicy
    from .record.batch import Batch
    from .record.recorder import Item, Recorder
    from .taxonomy import BrickId

EXIT_TIMEOUT_S: Final = 10.0
COALESCE_S: Final = 0.2
COALESCE_ROWS: Final = 8_192
MAX_BATCH_ROWS: Final = 131_072
MAX_PENDING_ROWS: Final = 1 << 17
"""Rows that may wait for the worker; beyond it, whoever ends a step resolves them itself."""
MAX_QUEUED_ROWS: Final = 1 << 18
"""Resolved rows that may wait for the exporter; beyond it, the oldest batches lose their span detail."""

MAX_QUEUED_STEPS: Final = 1 << 16
"""Steps that may wait for the exporter; beyond it, the oldest are lost with their own spans."""


class BatchSink(Protocol):
    """What the worker exports to."""

    def export(self, batch: Batch) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...


class _Flush:
    """One request to the worker and its answer."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.done = threading.Event()
        self.delivered = False


class Pipeline:
    """Moves rows from a recorder to the statistics and to a sink.

    Attributes:
        table, steps, exemplars: the statistics; read them with `lock` held, and `budgets` likewise.
        generation: how often they were forgotten; `start_unix_ns` is when they began.
        on_start: called when the worker starts, in a forked child again.
        on_exit: called with a timeout in seconds when the interpreter ends.
    """

    def __init__(self, recorder: Recorder, detail: DetailPolicy, sink: BatchSink) -> None:
        self._recorder = recorder
        self._detail = detail
        self._sink = sink
        self.budgets = Budgets(recorder.registry, recorder.losses)
        self.generation = 0
        self.on_start: Callable[[], object] = lambda: None
        self.on_exit: Callable[[float], object] = self.stop
        self._renew()
        recorder.notify = self._notify

    def _renew(self) -> None:
        self._forget()
        self.lock = threading.RLock()
        self._wake = threading.Event()
        self._full = threading.Event()
        self._queue: deque[Batch] = deque()
        self._queued_rows = 0
        self._flushes: deque[_Flush] = deque()
        self._start_lock = threading.RLock()
        self._worker: threading.Thread | None = None
        self._stopping = False
        self._collecting = False

    def _forget(self) -> None:
        self.generation += 1
        self.start_unix_ns = self._recorder.clock.unix()
        self.table = Table()
        self.steps = StepTable()
        self.exemplars = Exemplars()

    def restart_in_child(self) -> None:
        """After a fork: start empty; the worker starts again with the first step."""
        self._renew()

    def _notify(self, waiting_rows: int) -> None:
        if not self._wake.is_set():
            self._wake.set()
            if self._worker is None or not self._worker.is_alive():
                self._start()
        if waiting_rows >= COALESCE_ROWS:
            self._full.set()
            if waiting_rows > MAX_PENDING_ROWS:
                self.collect()

    def _start(self) -> None:
        with self._start_lock:
            alive = self._worker is not None and self._worker.is_alive()
            if not alive and not self._stopping:
                # The thread holds the pipeline weakly while it waits, so that a forgotten profiler can go.
                wake = self._wake
                held = weakref.ref(self, lambda _: wake.set())
                worker = threading.Thread(target=_work, args=(held, wake), name="otel-brick", daemon=True)
                try:
                    worker.start()
                except RuntimeError:  # the interpreter is shutting down; reads still collect
                    self._stopping = True
                else:
                    self._worker = worker
                    # Registered later than the provider's own handler, so it runs before that.
                    atexit.register(_stop_at_exit, weakref.ref(self))
                    self.on_start()

    def collect(self, wait_s: float = 0.0) -> None:
        """Resolve every step that has ended and add it to the statistics.

        Args:
            wait_s: how long to wait for the device to get past them; what it is not past by then comes later.
        """
        self._recorder.close_abandoned()
        if wait_s and self._recorder.device.holds():
            self._recorder.device.wait(wait_s)
        with self.lock:
            # A finalizer or signal handler may read us while we are at it; it gets what is there.
            if self._collecting:
                return
            self._collecting = True
            try:
                self._recorder.release_held()
                while items := self._recorder.take(MAX_BATCH_ROWS):
                    self._try(items)
                self._shorten_queue()
            finally:
                self._collecting = False

    def _try(self, items: list[Item]) -> None:
        losses = self._recorder.losses
        try:
            self._apply(items)
        except Exception as error:
            losses.remember("rows could not be resolved", error)
            losses.add("encode_error", sum(item.rows for item in items))
            for item in items:
                if isinstance(item, Ended) and item.record.span is not None:
                    item.record.span.end(item.record.end_ns + item.record.offset_ns)

    def _apply(self, items: list[Item]) -> None:
        registry = self._recorder.registry
        self._recorder.describe()
        batch = resolve(items, registry, self._recorder.losses)
        budgets = self.budgets.by_brick()
        if budgets is not None:
            batch = replace(batch, budgets=budgets)
        exported = any(record.span is not None or record.recording for record in batch.steps)
        rows = np.empty(0, np.intp)
        if exported:
            rows = self._detail.select(batch, registry.descriptor_level.data[batch.descriptor], self.steps)
        self.table.add(batch, registry)
        self.steps.add(batch, registry, self._recorder.clock.now())
        if exported and batch.ended:
            detail = batch.only(rows).with_ids(self._recorder.ids.span_ids(len(rows)))
            self.exemplars.add(detail, registry)
            self._queue.append(detail)
            self._queued_rows += len(detail)

    def _shorten_queue(self) -> None:
        while len(self._queue) > 1 and sum(len(batch.steps) for batch in self._queue) > MAX_QUEUED_STEPS:
            batch = self._queue.popleft()
            self._queued_rows -= len(batch)
            self._recorder.losses.add("queue_full", len(batch) + len(batch.steps))
        for position, batch in enumerate(self._queue):
            if self._queued_rows <= MAX_QUEUED_ROWS:
                break
            self._queued_rows -= len(batch)
            drop_detail(batch, np.arange(len(batch)), "queue_full", self._recorder.losses)
            self._queue[position] = batch.only(np.empty(0, np.intp))

    def replace(self, detail: DetailPolicy, sink: BatchSink) -> None:
        """Use another policy and sink for what is collected from now on."""
        with self.lock:
            self.collect()
            self._detail, self._sink = detail, sink

    def reset(self) -> None:
        """Forget all statistics, those of ended steps that were not read yet included."""
        if self._recorder.device.holds():
            self.collect(LIMIT_S)
        with self.lock:
            self.collect()
            self._forget()

    def set_budget(self, brick: BrickId | str, budget_ns: int | None) -> None:
        """Let a budget hold for what ends from now on."""
        with self.lock:
            self.collect()
            self.budgets.set(brick, budget_ns)

    def forget_budgets(self) -> None:
        """Let no budget hold for what ends from now on."""
        with self.lock:
            self.collect()
            self.budgets.clear()

    def flush(self, timeout_s: float) -> bool:
        """Let the worker export everything that has ended and flush the provider; False if that takes too long."""
        self._recorder.check_process()
        if self._worker is None or not self._worker.is_alive():
            self._start()
        if self._worker is None or not self._worker.is_alive():
            self.collect(timeout_s)
            return False
        if self._recorder.device.holds():
            deadline = time.monotonic() + timeout_s
            self.collect(timeout_s)
            timeout_s = max(0.0, deadline - time.monotonic())
        request = _Flush(timeout_s)
        self._flushes.append(request)
        self._wake.set()
        self._full.set()
        return request.done.wait(timeout_s) and request.delivered

    def stop(self, timeout_s: float) -> bool:
        """Flush once more and end the worker."""
        deadline = time.monotonic() + timeout_s
        delivered = self.flush(timeout_s) if self._worker is not None else True
        with self._start_lock:
            self._stopping = True
        self._wake.set()
        self._full.set()
        if self._worker is not None:
            self._worker.join(max(0.0, deadline - time.monotonic()))
        self._recorder.release_held(all_of_them=True)
        self.collect()
        if self._worker is None or not self._worker.is_alive():
            self._export()
        self._abandon()
        self._recorder.losses.tell()
        return delivered

    def _abandon(self) -> None:
        """Count what a worker in time trouble leaves, steps included."""
        with self.lock:
            left, self._queue = self._queue, deque()
            self._queued_rows = 0
        for batch in left:
            drop_detail(batch, np.arange(len(batch)), "already_shutdown", self._recorder.losses)
            ended = sum(record.span is not None for record in batch.steps)
            self._recorder.losses.add("already_shutdown", ended)

    def work(self) -> bool:
        """One round of the worker; False when it should end."""
        self._full.wait(COALESCE_S)
        self._wake.clear()
        self._full.clear()
        requests = list(self._flushes)
        self.collect()
        device = self._recorder.device
        timeline = device.timeline  # which a shutdown may take away meanwhile
        if timeline is not None:
            timeline.tend()
        if device.holds():
            self._wake.set()  # and look again in a moment
        self._export()
        self._recorder.losses.tell()
        for request in requests:
            self._flushes.popleft()
            try:
                request.delivered = self._sink.flush(request.timeout_s)
            except Exception as error:
                self._recorder.losses.remember("what was exported could not be flushed", error)
            finally:
                request.done.set()
        return not self._stopping

    def _export(self) -> None:
        while True:
            with self.lock:
                if not self._queue:
                    return
                batch = self._queue.popleft()
                self._queued_rows -= len(batch)
            try:
                self._sink.export(batch)
            except Exception as error:
                self._recorder.losses.remember("spans could not be exported", error)
                self._recorder.losses.add("encode_error", len(batch))


def _stop_at_exit(pipeline: weakref.ref[Pipeline]) -> None:
    alive = pipeline()
    if alive is not None:
        alive.on_exit(EXIT_TIMEOUT_S)


def _work(pipeline: weakref.ref[Pipeline], wake: threading.Event) -> None:
    while wake.wait():
        alive = pipeline()
        if alive is None or not alive.work():
            return
        del alive
