"""Whole ways out: a profiler's steps, rows and metrics reach real receivers, whatever set them up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from otel_brick import BrickProfiler
from otel_brick.export import BrickOTLPExporter
from otel_brick.testing import InMemoryTraces
from tests.unit.export.servers import SILENT, Answer, Collector, RawServer, collector, free_port


class Receiver:
    """Takes traces and metrics over HTTP."""

    def __init__(self) -> None:
        received: list[tuple[str, bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def resources(self) -> list[Any]:
        return [
            resource_spans
            for path, body in self.received
            if path == "/v1/traces"
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans
        ]

    def spans(self) -> list[Any]:
        return [span for found in self.resources() for scope in found.scope_spans for span in scope.spans]

    def metrics(self) -> set[str]:
        return {
            metric.name
            for path, body in self.received
            if path == "/v1/metrics"
            for found in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in found.scope_metrics
            for metric in scope.metrics
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


PROGRAM = """
import otel_brick
profiler = otel_brick.configure(
    service_name="engine", endpoint=ENDPOINT, resource_attributes={"team": "a"}, detail="all"
)
assert profiler is otel_brick.default_profiler() and profiler.is_enabled()
rms = otel_brick.define("RmsNorm", elements=64)
for _ in range(3):
    with otel_brick.step(phase="decode", tokens=1), otel_brick.layer(0):
        with rms, otel_brick.kernel("k", grid=2):
            pass
"""


def run(program: str, endpoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"ENDPOINT = {endpoint!r}\n{program}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | environment
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, timeout=60, env=environ
    )


def assert_program_arrived(receiver: Receiver) -> None:
    assert Counter(span.name for span in receiver.spans()) == {
        "step decode": 3,
        "layer": 3,
        "RmsNorm": 3,
        "k": 3,
    }
    by_id = {span.span_id: span for span in receiver.spans()}
    assert len(by_id) == 12
    parents = {"layer": "step decode", "RmsNorm": "layer", "k": "RmsNorm"}
    for span in receiver.spans():
        if span.name in parents:
            above = by_id[span.parent_span_id]
            assert above.name == parents[span.name]
            assert above.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano
            assert above.trace_id == span.trace_id
        else:
            assert span.parent_span_id == b""
    for found in receiver.resources():
        attributes = {item.key: item.value.string_value for item in found.resource.attributes}
        assert (attributes["service.name"], attributes["team"]) == ("engine", "a")
        assert [scope.scope.name for scope in found.scope_spans] == ["otel_brick"]


def test_a_configured_program_that_just_ends_delivers_traces_and_metrics(receiver: Receiver) -> None:
    done = run(PROGRAM, receiver.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert_program_arrived(receiver)
    assert {"brick.step.duration", "brick.duration", "brick.calls", "brick.tokens"} <= receiver.metrics()


def test_the_variables_configure_what_is_not_given(receiver: Receiver) -> None:
    program = PROGRAM.replace('service_name="engine", endpoint=ENDPOINT, ', "")
    done = run(program, "", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint, OTEL_SERVICE_NAME="engine")
    assert (done.returncode, done.stderr) == (0, "")
    assert_program_arrived(receiver)
    assert "brick.calls" in receiver.metrics()


def test_many_small_steps_arrive_whole(receiver: Receiver) -> None:
    program = """
import otel_brick
profiler = otel_brick.configure(endpoint=ENDPOINT, detail="all", metrics=False)
handle = otel_brick.define("B")
for _ in range(10_000):
    with otel_brick.step():
        with handle:
            pass
