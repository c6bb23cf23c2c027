"""The pushing thread: when it runs, what exporters see, and that no exporter holds anybody up."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource

import otel_brick
from otel_brick.export.metric_push import MetricPusher
from otel_brick.export.metric_series import MetricSource
from otel_brick.export.metrics import metrics_data
from otel_brick.stats.reader import Tables

SLACK_S = 0.5
"""What a bounded call may take on top of its timeout on a busy machine."""
TABLES = Tables()


def collect() -> MetricsData:
    """Metrics with a loss in them."""
    return metrics_data(
        MetricSource(TABLES, {"log_full": 2}), resource=Resource({"a": "b"}), start_unix_ns=1, now_unix_ns=2
    )


class Kept(MetricExporter):
    """Keeps what it gets; `act` decides what exporting does."""

    def __init__(self, act: Callable[[], MetricExportResult] = lambda: MetricExportResult.SUCCESS) -> None:
        super().__init__()
        self.act = act
        self.batches: list[MetricsData] = []
        self.timeouts_ms: list[float] = []
        self.instrumented: list[bool] = []
        self.threads: set[str] = set()
        self.calls: list[str] = []
        self.shut = threading.Event()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.batches.append(metrics_data)
        self.timeouts_ms.append(timeout_millis)
        self.instrumented.append(is_instrumentation_enabled())
        self.threads.add(threading.current_thread().name)
        self.calls.append("export")
        return self.act()

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        self.calls.append("force_flush")
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self.calls.append("shutdown")
        self.shut.set()


class Hanging:
    """An export that does not return until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> MetricExportResult:
        self.entered.set()
        self.let_go.wait(30)
        return MetricExportResult.SUCCESS


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.let_go.set()


def refuse() -> MetricExportResult:
    return MetricExportResult.FAILURE


def explode() -> MetricExportResult:
    raise ConnectionError("no route")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "otel-brick-metrics"]


# --- when it runs ---


def test_nothing_runs_before_it_is_started_and_one_daemon_thread_after() -> None:
    before = threads()
    exporter = Kept()
    pusher = MetricPusher(collect, exporter, 60)
    assert threads() == before

    assert pusher.start() and pusher.start()
    (thread,) = set(threads()) - set(before)
    assert thread.daemon
    assert pusher.shutdown(5)
    thread.join(5)
    assert not thread.is_alive()


def test_it_exports_at_its_interval() -> None:
    third = threading.Event()
    exporter = Kept()
    exporter.act = lambda: (len(exporter.batches) >= 3 and third.set()) or MetricExportResult.SUCCESS
    pusher = MetricPusher(collect, exporter, 0.1)
    begin = time.monotonic()
    pusher.start()

    assert third.wait(10)
    assert time.monotonic() - begin >= 0.3 - 0.01
    assert set(exporter.calls) == {"export"}
    assert pusher.shutdown(5)


def test_flush_exports_at_once_and_flushes_the_exporter() -> None:
    exporter = Kept()
    pusher = MetricPusher(collect, exporter, 60)

    assert pusher.flush(2)
    assert exporter.calls == ["export", "force_flush"]
    (of,) = exporter.batches[0].resource_metrics
    assert [metric.name for metric in of.scope_metrics[0].metrics] == ["brick.records.dropped"]
    assert 0 < exporter.timeouts_ms[0] <= 2_000
    assert pusher.shutdown(5)


def test_a_flush_does_not_put_the_next_export_off() -> None:
    second = threading.Event()
    exporter = Kept()
    exporter.act = lambda: (len(exporter.batches) == 2 and second.set()) or MetricExportResult.SUCCESS
    pusher = MetricPusher(collect, exporter, 0.8)
    begin = time.monotonic()
    pusher.start()
    time.sleep(0.6)
    assert pusher.flush(2)

    assert second.wait(5)
    assert time.monotonic() - begin < 1.2
    assert pusher.shutdown(5)


def test_the_exporter_s_own_requests_are_not_instrumented() -> None:
    exporter = Kept()
    pusher = MetricPusher(collect, exporter, 60)

    assert pusher.flush(2) and pusher.shutdown(2)
    assert exporter.instrumented == [False, False]
    assert exporter.threads == {"otel-brick-metrics"}
    assert is_instrumentation_enabled()


