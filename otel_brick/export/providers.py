"""Providers that we build where the user has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter


def tracer_provider(exporter: SpanExporter, resource: Resource | None = None) -> TracerProvider:
    """An SDK provider with a batch processor in front of an exporter, and ids that reseeding does not repeat."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from .ids import PrivateIdGenerator

    provider = TracerProvider(resource=resource, id_generator=PrivateIdGenerator())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
