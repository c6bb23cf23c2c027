"""`otel-brick demo --endpoint`: what a collector gets is what the files have, and what it does not get is said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_brick.cli.app import commands
from otel_brick.cli.demo import DemoOptions, DemoResult, run_demo
from otel_brick.cli.sending import Destination, Sent, check_endpoint
from tests.unit.export.servers import Answer, Collector, GrpcCollector, HttpCollector, collector

TOKENS = 3
REFUSE = Answer("bad")


@pytest.fixture
def http() -> Iterator[Collector]:
    yield from collector("http/protobuf")


@pytest.fixture
def grpc() -> Iterator[Collector]:
    yield from collector("grpc")


@pytest.fixture(params=["http/protobuf", "grpc"])
def either(request: pytest.FixtureRequest) -> Iterator[Collector]:
    yield from collector(request.param)


def base(server: Collector) -> str:
    assert isinstance(server, HttpCollector | GrpcCollector)
    return server.base


def run(folder: Path, destination: Destination) -> tuple[DemoResult, Sent]:
    results: list[DemoResult] = []
    options = DemoOptions("default", "x", TOKENS, 0, folder, "all", destination)
    sent = run_demo(options, lambda: None, results.append)
    assert sent is not None
    return results[0], sent


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
    result, sent = run(tmp_path, destination)
    assert sent_span_ids(either) == local_span_ids(result)
    assert sent_calls(either) == local_calls(tmp_path)
    assert sent == Sent(destination, len(result.spans), 0, True)
    assert str(sent) == (
        f"as service otel-brick-demo: {len(result.spans)} spans and metrics accepted by"
        f" {base(either)} ({either.protocol})"
    )


def test_metrics_go_elsewhere_over_http_whatever_spans_do(either: Collector, http: Collector, tmp_path: Path) -> None:
    metrics_url = f"{base(http)}/api/v1/otlp/v1/metrics"
    result, sent = run(tmp_path, Destination(base(either), either.protocol, metrics_url))
    assert sent_span_ids(either) == local_span_ids(result)
    assert bodies(either, "metrics") == []
    assert {seen.path for seen in http.script.seen} == {"/api/v1/otlp/v1/metrics"}
    assert sent_calls(http) == local_calls(tmp_path)
    assert str(sent) == (
        f"as service otel-brick-demo: {len(result.spans)} spans accepted by {base(either)} ({either.protocol}),"
        f" metrics accepted by {metrics_url} (http/protobuf)"
    )


def test_metrics_alone_can_be_sent(http: Collector, tmp_path: Path) -> None:
    _, sent = run(tmp_path, Destination(None, "http/protobuf", f"{base(http)}/v1/metrics"))
    assert bodies(http, "trace") == []
    assert sent_calls(http) == local_calls(tmp_path)
    assert sent.complete
    assert str(sent) == (f"as service otel-brick-demo: metrics accepted by {base(http)}/v1/metrics (http/protobuf)")


def test_what_is_refused_is_said_to_be_lost_and_not_tried_again(http: Collector, tmp_path: Path) -> None:
    http.script.always = REFUSE
    result, sent = run(tmp_path, Destination(base(http), "http/protobuf"))
    assert sorted(seen.path for seen in http.script.seen) == ["/v1/metrics", "/v1/traces"]
    assert not sent.complete
    assert str(sent) == (
        f"as service otel-brick-demo: 0 spans accepted by {base(http)} (http/protobuf),"
        f" not accepted: {len(result.spans)} spans and the metrics"
    )
    assert "HTTP 400" in sent.reason
    assert local_calls(tmp_path)


def test_the_command_fails_where_something_did_not_arrive(http: Collector, tmp_path: Path) -> None:
    delivered = command(tmp_path, "--endpoint", base(http))
    assert delivered.exit_code == 0
    assert delivered.output.index("Traces    ") < delivered.output.index("Sending   to ")
    assert f"spans and metrics accepted by {base(http)} (http/protobuf)" in delivered.output
    http.script.always = REFUSE
    refused = command(tmp_path, "--endpoint", base(http))
    assert refused.exit_code == 1
    assert f": 0 spans accepted by {base(http)} (http/protobuf), not accepted: " in refused.output
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


def test_with_seconds_further_texts_are_sent_and_the_files_stay_those_of_the_first(
    http: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    finished = command(tmp_path, "--endpoint", base(http), "--seconds", "1.5")
    assert finished.exit_code == 0, finished.output
    assert local_calls(tmp_path)["Sampling"] == TOKENS
    assert sent_calls(http)["Sampling"] > TOKENS
    assert len(bodies(http, "metrics")) >= 3
    assert len(set(sent_span_ids(http))) == len(sent_span_ids(http)) > TOKENS
    assert f": {len(sent_span_ids(http)):,} spans and metrics accepted by" in finished.output


def test_with_seconds_it_ends_when_nothing_is_accepted(
    http: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    http.script.always = REFUSE
    start = time.monotonic()
    assert command(tmp_path, "--endpoint", base(http), "--seconds", "60").exit_code == 1
    assert time.monotonic() - start < 30


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("more", [[], ["--seconds", "60"]])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_interrupt_while_sending_ends_it_at_once_and_says_what_was_not_sent(
    protocol: str, more: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["--prompt", "x", "--tokens", "3", "--output", str(tmp_path), "--endpoint", endpoint]
        with subprocess.Popen(
            [sys.executable, "-u", "-m", "otel_brick", "demo", *arguments, *more, "--protocol", protocol],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
            cwd=Path(__file__).parents[3],
        ) as program:  # fmt: skip
            assert program.stdout is not None and program.stderr is not None
            while not program.stdout.readline().startswith("Sending"):
                assert program.poll() is None
            time.sleep(0.5)
            start = time.monotonic()
            program.send_signal(signal.SIGINT)
            rest, errors = program.stdout.read(), program.stderr.read()
            assert program.wait(30) == 130
            assert time.monotonic() - start < 2
    assert rest.count("\n") == 1
    assert "interrupted, not sent: " in rest and " spans and the last metrics" in rest
    assert errors == ""
    assert local_calls(tmp_path)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "hint"),
    [
        ("grpc", "http/protobuf", "try --protocol grpc"),
        ("grpc without a scheme", "grpc", "OTEL_EXPORTER_OTLP_INSECURE=true"),
    ],
)
def test_a_wrong_protocol_is_hinted_at(
    endpoint: str, protocol: str, hint: str, grpc: Collector, tmp_path: Path
) -> None:
    address = base(grpc)
    if endpoint != "grpc":
        address = address.removeprefix("http://")
    finished = subprocess.run(
        [sys.executable, "-m", "otel_brick", "demo", "--prompt", "x", "--tokens", "3", "--output", str(tmp_path),
         "--endpoint", address, "--protocol", protocol],
        capture_output=True, text=True, encoding="utf-8", timeout=300, check=False, cwd=Path(__file__).parents[3],
        env={**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "2"},
    )  # fmt: skip
    assert finished.returncode == 1
    assert hint in finished.stdout.split("Hint      ")[-1], finished.stdout
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("http://localhost:99999", "http/protobuf"), ("http://user:1@host:0/x", "http/protobuf"), ("host:70000", "grpc")],
)
def test_a_port_that_is_none_is_named(endpoint: str, protocol: str) -> None:
    with pytest.raises(ValueError, match="the port must be from 1 to 65535; got "):
        check_endpoint(endpoint, protocol)


@pytest.mark.parametrize("endpoint", ["http://[::1]:4318", "http://user:99999@host:4318/x", "http://host/a:99999"])
def test_what_is_no_port_is_not_taken_for_one(endpoint: str) -> None:
    check_endpoint(endpoint, "http/protobuf")


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--endpoint", "localhost:4318"], "--endpoint"),
        (["--endpoint", "ftp://localhost"], "--endpoint"),
        (["--endpoint", "http://", "--protocol", "grpc"], "--endpoint"),
        (["--endpoint", "http://localhost:4318", "--protocol", "http/json"], "--protocol"),
        (["--metrics-endpoint", "localhost:9090"], "--metrics-endpoint"),
    ],
)
def test_a_bad_destination_is_named_before_the_run(tmp_path: Path, arguments: list[str], option: str) -> None:
    finished = command(tmp_path / "unused", *arguments)
    assert finished.exit_code == 2
    assert f"Invalid value for '{option}'" in finished.output
    assert not (tmp_path / "unused").exists()
