"""What threads, finalizers, signal handlers and failing providers may do at the worst moment, forced to happen."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import threading
import time as real_time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

import otel_brick.record.resolve
from otel_brick import BrickProfiler
from otel_brick.record.balance import repair
from otel_brick.record.clock import Clock
from otel_brick.record.lane import SPILL_LENGTH
from otel_brick.testing import InMemoryTraces


def nonzero(profiler: BrickProfiler) -> dict[str, int]:
    return {reason: count for reason, count in profiler.losses().items() if count}


def counts(profiler: BrickProfiler) -> dict[str, int]:
    return {brick.name: brick.count for brick in profiler.all_brick_stats()}


def in_threads(work: Sequence[Callable[[], object]], timeout_s: float = 10) -> None:
    """Run all of `work` at the same time; what one raises is raised, and one that never ends is a failure."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    deadline = real_time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - real_time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.fixture
def rapid_switching() -> Iterator[None]:
    """Threads take turns as often as the interpreter allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# --- locks ---


def interrupt(profiler: BrickProfiler, name: str) -> None:
    """What a signal handler or finalizer might do: two steps and one loose brick, each with a brick."""
    with profiler.step(), profiler.brick(name):
        pass
    with profiler.brick(name):
        pass
    json.loads(profiler.to_json())
    profiler.losses()
    profiler.disable()
    profiler.enable()
    with profiler.step(), profiler.lane(), profiler.brick(name):
        pass


@pytest.mark.parametrize(
    "lock",
    [
        "_recorder._lock",
        "_recorder.losses._lock",
        "_recorder.registry._lock",
        "_recorder.tracing._lock",
        "_pipeline.lock",
        "_pipeline._start_lock",
        "_recorder.switch_lock",
        "_recorder.device._lock",
        "_recorder.deferred._lock",
    ],
)
def test_a_thread_that_is_interrupted_inside_a_lock_can_record_and_read(lock: str) -> None:
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="all")

    def holder() -> None:
        with attrgetter(lock)(profiler):
            interrupt(profiler, "InHandler")

    in_threads([holder])
    assert counts(profiler) == {"InHandler": 3}
    assert profiler.step_count() == 2
    assert profiler.shutdown(timeout_s=10)
    assert len(traces.spans) == 4
    assert not nonzero(profiler)


def test_a_thread_that_is_interrupted_inside_the_lock_of_its_step_can_record_in_it() -> None:
    profiler = BrickProfiler.enabled(detail="none")

    def holder() -> None:
        with profiler.step():
            with profiler._recorder.current.get().record.lock:
                with profiler.lane(), profiler.brick("Same"):
                    pass
                with pytest.raises(ValueError, match="x"), profiler.brick("Failed"):
                    raise ValueError("x")
                interrupt(profiler, "InHandler")

    in_threads([holder])
    assert counts(profiler) == {"Same": 1, "Failed": 1, "InHandler": 3}
    assert profiler.step_count() == 3
    assert profiler.shutdown(timeout_s=10)


def test_every_reading_of_the_clock_may_be_interrupted_by_a_whole_step_and_a_report() -> None:
    # The clock is read while steps open, close and are collected, so an interrupt there stands for one anywhere.
    interrupted: list[str] = []
    inside = threading.local()

    def now() -> int:
        # A bounded number, since what is recorded during a collection makes it collect once more.
        if len(interrupted) < 40 and not getattr(inside, "busy", False) and threading.current_thread().name == "user":
            inside.busy = True
            interrupt(profiler, "InHandler")
            interrupted.append("once")
            inside.busy = False
        return real_time.perf_counter_ns()

    def user() -> None:
        threading.current_thread().name = "user"
        for _ in range(5):
            with profiler.step(), profiler.brick("Body"):
                pass
            profiler.losses()

    profiler = BrickProfiler.enabled(detail="none", clock=Clock(now=now))
    in_threads([user])
    assert counts(profiler) == {"InHandler": 3 * len(interrupted), "Body": 5}
    assert profiler.step_count() == 5 + 2 * len(interrupted)
    assert len(interrupted) == 40
    assert not nonzero(profiler)
    assert profiler.shutdown(timeout_s=10)


def test_a_log_handler_that_reads_statistics_cannot_deadlock_with_a_thread_that_collects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiler = BrickProfiler.enabled(detail="none")
    about_to_lock = threading.Event()

    class Handler(logging.Handler):
        def filter(self, record: logging.LogRecord) -> bool:  # the last thing before the handler's lock is taken
            about_to_lock.set()
            return True

        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    texts: list[str] = []
    handler = Handler()
    logger = logging.getLogger("otel_brick")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])

    # The lock of a handler is held while it formats a record, with our statistics in it for example.
    with profiler.step():
        handler.acquire()
        profiler.start("Abandoned")
    try:
        collecting = threading.Thread(target=profiler.losses, daemon=True)
        collecting.start()
        assert about_to_lock.wait(10)
        in_threads([lambda: texts.append(f"{profiler.step_count()} steps")], timeout_s=5)
    finally:
        handler.release()
    collecting.join(10)
    assert not collecting.is_alive()
    assert nonzero(profiler) == {"left_open": 1}
    assert profiler.shutdown(timeout_s=10)
    assert texts[0] == "1 steps"
    assert len(texts) == 2 and "left_open" in texts[1]


# --- threads against each other ---


@pytest.mark.usefixtures("rapid_switching")
def test_a_brick_first_seen_while_another_thread_collects_is_counted() -> None:
    for _ in range(8):
        profiler = BrickProfiler.enabled(detail="none")
        done = threading.Event()

        def user(number: int, profiler: BrickProfiler = profiler) -> None:
            for index in range(200):
                with profiler.brick(f"Name{number}_{index}"):
                    pass

        def reader(profiler: BrickProfiler = profiler, done: threading.Event = done) -> None:
            while not done.is_set():
                profiler.losses()

        reading = threading.Thread(target=reader, daemon=True)
        reading.start()
        in_threads([lambda: user(0), lambda: user(1)], timeout_s=30)
        done.set()
        reading.join(10)
        assert counts(profiler) == {f"Name{number}_{index}": 1 for number in range(2) for index in range(200)}
        assert not nonzero(profiler)
        assert profiler.shutdown(timeout_s=10)


@pytest.mark.usefixtures("rapid_switching")
def test_many_threads_may_close_the_same_abandoned_timers_at_once() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    with profiler.step():
        for _ in range(5_000):
            profiler.start("Abandoned")
        assert len(profiler._recorder.abandoned) == 5_000
        in_threads([profiler._recorder.close_abandoned] * 8)
        assert not profiler._recorder.abandoned
    assert nonzero(profiler) == {"left_open": 5_000}
    assert profiler.shutdown(timeout_s=10)


def test_abandoned_timers_that_another_thread_takes_first_are_no_error() -> None:
    class Taken(deque[Any]):
        def __bool__(self) -> bool:  # what the deque said just before the other thread emptied it
            return True

        def __len__(self) -> int:
            return 1

    profiler = BrickProfiler(detail="none")
    profiler._recorder.abandoned = Taken()
    profiler._recorder.close_abandoned()
    profiler._recorder.losses._untold = Taken()
    profiler._recorder.losses.tell()


def test_a_thread_that_writes_to_a_taken_step_does_not_shift_the_rows_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up, may_write, written = threading.Event(), threading.Event(), threading.Event()

    def now() -> int:
        if threading.current_thread().name == "late":  # it holds the lane's `extend` already
            looked_up.set()
            assert may_write.wait(10)
        return real_time.perf_counter_ns()

    concatenate = otel_brick.record.resolve._concatenate

    def interrupted(blocks: Any) -> Any:
        if blocks.lanes and blocks.lanes[0].recorder is profiler._recorder:
            may_write.set()
            assert written.wait(10)
        return concatenate(blocks)

    monkeypatch.setattr(otel_brick.record.resolve, "_concatenate", interrupted)
    profiler = BrickProfiler.enabled(detail="none", clock=Clock(now=now))
    late, first, second = profiler.define("Late"), profiler.define("First"), profiler.define("Second")

    def enter() -> None:
        late.__enter__()
        written.set()

    # Both steps are taken together, so that a shifted row would land in the other one.
    with profiler._pipeline.lock:
        with profiler.step():
            with first:
                pass
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(enter,), name="late", daemon=True).start()
            assert looked_up.wait(10)
        with profiler.step():
            for _ in range(3):
                with second:
                    pass
        profiler.losses()
    assert written.is_set()
    assert counts(profiler) == {"First": 1, "Second": 3}
    assert profiler.step_count() == 2
    assert not nonzero(profiler)
    assert profiler.shutdown(timeout_s=10)


# --- providers that fail or take long ---


class Failing(SpanProcessor):
    """Raises in the methods named, and notes the spans that come through."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        self.ended: list[str] = []

    def _maybe_raise(self, method: str) -> None:
        if method in self.methods:
            raise RuntimeError(f"{method} failed")

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._maybe_raise("on_start")

    def on_end(self, span: ReadableSpan) -> None:
        self._maybe_raise("on_end")
        self.ended.append(span.name)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self._maybe_raise("force_flush")
        return True


