"""Helpers for tests of instrumented programs: a clock that stands still, and spans kept in memory as trees.

The project's own tests use them too. They need nothing beyond the SDK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from .export.ids import PrivateIdGenerator
from .export.tree import SpanNode, span_trees
from .record.clock import Clock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler


class ManualClock:
    """Time that passes only when told to; give `clock.clock` to a profiler.

    Args:
        now_ns: monotonic time at the start.
        unix_ns: Unix time at the same moment.
    """

    def __init__(self, now_ns: int = 1_000, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._offset_ns = unix_ns - now_ns

    def advance(self, ns: int) -> None:
        """Let this many nanoseconds pass."""
        self._now_ns += ns

    @property
    def now_ns(self) -> int:
        """The monotonic time now."""
        return self._now_ns

    @property
    def clock(self) -> Clock:
        """The clock to measure with."""
        return Clock(now=lambda: self._now_ns, unix=lambda: self._now_ns + self._offset_ns)


class InMemoryTraces:
    """A tracer provider that keeps its spans; give `traces.provider` to a profiler, `flush` it, read `traces`."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, id_generator=PrivateIdGenerator())
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        """All spans that have left so far."""
        return list(self._exporter.get_finished_spans())

    def trees(self) -> list[SpanNode]:
        """The spans put together by their parents."""
        return span_trees(self.spans)

    def clear(self) -> None:
        """Forget the spans."""
        self._exporter.clear()


__all__ = ["InMemoryTraces", "ManualClock", "SpanNode", "span_trees"]
