"""Settings of the OTLP exporter: arguments over variables over defaults, with the official exporters' meaning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import opentelemetry.exporter.otlp.proto.grpc.exporter as official_grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OfficialGrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OfficialHttpExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from otel_brick.export.otlp import BrickOTLPExporter
from otel_brick.export.otlp_settings import OTLPSettings
from tests.unit.export.servers import SILENT, Collector, collector

GENERAL = "OTEL_EXPORTER_OTLP_"
OF_TRACES = "OTEL_EXPORTER_OTLP_TRACES_"
SPAN = ReadableSpan(name="theirs", context=SpanContext(1, 2, False, TraceFlags(1)), start_time=1, end_time=2)
OFFICIAL = {"http/protobuf": OfficialHttpExporter, "grpc": OfficialGrpcExporter}
IGNORED = {"user-agent", "accept", "accept-encoding", "connection", "content-length"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(GENERAL):
            monkeypatch.delenv(name)


def build(environ: dict[str, str] | None = None, **arguments: Any) -> OTLPSettings:
    return OTLPSettings.build(arguments, environ or {})


def test_without_anything_given_the_defaults_hold() -> None:
    settings = build()
    assert (settings.protocol, settings.endpoint) == ("http/protobuf", "http://localhost:4318/v1/traces")
    assert (settings.headers, settings.timeout_s, settings.compression) == ((), 10.0, "none")
    assert (settings.certificate_file, settings.client_key_file, settings.client_certificate_file) == (None,) * 3
    settings = build(protocol="grpc")
    assert (settings.endpoint, settings.insecure) == ("localhost:4317", True)


def test_arguments_win_over_variables_and_those_of_traces_over_general_ones() -> None:
    general = {
        GENERAL + "ENDPOINT": "http://general:1",
        GENERAL + "PROTOCOL": "grpc",
        GENERAL + "TIMEOUT": "1.5",
        GENERAL + "COMPRESSION": "gzip",
        GENERAL + "HEADERS": "a=general",
    }
    settings = build(general)
    assert (settings.endpoint, settings.protocol) == ("general:1", "grpc")
    assert (settings.timeout_s, settings.compression, settings.headers) == (1.5, "gzip", (("a", "general"),))
    of_traces = general | {
        OF_TRACES + "ENDPOINT": "http://traces:2/path",
        OF_TRACES + "PROTOCOL": "http/protobuf",
        OF_TRACES + "TIMEOUT": "2",
        OF_TRACES + "COMPRESSION": "deflate",
        OF_TRACES + "HEADERS": "b=traces",
    }
    settings = build(of_traces)
    assert (settings.endpoint, settings.protocol) == ("http://traces:2/path", "http/protobuf")
    assert (settings.timeout_s, settings.compression, settings.headers) == (2.0, "deflate", (("b", "traces"),))
    settings = build(
        of_traces, endpoint="http://given:3", timeout_s=3, compression="none", headers={"C": "given"}, protocol="grpc"
    )
    assert (settings.endpoint, settings.protocol) == ("given:3", "grpc")
    assert (settings.timeout_s, settings.compression, settings.headers) == (3.0, "none", (("c", "given"),))


def test_empty_variables_count_as_unset() -> None:
    names = ("ENDPOINT", "PROTOCOL", "TIMEOUT", "COMPRESSION", "HEADERS", "INSECURE", "CERTIFICATE")
    assert build({OF_TRACES + name: " " for name in names}) == build()
    given = {GENERAL + "TIMEOUT": "3", OF_TRACES + "TIMEOUT": ""}
    assert build(given).timeout_s == 3.0


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "endpoint": ("", "localhost:4318", "ftp://h", "http://", "http://h:port", "http://a b", 7),
        "protocol": ("http/json", "", 1),
        "headers": ("a=b", {"a": 1}, {"a b": "c"}, {"a": "line\nbreak"}, {1: "a"}, {"a": "\u20ac"}),
        "timeout_s": (0, -1, float("nan"), float("inf"), "soon", True, [1]),
        "compression": ("brotli", 1),
        "insecure": ("true", 1),
        "certificate_file": ("/nonexistent.pem", 7),
        "client_key_file": (Path("/nonexistent.pem"),),
        "client_certificate_file": ("/",),
    }.items(),
)
def test_a_malformed_argument_is_named(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must"):
            BrickOTLPExporter(**{name: value})


def test_a_key_needs_its_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = tmp_path / "key.pem"
    key.write_text("")
    with pytest.raises(ValueError, match="client_key_file must be given together"):
        build(client_key_file=key)
    assert build({GENERAL + "CLIENT_KEY": str(key)}).client_key_file is None
    assert "CLIENT_KEY" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "attribute"),
    [
        ("ENDPOINT", "localhost:4318", "endpoint"),
        ("ENDPOINT", "http://[::1", "endpoint"),
        ("PROTOCOL", "http/json", "protocol"),
        ("TIMEOUT", "10s", "timeout_s"),
        ("TIMEOUT", "-1", "timeout_s"),
        ("COMPRESSION", "zstd", "compression"),
        ("CERTIFICATE", "/nonexistent.pem", "certificate_file"),
        ("CLIENT_KEY", "/nonexistent.pem", "client_key_file"),
        ("CLIENT_CERTIFICATE", "/nonexistent.pem", "client_certificate_file"),
        ("HEADERS", "na%0Ame=a", "headers"),
    ],
)
@pytest.mark.parametrize("prefix", [GENERAL, OF_TRACES])
def test_a_malformed_variable_warns_once_and_its_default_holds(
    prefix: str, name: str, text: str, attribute: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        settings = build({prefix + name: text})
        assert getattr(settings, attribute) == getattr(build(), attribute)
    assert sum(prefix + name in message for message in caplog.messages) == 1


def test_a_malformed_header_does_not_cost_the_others_nor_show_its_value(caplog: pytest.LogCaptureFixture) -> None:
    settings = build({GENERAL + "HEADERS": "authorization=secret%0A,b=%C3%BCber"}, protocol="grpc")
    assert settings.headers == (("authorization", "secret"),)
    assert "'b'" in caplog.text and "secret" not in caplog.text


def test_logs_do_not_show_a_password() -> None:
    assert build(endpoint="http://me:secret@host:1/v1").destination == "http://host:1/v1"
    assert build(endpoint="http://host:1/a@b").destination == "http://host:1/a@b"
    assert build(protocol="grpc").destination == "localhost:4317"


def environments(base: str, protocol: str) -> Iterator[dict[str, str]]:
    """Variables that lead to a collector at `base`."""
    general = {GENERAL + "ENDPOINT": base}
    yield general
    yield {OF_TRACES + "ENDPOINT": base + "/custom" if protocol == "http/protobuf" else base}
    yield {GENERAL + "ENDPOINT": "http://127.0.0.1:1", OF_TRACES + "ENDPOINT": base}
    if protocol == "http/protobuf":
        yield {GENERAL + "ENDPOINT": base + "/"}
        yield {GENERAL + "ENDPOINT": base + "/prefix/"}
        yield {OF_TRACES + "ENDPOINT": base + "/a%20b?c=d"}
        for compression in ("gzip", "deflate", "none", " GZip "):
            yield general | {GENERAL + "COMPRESSION": compression}
        yield general | {GENERAL + "COMPRESSION": "gzip", OF_TRACES + "COMPRESSION": "none"}
    else:
        yield {GENERAL + "ENDPOINT": base.removeprefix("http://"), GENERAL + "INSECURE": "true"}
        yield general | {GENERAL + "TIMEOUT": "7"}
        yield general | {GENERAL + "TIMEOUT": "7", OF_TRACES + "TIMEOUT": "5"}
    for headers in ("a=b", "A=b, c=d e", "x=a%20b%3D,y=1=2", "good=1,ill formed,=2,other=3", ","):
        yield general | {GENERAL + "HEADERS": headers}
    yield general | {GENERAL + "HEADERS": "a=b,c=d", OF_TRACES + "HEADERS": "c=e"}


def sent(server: Collector, exporter: Any) -> tuple[Any, ...]:
    """What a collector sees of an exporter's request."""
    exporter.export([SPAN])
    exporter.shutdown()
    (seen,) = server.script.seen
    server.script.seen.clear()
    headers = {name: value for name, value in seen.headers.items() if name not in IGNORED}
    assert server.spans().pop().name == SPAN.name
    return seen.path, headers, None if seen.remaining_s is None else round(seen.remaining_s)


