"""Finished spans put together as trees, for reports and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import semconv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan


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

    @property
    def is_layer(self) -> bool:
        """Whether the span is a layer's."""
        return self.attributes.get(semconv.BRICK_SPAN_LEVEL) == "layer"

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