assert profiler.shutdown(timeout_s=50)
assert not any(profiler.losses().values()), profiler.losses()
from opentelemetry import trace
trace.get_tracer("app").start_span("after our shutdown").end()
"""
    done = run(program, receiver.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert Counter(span.name for span in receiver.spans()) == {
        "step other": 10_000,
        "B": 10_000,
        "after our shutdown": 1,
    }


def test_a_disabled_sdk_sends_nothing_and_counts_everything(receiver: Receiver) -> None:
    done = run(PROGRAM + "print(profiler.step_count())", receiver.endpoint, OTEL_SDK_DISABLED="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert receiver.received == []


def test_metrics_follow_a_variable_that_names_the_protocol_too() -> None:
    for server in collector("grpc"):
        program = PROGRAM.replace("ENDPOINT, res", "ENDPOINT, metrics=False, res") + "print(profiler.flush())"
        done = run(program, server.endpoint, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
        assert len(server.spans()) == 12


def test_spans_that_a_collector_refuses_are_counted_steps_included() -> None:
    for server in collector("http/protobuf"):
        server.script.always = Answer("bad")
        exporter = BrickOTLPExporter(endpoint=server.endpoint)
        profiler = BrickProfiler.enabled(exporter=exporter, detail="all")
        record(profiler, 4)
        profiler.shutdown(timeout_s=10)
        assert profiler.losses()["export_failed"] == 4 + 20


def test_a_program_ended_by_sigterm_delivers_too(receiver: Receiver) -> None:
    code = f"ENDPOINT = {receiver.endpoint!r}\n{PROGRAM}\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert_program_arrived(receiver)


def test_a_sigterm_handler_of_the_users_stays(receiver: Receiver) -> None:
    program = """
import signal
def own(number, frame): pass
signal.signal(signal.SIGTERM, own)
import otel_brick
otel_brick.configure(endpoint=ENDPOINT)
assert signal.getsignal(signal.SIGTERM) is own
"""
    done = run(program, receiver.endpoint)
    assert (done.returncode, done.stderr) == (0, "")


def test_configuring_twice_changes_nothing(receiver: Receiver) -> None:
    program = (
        PROGRAM
        + """
from opentelemetry import trace
before = trace.get_tracer_provider()
profiler.disable()
assert otel_brick.configure(endpoint="http://127.0.0.1:1", detail="none") is profiler
assert trace.get_tracer_provider() is before and profiler.is_enabled() and profiler.config.detail == "all"
"""
    )
    done = run(program, receiver.endpoint)
    told = "already configured: the profiler is enabled and everything else stays as it is\n"
    assert (done.returncode, done.stderr) == (0, told)
    assert_program_arrived(receiver)


def test_an_existing_provider_keeps_the_steps_and_rows_go_to_the_endpoint(receiver: Receiver) -> None:
    program = """
from opentelemetry import trace
from otel_brick.testing import InMemoryTraces
traces = InMemoryTraces()
trace.set_tracer_provider(traces.provider)
"""
    done = run(program + PROGRAM + "profiler.flush()\nprint([s.name for s in traces.spans])", receiver.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{['step decode'] * 3}\n"
    assert Counter(span.name for span in receiver.spans()) == {"layer": 3, "RmsNorm": 3, "k": 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("endpoint=5", "TypeError: endpoint must be a string"),
        ("protocol='http'", "ValueError: protocol must be one of http/protobuf, grpc; got 'http'"),
        ("detials='all'", "TypeError: configure() got unexpected arguments: detials"),
        ("detail='some'", "ValueError: detail must be one of auto, all, none; got 'some'"),
    ],
)
def test_a_bad_argument_of_configure_changes_nothing(call: str, message: str) -> None:
    program = f"""
import otel_brick
from opentelemetry import trace
try:
    otel_brick.configure({call})
except (TypeError, ValueError) as error:
    print(type(error).__name__ + ": " + str(error))
assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
assert not otel_brick.default_profiler().is_enabled()
"""
    done = run(program, "")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(message)


def test_the_ids_of_a_configured_program_do_not_repeat_with_the_seed(receiver: Receiver) -> None:
    program = PROGRAM.replace("for _ in range(3):", "import random\nfor _ in range(3):\n    random.seed(0)")
    for _ in range(2):
        assert run(program, receiver.endpoint).returncode == 0
    ids = [span.span_id for span in receiver.spans()]
    assert len(set(ids)) == len(ids) == 24
    assert len({span.trace_id for span in receiver.spans()}) == 6


@pytest.fixture(params=["http/protobuf", "grpc"])
def server(request: pytest.FixtureRequest) -> Iterator[Collector]:
    yield from collector(request.param)


def record(profiler: BrickProfiler, steps: int, rows: int = 5) -> None:
    handle = profiler.define("B", elements=3)
    for _ in range(steps):
        with profiler.step(phase="decode"):
            for _ in range(rows):
                with handle:
                    pass


def test_an_exporter_alone_takes_steps_and_rows(server: Collector) -> None:
    exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=server.protocol, insecure=True)
    profiler = BrickProfiler.enabled(exporter=exporter, detail="all")
    record(profiler, 20)
    assert profiler.flush(timeout_s=20)
    assert Counter(span.name for span in server.spans()) == {"step decode": 20, "B": 100}
    steps = {span.span_id for span in server.spans() if span.name == "step decode"}
    assert {span.parent_span_id for span in server.spans() if span.name == "B"} == steps
    assert profiler.shutdown(timeout_s=10)
    assert not any(profiler.losses().values())


def test_with_a_provider_the_exporter_takes_rows_only(server: Collector, traces: InMemoryTraces) -> None:
    exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=server.protocol, insecure=True)
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, exporter=exporter, detail="all")
    with traces.provider.get_tracer("app").start_as_current_span("request"), profiler.brick("Loose"):
        record(profiler, 2)
    assert profiler.flush(timeout_s=20)
    assert Counter(span.name for span in traces.spans) == {"step decode": 2, "request": 1}
    assert Counter(span.name for span in server.spans()) == {"B": 10, "Loose": 1}
    assert profiler.shutdown(timeout_s=10)


def test_an_ordinary_exporter_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="exporter must be a BrickOTLPExporter, not ConsoleSpanExporter; give"):
        BrickProfiler(exporter=ConsoleSpanExporter())  # type: ignore[arg-type]


@pytest.mark.parametrize("trouble", ["silent", "refused", "unavailable", "hangs_up", "never_answers"])
def test_shutdown_is_bounded_and_everything_is_delivered_or_counted(server: Collector, trouble: str) -> None:
    endpoint, raw = server.endpoint, None
    if trouble == "silent":
        server.script.always = SILENT
    elif trouble == "unavailable":
        server.script.always = Answer("unavailable", retry_after_s=60)
    else:
        raw = None if trouble == "refused" else RawServer(read_bytes=16 if trouble == "hangs_up" else None)
        port = free_port() if raw is None else raw.port
        endpoint = f"http://127.0.0.1:{port}" + ("/v1/traces" if server.protocol == "http/protobuf" else "")
    exporter = BrickOTLPExporter(endpoint=endpoint, protocol=server.protocol, insecure=True)
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, exporter=exporter, detail="all")
    record(profiler, 50, rows=20)
    began = time.monotonic()
    profiler.shutdown(timeout_s=2)
    assert time.monotonic() - began < 2.5
    assert len(traces.spans) == 50
    losses = profiler.losses()
    assert server.delivered() + losses["export_failed"] + losses["already_shutdown"] == 1_000
    assert profiler.stats("B").count == 1_000  # type: ignore[union-attr]
    if raw is not None:
        raw.close()


def test_metrics_and_counters_of_a_profiler(receiver: Receiver) -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    profiler = BrickProfiler.enabled(
        metric_exporter=OTLPMetricExporter(endpoint=f"{receiver.endpoint}/v1/metrics"),
        meter_provider=MeterProvider([reader]),
        histograms="none",
    )
    record(profiler, 4)
    assert profiler.flush(timeout_s=20)
    assert {"brick.time", "brick.calls", "brick.elements"} <= receiver.metrics()
    assert "brick.duration" not in receiver.metrics()
    data = reader.get_metrics_data()
    assert data is not None
    values = {
        metric.name: sum(point.value for point in metric.data.data_points)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert (values["brick.calls"], values["brick.elements"]) == (20, 60)
    assert profiler.shutdown(timeout_s=10)


def test_a_flush_sends_by_itself_where_no_thread_can_be_started(
    server: Collector, traces: InMemoryTraces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a program on Python 3.12 and later."""
    exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=server.protocol, insecure=True)
    monkeypatch.setattr(exporter._sender, "_start", lambda: None)
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, exporter=exporter, detail="all")
    record(profiler, 3)
    began = time.monotonic()
    assert profiler.flush(timeout_s=20)
    assert time.monotonic() - began < 10
    assert Counter(span.name for span in server.spans()) == {"B": 15}
    assert profiler.shutdown(timeout_s=10)
    assert not any(profiler.losses().values())
