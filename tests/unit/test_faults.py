"""Failing bodies and scopes closed wrongly: the user's exception is untouched, and what is wrong is counted."""

from __future__ import annotations

import contextvars
import gc
import logging
import threading
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from otel_brick import BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock, SpanNode


class EngineError(Exception):
    """An error of the user's."""


class Unprintable(Exception):
    """An error of the user's that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def nonzero(profiler: BrickProfiler) -> dict[str, int]:
    return {reason: count for reason, count in profiler.losses().items() if count}


def only_tree(profiler: BrickProfiler, traces: InMemoryTraces) -> SpanNode:
    assert profiler.flush()
    (tree,) = traces.trees()
    return tree


def test_an_exception_passes_unchanged_and_marks_every_scope_it_leaves(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    error = EngineError("bad weights")
    with pytest.raises(EngineError) as caught, profiler.step(), profiler.layer(3):
        with profiler.brick("Fine"):
            pass
        with profiler.brick(BrickId.RmsNorm), profiler.kernel("k"):
            raise error
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    step = only_tree(profiler, traces)
    (layer,) = step.children
    fine, failed = layer.children
    (kernel,) = failed.children
    for node in (step, layer, failed, kernel):
        assert node.attributes["error.type"] == f"{EngineError.__module__}.EngineError"
        assert node.span.status.status_code is StatusCode.ERROR
        assert node.span.status.description == "bad weights"
        assert node.span.events == ()
    assert "error.type" not in fine.attributes
    assert fine.span.status.status_code is StatusCode.UNSET
    assert profiler.brick_stats(BrickId.RmsNorm).failures == 1
    assert profiler.stats("Fine").failures == 0  # type: ignore[union-attr]
    assert not nonzero(profiler)


def test_a_handled_exception_marks_only_what_it_left(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step(), profiler.brick("Outer"):
        try:
            with profiler.brick("Inner"):
                raise ValueError("retry")
        except ValueError:
            pass
    step = only_tree(profiler, traces)
    (outer,) = step.children
    (inner,) = outer.children
    assert inner.attributes["error.type"] == "ValueError"
    assert "error.type" not in outer.attributes
    assert "error.type" not in step.attributes


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), Unprintable()])
def test_any_exception_passes(profiler: BrickProfiler, traces: InMemoryTraces, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, profiler.step(), profiler.brick("B"):
        raise error
    assert caught.value is error
    assert only_tree(profiler, traces).children[0].attributes["error.type"].endswith(type(error).__name__)


def test_many_different_errors_in_a_step_stay_bounded(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step():
        for number in range(1_500):
            with pytest.raises(ValueError, match=str(number)), profiler.brick("B"):
                raise ValueError(number)
    step = only_tree(profiler, traces)
    types = [child.attributes["error.type"] for child in step.children]
    assert types == ["ValueError"] * 1_024 + ["_OTHER"] * 476
    assert profiler.stats("B").failures == 1_500  # type: ignore[union-attr]


def test_a_scope_left_open_is_counted_and_holds_its_place_in_the_tree(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step():
        time.advance(10)
        profiler.brick("Forgotten").__enter__()
        time.advance(5)
        with profiler.brick("Inner"):
            time.advance(7)
        time.advance(100)
    step = only_tree(profiler, traces)
    assert step.outline() == ("step other", 122, (("Forgotten", 112, (("Inner", 7, ()),)),))
    assert nonzero(profiler) == {"left_open": 1}
    # Its duration says nothing, so it is in no statistic.
    assert profiler.brick_names() == ["Inner"]
    assert profiler.total_ns() == profiler.union_ns() == 7


def test_a_scope_closed_twice_is_counted_and_changes_nothing(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step(), profiler.brick("Outer"):
        inner = profiler.brick("Inner")
        with inner:
            time.advance(7)
        time.advance(1)
        inner.__exit__(None, None, None)
        time.advance(2)
    assert only_tree(profiler, traces).outline() == ("step other", 10, (("Outer", 10, (("Inner", 7, ()),)),))
    assert nonzero(profiler) == {"closed_twice": 1}


def test_a_scope_closed_out_of_order_hangs_below_the_step(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    first, second = profiler.brick("First"), profiler.brick("Second")
    with profiler.step():
        with profiler.brick("Outer"):
            first.__enter__()
            time.advance(3)
            second.__enter__()
            time.advance(4)
            first.__exit__(None, None, None)
            time.advance(5)
            second.__exit__(None, None, None)
        with profiler.brick("Next"):
            time.advance(1)
    step = only_tree(profiler, traces)
    assert sorted(child.name for child in step.children) == ["First", "Next", "Outer"]
    durations = {node.name: node.duration_ns for node in traces_of(step)}
    assert durations == {"step other": 13, "First": 7, "Second": 9, "Outer": 12, "Next": 1}
    (outer,) = (child for child in step.children if child.name == "Outer")
    assert [child.name for child in outer.children] == ["Second"]
    assert nonzero(profiler) == {"out_of_order": 1}


def traces_of(node: SpanNode) -> list[SpanNode]:
    return [node, *(below for child in node.children for below in traces_of(child))]


def test_one_malformed_lane_does_not_touch_the_others(profiler: BrickProfiler, time: ManualClock) -> None:
    for number in range(3):
        with profiler.step():
            if number == 1:
                profiler.brick("Forgotten").__enter__()
            for _ in range(4):
                with profiler.brick("Good"):
                    time.advance(2)
    assert profiler.stats("Good").count == 12  # type: ignore[union-attr]
    assert profiler.stats("Good").total_ns == 24  # type: ignore[union-attr]
    assert nonzero(profiler) == {"left_open": 1}


def test_closing_a_step_twice_is_counted(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    step = profiler.step()
    with step:
        pass
    step.__exit__(None, None, None)
    only_tree(profiler, traces)
    assert nonzero(profiler) == {"closed_twice": 1}


def test_a_scope_that_outlives_its_step_is_counted(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    started, go = threading.Event(), threading.Event()

    def work() -> None:
        with profiler.lane(), profiler.brick("Late"):
            started.set()
            go.wait(10)
        with profiler.brick("After"):
            pass

    with profiler.step():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        started.wait(10)
    go.set()
    thread.join()
    step = only_tree(profiler, traces)
    assert [child.name for child in step.children] == ["Late"]
    # The entry was left open at the step's end, and its exit came when nothing was open.
    assert nonzero(profiler) == {"left_open": 1, "out_of_order": 1}
    assert profiler.brick_names() == ["After"]


def test_a_brick_outside_any_step_is_a_child_of_the_current_span(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with traces.provider.get_tracer("app").start_as_current_span("request"):
        with profiler.brick("Outer"):
            time.advance(3)
            with profiler.brick("Inner"):
                time.advance(4)
        with profiler.brick("Second"):
            time.advance(1)
    request = only_tree(profiler, traces)
    assert request.name == "request"
    assert [child.outline() for child in request.children] == [
        ("Outer", 7, (("Inner", 4, ()),)),
        ("Second", 1, ()),
    ]
    assert profiler.step_count() == 0
    assert profiler.total_ns() == 8


def test_a_brick_outside_any_step_and_span_is_counted_only(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.brick("Alone"):
        time.advance(3)
    profiler.record_elapsed("Measured", 5)
    assert profiler.flush()
    assert traces.spans == []
    assert profiler.stats("Alone").total_ns == 3  # type: ignore[union-attr]
    assert profiler.stats("Measured").total_ns == 5  # type: ignore[union-attr]


def test_a_step_beyond_its_row_limit_keeps_its_statistics_and_says_what_it_dropped(
    traces: InMemoryTraces, time: ManualClock
) -> None:
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider,
        clock=time.clock,
        detail="all",
        max_rows_per_step=65_536,
        max_rows_per_trace=10**6,
    )
    count = 100_000
    handle = profiler.define("B", elements=2)
    with profiler.step(), profiler.layer(5), profiler.brick("Outer"):
        for _ in range(count):
            time.advance(1)
            with handle:
                time.advance(2)
    assert profiler.shutdown(timeout_s=60)
    (step,) = traces.trees()
    below = len(traces_of(step)) - 1
    dropped = step.attributes["brick.dropped.count"]
    assert dropped > 65_536
    assert below + dropped == count + 2
    assert nonzero(profiler) == {"log_full": dropped}
    assert [child.name for child in step.children] == ["layer"]
    assert [child.name for child in step.children[0].children] == ["Outer"]
    inner, outer = profiler.stats("B"), profiler.stats("Outer")
    assert inner is not None
    assert outer is not None
    assert (inner.count, inner.total_ns, inner.total_elements) == (count, 2 * count, 2 * count)
    assert (outer.total_ns, outer.exclusive_ns) == (3 * count, count)
    assert profiler.total_ns() == profiler.union_ns() == 3 * count
    matrix = profiler.layer_matrix()
    assert matrix.bricks == ("B", "Outer")
    assert matrix.count[5].tolist() == [count, 1]


def test_a_failing_span_processor_is_counted_and_not_felt(time: ManualClock) -> None:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("broken")

    provider = TracerProvider()
    provider.add_span_processor(Broken())
    profiler = BrickProfiler.enabled(tracer_provider=provider, clock=time.clock)
    with profiler.step(), profiler.brick("B"):
        pass
    profiler.shutdown(timeout_s=10)
    assert profiler.stats("B").count == 1  # type: ignore[union-attr]
    assert profiler.losses()["export_failed"] == 2


def test_a_forgotten_profiler_goes_away_with_its_worker(traces: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider)
    with profiler.step():
        pass
    assert profiler.flush()
    worker = profiler._pipeline._worker
    assert worker is not None and worker.is_alive()
    del profiler
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()


def test_a_step_open_at_shutdown_still_ends_and_what_it_held_is_counted(traces: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider)
    with profiler.step(), profiler.brick("Outer"):
        with profiler.brick("Inner"):
            pass
        assert profiler.shutdown(timeout_s=10)
        profiler.record_elapsed("Refused", 5)
        with profiler.brick("Refused"), profiler.layer(0):
            pass
    assert [span.name for span in traces.spans] == ["step other"]
    assert nonzero(profiler) == {"already_shutdown": 2 + 3}
    assert profiler.brick_names() == []


def test_an_exporter_whose_flush_raises_does_not_end_the_worker(traces: InMemoryTraces) -> None:
    class Broken:
        rows = 0

        def submit(self, blocks: list[Any], resource: object, losses: object) -> None:
            self.rows += sum(map(len, blocks))

        def flush(self, timeout_s: float) -> bool:
            raise RuntimeError("broken")

        def shutdown(self, timeout_millis: float = 30_000) -> None:
            pass

    exporter = Broken()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, exporter=exporter, detail="all")
    for steps in (1, 2):
        with profiler.step(), profiler.brick("B"):
            pass
        assert not profiler.flush(timeout_s=10)
        assert (exporter.rows, len(traces.spans)) == (steps, steps)
    profiler.shutdown(timeout_s=10)


def test_a_log_handler_that_raises_does_not_end_the_worker(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("broken")

    logger, handler = logging.getLogger("otel_brick"), Broken()
    logger.addHandler(handler)
    try:
        for _ in range(2):
            with profiler.step():
                profiler.brick("Forgotten").__enter__()
            assert profiler.flush(timeout_s=10)
    finally:
        logger.removeHandler(handler)
    assert len(traces.trees()) == 2
    assert nonzero(profiler) == {"left_open": 2}
