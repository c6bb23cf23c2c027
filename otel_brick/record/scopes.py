"""The scopes that are not on the hot path: a step with its OpenTelemetry span, and a lane inside a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link

from .. import semconv
from ..taxonomy import Phase
from .descriptors import count_argument
from .handles import decorate
from .lane import IdleLane, Lane, innermost
from .step import StepRecord, describe_error
from .tracing import is_exported, reset

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from contextvars import Token
    from types import TracebackType

    from .recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")


class StepScope:
    """One forward pass or training step: `with profiler.step(...) as step:`, or a decorator.

    A scope is entered once; as a decorator it asks for a new one at each call.
    """

    __slots__ = (
        "_again",
        "_attributes",
        "_context_token",
        "_lane_token",
        "_links",
        "_outer",
        "_parent",
        "_phase",
        "_record",
        "_recorder",
        "_tokens",
    )

    def __init__(
        self,
        recorder: Recorder,
        again: Callable[[], AbstractContextManager[Any]],
        phase: Phase,
        tokens: int,
        parent: Context | None,
        links: list[Link],
        attributes: Mapping[str, Any],
    ) -> None:
        self._recorder = recorder
        self._again = again
        self._phase = phase
        self._tokens = tokens
        self._parent = parent
        self._links = links
        self._attributes = attributes
        self._record: StepRecord | None = None
        self._lane_token: Token[Lane] | None = None
        self._outer: Lane | None = None
        self._context_token: Any = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return decorate(function, self._again)

    def add_tokens(self, count: int) -> None:
        """Add to the tokens that this step has processed.

        Raises:
            TypeError, ValueError: `count` is not an integer from 0 to 2**63 - 1.
        """
        number = count_argument("count", count)
        record = self._record
        if record is not None:
            with record.lock:
                record.tokens += number

    def __enter__(self) -> StepScope:
        if self._record is not None:
            raise RuntimeError("a step scope can be entered once; call step() again")
        recorder = self._recorder
        record = self._record = recorder.open_step(self._phase, self._tokens)
        self._lane_token = recorder.current.set(record.lanes[0])
        self._outer = innermost.get()
        innermost.set(record.lanes[0])
        started = recorder.tracing.start(
            f"step {self._phase.attribute_value}",
            self._parent,
            self._links,
            {
                semconv.BRICK_SPAN_LEVEL: "step",
                semconv.BRICK_PHASE: self._phase.attribute_value,
                semconv.BRICK_STEP_INDEX: record.index,
                semconv.THREAD_ID: threading.get_ident(),
                semconv.THREAD_NAME: threading.current_thread().name,
                **self._attributes,
            },
            record.start_ns + record.offset_ns,
        )
        if started is not None:
            record.tracer, span = started
            record.span = span if span.is_recording() else None
            record.parent = span.get_span_context()
            record.recording = is_exported(span)
            record.root = not trace.get_current_span(self._parent).get_span_context().is_valid
            self._context_token = otel_context.attach(trace.set_span_in_context(span, self._parent))
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record, token = self._record, self._lane_token
        if record is None or token is None:
            self._recorder.losses.add("closed_twice")
            return
        self._lane_token = None
        if error is not None:
            record.error = describe_error(error, value)
        # In another context than the one entered, for example when a generator is closed by another task, neither
        # variable is ours to reset: the lane there turns idle by itself.
        same_context = reset(self._recorder.current, token)
        if same_context:
            innermost.set(self._outer)
        if self._context_token is not None and same_context:
            otel_context.detach(self._context_token)
        self._recorder.close_step(record)


class LaneScope:
    """A sequential flow of its own inside the current step: `with profiler.lane():` in a task or thread.

    Outside every step it changes nothing.
    """

    __slots__ = ("_lane", "_outer", "_recorder", "_token")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lane: Lane | None = None
        self._token: Token[Lane] | None = None
        self._outer: Lane | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return decorate(function, lambda: LaneScope(self._recorder))

    def __enter__(self) -> None:
        caller = self._recorder.current.get()
        if isinstance(caller, IdleLane):
            return
        lane = self._lane = self._recorder.open_lane(caller.record)
        caller.mark(lane.number)
        self._token = self._recorder.current.set(lane)
        self._outer = innermost.get()
        innermost.set(lane)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane, token = self._lane, self._token
        if lane is None:
            return
        if token is None:
            self._recorder.losses.add("closed_twice")
            return
        self._token = None
        if reset(self._recorder.current, token):
            innermost.set(self._outer)
        lane.finish()
