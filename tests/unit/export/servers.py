"""Collectors on the loopback interface that answer as told, for both protocols, and what they have received.

A collector answers a request with the first answer of its script that is left, and accepts when none is. `received`
holds only requests that it accepted: what a client was told to be delivered.
"""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MAX_WAIT_S = 20.0


@dataclass(frozen=True)
class Answer:
    """What a collector does with one request.

    Attributes:
        kind: accept, partial, throttled, unavailable, bad, silent (never answers), cut (200, but the connection ends
            within the body), hang_up (the connection ends without an answer).
        retry_after_s: the delay that `throttled` and `unavailable` ask for.
        rejected: spans that `partial` rejects.
        message: words of `partial` and `bad`.
    """

    kind: str = "accept"
    retry_after_s: int | None = None
    rejected: int = 0
    message: str = ""


ACCEPT = Answer()
SILENT = Answer("silent")


@dataclass
class Seen:
    """A request as the collector saw it, whatever it answered."""

    path: str
    headers: dict[str, str]
    peer: str
    size_bytes: int
    remaining_s: float | None = None


@dataclass
class Script:
    """What a collector does and has seen."""

    answers: deque[Answer] = field(default_factory=deque)
    always: Answer = ACCEPT
    max_bytes: int | None = None
    received: list[bytes] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    rejected: int = 0
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, body: bytes, seen: Seen) -> Answer:
        with self.lock:
            self.seen.append(seen)
            if self.max_bytes is not None and len(body) > self.max_bytes:
                return Answer("too_large")
            answer = self.answers.popleft() if self.answers else self.always
            if answer.kind in ("accept", "partial", "cut"):
                self.received.append(body)
                self.rejected += answer.rejected
            return answer

    def wait(self) -> None:
        self.release.wait(MAX_WAIT_S)


class Collector:
    """A collector; `endpoint` is what an exporter's argument takes."""

    protocol: str
    endpoint: str

    def __init__(self) -> None:
        self.script = Script()

    def answer(self, *answers: Answer) -> None:
        self.script.answers.extend(answers)

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.script.received]

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests()
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]

    def delivered(self) -> int:
        """Spans that were accepted and not rejected."""
        return len(self.spans()) - self.script.rejected

    def close(self) -> None:
        raise NotImplementedError


def _response(answer: Answer) -> bytes:
    partial = ExportTracePartialSuccess(rejected_spans=answer.rejected, error_message=answer.message)
    given = answer.kind == "partial"
    return ExportTraceServiceResponse(partial_success=partial if given else None).SerializeToString()


class HttpCollector(Collector):
    protocol = "http/protobuf"

    def __init__(self, port: int = 0, certificate: tuple[str, str, str] | None = None) -> None:
        super().__init__()
        script = self.script

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                wire = self.rfile.read(int(self.headers["Content-Length"]))
                body = _decompressed(wire, self.headers.get("Content-Encoding"))
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.path, headers, f"{self.client_address[0]}:{self.client_address[1]}", len(wire))
                self._answer(script.decide(body, seen))

            def _answer(self, answer: Answer) -> None:
                status = {"throttled": 429, "unavailable": 503, "bad": 400, "too_large": 413}.get(answer.kind, 200)
                content = Status(message=answer.message).SerializeToString() if status == 400 else _response(answer)
                if answer.kind == "silent":
                    script.wait()
                if answer.kind in ("silent", "hang_up"):
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(content) + (100 if answer.kind == "cut" else 0)))
                if answer.retry_after_s is not None:
                    self.send_header("Retry-After", str(answer.retry_after_s))
                self.end_headers()
                self.wfile.write(content)
                if answer.kind == "cut":
                    self.close_connection = True

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.connections: list[socket.socket] = []

            def process_request(self, request: Any, client_address: Any) -> None:
                self.connections.append(request)
                super().process_request(request, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        if certificate is not None:
            self._server.socket = _server_context(certificate).wrap_socket(self._server.socket, server_side=True)
        scheme, name = ("https", "localhost") if certificate else ("http", "127.0.0.1")
        self.base = f"{scheme}://{name}:{self._server.server_port}"
        self.endpoint = f"{self.base}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.script.release.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in self._server.connections:
            _end(connection)


def _decompressed(wire: bytes, encoding: str | None) -> bytes:
    return {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(encoding or "", bytes)(wire)


def _server_context(certificate: tuple[str, str, str]) -> Any:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[0], certificate[1])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate[2])
    return context


