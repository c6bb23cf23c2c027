"""Traces and metrics to an OpenTelemetry collector, from a program that has no OpenTelemetry set-up of its own.

    OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 python examples/otlp.py

Without that variable a receiver on the loopback interface, in this process, takes the collector's place.
"""

import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import otel_brick
from otel_brick import BrickId

LAYERS, HIDDEN, TOKENS = 4, 512, 40

# Bricks may be defined anywhere, also in a library: they do nothing until the program configures the profiler.
norm = otel_brick.define(BrickId.RmsNorm, elements=HIDDEN)
projection = otel_brick.define(BrickId.UpProjection, elements=HIDDEN, bytes_read=4 * HIDDEN * HIDDEN)


def forward(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    for index in range(LAYERS):
        with otel_brick.layer(index, type="decoder"):
            with norm:
                x = x / np.sqrt(np.mean(x * x))
            with projection:
                x = np.tanh(x @ weights[index])
    return x


def main() -> None:
    receiver = None if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") else Receiver()
    profiler = otel_brick.configure(service_name="otlp-example", endpoint=receiver and receiver.url)

    weights = np.random.default_rng(0).standard_normal((LAYERS, HIDDEN, HIDDEN), dtype=np.float32)
    x = np.ones(HIDDEN, dtype=np.float32)
    for _ in range(TOKENS):
        with otel_brick.step(phase="decode", tokens=1):
            x = forward(x, weights)

    profiler.shutdown()  # a program that exits normally does this by itself
    lost = {reason: count for reason, count in profiler.losses().items() if count}
    print(f"lost: {lost or 'nothing'}")
    if receiver is not None:
        receiver.report()


class Receiver(ThreadingHTTPServer):
    """Takes OTLP over HTTP and notes the names of what arrives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans = Counter[str]()
        self.metrics: dict[str, str] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def report(self) -> None:
        for name, count in sorted(self.spans.items()):
            print(f"{count:4} x {name}")
        for name, kind in sorted(self.metrics.items()):
            print(f"{name:<24} {kind}")


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in part.scope_spans:
                    self.server.spans.update(span.name for span in scope.spans)
        else:
            for part in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in part.scope_metrics:
                    for one in scope.metrics:
                        self.server.metrics[one.name] = f"{one.WhichOneof('data')} in {one.unit}"
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None: ...


if __name__ == "__main__":
    main()
