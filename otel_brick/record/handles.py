"""Handles: the scopes of layers, bricks and kernels, reusable, stateless and as cheap as Python allows.

A handle writes its site at entry and exit into whatever lane is current, and nothing else. Switching a profiler off
or on changes the class of its handles; a `with` statement binds `__exit__` before it calls `__enter__`, so a scope
that is open at that moment still closes the way it began.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from .lane import SPILL_LENGTH

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from .recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")


def decorate(function: Callable[P, R], scope: Callable[[], AbstractContextManager[Any]]) -> Callable[P, R]:
    """Wrap a function so that each call runs inside a new scope.

    Raises:
        TypeError: for generator functions, whose body runs after the call has returned.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"cannot decorate the generator function {function.__qualname__}: its body runs after the call; "
            "use a `with` block inside it"
        )
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            with scope():
                return await function(*args, **kwargs)

        return cast("Callable[P, R]", run_coroutine)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with scope():
            return function(*args, **kwargs)

    return run


class Handle:
    """A bound layer, brick or kernel: `with handle:` around its work, or `@handle` on a function.

    It holds no state of its entries: use one handle from any number of threads and tasks, nested in itself too. What
    `with handle as x` binds is None.
    """

    __slots__ = ("__weakref__", "_enter", "_lane", "_leave", "_now", "_recorder", "_tail")

    def __init__(self, recorder: Recorder, site: int, tail: tuple[int, ...] = ()) -> None:
        self._lane = recorder.current.get
        self._now = recorder.clock.now
        self._enter = site
        self._leave = ~site
        self._tail = tail
        self._recorder = recorder

    def switch(self, on: bool) -> None:
        """Record from the next entry on, or stop recording."""
        self.__class__ = handle_class(self._recorder.attach_context, bool(self._tail)) if on else OffHandle  # pyright: ignore[reportAttributeAccessIssue]

    def with_tail(self, tail: tuple[int, ...]) -> Handle:
        """The same handle with counts to write at each exit, not registered: it is not switched off with the others."""
        handle = Handle.__new__(TailHandle)
        handle._lane, handle._now, handle._recorder = self._lane, self._now, self._recorder
        handle._enter, handle._leave, handle._tail = self._enter, self._leave, tail
        if self._recorder.attach_context:
            handle.switch(True)
        return handle

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        self._recorder.handles.add(self)
        self.switch(self._recorder.on)
        return decorate(function, lambda: self)

    def __enter__(self) -> None:
        self._lane().extend((self._enter, self._now()))

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._now()
        lane = self._lane()
        if error is None:
            lane.extend((self._leave, now))
        else:
            lane.extend((self._leave, now, *lane.fail(error, value)))
        if len(lane) > SPILL_LENGTH:
            lane.spill()


class TailHandle(Handle):
    """A handle whose counts found no room in the site table: it writes them at each exit."""

    __slots__ = ()

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._now()
        lane = self._lane()
        failure = () if error is None else lane.fail(error, value)
        lane.extend((self._leave, now, *self._tail, *failure))
        if len(lane) > SPILL_LENGTH:
            lane.spill()


class AttachedHandle(TailHandle):
    """A handle that also becomes the current OpenTelemetry span (`attach_context=True`)."""

    __slots__ = ()

    def __enter__(self) -> None:
        lane = self._lane().opened()
        tag = lane.recorder.attachments.push(lane.record)
        lane.extend((self._enter, self._now(), *tag))

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        attachments = self._lane().recorder.attachments
        super().__exit__(error, value, traceback)
        attachments.pop()


class OffHandle(Handle):
    """The class of every handle of a disabled profiler.

    Both methods are C builtins that ignore what they are given, which is twice as cheap as an empty Python function.
    """

    __slots__ = ()

    __enter__ = itertools.repeat(None).__next__  # pyright: ignore
    __exit__ = "".format  # pyright: ignore


def handle_class(attach_context: bool, tail: bool) -> type[Handle]:
    """The class of a handle while its profiler is enabled."""
    if attach_context:
        return AttachedHandle
    return TailHandle if tail else Handle
