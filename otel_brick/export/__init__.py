"""Export: batches leave as OpenTelemetry spans, statistics as metrics and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .otlp import BrickOTLPExporter

__all__ = ["BrickOTLPExporter"]


def __getattr__(name: str) -> Any:
    """Load the exporter, and with it the SDK, when somebody asks for it."""
    if name == "BrickOTLPExporter":
        from .otlp import BrickOTLPExporter

        return BrickOTLPExporter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
