"""An id generator for tracer providers that we or our users build."""

from __future__ import annotations

from opentelemetry.sdk.trace.id_generator import IdGenerator

from ..record.ids import IdSource


class PrivateIdGenerator(IdGenerator):
    """Draws ids from a generator that `random.seed` does not reach.

    Give it to a `TracerProvider` in programs that reseed Python's `random` module.
    """

    def __init__(self) -> None:
        self._source = IdSource()

    def generate_span_id(self) -> int:
        """An unsigned 64-bit id, never zero."""
        return self._source.span_id()

    def generate_trace_id(self) -> int:
        """An unsigned 128-bit id, never zero."""
        return self._source.trace_id()
