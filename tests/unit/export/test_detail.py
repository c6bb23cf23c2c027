"""Which steps have spans below them, which rows those are, and that nothing else depends on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_brick import BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock, SpanNode, span_trees


class KeptMetrics(MetricExporter):
    """Keeps the last export."""

    def __init__(self) -> None:
        super().__init__()
        self.last: MetricsData | None = None

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.last = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        pass

    def points(self, name: str) -> list[Any]:
        assert self.last is not None
        (scope,) = self.last.resource_metrics[0].scope_metrics
        (metric,) = (metric for metric in scope.metrics if metric.name == name)
        return list(metric.data.data_points)


def steps(traces: InMemoryTraces) -> list[SpanNode]:
    found = [node for node in all_nodes(traces.trees()) if node.attributes.get("brick.span.level") == "step"]
    return sorted(found, key=lambda node: node.attributes["brick.step.index"])


def all_nodes(nodes: list[SpanNode]) -> list[SpanNode]:
    return [below for node in nodes for below in (node, *all_nodes(node.children))]


def reasons(traces: InMemoryTraces) -> list[str]:
    return [step.attributes["brick.detail.reason"] for step in steps(traces)]


def run_steps(profiler: BrickProfiler, time: ManualClock, count: int, *, rows: int = 1, phase: str = "decode") -> None:
    handle = profiler.define("B", elements=3)
    for _ in range(count):
        with profiler.step(phase=phase):
            for _ in range(rows):
                with handle:
                    time.advance(10)


def test_the_first_two_steps_of_a_phase_then_one_in_the_interval(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, clock=time.clock, detail_interval=4)
    for _ in range(5):
        run_steps(profiler, time, 2)
        run_steps(profiler, time, 1, phase="prefill")
    assert profiler.shutdown()
    by_phase = {
        phase: [step.attributes["brick.detail.reason"] for step in steps(traces) if step.name == f"step {phase}"]
        for phase in ("decode", "prefill")
    }
    assert by_phase["decode"] == ["first", "first", *["none"] * 2, "interval", *["none"] * 3, "interval", "none"]
    assert by_phase["prefill"] == ["first", "first", "none", "none", "interval"]
    for step in steps(traces):
        assert len(step.children) == (step.attributes["brick.detail.reason"] != "none")
        assert step.attributes["brick.sampling.interval"] == 4
        assert "brick.dropped.count" not in step.attributes
    assert profiler.stats("B").count == 15  # type: ignore[union-attr]
    assert not any(profiler.losses().values())


def test_steps_are_counted_by_trace_and_root_steps_together(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, clock=time.clock)
    tracer = traces.provider.get_tracer("app")
    for _ in range(2):
        with tracer.start_as_current_span("request"):
            run_steps(profiler, time, 3)
    run_steps(profiler, time, 3)
    assert profiler.shutdown()
    assert reasons(traces) == ["first", "first", "none"] * 3


def test_a_step_slower_than_the_99th_percentile_has_detail(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, clock=time.clock, detail_interval=10**6)
    run_steps(profiler, time, 99)
    run_steps(profiler, time, 1, rows=3)
    profiler.losses()
    run_steps(profiler, time, 5)
    run_steps(profiler, time, 1, rows=4)
    assert profiler.shutdown()
    # The hundredth step comes too early to be called slow: there is no percentile yet.
    assert reasons(traces) == ["first", "first", *["none"] * 103, "slow"]


def test_a_step_that_failed_has_detail(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, clock=time.clock, detail_interval=10**6)
    run_steps(profiler, time, 4)
    with pytest.raises(KeyError), profiler.step(phase="decode"), profiler.brick("B"):
        raise KeyError("lost")
    run_steps(profiler, time, 1)
    assert profiler.shutdown()
    assert reasons(traces) == ["first", "first", "none", "none", "failed", "none"]
    assert [len(step.children) for step in traces.trees() if step.attributes["brick.detail.reason"] == "failed"] == [1]


@pytest.mark.parametrize(("detail", "kept"), [("auto", 7), ("all", 7), ("none", 0)])
def test_a_steps_cap_cuts_kernels_first_and_then_the_latest(
    traces: InMemoryTraces, time: ManualClock, detail: str, kept: int
) -> None:
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider, clock=time.clock, detail=detail, max_rows_per_step=7
    )
    with profiler.step(), profiler.layer(0):
        for number in range(4):
            with profiler.brick(f"B{number}"), profiler.kernel("k"), profiler.brick("Inside"):
                time.advance(1)
    assert profiler.shutdown()
    (step,) = traces.trees()
    below = all_nodes(step.children)
    assert len(below) == kept
    if kept:
        (layer,) = step.children
        assert [brick.name for brick in layer.children] == ["B0", "B1", "B2"]
        # What stood below a kernel that was cut hangs below the kernel's brick.
        assert [[inner.name for inner in brick.children] for brick in layer.children] == [["Inside"]] * 3
        assert step.attributes["brick.dropped.count"] == 13 - kept
        assert profiler.losses()["trace_cap"] == 13 - kept
    else:
        assert step.attributes["brick.detail.reason"] == "none"
        assert not any(profiler.losses().values())
    assert profiler.stats("Inside").count == 4  # type: ignore[union-attr]


def test_a_selected_step_that_finds_the_traces_cap_used_up_says_so(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider, clock=time.clock, detail="all", max_rows_per_trace=25
    )
    with traces.provider.get_tracer("app").start_as_current_span("request"):
        run_steps(profiler, time, 4, rows=10)
    run_steps(profiler, time, 1, rows=10)
    assert profiler.shutdown()
    assert reasons(traces) == ["all", "all", "cap", "cap", "all"]
    assert [step.attributes.get("brick.dropped.count") for step in steps(traces)] == [None, None, 10, 10, None]
    assert profiler.losses()["trace_cap"] == 20


def test_attached_rows_leave_whatever_the_policy(traces: InMemoryTraces, time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider, clock=time.clock, detail="none", attach_context=True, max_rows_per_step=1
    )
    with profiler.step(), profiler.layer(0), profiler.brick("B"):
        with traces.provider.get_tracer("app").start_as_current_span("theirs"):
            pass
    assert profiler.shutdown()
    (step,) = traces.trees()
    assert [node.name for node in all_nodes([step])] == ["step other", "layer", "B", "theirs"]


@pytest.mark.parametrize("cap", [20_000, None])
def test_a_request_of_500_steps(cap: int | None) -> None:
    """300 rows a step: detail for the first, one in 16 and the slow one; metrics and exemplars for all."""
    time, spans, metrics = ManualClock(), InMemorySpanExporter(), KeptMetrics()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(spans))
    arguments = {} if cap is None else {"max_rows_per_trace": cap}
    profiler = BrickProfiler.enabled(
        tracer_provider=provider, metric_exporter=metrics, clock=time.clock, detail="auto", **arguments
    )
    handle = profiler.define("B", elements=3)
    with provider.get_tracer("app").start_as_current_span("request"):
        for number in range(500):
            with profiler.step(phase="decode", tokens=1):
                for _ in range(300):
                    with handle:
                        time.advance(30_000 if number == 410 else 10_000)
            if number % 50 == 0:
                assert profiler.flush(timeout_s=60)
    assert profiler.flush(timeout_s=60)
    provider.force_flush()

    (request,) = span_trees(spans.get_finished_spans())
    detail = {step.attributes["brick.step.index"]: step.attributes["brick.detail.reason"] for step in request.children}
    assert len(detail) == 500
    selected = {0: "first", 1: "first", **dict.fromkeys(range(16, 500, 16), "interval"), 410: "slow"}
    if cap is None:
        # 13 steps of 300 rows stay within 4,000.
        fitting = sorted(selected)[:13]
        selected = {index: reason if index in fitting else "cap" for index, reason in selected.items()}
    assert detail == {**dict.fromkeys(range(500), "none"), **selected}
    for step in request.children:
        index = step.attributes["brick.step.index"]
        has_detail = selected.get(index, "cap") != "cap"
        assert len(step.children) == (300 if has_detail else 0)
        assert step.attributes.get("brick.dropped.count") == (300 if selected.get(index) == "cap" else None)

    (calls,) = metrics.points("brick.calls")
    assert calls.value == 150_000
    (bricks,) = metrics.points("brick.duration")
    assert (bricks.count, sum(bricks.bucket_counts)) == (150_000, 150_000)
    (durations,) = metrics.points("brick.step.duration")
    assert durations.count == 500
    (tokens,) = metrics.points("brick.tokens")
    assert tokens.value == 500
    exported = {span.context.span_id: span for span in spans.get_finished_spans()}
    exemplars = [*bricks.exemplars, *durations.exemplars]
    assert {exported[exemplar.span_id].name for exemplar in exemplars} == {"B", "step decode"}
    for exemplar in exemplars:
        span = exported[exemplar.span_id]
        assert exemplar.trace_id == span.context.trace_id
        assert exemplar.value == pytest.approx((span.end_time - span.start_time) / 1e9)
    assert profiler.shutdown(timeout_s=10)
    names = Counter(span.name for span in spans.get_finished_spans())
    assert names["B"] == 300 * sum(reason not in ("cap", "none") for reason in detail.values())
