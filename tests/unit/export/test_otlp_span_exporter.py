"""The OTLP exporter as an ordinary span exporter of the SDK, with TLS, after a fork and before it is needed."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from otel_brick.export.otlp import BrickOTLPExporter
from tests.unit.export.servers import COLLECTORS, SILENT, Answer, collector, free_port

PROTOCOLS = tuple(COLLECTORS)


def spans(count: int, padding: int = 0) -> list[ReadableSpan]:
    return [
        ReadableSpan(
            name="theirs",
            context=SpanContext(1, number, False, TraceFlags(1)),
            resource=Resource.get_empty(),
            attributes={"padding": "x" * padding},
            start_time=1,
            end_time=2,
        )
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_processor_delivers_through_it(protocol: str) -> None:
    for server in collector(protocol):
        exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=protocol)
        assert isinstance(exporter, SpanExporter)
        provider = TracerProvider(resource=Resource.create({"service.name": "engine"}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("their.library", "1.2")
        for number in range(700):
            tracer.start_span(f"request {number}").end()
        assert provider.force_flush()
        tracer.start_span("last").end()
        provider.shutdown()
        names = [span.name for span in server.spans()]
        assert names == [*(f"request {number}" for number in range(700)), "last"]
        scopes = {scope.scope.name for each in server.requests() for scope in each.resource_spans[0].scope_spans}
        assert scopes == {"their.library"}


def test_the_processor_can_pass_its_timeout_on() -> None:
    parameter = inspect.signature(BrickOTLPExporter.shutdown).parameters["timeout_millis"]
    assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    assert "timeout_millis" in inspect.getfullargspec(BrickOTLPExporter.shutdown).args


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_results_say_whether_spans_were_delivered(protocol: str) -> None:
    for server in collector(protocol):
        exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=protocol, timeout_s=0.5)
        server.answer(Answer("bad"), Answer(), Answer("partial", rejected=1, message="too old"), Answer("unavailable"))
        results = [exporter.export(spans(2)) for _ in range(4)]
        failure, success = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
        assert results == [failure, success, success, success]
        server.answer(SILENT)
        assert exporter.export(spans(2)) is failure
        seen = len(server.script.seen)
        assert exporter.export([]) is success
        assert exporter.force_flush() and exporter.force_flush(timeout_millis=1)
        exporter.shutdown()
        assert exporter.export(spans(1)) is failure
        exporter.shutdown(timeout_millis=10)
        assert exporter.force_flush()
        assert len(server.script.seen) == seen


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_can_not_be_delivered_or_encoded_is_a_failure(protocol: str) -> None:
    exporter = BrickOTLPExporter(endpoint=f"http://127.0.0.1:{free_port()}/", protocol=protocol, timeout_s=0.2)
    assert exporter.export(spans(1)) is SpanExportResult.FAILURE
    bad: Any = [object()]
    assert exporter.export(bad) is SpanExportResult.FAILURE
    exporter.shutdown()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_too_large_a_batch_is_divided(protocol: str) -> None:
    for server in collector(protocol):
        exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=protocol)
        assert exporter.export(spans(400, padding=10_000)) is SpanExportResult.SUCCESS
        assert len(server.script.received) == 2
        server.script.max_bytes = 30_000
        assert exporter.export(spans(8, padding=10_000)) is SpanExportResult.SUCCESS
        assert len(server.spans()) == 408
        assert exporter.export(spans(1, padding=40_000)) is SpanExportResult.FAILURE
        exporter.shutdown()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shutdown_ends_an_export_of_another_thread(protocol: str) -> None:
    exporter = BrickOTLPExporter(endpoint=f"http://127.0.0.1:{free_port()}/", protocol=protocol)
    results: list[SpanExportResult] = []
    thread = threading.Thread(target=lambda: results.append(exporter.export(spans(1))))
    thread.start()
    time.sleep(0.1)
    began = time.monotonic()
    exporter.shutdown(5_000)
    thread.join(5)
    assert time.monotonic() - began < 4
    assert results == [SpanExportResult.FAILURE]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A certificate for localhost that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    chain, key = str(tmp_path / "chain.pem"), str(tmp_path / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extensions = ["subjectAltName=DNS:localhost", "keyUsage=critical,digitalSignature,keyCertSign"]
    added = [part for extension in extensions for part in ("-addext", extension)]
    subprocess.run([*command.split(), *added, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return chain, key


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_sides_are_authenticated_by_certificates(
    protocol: str, certificate: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, key = certificate
    both = tmp_path / "both.pem"
    both.write_text(Path(chain).read_text() + Path(key).read_text())
    server = COLLECTORS[protocol](certificate=(chain, key, chain))

    def result(**arguments: Any) -> SpanExportResult:
        exporter = BrickOTLPExporter(endpoint=server.endpoint, protocol=protocol, timeout_s=3, **arguments)
        try:
            return exporter.export(spans(1))
        finally:
            exporter.shutdown()

    success, failure = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    own = {"client_certificate_file": chain, "client_key_file": key}
    assert result(certificate_file=Path(chain), **own) is success
    assert result(certificate_file=chain, client_certificate_file=both) is success
    for name, value in (("CERTIFICATE", chain), ("CLIENT_CERTIFICATE", chain), ("CLIENT_KEY", key)):
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert result() is success
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_CERTIFICATE")
    monkeypatch.setattr("otel_brick.export.transport.FIRST_BACKOFF_S", 10.0)
    assert result() is failure
    server.close()


FORKING = """
import os, sys
import numpy as np
from opentelemetry.sdk.resources import Resource
from otel_brick.export.otlp import BrickOTLPExporter
from otel_brick.record.losses import Losses

endpoint, protocol = sys.argv[1:]
exporter = BrickOTLPExporter(endpoint=endpoint, protocol=protocol)
resource = Resource({})

def submit(number):
    losses = Losses()
    block = np.frombuffer(b"\\x12\\x0a\\x12\\x08" + number.to_bytes(8, "big"), np.uint8).reshape(1, -1)
    exporter.submit([block], resource, losses)
    return losses

submit(1)
assert exporter.flush(10)
submit(2)  # perhaps still queued when the child begins
child = os.fork()
losses = submit(4 if child == 0 else 3)
assert exporter.flush(10)
assert not any(losses.snapshot().values())
exporter.shutdown(5000)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_forked_child_sends_its_own_spans_only(protocol: str) -> None:
    for server in collector(protocol):
        # Newer interpreters warn of every fork with threads.
        program = [sys.executable, "-W", "ignore", "-c", FORKING, server.endpoint, protocol]
        done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(int.from_bytes(span.span_id, "big") for span in server.spans()) == [1, 2, 3, 4]


def test_no_library_is_loaded_before_an_exporter_is_made() -> None:
    program = "import sys, otel_brick, otel_brick.export.otlp\nprint([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["grpc", "requests", "urllib3"]
    done = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
