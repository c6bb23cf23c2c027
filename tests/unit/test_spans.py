"""What spans say: names, attributes and relations exactly, on the SDK's tracer and on any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Link, SpanKind, StatusCode

from otel_brick import BrickCategory, BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock, SpanNode, span_trees


def only_tree(profiler: BrickProfiler, traces: InMemoryTraces) -> SpanNode:
    assert profiler.flush()
    (tree,) = traces.trees()
    return tree


def test_attributes_are_exactly_these(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with (
        profiler.step(phase="decode", tokens=4, batch_size=2, attributes={"gen_ai.request.model": "m"}) as step,
        profiler.layer(3, type="decoder"),
        profiler.brick(BrickId.QkvProjection, elements=64, bytes_read=1_000, bytes_written=24),
        profiler.kernel("gemv", ptx_hash="00FF00FF00FF00FF", grid=(128, 2), block=256, shared_mem=48, elements=7),
    ):
        step.add_tokens(1)
        profiler.add_tokens(2)
    step_node = only_tree(profiler, traces)
    (layer,) = step_node.children
    (brick,) = layer.children
    (kernel,) = brick.children
    assert (step_node.name, step_node.attributes) == (
        "step decode",
        {
            "brick.span.level": "step",
            "brick.phase": "decode",
            "brick.step.index": 0,
            "brick.batch.size": 2,
            "brick.token.count": 7,
            "brick.timing.source": "host",
            "brick.detail.reason": "all",
            "thread.id": threading.get_ident(),
            "thread.name": "MainThread",
            "gen_ai.request.model": "m",
        },
    )
    assert (layer.name, layer.attributes) == (
        "layer decoder",
        {"brick.span.level": "layer", "brick.layer.index": 3, "brick.layer.type": "decoder"},
    )
    assert (brick.name, brick.attributes) == (
        "QkvProjection",
        {
            "brick.span.level": "brick",
            "brick.name": "QkvProjection",
            "brick.category": "attention",
            "brick.layer.index": 3,
            "brick.element.count": 64,
            "brick.io.size": 1_024,
            "brick.io.read.size": 1_000,
            "brick.io.write.size": 24,
        },
    )
    assert (kernel.name, kernel.attributes) == (
        "gemv",
        {
            "brick.span.level": "kernel",
            "brick.name": "QkvProjection",
            "brick.element.count": 7,
            "brick.cuda.kernel.name": "gemv",
            "brick.cuda.ptx.hash": "00ff00ff00ff00ff",
            "brick.cuda.grid.x": 128,
            "brick.cuda.grid.y": 2,
            "brick.cuda.grid.z": 1,
            "brick.cuda.block.x": 256,
            "brick.cuda.block.y": 1,
            "brick.cuda.block.z": 1,
            "brick.cuda.shared_memory.dynamic.size": 48,
        },
    )
    for node in (layer, brick, kernel):
        assert node.span.kind is SpanKind.INTERNAL
        assert node.span.status.status_code is StatusCode.UNSET
        assert node.span.resource == traces.provider.resource
        assert node.span.instrumentation_scope == step_node.span.instrumentation_scope
        assert node.span.instrumentation_scope.name == "otel_brick"  # type: ignore[union-attr]


def test_what_is_not_given_is_not_sent(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step(), profiler.layer(0), profiler.brick("Own", category=BrickCategory.Ffn):
        with profiler.kernel(""):
            pass
        with profiler.brick("Read", bytes_read=0):
            pass
    step = only_tree(profiler, traces)
    (layer,) = step.children
    (own,) = layer.children
    kernel, read = own.children
    assert "brick.token.count" not in step.attributes
    assert "brick.dropped.count" not in step.attributes
    assert (layer.name, "brick.layer.type" in layer.attributes) == ("layer", False)
    assert own.attributes == {
        "brick.span.level": "brick",
        "brick.name": "Own",
        "brick.category": "ffn",
        "brick.layer.index": 0,
    }
    assert (kernel.name, kernel.attributes) == (
        "cuda kernel",
        {"brick.span.level": "kernel", "brick.name": "Own"},
    )
    assert read.attributes["brick.io.size"] == read.attributes["brick.io.read.size"] == 0
    assert "brick.io.write.size" not in read.attributes
    assert "brick.element.count" not in read.attributes


def test_counts_of_63_bits_are_sent_exactly(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    most = (1 << 63) - 1
    with profiler.step(tokens=most), profiler.brick("B", elements=most, bytes_read=most, bytes_written=most):
        pass
    step = only_tree(profiler, traces)
    (brick,) = step.children
    assert step.attributes["brick.token.count"] == most
    assert brick.attributes["brick.element.count"] == most
    assert brick.attributes["brick.io.read.size"] == brick.attributes["brick.io.write.size"] == most
    # The sum does not fit OTLP's signed 64 bits and stays at their largest number.
    assert brick.attributes["brick.io.size"] == most
    assert profiler.stats("B").total_bytes == 2 * most  # type: ignore[union-attr]


def test_a_step_hangs_below_the_current_span_and_others_hang_below_it(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    tracer = traces.provider.get_tracer("app")
    with tracer.start_as_current_span("request"), profiler.step(), profiler.brick("B"):
        with tracer.start_as_current_span("inside"):
            pass
    request = only_tree(profiler, traces)
    (step,) = request.children
    assert (request.name, step.name) == ("request", "step other")
    assert sorted(child.name for child in step.children) == ["B", "inside"]


def test_attached_bricks_are_the_parents_of_what_runs_inside_them(traces: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, attach_context=True, detail="none")
    tracer = traces.provider.get_tracer("app")
    with profiler.step(), profiler.layer(1), profiler.brick("Outer"):
        with profiler.brick("Inner"), tracer.start_as_current_span("inside"):
            pass
        with tracer.start_as_current_span("beside"):
            pass
    assert not trace.get_current_span().get_span_context().is_valid
    step = only_tree(profiler, traces)
    (layer,) = step.children
    (outer,) = layer.children
    assert [(child.name, [below.name for below in child.children]) for child in outer.children] == [
        ("Inner", ["inside"]),
        ("beside", []),
    ]
    profiler.shutdown()


def test_attached_bricks_leave_no_context_behind_when_they_fail_or_repeat(traces: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, attach_context=True)
    handle = profiler.define("B")
    with traces.provider.get_tracer("app").start_as_current_span("request") as request:
        for _ in range(3):
            with pytest.raises(ValueError, match="x"), handle, handle:
                raise ValueError("x")
            assert trace.get_current_span() is request
    assert profiler.flush()
    (root,) = traces.trees()
    assert [len(child.children) for child in root.children] == [1, 1, 1]
    profiler.shutdown()


def test_parent_and_links_are_taken_as_given(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    tracer = traces.provider.get_tracer("app")
    requests = [tracer.start_span(f"request {number}") for number in range(3)]
    contexts = [request.get_span_context() for request in requests]
    with profiler.step(parent=requests[0], links=[requests[1], contexts[2], Link(contexts[0], {"weight": 2})]):
        assert trace.get_current_span().get_span_context().trace_id == contexts[0].trace_id
    with profiler.step(parent=contexts[1]), profiler.brick("B"):
        pass
    with profiler.step(parent=trace.set_span_in_context(requests[2])):
        pass
    assert profiler.flush()
    steps = [span for span in traces.spans if span.name == "step other"]
    assert [step.parent.span_id for step in steps] == [  # type: ignore[union-attr]
        context.span_id for context in contexts
    ]
    assert [link.context for link in steps[0].links] == [contexts[1], contexts[2], contexts[0]]
    assert steps[0].links[2].attributes == {"weight": 2}


def test_times_are_on_the_calendar_and_a_step_ends_where_it_ended(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    began = time.clock.unix()
    with profiler.step():
        time.advance(5)
        with profiler.brick("B"):
            time.advance(7)
        time.advance(11)
    time.advance(1_000_000)
    step = only_tree(profiler, traces)
    (brick,) = step.children
    assert (step.span.start_time, step.span.end_time) == (began, began + 23)
    assert (brick.span.start_time, brick.span.end_time) == (began + 5, began + 12)


def test_a_steps_span_is_ended_by_the_worker_with_its_late_attributes(time: ManualClock) -> None:
    ended: list[tuple[str, bool]] = []

    class Watch(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            on_worker = threading.current_thread().name == "otel-brick"
            assert span.attributes is not None
            ended.append((span.name, on_worker and "brick.span.level" in span.attributes))

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True  # older SDKs do not give this

    provider = TracerProvider()
    provider.add_span_processor(Watch())
    profiler = BrickProfiler.enabled(tracer_provider=provider, clock=time.clock)
    with profiler.step(), profiler.brick("B"):
        pass
    assert profiler.flush()
    assert ended == [("step other", True), ("B", True)]
    profiler.shutdown()


def test_the_environments_span_limits_hold(monkeypatch: pytest.MonkeyPatch, traces: InMemoryTraces) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider)
    with profiler.step(), profiler.brick("LongName", elements=3):
        pass
    assert profiler.shutdown()
    brick = traces.spans[-1]
    assert brick.attributes == {"brick.span.level": "bric", "brick.name": "Long", "brick.category": "othe"}


class ForeignTracer(trace.Tracer):
    """A tracer without the SDK's public attributes, as wrappers of other products have."""

    def __init__(self, inner: trace.Tracer) -> None:
        self._inner = inner

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._inner.start_span(*args, **kwargs)

    @contextmanager
    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Iterator[trace.Span]:  # type: ignore[override]
        with self._inner.start_as_current_span(*args, **kwargs) as span:
            yield span


