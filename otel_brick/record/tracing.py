"""The step's own OpenTelemetry span: which provider makes it, whether it records, and what it hangs below."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Tracer, TracerProvider

from ..semconv import SCOPE_NAME
from ..version import __version__
from .lane import TAG_SPAN

if TYPE_CHECKING:
    from .ids import IdSource
    from .step import StepRecord

logger = logging.getLogger("otel_brick")

LinkLike = Link | Span | SpanContext
ParentLike = Context | Span | SpanContext


def link_arguments(links: Iterable[LinkLike] | None) -> list[Link]:
    """Turn spans and span contexts into links.

    Raises:
        TypeError: for anything else, naming it.
    """
    if links is None:
        return []
    if not isinstance(links, Iterable):
        raise TypeError(f"links must be several spans or span contexts, not {type(links).__name__}")
    return [_link(item) for item in links]


def _link(item: object) -> Link:
    if isinstance(item, Link):
        return item
    if isinstance(item, Span):
        return Link(item.get_span_context())
    if isinstance(item, SpanContext):
        return Link(item)
    raise TypeError(f"links must hold spans, span contexts or Link objects, not {type(item).__name__}")


def parent_argument(parent: ParentLike | None) -> Context | None:
    """Turn a span or span context into an OpenTelemetry context; None stays None, the current context.

    Raises:
        TypeError: for anything else, naming it.
    """
    if parent is None or isinstance(parent, Context):
        return parent
    if isinstance(parent, Span):
        return trace.set_span_in_context(parent)
    if isinstance(parent, SpanContext):
        return trace.set_span_in_context(NonRecordingSpan(parent))
    raise TypeError(f"parent must be a span, span context or Context, not {type(parent).__name__}")


def is_exported(span: Span) -> bool:
    """Whether a span is recorded and sampled, so that spans below it may leave."""
    return span.is_recording() and span.get_span_context().trace_flags.sampled


class Tracing:
    """Starts step spans with the given provider, or with whatever provider is global at that moment."""

    def __init__(
        self,
        provider: TracerProvider | None,
        make_private: Callable[[], TracerProvider] | None = None,
        *,
        ours: TracerProvider | None = None,
    ) -> None:
        """Use `provider`, or the global one; where there is none, the one that `make_private` makes.

        Args:
            ours: a provider that we have made ourselves, so that nobody needs to be told what it does.
        """
        self._ours = ours
        self.renew_lock()
        self._given = provider
        self._make_private = make_private
        self.private: TracerProvider | None = None
        self._provider: TracerProvider | None = None
        self._failed = False
        self._tracer: Tracer | None = None

    @property
    def provider(self) -> TracerProvider:
        """The provider in use now."""
        if self._given is not None:
            return self._given
        provider = trace.get_tracer_provider()
        if self._make_private is None or not isinstance(provider, trace.ProxyTracerProvider):
            return provider
        with self._lock:
            if self.private is None:
                self.private = self._make_private()
        return self.private

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        self._lock = threading.RLock()

    @property
    def tracer(self) -> Tracer:
        """The tracer in use now; a provider that became global later is noticed."""
        provider = self.provider
        if self._tracer is None or provider is not self._provider:
            self._tracer, self._provider = provider.get_tracer(SCOPE_NAME, __version__), provider
            if provider is not self.private and provider is not self._ours:
                _tell_route(self._tracer, columnar=self._make_private is not None)
        return self._tracer

    def start(
        self,
        name: str,
        parent: Context | None,
        links: list[Link],
        attributes: Mapping[str, Any],
        start_unix_ns: int,
    ) -> tuple[Tracer, Span] | None:
        """Start a step's span; None while instrumentation is suppressed or where the provider fails."""
        try:
            if not is_instrumentation_enabled():
                return None
            tracer = self.tracer
            span = tracer.start_span(
                name,
                parent,
                links=links,
                attributes=dict(attributes),
                start_time=start_unix_ns,
                record_exception=False,
                set_status_on_exception=False,
            )
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.warning("the tracer provider could not start a step span", exc_info=error)
            return None
        return tracer, span


_READABLE: Final = (
    "spans leave as SDK span objects through your provider's own processors, tens of microseconds each on the worker "
    "thread; exporter=BrickOTLPExporter(...) sends what is below a step at a fiftieth of that"
)
_COLUMNAR: Final = "steps leave through your provider's own processors, what is below them through the exporter given"
_USER_IDS: Final = (
    "steps are started by your tracer provider: their ids come from its id generator, which draws from Python's "
    "global random module unless you gave another (ids repeat if that is reseeded); ids below a step are our own"
)
_told_route = False


def _tell_route(tracer: Tracer, *, columnar: bool) -> None:
    global _told_route
    if hasattr(tracer, "span_processor") and not _told_route:
        _told_route = True
        logger.info("%s; %s", _COLUMNAR if columnar else _READABLE, _USER_IDS)


class Attachments:
    """The OpenTelemetry contexts that open layers and bricks have made current, in each flow by itself.

    A context may be left in another flow than it was entered in (a generator closed by another task): detaching
    there would log an error, so the variable of ours that is set and reset alongside tells whether it may be done.
    """

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self._top: ContextVar[list[Any] | None] = ContextVar("otel_brick.attachments", default=None)

    def push(self, record: StepRecord | None) -> tuple[int, ...]:
        """Make a new child of the current span current; returns the tag that gives the row the same id."""
        node: list[Any] = [None, None]
        tag: tuple[int, ...] = ()
        if record is not None and record.recording:
            parent = trace.get_current_span().get_span_context()
            span_id = self._ids.span_id()
            child = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
            node[1] = otel_context.attach(trace.set_span_in_context(NonRecordingSpan(child)))
            tag = (TAG_SPAN, span_id - (1 << 64) if span_id >> 63 else span_id)
        node[0] = self._top.set(node)
        return tag

    def pop(self) -> None:
        """Undo the innermost `push` of this flow, if it was made in this context."""
        node = self._top.get()
        if node is not None and reset(self._top, node[0]) and node[1] is not None:
            otel_context.detach(node[1])


def reset(variable: ContextVar[Any], token: Token[Any]) -> bool:
    """Reset a context variable; False where the token was made in another context or already used."""
    try:
        variable.reset(token)
    except (ValueError, RuntimeError):
        return False
    return True
