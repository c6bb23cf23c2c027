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

from ..taxonomy import SpanLevel
from .lane import SPILL_LENGTH, TAG_MARK, TAG_SYNCED
from .marks import NO_MARK, no_mark

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from .lane import Lane
    from .marks import DeviceTimeline, Mark
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

    __slots__ = (
        "__weakref__",
        "_enter",
        "_kept",
        "_lane",
        "_leave",
        "_level",
        "_mark",
        "_now",
        "_recorder",
        "_stream",
        "_tail",
    )

    def __init__(
        self,
        recorder: Recorder,
        site: int,
        level: SpanLevel,
        tail: tuple[int, ...] = (),
    ) -> None:
        self._lane = recorder.current.get
        self._now = recorder.clock.now
        self._enter = site
        self._leave = ~site
        self._level = level
        self._tail = tail
        self._recorder = recorder
        self._stream: int | None = None
        self._kept: object = None
        self._mark: Mark = no_mark

    def switch(self, on: bool) -> None:
        """Record from the next entry on, or stop recording."""
        timeline = self._recorder.device.active if on else None
        self._mark = no_mark
        if timeline is not None:
            self._mark = timeline.default if self._stream is None else timeline.mark_of(self._stream)
        self.__class__ = self._class(timeline) if on else OffHandle  # pyright: ignore[reportAttributeAccessIssue]

    def _class(self, timeline: DeviceTimeline | None) -> type[Handle]:
        """The class of this handle while its profiler is enabled."""
        if self._recorder.attach_context:
            return AttachedHandle
        if timeline is None:
            return TailHandle if self._tail else Handle
        if self._recorder.device.synchronizes(self._level):
            return SyncedHandle
        return MarkedKernel if self._level >= SpanLevel.Kernel else MarkedHandle

    def with_tail(self, tail: tuple[int, ...]) -> Handle:
        """The same handle with counts to write at each exit, not registered: it is not switched off with the others."""
        handle = self._copy(tail)
        if self._recorder.attach_context or self._recorder.device.active is not None:
            handle.switch(True)
        return handle

    def on_stream(self, stream: object) -> Handle:
        """The same handle for work on a stream of its own, which it keeps alive."""
        handle = self._copy(())
        handle._stream, handle._kept = self._recorder.device.handle_of(stream), stream
        with self._recorder.switch_lock:
            handle.switch(self._recorder.on)
            self._recorder.handles.add(handle)
        return handle

    def _copy(self, tail: tuple[int, ...]) -> Handle:
        handle = Handle.__new__(TailHandle)
        handle._lane, handle._now, handle._recorder = self._lane, self._now, self._recorder
        handle._enter, handle._leave, handle._level = self._enter, self._leave, self._level
        handle._tail, handle._mark = self._tail + tail, self._mark
        handle._stream, handle._kept = self._stream, self._kept
        return handle

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        with self._recorder.switch_lock:
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


class MarkedHandle(Handle):
    """A handle that also marks its stream at entry and exit, on a profiler that takes device time."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._lane().extend((self._enter, self._now(), TAG_MARK, self._mark()))

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._now()
        lane = self._lane()
        failure = () if error is None else lane.fail(error, value)
        lane.extend((self._leave, now, TAG_MARK, self._mark(), *self._tail, *failure))
        if len(lane) > SPILL_LENGTH:
            lane.spill()


class SyncedHandle(MarkedHandle):
    """A handle that waits at its exit until its stream has done what was asked of it."""

    __slots__ = ()

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane = self._lane()
        token = self._mark()
        synced = (TAG_SYNCED, 1) if self._recorder.device.synchronize(lane.record, token) else ()
        failure = () if error is None else lane.fail(error, value)
        lane.extend((self._leave, self._now(), TAG_MARK, token, *synced, *self._tail, *failure))
        if len(lane) > SPILL_LENGTH:
            lane.spill()


class MarkedKernel(MarkedHandle):
    """A kernel given by hand: it marks its stream in the steps whose kernels are to be marked."""

    __slots__ = ()

    def __enter__(self) -> None:
        lane = self._lane().opened()
        token = self._mark() if lane.record.kernel_marks else NO_MARK
        lane.extend((self._enter, self._now(), TAG_MARK, token))

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._now()
        lane = self._lane()
        failure = () if error is None else lane.fail(error, value)
        token = self._mark() if lane.record.kernel_marks else NO_MARK
        lane.extend((self._leave, now, TAG_MARK, token, *self._tail, *failure))
        if len(lane) > SPILL_LENGTH:
            lane.spill()


class AttachedHandle(Handle):
    """A handle that also becomes the current OpenTelemetry span (`attach_context=True`)."""

    __slots__ = ()

    def __enter__(self) -> None:
        lane = self._lane().opened()
        tag = lane.recorder.attachments.push(lane.record)
        lane.extend((self._enter, self._now(), *tag, TAG_MARK, self._marked(lane)))

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = self._now()
        lane = self._lane()
        attachments = lane.recorder.attachments
        token = self._marked(lane)
        synced: tuple[int, ...] = ()
        if self._recorder.device.synchronizes(self._level) and self._recorder.device.synchronize(lane.record, token):
            now, synced = self._now(), (TAG_SYNCED, 1)
        failure = () if error is None else lane.fail(error, value)
        lane.extend((self._leave, now, TAG_MARK, token, *synced, *self._tail, *failure))
        if len(lane) > SPILL_LENGTH:
            lane.spill()
        attachments.pop()

    def _marked(self, lane: Lane) -> int:
        return self._mark() if self._level < SpanLevel.Kernel or lane.record.kernel_marks else NO_MARK


class OffHandle(Handle):
    """The class of every handle of a disabled profiler.

    Both methods are C builtins that ignore what they are given, which is twice as cheap as an empty Python function.
    """

    __slots__ = ()

    __enter__ = itertools.repeat(None).__next__  # pyright: ignore
    __exit__ = "".format  # pyright: ignore
