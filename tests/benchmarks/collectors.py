"""Where the benchmarks send to: exporters that stop at the bytes, and collectors on the loopback interface.

A collector runs in another process, so that the process time of the benchmark does not contain it, and reads requests
without decoding them. One that is down either refuses connections or accepts them and never answers.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_brick.export.otlp import Frame, packed
from otel_brick.export.sender import MAX_REQUEST_BYTES

UP, REFUSING, SILENT = "up", "refusing", "silent"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


class Discard(SpanExporter):
    """Encodes spans to bytes as the OTLP exporters do and throws them away."""

    def __init__(self) -> None:
        self.spans = 0
        self.bytes = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.bytes += len(encode_spans(spans).SerializeToString())
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


class DiscardRows(Discard):
    """Also takes encoded rows: puts requests together and throws them away."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0
        self.row_bytes = 0
        self._frames: dict[int, tuple[Resource, Frame]] = {}

    def submit(self, blocks: Sequence[NDArray[np.uint8]], resource: Resource, losses: Any) -> None:
        known = self._frames.get(id(resource))
        if known is None:
            known = self._frames[id(resource)] = resource, Frame.of(resource)
        for payload in packed(known[1], blocks, MAX_REQUEST_BYTES):
            self.row_bytes += len(payload.body())
            self.rows += payload.rows

    def flush(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        pass


@contextmanager
def collector(kind: str) -> Generator[str]:
    """A collector of one of the three kinds; gives its endpoint."""
    if kind == REFUSING:
        with socket.socket() as reserved:  # bound and not listening, so that nobody else can take the port
            reserved.bind(("127.0.0.1", 0))
            yield _endpoint(reserved.getsockname()[1])
        return
    child = subprocess.Popen([sys.executable, __file__, kind], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        yield _endpoint(int(child.stdout.readline()))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def _endpoint(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/traces"


# --- the other process ---


def _serve(kind: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    kept: list[socket.socket] = []
    while True:
        connection, _ = listener.accept()
        if kind == SILENT:
            kept.append(connection)
        else:
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    with connection, connection.makefile("rb") as stream:
        while True:
            length = 0
            line = stream.readline()
            if not line:
                return
            while line not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
                line = stream.readline()
            while length > 0:
                got = stream.readinto(memoryview(buffer)[: min(length, len(buffer))])
                if not got:
                    return
                length -= got
            connection.sendall(ANSWER)


if __name__ == "__main__":
    _serve(sys.argv[1])
