"""The gateway: which traces it keeps, what it takes out of them, the metrics it makes, and its queue on disk."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stack.conftest import SAMPLING_PERCENTAGE, Stack
from tests.stack.demos import read_spans
from tests.stack.engine import BRICKS_OF_LAYER, KERNELS_OF_STEP, LAYERS, ROWS_OF_STEP, Engine
from tests.stack.processes import Binaries, wait_for
from tests.stack.queries import Prometheus, Span
from tests.stack.stack import CONFIGS, Collector, PrometheusServer, Sink

SERVICE = "gateway-test"
FAST, SLOW, FAILED = 300, 3, 4
SPANS_OF_STEP = 1 + ROWS_OF_STEP


@dataclass(frozen=True)
class Run:
    """An engine's steps, all of which went through agent and gateway."""

    fast: set[str]
    slow: set[str]
    failed: set[str]
    profile: dict[str, Any]

    @property
    def all(self) -> set[str]:
        return self.fast | self.slow | self.failed


def by_trace(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.trace_id, []).append(span)
    return found


@pytest.fixture(scope="module")
def run(stack: Stack) -> Run:
    with Engine(SERVICE, stack.edge.grpc, "grpc", detail="all") as engine:
        fast = set(engine.steps(FAST))
        failed = set(engine.steps(FAILED, fails=True))
        slow = set(engine.steps(SLOW, brick_ms=50))
        assert engine.flush()
        assert engine.losses() == {}
        return Run(fast, slow, failed, engine.profile())


@pytest.fixture(scope="module")
def lean(stack: Stack, run: Run) -> dict[str, list[Span]]:
    """What the backend without kernels has, once it has the traces that must be there and the share of the others."""

    def kept() -> dict[str, list[Span]]:
        traces = stack.jaeger.query.traces(SERVICE)
        assert run.slow | run.failed < set(traces)
        assert {len(spans) for spans in traces.values()} == {SPANS_OF_STEP - KERNELS_OF_STEP}
        return traces

    return wait_for("the kept traces in Jaeger", kept)