class ForeignProvider(trace.TracerProvider):
    """Gives foreign tracers and cannot be flushed."""

    def __init__(self, inner: TracerProvider) -> None:
        self._inner = inner

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return ForeignTracer(self._inner.get_tracer(*args, **kwargs))


def test_a_tracer_of_another_product_gets_the_same_tree(traces: InMemoryTraces, time: ManualClock) -> None:
    outlines: list[Any] = []
    for provider in (traces.provider, ForeignProvider(traces.provider)):
        profiler = BrickProfiler.enabled(tracer_provider=provider, clock=time.clock)
        profiler.set_brick_budget("Fine", 1)
        with pytest.raises(ValueError, match="x"), profiler.step(), profiler.layer(0):
            time.advance(1)
            with profiler.brick("Fine", elements=3):
                time.advance(2)
            with profiler.brick("Failed"), profiler.kernel("k", grid=4):
                time.advance(3)
                raise ValueError("x")
        assert profiler.shutdown()
        (tree,) = span_trees(traces.spans)
        outlines.append((tree.outline(), flat(tree)))
        traces.clear()
    assert outlines[0] == outlines[1]
    assert [at["brick.budget.exceeded"] for name, at, _ in outlines[0][1] if name == "Fine"] == [True]


def flat(node: SpanNode) -> list[Any]:
    status = (node.span.status.status_code, node.span.status.description)
    return [(node.name, node.attributes, status), *(item for child in node.children for item in flat(child))]
