"""Rows submitted to the OTLP exporter: each is delivered exactly once or counted, whatever the collector does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from otel_brick import semconv
from otel_brick.export import sender, transport
from otel_brick.export.columnar import varint
from otel_brick.export.otlp import BrickOTLPExporter
from otel_brick.record.losses import Losses
from otel_brick.version import __version__
from tests.unit.export.servers import SILENT, Answer, Collector, CountingProxy, RawServer, collector, free_port

PROTOCOLS = ("http/protobuf", "grpc")
RESOURCE = Resource({"service.name": "engine", "host.id": 7}, "https://opentelemetry.io/schemas/1.30.0")

Make = Callable[..., BrickOTLPExporter]


def make_block(rows: int, first_id: int = 1, padding: int = 0) -> NDArray[np.uint8]:
    """Encoded entries of `ScopeSpans.spans`, ids counting from `first_id`."""
    entries = []
    for number in range(first_id, first_id + rows):
        span = ReadableSpan(
            name="RmsNorm",
            context=SpanContext(1, number, False, TraceFlags(1)),
            resource=RESOURCE,
            attributes={"padding": "x" * padding},
            start_time=1_700_000_000_000_000_000,
            end_time=1_700_000_000_000_000_500,
        )
        body = encode_spans([span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString()
        entries.append(b"\x12" + varint(len(body)) + body)
    return np.frombuffer(b"".join(entries), np.uint8).reshape(rows, -1)


def ids(server: Collector) -> list[int]:
    return [int.from_bytes(span.span_id, "big") for span in server.spans()]


@pytest.fixture(params=PROTOCOLS)
def server(request: pytest.FixtureRequest) -> Iterator[Collector]:
    yield from collector(request.param)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[BrickOTLPExporter] = []

    def make(**arguments: Any) -> BrickOTLPExporter:
        made.append(BrickOTLPExporter(**arguments))
        return made[-1]

    yield make
    for exporter in made:
        exporter.shutdown(100)


@pytest.fixture
def losses() -> Losses:
    return Losses()


def lost(losses: Losses) -> dict[str, int]:
    return {reason: count for reason, count in losses.snapshot().items() if count}


def to(server: Collector, make: Make, **arguments: Any) -> BrickOTLPExporter:
    return make(endpoint=server.endpoint, protocol=server.protocol, **arguments)


def test_a_request_holds_the_rows_below_resource_and_scope(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    exporter.submit([make_block(3), make_block(2, 4, padding=50)], RESOURCE, losses)
    assert exporter.flush(10)
    (request,) = server.requests()
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans
    assert [int.from_bytes(span.span_id, "big") for span in scope_spans.spans] == [1, 2, 3, 4, 5]
    assert resource_spans.schema_url == RESOURCE.schema_url
    assert {pair.key: pair.value for pair in resource_spans.resource.attributes}.keys() == {"service.name", "host.id"}
    assert (scope_spans.scope.name, scope_spans.scope.version) == (semconv.SCOPE_NAME, __version__)
    assert lost(losses) == {}


def test_the_frame_is_what_the_official_encoder_writes(server: Collector, make: Make, losses: Losses) -> None:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    span = ReadableSpan(
        name="RmsNorm",
        context=SpanContext(1, 1, False, TraceFlags(1)),
        resource=RESOURCE,
        attributes={"padding": ""},
        start_time=1_700_000_000_000_000_000,
        end_time=1_700_000_000_000_000_500,
        instrumentation_scope=InstrumentationScope(semconv.SCOPE_NAME, __version__),
    )
    exporter = to(server, make)
    exporter.submit([make_block(1)], RESOURCE, losses)
    assert exporter.flush(10)
    assert server.requests() == [encode_spans([span])]


def test_requests_share_one_connection(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    for number in range(12):
        exporter.submit([make_block(2, 1 + 2 * number)], RESOURCE, losses)
        assert exporter.flush(10)
    assert len(server.script.seen) == 12
    assert len({seen.peer for seen in server.script.seen}) == 1
    assert ids(server) == list(range(1, 25))


def test_no_rows_are_no_request(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    exporter.submit([], RESOURCE, losses)
    exporter.submit([make_block(1)[:0]], RESOURCE, losses)
    assert exporter.flush(10)
    assert server.script.seen == []


@pytest.mark.parametrize("block", [np.zeros(4, np.uint8), np.zeros((2, 2), np.int8), np.zeros((2, 0), np.uint8)])
def test_what_is_no_block_is_refused(make: Make, losses: Losses, block: Any) -> None:
    with pytest.raises(ValueError, match="blocks must be"):
        make(endpoint="http://127.0.0.1:1/v1/traces").submit([block], RESOURCE, losses)


def test_blocks_that_are_not_contiguous_are_sent_too(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    exporter.submit([make_block(6)[::2], np.asfortranarray(make_block(3, 10))], RESOURCE, losses)
    assert exporter.flush(10)
    assert ids(server) == [1, 3, 5, 10, 11, 12]


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_requests_are_compressed_when_asked(server: Collector, make: Make, losses: Losses, compression: str) -> None:
    proxy = CountingProxy(int(server.endpoint.split(":")[2].split("/")[0]))
    place = server.endpoint.split("://")[1].split("/", 1)
    endpoint = f"http://127.0.0.1:{proxy.port}/" + "".join(place[1:])
    exporter = make(endpoint=endpoint, protocol=server.protocol, compression=compression)
    block = make_block(200, padding=1000)
    exporter.submit([block], RESOURCE, losses)
    assert exporter.flush(10)
    assert ids(server) == list(range(1, 201))
    assert proxy.sent_bytes < block.size / 10
    if server.protocol == "http/protobuf":
        assert server.script.seen[0].headers["content-encoding"] == compression
    proxy.close()


def test_headers_go_with_every_request(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make, headers={"Authorization": "Bearer abc", "x-tenant": "a b", "x-key-bin": "bytes"})
    exporter.submit([make_block(1)], RESOURCE, losses)
    assert exporter.flush(10)
    (seen,) = server.script.seen
    assert (seen.headers["authorization"], seen.headers["x-tenant"]) == ("Bearer abc", "a b")
    assert seen.headers["x-key-bin"] in ("bytes", b"bytes")
    assert seen.headers["user-agent"].startswith(f"otel-brick/{__version__}")
    grpc_path = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
    assert seen.path == (grpc_path if server.protocol == "grpc" else "/v1/traces")


def test_the_url_is_used_as_given_and_its_user_is_sent(make: Make, losses: Losses) -> None:
    for server in collector("http/protobuf"):
        base = server.endpoint.removesuffix("/v1/traces").replace("://", "://me:p%40ss@")
        exporter = make(endpoint=f"{base}/custom/path?tenant=a")
        exporter.submit([make_block(1)], RESOURCE, losses)
        assert exporter.flush(10)
        (seen,) = server.script.seen
        assert seen.path == "/custom/path?tenant=a"
        assert seen.headers["authorization"] == "Basic bWU6cEBzcw=="


def test_a_proxy_of_the_environment_is_used(make: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in collector("http/protobuf"):
        monkeypatch.setenv("http_proxy", server.endpoint.removesuffix("/v1/traces"))
        monkeypatch.setenv("no_proxy", "localhost")
        exporter = make(endpoint="http://collector.invalid:4318/v1/traces")
        exporter.submit([make_block(1)], RESOURCE, losses)
        assert exporter.flush(10)
        (seen,) = server.script.seen
        assert (seen.path, seen.headers["host"]) == (
            "http://collector.invalid:4318/v1/traces",
            "collector.invalid:4318",
        )


def test_spans_that_the_collector_rejects_are_counted_and_its_words_logged_once(
    server: Collector, make: Make, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer(*[Answer("partial", rejected=2, message="too old")] * 2, Answer("partial", message="be quick"))
    exporter = to(server, make)
    for number in range(3):
        exporter.submit([make_block(5, 1 + 5 * number)], RESOURCE, losses)
    assert exporter.flush(10)
    assert lost(losses) == {"export_failed": 4}
    assert server.delivered() + 4 == 15
    assert sum("too old" in message for message in caplog.messages) == 1
    assert sum("be quick" in message for message in caplog.messages) == 1


def test_a_busy_collector_is_asked_again_after_the_time_it_wants(server: Collector, make: Make, losses: Losses) -> None:
    server.answer(Answer("throttled", retry_after_s=1))
    exporter = to(server, make)
    began = time.monotonic()
    exporter.submit([make_block(4)], RESOURCE, losses)
    assert exporter.flush(10)
    assert time.monotonic() - began >= 1
    assert (ids(server), lost(losses), len(server.script.seen)) == ([1, 2, 3, 4], {}, 2)


def test_an_unavailable_collector_is_asked_again(server: Collector, make: Make, losses: Losses) -> None:
    server.answer(Answer("unavailable"))
    exporter = to(server, make)
    exporter.submit([make_block(4)], RESOURCE, losses)
    assert exporter.flush(10)
    assert (ids(server), lost(losses), len(server.script.seen)) == ([1, 2, 3, 4], {}, 2)


def test_a_delay_beyond_the_timeout_is_not_waited_for(server: Collector, make: Make, losses: Losses) -> None:
    server.script.always = Answer("throttled", retry_after_s=60)
    exporter = to(server, make)
    began = time.monotonic()
    exporter.submit([make_block(4)], RESOURCE, losses)
    assert exporter.flush(10)
    assert time.monotonic() - began < 8
    assert (lost(losses), len(server.script.seen)) == ({"export_failed": 4}, 1)


def test_a_refusal_is_final(server: Collector, make: Make, losses: Losses, caplog: pytest.LogCaptureFixture) -> None:
    server.answer(Answer("bad", message="no such tenant"))
    exporter = to(server, make)
    exporter.submit([make_block(3)], RESOURCE, losses)
    exporter.submit([make_block(3, 4)], RESOURCE, losses)
    assert exporter.flush(10)
    assert (ids(server), lost(losses), len(server.script.seen)) == ([4, 5, 6], {"export_failed": 3}, 2)
    assert any("no such tenant" in message and server.endpoint[-14:] in message for message in caplog.messages)


@pytest.mark.parametrize("max_bytes", [700, 5_000])
def test_a_request_that_is_too_large_is_delivered_in_parts(
    server: Collector, make: Make, losses: Losses, max_bytes: int
) -> None:
    server.script.max_bytes = max_bytes
    exporter = to(server, make)
    exporter.submit([make_block(40, padding=100), make_block(37, 41, padding=200)], RESOURCE, losses)
    assert exporter.flush(10)
    assert (ids(server), lost(losses)) == (list(range(1, 78)), {})


def test_a_single_span_that_is_too_large_is_counted(server: Collector, make: Make, losses: Losses) -> None:
    server.script.max_bytes = 1_000
    exporter = to(server, make)
    exporter.submit([make_block(2), make_block(3, 3, padding=2_000), make_block(2, 6)], RESOURCE, losses)
    assert exporter.flush(10)
    assert (ids(server), lost(losses)) == ([1, 2, 6, 7], {"export_failed": 3})


def test_requests_stay_below_the_limit_and_later_ones_below_the_collectors(
    server: Collector, make: Make, losses: Losses
) -> None:
    block = make_block(100, padding=10_000)
    exporter = to(server, make)
    exporter.submit([np.repeat(block, 5, axis=0)] * 2, RESOURCE, losses)
    assert exporter.flush(20)
    sizes = [len(body) for body in server.script.received]
    assert len(sizes) == 4 and max(sizes) <= sender.MAX_REQUEST_BYTES
    assert len(server.spans()) == 1000
    server.script.max_bytes = 1_000_000
    exporter.submit([np.repeat(block, 2, axis=0)], RESOURCE, losses)
    assert exporter.flush(20)
    refused = len(server.script.seen) - len(server.script.received)
    exporter.submit([np.repeat(block, 4, axis=0)], RESOURCE, losses)
    assert exporter.flush(20)
    assert len(server.script.seen) - len(server.script.received) == refused > 0
    assert (len(server.spans()), lost(losses)) == (1600, {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_comes_late_gets_everything(make: Make, losses: Losses, protocol: str) -> None:
    port = free_port()
    path = "/v1/traces" if protocol == "http/protobuf" else ""
    exporter = make(endpoint=f"http://127.0.0.1:{port}{path}", protocol=protocol)
    exporter.submit([make_block(3)], RESOURCE, losses)
    assert not exporter.flush(0.3)
    for server in collector(protocol, port):
        assert exporter.flush(10)
        assert (ids(server), lost(losses)) == ([1, 2, 3], {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_comes_back_gets_what_follows(
    make: Make, losses: Losses, protocol: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "otel_brick")
    # A channel of gRPC tries to connect again after up to 1.2 s; attempts must go on for longer.
    monkeypatch.setattr(transport, "backoff_s", lambda attempts: 0.2)
    port, path = free_port(), "/v1/traces" if protocol == "http/protobuf" else ""
    exporter = make(endpoint=f"http://127.0.0.1:{port}{path}", protocol=protocol, timeout_s=1.5)
    for server in collector(protocol, port):
        exporter.submit([make_block(2)], RESOURCE, losses)
        assert exporter.flush(10)
        assert ids(server) == [1, 2]
    exporter.submit([make_block(2, 3)], RESOURCE, losses)
    assert exporter.flush(10)
    assert lost(losses) == {"export_failed": 2}
    for server in collector(protocol, port):
        exporter.submit([make_block(2, 7)], RESOURCE, losses)
        assert exporter.flush(10)
        assert ids(server) == [7, 8]
    said = [message for message in caplog.messages if "could not be exported" in message or "again" in message]
    assert ["again" in message for message in said] == [False, True]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_collector_that_restarts_gets_what_was_sent_meanwhile(make: Make, losses: Losses, protocol: str) -> None:
    raw = RawServer(read_bytes=1_000, once=True)
    path = "/v1/traces" if protocol == "http/protobuf" else ""
    exporter = make(endpoint=f"http://127.0.0.1:{raw.port}{path}", protocol=protocol)
    exporter.submit([make_block(20, padding=1_000)], RESOURCE, losses)
    assert not exporter.flush(0.1)
    assert raw.connections == 1
    for server in collector(protocol, raw.port):
        assert exporter.flush(10)
        assert (ids(server), lost(losses)) == (list(range(1, 21)), {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_connection_that_is_refused_is_tried_until_time_is_over(
    make: Make, losses: Losses, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "backoff_s", lambda attempts: 0.1)
    endpoint = f"http://127.0.0.1:{free_port()}" + ("/v1/traces" if protocol == "http/protobuf" else "")
    exporter = make(endpoint=endpoint, protocol=protocol, timeout_s=0.8)
    began = time.monotonic()
    exporter.submit([make_block(3)], RESOURCE, losses)
    assert exporter.flush(5)
    assert 0.6 < time.monotonic() - began < 4
    assert lost(losses) == {"export_failed": 3}


def test_an_answer_that_never_comes_is_not_asked_for_again(server: Collector, make: Make, losses: Losses) -> None:
    server.answer(SILENT)
    exporter = to(server, make, timeout_s=0.5)
    exporter.submit([make_block(3)], RESOURCE, losses)
    exporter.submit([make_block(3, 4)], RESOURCE, losses)
    assert exporter.flush(5)
    assert (ids(server), lost(losses), len(server.script.seen)) == ([4, 5, 6], {"export_failed": 3}, 2)


def test_an_answer_that_is_cut_counts_by_its_status(make: Make, losses: Losses) -> None:
    for server in collector("http/protobuf"):
        server.answer(Answer("cut"))
        exporter = to(server, make)
        exporter.submit([make_block(3)], RESOURCE, losses)
        exporter.submit([make_block(3, 4)], RESOURCE, losses)
        assert exporter.flush(5)
        assert (ids(server), lost(losses)) == ([1, 2, 3, 4, 5, 6], {})


def test_a_connection_that_ends_before_the_answer_is_tried_once_more(make: Make, losses: Losses) -> None:
    for server in collector("http/protobuf"):
        server.answer(Answer("hang_up"))
        exporter = to(server, make)
        exporter.submit([make_block(3)], RESOURCE, losses)
        assert exporter.flush(5)
        assert (ids(server), lost(losses), len(server.script.seen)) == ([1, 2, 3], {}, 2)
        server.answer(*[Answer("hang_up")] * 2)
        exporter.submit([make_block(3, 4)], RESOURCE, losses)
        assert exporter.flush(5)
        assert (lost(losses), len(server.script.seen)) == ({"export_failed": 3}, 4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_connection_that_ends_within_the_request_costs_that_request(
    make: Make, losses: Losses, protocol: str
) -> None:
    raw = RawServer(read_bytes=20_000)
    path = "/v1/traces" if protocol == "http/protobuf" else ""
    exporter = make(endpoint=f"http://127.0.0.1:{raw.port}{path}", protocol=protocol, timeout_s=1)
    exporter.submit([make_block(50, padding=10_000)], RESOURCE, losses)
    assert exporter.flush(5)
    assert lost(losses) == {"export_failed": 50}
    assert raw.connections >= 2
    raw.close()


def test_submitting_never_waits_and_a_full_queue_loses_its_oldest(
    server: Collector, make: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_QUEUE_BYTES", 20_000)
    server.answer(SILENT)
    exporter = to(server, make)
    exporter.submit([make_block(1)], RESOURCE, losses)
    while not server.script.seen:
        time.sleep(0.002)
    blocks = [make_block(10, 2 + 10 * number, padding=400) for number in range(10)]
    began = time.monotonic()
    for block in blocks:
        exporter.submit([block], RESOURCE, losses)
    assert time.monotonic() - began < 5
    dropped = lost(losses)["queue_full"]
    assert 0 < dropped < 100 and dropped % 10 == 0
    server.script.release.set()
    assert exporter.flush(10)
    answered = [number for number in ids(server) if number > 1]
    assert answered == list(range(2 + dropped, 102))


def test_flush_waits_only_for_what_was_submitted_before(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    assert exporter.flush(0)
    server.answer(SILENT)
    exporter.submit([make_block(1)], RESOURCE, losses)
    assert not exporter.flush(0.1)
    done = threading.Event()
    threading.Thread(target=lambda: exporter.flush(10) and done.set()).start()
    server.script.release.set()
    assert done.wait(5)


@pytest.mark.parametrize("case", ["silent", "refused", "retry_after", "mute", "closes", "stalled_retry"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shutdown_ends_in_time_and_counts_the_rest(make: Make, losses: Losses, protocol: str, case: str) -> None:
    path = "/v1/traces" if protocol == "http/protobuf" else ""
    raw = RawServer(read_bytes=20_000 if case == "closes" else None)
    for server in collector(protocol):
        server.script.always = {
            "silent": SILENT,
            "retry_after": Answer("unavailable", retry_after_s=60),
            "stalled_retry": Answer("throttled", retry_after_s=9),
        }.get(case, Answer())
        port = {"mute": raw.port, "closes": raw.port, "refused": free_port()}.get(case)
        endpoint = server.endpoint if port is None else f"http://127.0.0.1:{port}{path}"
        exporter = make(endpoint=endpoint, protocol=protocol)
        for number in range(5):
            exporter.submit([make_block(10, 1 + 10 * number, padding=4_000)], RESOURCE, losses)
        exporter.flush(0.1)
        began = time.monotonic()
        exporter.shutdown(500)
        assert time.monotonic() - began < 2
        assert (server.delivered(), lost(losses)) == (0, {"export_failed": 50})
        exporter.submit([make_block(2)], RESOURCE, losses)
        exporter.shutdown(1_000)
        assert exporter.flush(0.1)
        assert lost(losses) == {"export_failed": 50, "already_shutdown": 2}
    raw.close()


def test_a_connection_that_the_collector_closed_while_idle_costs_nothing_at_shutdown(
    server: Collector, make: Make, losses: Losses
) -> None:
    exporter = to(server, make)
    exporter.submit([make_block(1)], RESOURCE, losses)
    assert exporter.flush(10)
    if server.protocol == "http/protobuf":
        server.answer(Answer("hang_up"))
    exporter.submit([make_block(1, 2)], RESOURCE, losses)
    exporter.shutdown(5_000)
    assert (ids(server), lost(losses)) == ([1, 2], {})


def test_shutdown_delivers_what_is_queued(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    for number in range(30):
        exporter.submit([make_block(2, 1 + 2 * number)], RESOURCE, losses)
    exporter.shutdown(10_000)
    assert (ids(server), lost(losses)) == (list(range(1, 61)), {})


def test_failures_are_logged_once_a_minute(
    server: Collector, make: Make, losses: Losses, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[str]:
        return [message.split(" to ")[0] for message in caplog.messages if "exported" in message]

    caplog.set_level(logging.INFO)
    server.script.always = Answer("bad", message="no such tenant")
    exporter = to(server, make)
    for _ in range(3):
        exporter.submit([make_block(5)], RESOURCE, losses)
        assert exporter.flush(10)
        assert said() == ["5 spans could not be exported"]
    monkeypatch.setattr(sender, "LOG_INTERVAL_S", 0.0)
    exporter.submit([make_block(5)], RESOURCE, losses)
    assert exporter.flush(10)
    server.script.always = Answer()
    exporter.submit([make_block(5)], RESOURCE, losses)
    exporter.submit([make_block(5)], RESOURCE, losses)
    assert exporter.flush(10)
    assert said() == ["5 spans could not be exported", "15 spans could not be exported", "spans are exported"]


def test_requests_are_hidden_from_instrumentation(
    server: Collector, make: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grpc
    import urllib3
    from opentelemetry.instrumentation.utils import is_instrumentation_enabled

    enabled: list[bool] = []

    def noting(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            enabled.append(is_instrumentation_enabled())
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(urllib3.HTTPConnectionPool, "urlopen", noting(urllib3.HTTPConnectionPool.urlopen))
    monkeypatch.setattr(grpc, "insecure_channel", noting(grpc.insecure_channel))
    exporter = to(server, make)
    exporter.submit([make_block(1)], RESOURCE, losses)
    assert exporter.flush(10)
    exporter.export([ReadableSpan("theirs", SpanContext(1, 1, False, TraceFlags(1)), resource=RESOURCE)])
    assert enabled and not any(enabled)
    assert is_instrumentation_enabled()


def test_many_threads_may_do_everything_at_once(server: Collector, make: Make, losses: Losses) -> None:
    exporter = to(server, make)
    blocks = [make_block(3, 1 + 3 * number) for number in range(48)]
    span = ReadableSpan("theirs", SpanContext(1, 1_000, False, TraceFlags(1)), resource=RESOURCE)

    def work(part: int) -> None:
        for block in blocks[part::4]:
            exporter.submit([block], RESOURCE, losses)
            exporter.export([span])
            exporter.flush(5)
        if part == 0:
            exporter.shutdown(5_000)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ours = [number for number in ids(server) if number < 1_000]
    assert len(ours) == len(set(ours))
    assert len(ours) + sum(lost(losses).values()) == 144


def test_the_thread_ends_when_there_is_nothing_to_do(
    server: Collector, make: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "IDLE_S", 0.05)
    exporter = to(server, make)

    def running() -> bool:
        return any(thread.name == "otel-brick-sender" for thread in set(threading.enumerate()) - before)

    before = set(threading.enumerate())
    for number in (1, 2):
        exporter.submit([make_block(1, number)], RESOURCE, losses)
        assert running()
        assert exporter.flush(10)
        deadline = time.monotonic() + 5
        while running() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running()
    assert ids(server) == [1, 2]


def test_shutdown_sends_by_itself_where_no_thread_can_start_any_more(
    server: Collector, make: Make, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    exporter = to(server, make)
    with monkeypatch.context() as late:
        late.setattr(threading.Thread, "start", start)
        exporter.submit([make_block(2)], RESOURCE, losses)
    exporter.submit([], RESOURCE, losses)
    exporter.shutdown(5_000)
    assert (ids(server), lost(losses)) == ([1, 2], {})


def test_an_address_that_can_not_be_resolved_is_counted(make: Make, losses: Losses) -> None:
    exporter = make(endpoint="http://collector.invalid:4318/v1/traces", timeout_s=0.5)
    exporter.submit([make_block(2)], RESOURCE, losses)
    assert exporter.flush(10)
    assert lost(losses) == {"export_failed": 2}
