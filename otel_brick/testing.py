"""Helpers for tests of instrumented programs: a clock that stands still, and spans kept in memory as trees.

The project's own tests use them too. They need nothing beyond the SDK.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from .export.ids import PrivateIdGenerator
from .record.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass
class SpanNode:
    """A span and the spans below it, in order of their start."""

    span: ReadableSpan
    children: list[SpanNode] = field(default_factory=list["SpanNode"])

    @property
    def name(self) -> str:
        """The span's name."""
        return self.span.name

    @property
    def duration_ns(self) -> int:
        """The span's duration."""
        return (self.span.end_time or 0) - (self.span.start_time or 0)

    @property
    def attributes(self) -> dict[str, Any]:
        """The span's attributes."""
        return dict(self.span.attributes or {})

    def outline(self) -> tuple[Any, ...]:
        """Name, duration and children, nested, for comparison with what a test expects."""
        return (self.name, self.duration_ns, tuple(child.outline() for child in self.children))


def span_trees(spans: Sequence[ReadableSpan]) -> list[SpanNode]:
    """Put spans together by their parents.

    Returns:
        The spans whose parent is not among `spans`, each with what is below it.

    Raises:
        ValueError: two spans have the same id.
    """
    nodes = {_span_id(span): SpanNode(span) for span in spans}
    if len(nodes) != len(spans):
        raise ValueError(f"{len(spans)} spans have only {len(nodes)} different ids")
    roots: list[SpanNode] = []
    for node in nodes.values():
        parent = node.span.parent
        above = nodes.get(parent.span_id) if parent is not None else None
        (roots if above is None else above.children).append(node)
    for node in nodes.values():
        node.children.sort(key=lambda child: child.span.start_time or 0)
    return roots


def _span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


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