@pytest.mark.parametrize("protocol", OFFICIAL)
def test_a_collector_sees_what_it_sees_of_the_official_exporter(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in collector(protocol):
        for environ in environments(server.base, protocol):
            with monkeypatch.context() as variables:
                for name, value in environ.items():
                    variables.setenv(name, value)
                expected = sent(server, OFFICIAL[protocol]())
                variables.setenv(GENERAL + "PROTOCOL", protocol)
                assert sent(server, BrickOTLPExporter()) == expected, environ


def test_the_timeout_of_the_environment_counts_as_for_the_official_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def elapsed_s(exporter: Any) -> float:
        began = time.monotonic()
        try:
            exporter.export([SPAN])
        except Exception:  # old releases let it through
            pass
        return time.monotonic() - began

    for server in collector("http/protobuf"):
        server.script.always = SILENT
        monkeypatch.setenv(OF_TRACES + "ENDPOINT", server.endpoint)
        monkeypatch.setenv(GENERAL + "TIMEOUT", "1")
        with ThreadPoolExecutor(2) as pool:
            ours, theirs = pool.map(elapsed_s, (BrickOTLPExporter(), OfficialHttpExporter()))
    assert 0.9 < ours < 1.9
    assert 0.9 < theirs < 1.9


@pytest.mark.parametrize("of_traces", [None, "true", "false", "TRUE"])
@pytest.mark.parametrize("general", [None, "true", "false", "yes"])
@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("endpoint", ["http://h:1", "https://h:1", "h:1", "dns:///h:1"])
def test_grpc_goes_without_tls_exactly_where_the_official_exporter_does(
    endpoint: str, given: bool | None, general: str | None, of_traces: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, str]] = []

    class Channel:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    def insecure_channel(target: str, **_: Any) -> Channel:
        made.append(("insecure", target))
        return Channel()

    def secure_channel(target: str, *_: Any, **__: Any) -> Channel:
        made.append(("secure", target))
        return Channel()

    for module in (grpc, official_grpc):
        monkeypatch.setattr(module, "insecure_channel", insecure_channel)
        monkeypatch.setattr(module, "secure_channel", secure_channel)
    for prefix, value in ((GENERAL, general), (OF_TRACES, of_traces)):
        if value is not None:
            monkeypatch.setenv(prefix + "INSECURE", value)
    OfficialGrpcExporter(endpoint=endpoint, insecure=given)
    BrickOTLPExporter(endpoint=endpoint, insecure=given, protocol="grpc").export([SPAN])
    assert made[0] == made[1]
