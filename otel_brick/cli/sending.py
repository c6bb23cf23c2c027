"""Where the demo sends its spans and metrics besides its files: OTLP endpoints that the user names.

A `Destination` comes in, exporters that count go out, and at the end a `Sent` says what arrived. After a failure, which
an exporter reports when its time for repeating is over, nothing more is tried: a run of a hundred flushes must not wait
a hundred times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..export import BrickOTLPExporter
from ..export.otlp_settings import OTLPSettings

HTTP = "http/protobuf"
PROTOCOLS = (HTTP, "grpc")


def check_endpoint(endpoint: str, protocol: str) -> None:
    """Find out before a run whether spans or metrics can be sent there at all.

    Raises:
        ValueError: the endpoint is malformed; the message says what is expected.
    """
    OTLPSettings.build({"endpoint": endpoint, "protocol": protocol}, {})


@dataclass(frozen=True)
class Destination:
    """What the user chose, already checked.

    Attributes:
        endpoint: over HTTP a base URL, over gRPC a URL or a target; None sends no spans.
        protocol: one of `PROTOCOLS`.
        metrics_endpoint: the complete HTTP URL for metrics that do not go to `endpoint`.
    """

    endpoint: str | None
    protocol: str
    metrics_endpoint: str | None = None

    def span_exporter(self) -> CountingExporter | None:
        """An exporter for spans, None where only metrics are sent."""
        if self.endpoint is None:
            return None
        return CountingExporter(BrickOTLPExporter(endpoint=self._url("traces"), protocol=self.protocol))

    def metric_exporter(self) -> CountingMetricExporter:
        """An exporter for metrics: the official one, as `otel_brick.configure` has it."""
        if self.metrics_endpoint is None and self.protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

            return CountingMetricExporter(GrpcExporter(endpoint=self.endpoint))
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return CountingMetricExporter(HttpExporter(endpoint=self.metrics_endpoint or self._url("metrics")))

    def _url(self, signal: str) -> str | None:
        if self.endpoint is None or self.protocol == "grpc":
            return self.endpoint
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"

    def spans_name(self) -> str:
        """Where spans go, for a person; without a password."""
        return f"{_without_user(self.endpoint or '')} ({self.protocol})"

    def metrics_name(self) -> str:
        """Where metrics go, for a person; without a password."""
        if self.metrics_endpoint is None:
            return self.spans_name()
        return f"{_without_user(self.metrics_endpoint)} ({HTTP})"


@dataclass(frozen=True)
class Sent:
    """What became of a run's spans and metrics.

    Attributes:
        spans: that arrived; None where none were to be sent.
        spans_lost: that did not.
        metrics: whether the last export of metrics, which says everything, arrived.
    """

    destination: Destination
    spans: int | None
    spans_lost: int
    metrics: bool

    @property
    def complete(self) -> bool:
        """Whether everything arrived."""
        return self.metrics and not self.spans_lost

    def __str__(self) -> str:
        """One line for a person."""
        parts: list[str] = []
        spans, metrics = self.destination.spans_name(), self.destination.metrics_name()
        if self.spans is not None:
            both = " and metrics" if self.metrics and spans == metrics else ""
            parts.append(f"{self.spans:,} spans{both} to {spans}")
        if self.metrics and (self.spans is None or spans != metrics):
            parts.append(f"metrics to {metrics}")
        lost = [f"{self.spans_lost:,} spans"] if self.spans_lost else []
        if not self.metrics:
            lost.append("the metrics" if self.spans is not None and spans == metrics else f"the metrics for {metrics}")
        parts.append(f"lost {' and '.join(lost)}" if lost else "nothing lost")
        return ", ".join(parts)


class CountingExporter(SpanExporter):
    """Passes spans through until that fails, and counts what arrived."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._failed = False
        self.written = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, unless an earlier time failed."""
        if self._failed:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.written += len(spans)
        else:
            self._failed = True
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter."""
        return self._exporter.force_flush(timeout_millis)


class CountingMetricExporter(MetricExporter):
    """Passes metrics through until that fails; `delivered` says how the last time went."""

    def __init__(self, exporter: MetricExporter) -> None:
        super().__init__()
        self._exporter = exporter
        self._failed = False
        self.delivered = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object) -> MetricExportResult:
        """Export, unless an earlier time failed."""
        if self._failed:
            return MetricExportResult.FAILURE
        self.delivered = self._exporter.export(metrics_data, timeout_millis) is MetricExportResult.SUCCESS
        self._failed = not self.delivered
        return MetricExportResult.SUCCESS if self.delivered else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Flush the exporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown(timeout_millis)


def _without_user(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