class GrpcCollector(Collector):
    protocol = "grpc"

    def __init__(self, port: int = 0, certificate: tuple[str, str, str] | None = None) -> None:
        import grpc

        super().__init__()
        script = self.script
        # A channel that reached for a port too early would otherwise share its patience with later ones.
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])

        class Handler(grpc.GenericRpcHandler):
            def service(self, handler_call_details: Any) -> Any:
                path = handler_call_details.method

                def export(body: bytes, context: Any) -> bytes:
                    metadata = {name: value for name, value in context.invocation_metadata()}
                    remaining = context.time_remaining()
                    answer = script.decide(body, Seen(path, metadata, context.peer(), len(body), remaining))
                    return _grpc_answer(answer, context, script)

                return grpc.unary_unary_rpc_method_handler(export)

        self._server.add_generic_rpc_handlers((Handler(),))
        place = f"127.0.0.1:{port}"
        if certificate is None:
            bound = self._server.add_insecure_port(place)
        else:
            chain, key, trusted = (_read(path) for path in certificate)
            credentials = grpc.ssl_server_credentials([(key, chain)], trusted, require_client_auth=True)
            bound = self._server.add_secure_port(place, credentials)
        self._server.start()
        self.base = self.endpoint = f"https://localhost:{bound}" if certificate else f"http://127.0.0.1:{bound}"

    def close(self) -> None:
        self.script.release.set()
        self._server.stop(0).wait(5)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _grpc_answer(answer: Answer, context: Any, script: Script) -> bytes:
    import grpc

    code = {
        "throttled": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "unavailable": grpc.StatusCode.UNAVAILABLE,
        "bad": grpc.StatusCode.INVALID_ARGUMENT,
        "too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    }.get(answer.kind)
    if answer.kind == "silent":
        script.wait()
    if code is None:
        return _response(answer)
    if answer.retry_after_s is not None:
        status = Status(code=code.value[0])
        info = RetryInfo()
        info.retry_delay.seconds = answer.retry_after_s
        status.details.add().Pack(info)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    details = "grpc: received message larger than max" if answer.kind == "too_large" else answer.message
    return context.abort(code, details)


class RawServer:
    """Accepts connections and does as told with them, below any protocol.

    Args:
        read_bytes: closes a connection after so many bytes; None keeps all open and never answers.
        once: whether it goes away with the first connection.
    """

    def __init__(self, read_bytes: int | None = None, once: bool = False) -> None:
        self._read_bytes = read_bytes
        self._once = once
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.port = self._socket.getsockname()[1]
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            if self._read_bytes is not None:
                try:
                    connection.recv(self._read_bytes)
                except OSError:
                    pass
                if self._once:
                    self.close()
                connection.close()

    def close(self) -> None:
        # The port first: whoever loses a connection may try again at once, and must not get in here.
        _end(self._socket)
        self._socket.close()
        for connection in self._open:
            connection.close()


class CountingProxy:
    """Passes bytes on to a port and counts those of the clients: what compression saves on any protocol."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.sent_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, counts in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, counts), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(65_536):
                if counts:
                    self.sent_bytes += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            _end(source)
            _end(sink)

    def close(self) -> None:
        _end(self._socket)
        self._socket.close()


def _end(connection: socket.socket) -> None:
    """Wake whoever waits for a socket, which closing alone does not."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


COLLECTORS = {"http/protobuf": HttpCollector, "grpc": GrpcCollector}


def collector(protocol: str, port: int = 0) -> Iterator[Collector]:
    """One collector, closed afterwards: the body of a fixture or of a loop."""
    server = COLLECTORS[protocol](port)
    try:
        yield server
    finally:
        server.close()