def test_nothing_to_say_is_not_exported() -> None:
    exporter = Kept()
    pusher = MetricPusher(lambda: MetricsData([]), exporter, 60)

    assert pusher.flush(2) and pusher.shutdown(2)
    assert exporter.calls == ["force_flush", "force_flush", "shutdown"]


# --- its end ---


def test_shutdown_exports_once_more_then_shuts_the_exporter_down() -> None:
    exporter = Kept()
    pusher = MetricPusher(collect, exporter, 60)

    assert pusher.shutdown(2) and pusher.shutdown(2)
    assert exporter.calls == ["export", "force_flush", "shutdown"]
    assert not pusher.flush(2)
    assert not pusher.start()
    assert exporter.calls == ["export", "force_flush", "shutdown"]


def test_threads_that_shut_down_together_all_wait_for_the_same_end() -> None:
    exporter = Kept(lambda: time.sleep(0.1) or MetricExportResult.SUCCESS)
    pusher = MetricPusher(collect, exporter, 60)
    results: list[bool] = []
    callers = [threading.Thread(target=lambda: results.append(pusher.shutdown(5))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)

    assert results == [True] * 8
    assert exporter.calls == ["export", "force_flush", "shutdown"]


def test_a_pusher_that_nobody_holds_is_collected_and_its_thread_ends() -> None:
    before = threads()
    pusher = MetricPusher(collect, Kept(), 60)
    assert pusher.flush(2)
    (thread,) = set(threads()) - set(before)
    forgotten = weakref.ref(pusher)
    del pusher
    gc.collect()

    thread.join(5)
    assert not thread.is_alive()
    assert forgotten() is None


def test_while_the_interpreter_ends_the_caller_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    exporter = Kept()
    pusher = MetricPusher(collect, exporter, 60)

    assert not pusher.start()
    assert pusher.flush(2) and pusher.shutdown(2)
    assert exporter.calls == ["export", "force_flush", "export", "force_flush", "shutdown"]


# --- exporters that fail ---


@pytest.mark.parametrize("act", [refuse, explode])
def test_a_failing_exporter_is_logged_once_and_counted(
    act: Callable[[], MetricExportResult], caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Kept(act)
    pusher = MetricPusher(collect, exporter, 60)

    assert [pusher.flush(2) for _ in range(3)] == [False] * 3
    assert pusher.failures == 3
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("otel_brick", logging.WARNING)
    exporter.act = lambda: MetricExportResult.SUCCESS
    assert pusher.flush(2)
    assert pusher.shutdown(2)


def test_a_collection_that_raises_is_a_failure_like_any_other() -> None:
    exporter = Kept()
    pusher = MetricPusher(lambda: 1 // 0, exporter, 60)  # pyright: ignore[reportArgumentType]

    assert not pusher.flush(2)
    assert not pusher.shutdown(2)
    assert pusher.failures == 2
    assert exporter.calls == ["force_flush", "force_flush", "shutdown"]


@pytest.mark.parametrize("verb", ["force_flush", "shutdown"])
def test_an_exporter_that_raises_elsewhere_stops_nobody(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Kept()
    monkeypatch.setattr(exporter, verb, lambda timeout_millis: 1 // 0)
    pusher = MetricPusher(collect, exporter, 60)

    assert pusher.flush(2) == (verb == "shutdown")
    assert not pusher.shutdown(2)
    assert exporter.calls.count("export") == 2


def test_flush_and_shutdown_end_in_time_when_the_exporter_hangs(hanging: Hanging) -> None:
    exporter = Kept(hanging)
    pusher = MetricPusher(collect, exporter, 60)
    for call in (pusher.flush, pusher.flush, pusher.shutdown, pusher.shutdown):
        begin = time.monotonic()
        assert not call(0.2)
        assert 0.2 - 0.01 <= time.monotonic() - begin < 0.2 + SLACK_S
    assert exporter.calls == ["export"]

    hanging.let_go.set()
    assert exporter.shut.wait(5), "the exporter is shut down as soon as it lets go"
    assert exporter.calls == ["export", "force_flush", "shutdown"]


def test_a_flush_of_two_seconds_is_back_within_two_and_a_half(hanging: Hanging) -> None:
    pusher = MetricPusher(collect, Kept(hanging), 0.01)
    pusher.start()
    assert hanging.entered.wait(5)
    begin = time.monotonic()

    assert not pusher.flush(2)
    assert time.monotonic() - begin < 2.5


# --- its interval ---


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), 1e300])
def test_an_interval_that_no_thread_can_wait_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="interval_s must be a positive number of seconds"):
        MetricPusher(collect, Kept(), interval)


@pytest.mark.parametrize(("text", "seconds"), [("250", 0.25), ("", 60), (" 1500 ", 1.5)])
def test_the_interval_comes_from_the_environment_in_milliseconds(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    assert MetricPusher(collect, Kept())._interval_s == seconds
    assert MetricPusher(collect, Kept(), 7)._interval_s == 7


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf", "1e300"])
def test_a_bad_interval_in_the_environment_is_reported_and_the_default_used(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)

    assert MetricPusher(collect, Kept())._interval_s == 60
    assert f"OTEL_METRIC_EXPORT_INTERVAL must be a positive number of milliseconds; got '{text}'" in caplog.text


def test_a_periodic_export_has_the_time_that_the_environment_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", "1234")
    done = threading.Event()
    exporter = Kept(lambda: done.set() or MetricExportResult.SUCCESS)
    pusher = MetricPusher(collect, exporter, 0.01)
    pusher.start()

    assert done.wait(5)
    assert exporter.timeouts_ms[0] == 1234
    assert pusher.shutdown(5)


# --- forks ---

FORK = """
import os, signal, threading
from opentelemetry.sdk.metrics.export import MetricExportResult
from tests_push import Kept, collect, explode
from otel_brick.export.metric_push import MetricPusher

exporter = Kept(explode)
pusher = MetricPusher(collect, exporter, 60)
assert not pusher.flush(5)
exporter.act = lambda: MetricExportResult.SUCCESS
held, release = threading.Event(), threading.Event()

def hold():
    with pusher._lock:
        held.set()
        release.wait(30)

threading.Thread(target=hold, daemon=True).start()
held.wait(5)
child = os.fork()
if not child:
    signal.alarm(20)
    alone = threading.active_count() == 1
    good = alone and pusher.flush(5) and pusher.failures == 0 and len(exporter.batches) == 2
    os._exit(0 if good and pusher.shutdown(5) and exporter.calls[-1] == "shutdown" else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
release.set()
print(code, pusher.failures, pusher.shutdown(5))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_has_no_thread_until_it_exports_itself(tmp_path: Path) -> None:
    (tmp_path / "tests_push.py").write_text(Path(__file__).read_text())
    root = Path(otel_brick.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root)))},
    )

    assert (done.returncode, done.stdout) == (0, "0 1 True\n"), done.stderr


# --- the official exporters ---


def names(request: ExportMetricsServiceRequest) -> list[str]:
    (of,) = request.resource_metrics
    return [metric.name for metric in of.scope_metrics[0].metrics]


def test_the_console_exporter_prints_it() -> None:
    out = io.StringIO()
    pusher = MetricPusher(collect, ConsoleMetricExporter(out), 60)

    assert pusher.flush(2) and pusher.shutdown(2)
    assert out.getvalue().count('"name": "brick.records.dropped"') == 2


def test_the_http_exporter_delivers_it() -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    bodies: list[bytes] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        exporter = OTLPMetricExporter(f"http://127.0.0.1:{server.server_port}/v1/metrics")
        pusher = MetricPusher(collect, exporter, 60)
        assert pusher.flush(5) and pusher.shutdown(5)
    finally:
        server.shutdown()
        server.server_close()

    assert [names(ExportMetricsServiceRequest.FromString(body)) for body in bodies] == [["brick.records.dropped"]] * 2


def test_the_grpc_exporter_delivers_it() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service

    requests: list[ExportMetricsServiceRequest] = []

    class Server(service.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportMetricsServiceResponse:
            requests.append(request)
            return ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_MetricsServiceServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        pusher = MetricPusher(collect, OTLPMetricExporter(f"127.0.0.1:{port}", insecure=True), 60)
        assert pusher.flush(10) and pusher.shutdown(10)
    finally:
        server.stop(0)

    assert [names(request) for request in requests] == [["brick.records.dropped"]] * 2


def test_a_collector_that_is_down_holds_nobody_up() -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    pusher = MetricPusher(collect, OTLPMetricExporter("http://127.0.0.1:9/v1/metrics", timeout=2), 60)
    for call in (pusher.flush, pusher.shutdown):
        begin = time.monotonic()
        assert not call(0.3)
        assert time.monotonic() - begin < 0.3 + SLACK_S