@pytest.fixture(scope="module")
def complete(stack: Stack, run: Run, lean: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """What the backend with everything has."""

    def kept() -> dict[str, list[Span]]:
        traces = by_trace([span for span in read_spans(stack.sink.traces_path) if span.trace_id in run.all])
        assert set(traces) == set(lean)
        assert {len(spans) for spans in traces.values()} == {SPANS_OF_STEP}
        return traces

    return wait_for("the kept traces in the sink", kept)


def test_every_slow_and_every_failed_step_is_kept(run: Run, lean: dict[str, list[Span]]) -> None:
    assert len(run.slow) == SLOW and len(run.failed) == FAILED
    assert run.slow | run.failed <= set(lean)


def test_of_the_other_steps_the_configured_share_is_kept(run: Run, lean: dict[str, list[Span]]) -> None:
    kept = len(set(lean) & run.fast)
    expected = FAST * SAMPLING_PERCENTAGE / 100
    # Five standard deviations around the share; the choice is by a hash of random ids.
    assert abs(kept - expected) < 5 * (expected * (1 - SAMPLING_PERCENTAGE / 100)) ** 0.5


def test_kernels_are_kept_from_one_backend_and_nothing_else_is(
    lean: dict[str, list[Span]], complete: dict[str, list[Span]]
) -> None:
    for trace_id, spans in complete.items():
        ids = {span.span_id for span in spans if span.level != "kernel"}
        assert {span.span_id for span in lean[trace_id]} == ids
        assert sum(span.level == "kernel" for span in spans) == KERNELS_OF_STEP


def test_span_metrics_count_all_spans_by_layer_before_the_sampling(run: Run, stack: Stack) -> None:
    prometheus = stack.prometheus.query
    selected = f'traces_span_metrics_calls_total{{service_name="{SERVICE}", brick_span_level="brick"}}'
    expression = f"sum by (brick_name, brick_layer_index) ({selected})"
    expected = {(name, str(index)): len(run.all) for name in BRICKS_OF_LAYER for index in range(LAYERS)}
    expected["LmHead", ""] = len(run.all)
    wait_for("span metrics", lambda: prometheus.values(expression, "brick_name", "brick_layer_index") == expected, 30)


def test_metrics_of_the_library_arrive_by_remote_write(run: Run, stack: Stack) -> None:
    prometheus: Prometheus = stack.prometheus.query
    counts = {(brick["name"],): brick["count"] for brick in run.profile["bricks"]}
    expression = f'sum by (brick_name) (brick_calls_total{{job="{SERVICE}"}})'
    wait_for("brick_calls_total", lambda: prometheus.values(expression, "brick_name") == counts)
    buckets = f'sum by (brick_name) (brick_duration_seconds_bucket{{job="{SERVICE}", le="+Inf"}})'
    assert prometheus.values(buckets, "brick_name") == counts


def queued(gateway: Collector, exporter: str) -> float:
    """How much waits in the queue of an exporter."""
    with urllib.request.urlopen(f"http://{gateway.telemetry_address}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    lines = [line for line in page.splitlines() if line.startswith("otelcol_exporter_queue_size{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'exporter="{exporter}"' in line)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_waits_for_a_backend_survives_the_gateways_end(
    end: str, binaries: Binaries, stack: Stack, tmp_path: Path
) -> None:
    sink = Sink(binaries, "backend", tmp_path)
    gateway = Collector(
        binaries,
        "gateway",
        tmp_path,
        [CONFIGS / "gateway.yaml"],
        {
            "JAEGER_OTLP_ENDPOINT": stack.jaeger.grpc_address,
            "TEMPO_OTLP_ENDPOINT": sink.grpc_address,
            "PROMETHEUS_REMOTE_WRITE_URL": stack.prometheus.remote_write,
            "QUEUE_DIRECTORY": str(tmp_path / "queue"),
            "DECISION_WAIT": "1s",
            "SAMPLING_PERCENTAGE": "100",
        },
    )
    service = f"queue-{end}"
    try:
        gateway.start()
        with Engine(service, gateway.http, detail="all") as engine:
            sent = set(engine.steps(50))
            assert engine.flush()
            assert engine.losses() == {}
        wait_for("the other backend", lambda: stack.jaeger.query.trace_ids(service) == sent)
        wait_for("the queue", lambda: queued(gateway, "otlp_grpc/tempo") > 0)
        getattr(gateway, end)()
        gateway.start()
        sink.start()

        def arrived() -> list[Span]:
            spans = read_spans(sink.traces_path)
            assert len(spans) >= len(sent) * SPANS_OF_STEP, f"{len(spans)} spans"
            return spans

        spans = wait_for("the backend", arrived, 60)
        assert len({span.span_id for span in spans}) == len(spans) == len(sent) * SPANS_OF_STEP
        assert {span.trace_id for span in spans} == sent
    finally:
        gateway.stop()
        sink.stop()


def test_metrics_by_otlp_wait_on_disk_while_prometheus_is_away(
    binaries: Binaries, stack: Stack, tmp_path: Path
) -> None:
    prometheus = PrometheusServer(binaries, "prometheus", tmp_path)
    gateway = Collector(
        binaries,
        "gateway",
        tmp_path,
        [CONFIGS / "gateway.yaml"],
        {
            "JAEGER_OTLP_ENDPOINT": stack.jaeger.grpc_address,
            "TEMPO_OTLP_ENDPOINT": stack.sink.grpc_address,
            "METRICS_EXPORTERS": "[otlp_http/prometheus]",
            "PROMETHEUS_OTLP_ENDPOINT": f"http://{prometheus.address}/api/v1/otlp",
            "QUEUE_DIRECTORY": str(tmp_path / "queue"),
        },
    )
    try:
        gateway.start()
        with Engine("prometheus-away", gateway.http) as engine:
            engine.steps(30)
            assert engine.flush()
            profile = engine.profile()
        wait_for("the queue", lambda: queued(gateway, "otlp_http/prometheus") > 0)
        gateway.kill()
        prometheus.start()
        gateway.start()
        counts = {(brick["name"],): brick["count"] for brick in profile["bricks"]}
        expression = 'sum by (brick_name) (brick_calls_total{job="prometheus-away"})'
        wait_for("brick_calls_total", lambda: prometheus.query.values(expression, "brick_name") == counts, 60)
    finally:
        gateway.kill()
        prometheus.kill()
