"""What `BrickOTLPExporter` encodes itself, and the metrics, through a collector: nothing is added, changed or lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_brick import BrickCategory, BrickId, BrickProfiler, semconv
from tests.stack.conftest import Stack, complete
from tests.stack.demos import assert_nested, exact
from tests.stack.otlp import (
    RememberingExporter,
    RememberingMetricExporter,
    metric_requests,
    metrics_of,
    spans_in,
    trace_requests,
)
from tests.stack.processes import wait_for

STEPS = 40
SPANS_OF_STEP = 7


def metric_exporter(stack: Stack, protocol: str) -> RememberingMetricExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return RememberingMetricExporter(GrpcExporter(endpoint=stack.agent.grpc))
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return RememberingMetricExporter(HttpExporter(endpoint=f"{stack.agent.http}/v1/metrics"))


class Sent:
    """What a program with all kinds of rows sent, and the service that it calls itself."""

    def __init__(self, stack: Stack, protocol: str) -> None:
        self.service = f"encoded-{protocol.replace('/', '-')}"
        exporter = RememberingExporter(stack.agent.endpoint(protocol), protocol)
        metrics = metric_exporter(stack, protocol)
        provider = TracerProvider(resource=Resource.create({"service.name": self.service}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        profiler = BrickProfiler.enabled(
            tracer_provider=provider, exporter=exporter, metric_exporter=metrics, detail="all"
        )
        profiler.set_brick_budget("Sampling", 1)
        run_every_kind(profiler)
        assert profiler.flush()
        assert profiler.shutdown()
        provider.shutdown()
        self.losses = profiler.losses()
        self.spans: list[Span] = exporter.sent
        self.metrics = metrics_of(metrics.sent, self.service)


def run_every_kind(profiler: BrickProfiler) -> None:
    """Layers, bricks in bricks, kernels, counts that are large and none, names beyond ASCII, and failures."""
    for index in range(STEPS):
        try:
            with profiler.step(
                phase=("prefill", "decode", "train_backward")[index % 3],
                tokens=index,
                batch_size=2,
                attributes={"request.kind": "tést", "ratio": 0.5, "cached": True},
            ):
                with profiler.layer(index, type="decoder"):
                    with profiler.brick(BrickId.RmsNorm, elements=1 << 40, bytes_read=1, bytes_written=0):
                        with profiler.kernel(
                            "norm_kernel", ptx_hash=0xABCDEF, grid=(65535, 2, 1), block=(128,), shared_mem=49152
                        ):
                            pass
                    with profiler.brick("Attention/é", category=BrickCategory.Attention):
                        with profiler.brick(BrickId.AttentionSoftmax):
                            time.sleep(0.0001)
                with profiler.brick("Sampling"):
                    if index % 10 == 9:
                        raise ValueError("as asked")
        except ValueError:
            pass


@pytest.fixture(scope="module", params=["http/protobuf", "grpc"])
def sent(request: pytest.FixtureRequest, stack: Stack) -> Sent:
    return Sent(stack, request.param)


def test_nothing_is_lost(sent: Sent) -> None:
    assert set(sent.losses.values()) == {0}
    assert len(sent.spans) == STEPS * SPANS_OF_STEP


def test_the_collector_writes_the_spans_that_were_encoded(sent: Sent, stack: Stack) -> None:
    ours = {span.span_id: span for span in sent.spans}

    def written() -> list[Span]:
        found = [span for request in trace_requests(stack.agent_traces) for span in spans_in(request)]
        found = [span for span in found if span.span_id in ours]
        assert len(found) >= len(ours), f"{len(found)} of {len(ours)} spans"
        return found

    told = wait_for("the collector's file", written)
    assert len(told) == len(ours)
    for span in told:
        assert span == ours[span.span_id]


def test_jaeger_shows_each_step_with_its_layer_bricks_and_kernel(sent: Sent, stack: Stack) -> None:
    by_trace: dict[str, set[str]] = {}
    for span in sent.spans:
        by_trace.setdefault(span.trace_id.hex(), set()).add(span.span_id.hex())
    assert len(by_trace) == STEPS
    for trace_id, ids in by_trace.items():
        spans = complete(stack, trace_id, len(ids))
        assert {span.span_id for span in spans} == ids
        names = {span.span_id: span.name for span in spans}
        tree = sorted((names.get(span.parent_id, ""), span.name) for span in spans)
        step = next(span.name for span in spans if span.level == "step")
        assert tree == sorted(
            [
                ("", step),
                (step, "layer decoder"),
                ("layer decoder", "RmsNorm"),
                ("RmsNorm", "norm_kernel"),
                ("layer decoder", "Attention/é"),
                ("Attention/é", "AttentionSoftmax"),
                (step, "Sampling"),
            ]
        )


def test_jaeger_has_every_attribute_with_its_type_and_nothing_more(sent: Sent, stack: Stack) -> None:
    """Of a failed step, against what the program said and nothing that the library made of it."""
    index = STEPS - 1
    (trace_id,) = stack.jaeger.query.trace_ids(sent.service, **{"brick.step.index": str(index)})
    spans = complete(stack, trace_id, SPANS_OF_STEP)
    assert_nested(spans)
    told = {span.name: (span.status, exact(span.attributes)) for span in spans}
    assert told == {
        "step prefill": (
            "error",
            exact(
                {
                    "brick.span.level": "step",
                    "brick.phase": "prefill",
                    "brick.step.index": index,
                    "brick.token.count": index,
                    "brick.batch.size": 2,
                    "brick.detail.reason": "all",
                    "brick.timing.source": "host",
                    "error.type": "ValueError",
                    "request.kind": "tést",
                    "ratio": 0.5,
                    "cached": True,
                    "thread.id": threading.get_ident(),
                    "thread.name": threading.current_thread().name,
                }
            ),
        ),
        "layer decoder": (
            "unset",
            exact({"brick.span.level": "layer", "brick.layer.index": index, "brick.layer.type": "decoder"}),
        ),
        "RmsNorm": (
            "unset",
            exact(
                {
                    "brick.span.level": "brick",
                    "brick.name": "RmsNorm",
                    "brick.category": "norm",
                    "brick.layer.index": index,
                    "brick.element.count": 1 << 40,
                    "brick.io.size": 1,
                    "brick.io.read.size": 1,
                    "brick.io.write.size": 0,
                }
            ),
        ),
        "norm_kernel": (
            "unset",
            exact(
                {
                    "brick.span.level": "kernel",
                    "brick.name": "RmsNorm",
                    "brick.cuda.kernel.name": "norm_kernel",
                    "brick.cuda.ptx.hash": "0000000000abcdef",
                    "brick.cuda.grid.x": 65535,
                    "brick.cuda.grid.y": 2,
                    "brick.cuda.grid.z": 1,
                    "brick.cuda.block.x": 128,
                    "brick.cuda.block.y": 1,
                    "brick.cuda.block.z": 1,
                    "brick.cuda.shared_memory.dynamic.size": 49152,
                }
            ),
        ),
        "Attention/é": ("unset", exact(of_brick("Attention/é", index))),
        "AttentionSoftmax": ("unset", exact(of_brick("AttentionSoftmax", index))),
        "Sampling": (
            "error",
            exact(
                {
                    "brick.span.level": "brick",
                    "brick.name": "Sampling",
                    "brick.category": "other",
                    "brick.budget.duration": 1e-9,
                    "brick.budget.exceeded": True,
                    "error.type": "ValueError",
                }
            ),
        ),
    }


def of_brick(name: str, layer: int) -> dict[str, Any]:
    """The attributes of a brick without counts."""
    return {
        "brick.span.level": "brick",
        "brick.name": name,
        "brick.category": "attention",
        "brick.layer.index": layer,
    }


def test_jaeger_has_failures_as_errors(sent: Sent, stack: Stack) -> None:
    # By our attribute: the storage in memory of this Jaeger finds nothing for its own tag error=true.
    failed = stack.jaeger.query.trace_ids(sent.service, **{"error.type": "ValueError"})
    assert len(failed) == STEPS // 10
    for trace_id in failed:
        spans = {span.level: span for span in stack.jaeger.query.trace(trace_id) if span.status == "error"}
        assert spans["brick"].attributes["error.type"] == spans["step"].attributes["error.type"] == "ValueError"


def test_the_collector_writes_the_metrics_that_were_sent(sent: Sent, stack: Stack) -> None:
    def written() -> bool:
        found = [metrics_of(request, sent.service) for request in metric_requests(stack.agent_metrics)]
        assert any(found), "no metrics of the service"
        return sent.metrics in found

    assert wait_for("the collector's file", written)
    assert set(sent.metrics) >= {metric.name for metric in semconv.METRICS if not metric.name.startswith("brick.cuda.")}
