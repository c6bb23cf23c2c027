"""Providers that we build where the user has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from .ids import PrivateIdGenerator

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

    from ..record.losses import Losses
    from .otlp import BrickOTLPExporter


class CountedExporter(SpanExporter):
    """Passes everything on and counts the spans that could not be delivered."""

    def __init__(self, exporter: BrickOTLPExporter, losses: Losses) -> None:
        self._exporter = exporter
        self._losses = losses

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, and count a failure."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._losses.add("export_failed", len(spans))
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the exporter."""
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown(timeout_millis)


def tracer_provider(exporter: BrickOTLPExporter, losses: Losses, resource: Resource | None = None) -> TracerProvider:
    """An SDK provider with a batch processor in front of an exporter, and ids that reseeding does not repeat."""
    provider = TracerProvider(resource=resource, id_generator=PrivateIdGenerator())
    provider.add_span_processor(BatchSpanProcessor(CountedExporter(exporter, losses)))
    return provider
