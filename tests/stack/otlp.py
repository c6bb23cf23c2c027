"""OTLP as messages of the official classes: what our exporters hand over, and what collectors write into files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from otel_brick.export import BrickOTLPExporter
from otel_brick.record.losses import Losses

_IDS = ("traceId", "spanId", "parentSpanId")


class RememberingExporter(BrickOTLPExporter):
    """Sends, and keeps what it sends as spans of the official classes."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        super().__init__(endpoint=endpoint if protocol == "grpc" else f"{endpoint}/v1/traces", protocol=protocol)
        self.sent: list[Span] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans that the SDK hands over: steps."""
        self.sent += spans_in(encode_spans(spans))
        return super().export(spans)

    def submit(self, blocks: Sequence[NDArray[np.uint8]], resource: Resource, losses: Losses) -> None:
        """Send rows that a profiler has encoded."""
        for block in blocks:
            self.sent += ScopeSpans.FromString(block.tobytes()).spans
        super().submit(blocks, resource, losses)


class RememberingMetricExporter(MetricExporter):
    """Passes metrics on, and keeps the last that it passed as messages of the official classes."""

    def __init__(self, exporter: MetricExporter) -> None:
        super().__init__()
        self._exporter = exporter
        self.sent = ExportMetricsServiceRequest()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object) -> MetricExportResult:
        """Send metrics."""
        self.sent = encode_metrics(metrics_data)
        return self._exporter.export(metrics_data, timeout_millis)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Flush the exporter behind this one."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        """Shut down the exporter behind this one."""
        self._exporter.shutdown(timeout_millis)


def trace_requests(path: Path) -> Iterator[ExportTraceServiceRequest]:
    """The requests in a collector's file of traces."""
    for content in _lines(path):
        yield _parsed(content, ExportTraceServiceRequest())


def metric_requests(path: Path) -> Iterator[ExportMetricsServiceRequest]:
    """The requests in a collector's file of metrics."""
    for content in _lines(path):
        yield _parsed(content, ExportMetricsServiceRequest())


def spans_in(request: ExportTraceServiceRequest) -> list[Span]:
    """All spans of a request."""
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def metrics_of(request: ExportMetricsServiceRequest, service: str) -> dict[str, Metric]:
    """The metrics of a service by name; empty where the request has none of it."""
    return {
        metric.name: metric
        for resource in request.resource_metrics
        if any(one.key == "service.name" and one.value.string_value == service for one in resource.resource.attributes)
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON of each line; the last may be half written."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else ():
        yield json.loads(line)


def _parsed(content: dict[str, Any], message: Message) -> Any:
    return ParseDict(_with_base64(content), message)


def _with_base64(value: Any) -> Any:
    """The same with identifiers as protobuf's JSON has them; that of OTLP has them in hexadecimal."""
    if isinstance(value, list):
        return [_with_base64(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key in _IDS else _with_base64(one)
        for key, one in value.items()
    }
