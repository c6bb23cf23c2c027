"""`otel-brick demo --endpoint`: what a collector gets is what the files have, and what it does not get is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_brick.cli.app import commands
from otel_brick.cli.demo import DemoOptions, DemoResult, run_demo
from otel_brick.cli.sending import Destination, Sent
from tests.unit.export.servers import Answer, Collector, GrpcCollector, HttpCollector, collector

TOKENS = 3
REFUSE = Answer("bad")


@pytest.fixture
def http() -> Iterator[Collector]:
    yield from collector("http/protobuf")


@pytest.fixture(params=["http/protobuf", "grpc"])
def either(request: pytest.FixtureRequest) -> Iterator[Collector]:
    yield from collector(request.param)


def base(server: Collector) -> str:
    assert isinstance(server, HttpCollector | GrpcCollector)
    return server.base


def run(folder: Path, destination: Destination) -> DemoResult:
    return run_demo(DemoOptions("default", "x", TOKENS, 0, folder, "all", destination), lambda: None)


def command(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        commands, ["demo", "--prompt", "x", "--tokens", str(TOKENS), "--output", str(folder), *arguments]
    )


def bodies(server: Collector, signal: str) -> list[bytes]:
    """The bodies of accepted requests of a signal, `trace` or `metrics`."""
    script = server.script
    assert len(script.seen) == len(script.received)
    return [body for seen, body in zip(script.seen, script.received, strict=True) if signal in seen.path.lower()]


def sent_span_ids(server: Collector) -> list[str]:
    return sorted(
        span.span_id.hex()
        for body in bodies(server, "trace")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    )


def sent_calls(server: Collector) -> dict[str, int]:
    """`brick.calls` by brick in the last request of metrics."""
    calls: dict[str, int] = {}
    (resource,) = ExportMetricsServiceRequest.FromString(bodies(server, "metrics")[-1]).resource_metrics
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in metric.sum.data_points if metric.name == "brick.calls" else ():
                name = next(one.value.string_value for one in point.attributes if one.key == "brick.name")
                calls[name] = calls.get(name, 0) + point.as_int
    return calls


def local_calls(folder: Path) -> dict[str, int]:
    profile = json.loads((folder / "brick_profile.json").read_text(encoding="utf-8"))
    return {brick["name"]: brick["count"] for brick in profile["bricks"]}


def local_span_ids(result: DemoResult) -> list[str]:
    return sorted(f"{span.context.span_id:016x}" for span in result.spans if span.context is not None)


def test_the_collector_gets_the_spans_and_the_metrics_of_the_files(either: Collector, tmp_path: Path) -> None:
    destination = Destination(base(either), either.protocol)
    result = run(tmp_path, destination)
    assert sent_span_ids(either) == local_span_ids(result)
    assert sent_calls(either) == local_calls(tmp_path)
    assert result.sent == Sent(destination, len(result.spans), 0, True)
    assert str(result.sent) == (
        f"{len(result.spans)} spans and metrics to {base(either)} ({either.protocol}), nothing lost"
    )


def test_metrics_go_elsewhere_over_http_whatever_spans_do(either: Collector, http: Collector, tmp_path: Path) -> None:
    metrics_url = f"{base(http)}/api/v1/otlp/v1/metrics"
    result = run(tmp_path, Destination(base(either), either.protocol, metrics_url))
    assert sent_span_ids(either) == local_span_ids(result)
    assert bodies(either, "metrics") == []
    assert {seen.path for seen in http.script.seen} == {"/api/v1/otlp/v1/metrics"}
    assert sent_calls(http) == local_calls(tmp_path)
    assert str(result.sent) == (
        f"{len(result.spans)} spans to {base(either)} ({either.protocol}),"
        f" metrics to {metrics_url} (http/protobuf), nothing lost"
    )


def test_metrics_alone_can_be_sent(http: Collector, tmp_path: Path) -> None:
    result = run(tmp_path, Destination(None, "http/protobuf", f"{base(http)}/v1/metrics"))
    assert bodies(http, "trace") == []
    assert sent_calls(http) == local_calls(tmp_path)
    assert result.sent is not None and result.sent.complete
    assert str(result.sent) == f"metrics to {base(http)}/v1/metrics (http/protobuf), nothing lost"


def test_what_is_refused_is_said_to_be_lost_and_not_tried_again(http: Collector, tmp_path: Path) -> None:
    http.script.always = REFUSE
    result = run(tmp_path, Destination(base(http), "http/protobuf"))
    assert sorted(seen.path for seen in http.script.seen) == ["/v1/metrics", "/v1/traces"]
    assert result.sent is not None and not result.sent.complete
    assert str(result.sent) == (
        f"0 spans to {base(http)} (http/protobuf), lost {len(result.spans)} spans and the metrics"
    )
    assert local_calls(tmp_path)


def test_the_command_fails_where_something_did_not_arrive(http: Collector, tmp_path: Path) -> None:
    delivered = command(tmp_path, "--endpoint", base(http))
    assert delivered.exit_code == 0
    assert f"spans and metrics to {base(http)} (http/protobuf), nothing lost" in delivered.output
    http.script.always = REFUSE
    refused = command(tmp_path, "--endpoint", base(http))
    assert refused.exit_code == 1
    assert f"Sent      0 spans to {base(http)} (http/protobuf), lost " in refused.output
    assert local_calls(tmp_path)


def test_without_an_endpoint_nothing_is_sent_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    finished = command(tmp_path)
    assert finished.exit_code == 0
    assert "Sent" not in finished.output


def test_the_line_does_not_show_passwords() -> None:
    destination = Destination("http://user:secret@host:4318", "grpc", "http://user:secret@host:9090/v1/metrics")
    for text in (str(Sent(destination, 1, 1, True)), str(Sent(destination, 1, 0, False))):
        assert "secret" not in text
        assert "host:4318" in text and "host:9090" in text


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--endpoint", "localhost:4318"], "--endpoint"),
        (["--endpoint", "ftp://localhost"], "--endpoint"),
        (["--endpoint", "http://", "--protocol", "grpc"], "--endpoint"),
        (["--endpoint", "http://localhost:4318", "--protocol", "http/json"], "--protocol"),
        (["--metrics-endpoint", "localhost:9090", "--protocol", "grpc"], "--metrics-endpoint"),
    ],
)
def test_a_bad_destination_is_named_before_the_run(tmp_path: Path, arguments: list[str], option: str) -> None:
    finished = command(tmp_path / "unused", *arguments)
    assert finished.exit_code == 2
    assert f"Invalid value for '{option}'" in finished.output
    assert not (tmp_path / "unused").exists()