def failing(*methods: str, **arguments: Any) -> tuple[Failing, BrickProfiler]:
    processor = Failing(*methods)
    provider = TracerProvider()
    provider.add_span_processor(processor)
    return processor, BrickProfiler.enabled(tracer_provider=provider, detail="all", **arguments)


def one_step(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.brick("B"):
        pass


def test_a_provider_that_cannot_be_flushed_costs_neither_the_worker_nor_later_steps() -> None:
    processor, profiler = failing("force_flush")
    one_step(profiler)
    began = real_time.monotonic()
    assert profiler.flush(timeout_s=30) is False
    assert real_time.monotonic() - began < 10
    worker = profiler._pipeline._worker
    assert worker is not None and worker.is_alive()
    # More than the spans between two flushes of the worker's own, which fail too.
    for _ in range(600):
        one_step(profiler)
    assert profiler.flush(timeout_s=30) is False
    assert profiler._pipeline._worker is worker and worker.is_alive()
    assert sorted(processor.ended) == ["B"] * 601 + ["step other"] * 601
    assert not profiler._pipeline._queue
    processor.methods = ()
    one_step(profiler)
    assert profiler.shutdown(timeout_s=10)
    assert len(processor.ended) == 2 * 602
    assert not nonzero(profiler)


def test_spans_that_a_processor_refuses_are_counted_and_later_ones_leave() -> None:
    processor, profiler = failing("on_end")
    for _ in range(3):
        one_step(profiler)
        assert profiler.flush(timeout_s=10)
    assert nonzero(profiler) == {"export_failed": 6}
    assert processor.ended == []
    worker = profiler._pipeline._worker
    processor.methods = ()
    for _ in range(2):
        one_step(profiler)
    assert profiler.flush(timeout_s=10)
    assert profiler._pipeline._worker is worker
    assert sorted(processor.ended) == ["B"] * 2 + ["step other"] * 2
    assert counts(profiler) == {"B": 5}
    assert profiler.shutdown(timeout_s=10)
    assert nonzero(profiler) == {"export_failed": 6}


def test_a_provider_that_cannot_start_spans_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    processor, profiler = failing("on_start")
    with caplog.at_level(logging.WARNING, "otel_brick"):
        for _ in range(200):
            one_step(profiler)
    assert [record.getMessage() for record in caplog.records] == ["the tracer provider could not start a step span"]
    assert counts(profiler) == {"B": 200}
    assert profiler.step_count() == 200
    assert profiler.shutdown(timeout_s=10)
    assert processor.ended == []


class Blocked(SpanExporter):
    """Takes up to 20 s for each call until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.names: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.released.wait(20)
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize("processor", [SimpleSpanProcessor, BatchSpanProcessor])
def test_shutdown_takes_no_longer_than_allowed_and_every_span_is_delivered_or_counted(processor: Any) -> None:
    exporter = Blocked()
    provider = TracerProvider()
    provider.add_span_processor(processor(exporter))
    profiler = BrickProfiler.enabled(tracer_provider=provider, detail="all")
    try:
        for _ in range(300):  # with their bricks more than are handed over between two flushes
            one_step(profiler)
        assert exporter.entered.wait(10)
        for _ in range(300):
            one_step(profiler)
        began = real_time.monotonic()
        assert profiler.shutdown(timeout_s=1) is False
        assert real_time.monotonic() - began < 3
    finally:
        exporter.released.set()
    worker = profiler._pipeline._worker
    assert worker is not None
    worker.join(10)
    assert not worker.is_alive()
    provider.shutdown()
    left = nonzero(profiler)
    assert list(left) == ["already_shutdown"]
    assert len(exporter.names) + left["already_shutdown"] == 1_200
    assert left["already_shutdown"] >= 600  # at least what came while the worker was held up
    assert counts(profiler) == {"B": 600}


# --- bounds ---


def lines_of_repair(rows: int) -> int:
    """How many lines it takes to match scopes that are all open at once and close in the order they opened."""
    site = np.arange(rows, dtype=np.int64)
    executed = 0

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal executed
        executed += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        matched = repair(np.concatenate((site, ~site)), np.concatenate((site, site)))
    finally:
        sys.settrace(before)
    assert matched.exit.tolist() == list(range(rows, 2 * rows))
    assert matched.out_of_order.tolist() == [True] * (rows - 1) + [False]
    assert matched.closed_twice == 0
    return executed


def test_matching_scopes_that_are_all_open_at_once_takes_work_in_proportion_to_them() -> None:
    assert lines_of_repair(8_000) < 8.5 * lines_of_repair(1_000)


def test_a_step_of_20000_overlapping_scopes_is_read_at_once() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    with profiler.step():
        # Bound by `define`, each with counts of its own, so that no two may be taken for each other.
        scopes = [profiler.define("B", elements=index) for index in range(20_000)]
        for scope in scopes:
            scope.__enter__()
        for scope in scopes:
            scope.__exit__(None, None, None)
    in_threads([profiler.losses], timeout_s=5)
    assert counts(profiler) == {"B": 20_000}
    assert nonzero(profiler) == {"out_of_order": 19_999}
    assert profiler.shutdown(timeout_s=10)


def test_short_lanes_of_a_long_step_are_handed_over_before_it_ends() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    profiler._recorder.row_limit = 500
    handle = profiler.define("B")
    most = 0
    with profiler.step():
        record = profiler._recorder.current.get().record
        for _ in range(5_000):
            with profiler.lane(), handle:
                pass
            most = max(most, len(record.lanes))
        # The step's own lane and those that hold up to 500 rows.
        assert most == 501
        seen = profiler.stats("B")
        assert seen is not None and seen.count >= 4_500
    assert counts(profiler) == {"B": 5_000}
    assert profiler.step_count() == 1
    assert not nonzero(profiler)
    assert profiler.shutdown(timeout_s=10)


@pytest.mark.parametrize("scope", ["brick", "step"])
def test_measured_bricks_below_an_open_scope_become_arrays(scope: str) -> None:
    profiler = BrickProfiler.enabled(detail="none")
    most = 0
    with profiler.brick("Serve") if scope == "brick" else profiler.step():
        lane = profiler._recorder.current.get()
        for number in range(10_000):
            profiler.record_elapsed("B", 1_000, number)
            most = max(most, len(lane))
        assert most <= SPILL_LENGTH
        assert sum(map(len, lane.chunks)) + len(lane) >= 40_000
    stats = profiler.stats("B")
    assert stats is not None
    assert (stats.count, stats.total_ns, stats.total_elements) == (10_000, 10_000_000, sum(range(10_000)))
    assert not nonzero(profiler)
    assert profiler.shutdown(timeout_s=10)
