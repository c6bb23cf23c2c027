"""The verbs of recording: everything a user calls to say that something happens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, cast

from .. import semconv
from ..taxonomy import BrickCategory, BrickId, Phase, SpanLevel
from .descriptors import NO_COUNT, OVERFLOW_NAME, Descriptor, count_argument, launch_argument, printable
from .handles import Handle
from .lane import (
    TAG_BYTES_READ,
    TAG_BYTES_WRITTEN,
    TAG_COMPRESSED,
    TAG_ELEMENTS,
    TAG_LAYER,
    IdleLane,
)
from .off import OffScope, OffStep
from .recorder import Recorder
from .scopes import LaneScope, StepScope
from .timers import BrickTimer, elapsed_argument
from .tracing import LinkLike, ParentLike, link_arguments, parent_argument

MAX_HANDLES: Final = 1 << 17
MAX_KERNEL_NAME: Final = 128


class _Omitted(Enum):
    """The default of counts: unlike None, nobody passes it by mistake, and it equals no number."""

    omitted = "omitted"

    # Enum hashes in Python code; brick() hashes this on every call.
    __hash__ = object.__hash__


OMITTED: Final = cast("int", _Omitted.omitted)
"""Stands for a count that is not given; to a type checker it is an integer like the others."""


class Verbs:
    """Recording for one recorder, on or off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._enabled = False
        self._shut = False
        self._switch_lock = threading.Lock()
        self._bricks: dict[tuple[Any, ...], Handle] = {}
        self._layers: dict[tuple[Any, ...], Handle] = {}
        self._kernels: dict[tuple[Any, ...], Handle] = {}
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def enable(self) -> None:
        """Record what begins from now on."""
        self._switch(True)

    def disable(self) -> None:
        """Record nothing that begins from now on; what is open still closes and counts."""
        self._switch(False)

    def is_enabled(self) -> bool:
        """Whether scopes that begin now are recorded."""
        return self._enabled

    def _switch(self, on: bool) -> None:
        with self._switch_lock:
            if self._shut:
                return
            self._enabled = on
            for handle in list(self._handles):
                handle.switch(on)

    def _shut_down(self) -> bool:
        """Take no more steps and rows, and count those that come; False if that was so already."""
        with self._switch_lock:
            first, self._shut, self._enabled = not self._shut, True, False
        self._recorder.shut()
        return first

    def _refuses(self) -> bool:
        """Whether nothing is recorded now; counts what a profiler that is shut down refuses."""
        if self._shut:
            self._recorder.losses.add("already_shutdown")
        return not self._enabled

    def _off(self, verb: Callable[..., Any], *arguments: Any, **keywords: Any) -> OffScope:
        if self._shut:
            self._recorder.losses.add("already_shutdown")
        return OffScope((verb, arguments, keywords))

    def step(
        self,
        *,
        phase: Phase | str | None = None,
        tokens: int = OMITTED,
        batch_size: int = OMITTED,
        links: Iterable[LinkLike] | None = None,
        parent: ParentLike | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> StepScope | OffStep:
        """Open a step: one OpenTelemetry span, below the current one, that becomes current itself.

        Args:
            phase: for example `"prefill"` or `"decode"`; default `"other"`.
            tokens: tokens that the step processes; `add_tokens` on the scope adds more.
            batch_size: sequences in the step.
            links: spans or span contexts of the requests that this step serves.
            parent: a span, span context or OpenTelemetry context to hang below, instead of the current one.
            attributes: further attributes of the step's span.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        arguments = {
            "phase": phase,
            "tokens": tokens,
            "batch_size": batch_size,
            "links": links,
            "parent": parent,
            "attributes": attributes,
        }
        if not self._enabled:
            self._refuses()
            return OffStep((self.step, (), arguments))
        if attributes is not None and not isinstance(attributes, Mapping):
            raise TypeError(f"attributes must be a mapping, not {type(attributes).__name__}")
        extra = {} if attributes is None else dict(attributes)
        if batch_size is not OMITTED:
            extra[semconv.BRICK_BATCH_SIZE] = count_argument("batch_size", batch_size)
        return StepScope(
            self._recorder,
            partial(self.step, **arguments),
            Phase.of(phase),
            0 if tokens is OMITTED else count_argument("tokens", tokens),
            parent_argument(parent),
            link_arguments(links),
            extra,
        )

    def lane(self) -> LaneScope:
        """Open a sequential flow of its own in the current step, for a task or thread that runs beside others."""
        return LaneScope(self._recorder)

    def layer(self, index: int, *, type: str = "") -> Handle | OffScope:
        """A layer of the model.

        Args:
            index: position in the model.
            type: for example `"decoder"`; part of the span's name.

        Raises:
            TypeError, ValueError: `index` is not a count, `type` not a string.
        """
        if not self._enabled:
            return self._off(self.layer, index, type=type)
        if not isinstance(type, str):
            raise TypeError(f"type must be a string, not {type.__class__.__name__} ({type!r})")
        handle = self._layers.get((index, type)) if index.__class__ is int else None
        if handle is not None:
            return handle
        number = count_argument("index", index)
        if number >= 1 << 31:
            raise ValueError(f"index must be below 2**31; got {number}")
        return self._handle(self._layers, (number, type), Descriptor(SpanLevel.Layer, printable(type)), layer=number)

    def brick(
        self,
        brick: BrickId | str,
        *,
        elements: int = OMITTED,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
        category: BrickCategory | None = None,
        exact: bool = False,
    ) -> Handle | OffScope:
        """A brick: a named operation, the unit of statistics.

        Args:
            brick: a known brick, its name or alias, or any other name for a dynamic brick.
            elements: elements processed.
            bytes_read, bytes_written: bytes moved.
            category: of a dynamic brick, fixed by its first use; default `BrickCategory.Other`.
            exact: True to take aliases such as `"Softmax"` as names of dynamic bricks.

        Returns:
            A scope for `with`, also a decorator. It is a reusable handle: bind it once with `define` where the
            arguments never change.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if not self._enabled:
            return self._off(
                self.brick,
                brick,
                elements=elements,
                bytes_read=bytes_read,
                bytes_written=bytes_written,
                category=category,
                exact=exact,
            )
        # Equal numbers of other types find the same handle, so only exact integers may take this way.
        if (
            (elements is OMITTED or elements.__class__ is int)
            and (bytes_read is OMITTED or bytes_read.__class__ is int)
            and (bytes_written is OMITTED or bytes_written.__class__ is int)
        ):
            try:
                handle = self._bricks.get((brick, elements, bytes_read, bytes_written, category, exact))
            except TypeError:  # not hashable, which define() has better words for
                handle = None
            if handle is not None:
                return handle
        return self.define(
            brick,
            elements=elements,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            category=category,
            exact=exact,
        )

    def kernel(
        self,
        name: str,
        *,
        ptx_hash: int | str | None = None,
        grid: int | tuple[int, ...] | None = None,
        block: int | tuple[int, ...] | None = None,
        shared_mem: int | None = None,
        elements: int = OMITTED,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
    ) -> Handle | OffScope:
        """A kernel launch given by hand; `launch_argument` says how the launch signature may be written.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if not self._enabled:
            return self._off(
                self.kernel,
                name,
                ptx_hash=ptx_hash,
                grid=grid,
                block=block,
                shared_mem=shared_mem,
                elements=elements,
                bytes_read=bytes_read,
                bytes_written=bytes_written,
            )
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {type(name).__name__} ({name!r})")
        launch = launch_argument(ptx_hash, grid, block, shared_mem)
        counts = _counts(elements, bytes_read, bytes_written)
        key = (name, launch, *counts)
        return self._kernels.get(key) or self._handle(
            self._kernels, key, Descriptor(SpanLevel.Kernel, printable(name[:MAX_KERNEL_NAME]), launch=launch), *counts
        )

    def define(
        self,
        brick: BrickId | str,
        *,
        elements: int = OMITTED,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
        category: BrickCategory | None = None,
        exact: bool = False,
    ) -> Handle:
        """Bind a brick and its counts to a handle, the fast form: `with handle:` or `@handle`.

        Takes the arguments of `brick`. A handle follows its profiler when that is enabled or disabled later.

        Raises:
            TypeError, ValueError: an argument is not what it should be.
        """
        counts = _counts(elements, bytes_read, bytes_written)
        key = (brick, *(OMITTED if count == NO_COUNT else count for count in counts), category, exact)
        descriptor = self._recorder.registry.brick(brick, category, exact=exact)
        return self._bricks.get(key) or self._handle(self._bricks, key, descriptor, *counts)

    def _handle(
        self,
        cache: dict[tuple[Any, ...], Handle],
        key: tuple[Any, ...],
        descriptor: Descriptor,
        elements: int = NO_COUNT,
        bytes_read: int = NO_COUNT,
        bytes_written: int = NO_COUNT,
        layer: int = NO_COUNT,
    ) -> Handle:
        """Make the handle of a descriptor with fixed counts, and remember it while there is room."""
        registry = self._recorder.registry
        number = registry.descriptor(descriptor)
        tail: tuple[int, ...] = ()
        site = registry.site(number, elements, bytes_read, bytes_written, layer)
        if site is None:
            site = registry.bare_site(number)
            tail = _tags(elements, bytes_read, bytes_written)
            if layer != NO_COUNT:
                tail = (*tail, TAG_LAYER, layer)
        handle = Handle(self._recorder, site, tail)
        with self._switch_lock:
            handle.switch(self._enabled or self._shut)
            self._handles.add(handle)
        if not tail and len(cache) < MAX_HANDLES and descriptor.name != OVERFLOW_NAME:
            cache[key] = handle
        return handle

    def start_brick(self, brick: BrickId) -> BrickTimer:
        """Start a known brick; `stop_brick` ends it. On a disabled profiler the timer is dead.

        Raises:
            TypeError: not a `BrickId`; `start` takes names.
        """
        if self._refuses():
            return BrickTimer(self._recorder, None)
        if not isinstance(brick, BrickId):
            raise TypeError(f"brick must be a BrickId, not {type(brick).__name__}; start() takes names")
        return BrickTimer(self._recorder, self._bare_site(brick))

    def start(self, name: str, *, exact: bool = False) -> BrickTimer:
        """Start a brick by name or alias; `stop` ends it. On a disabled profiler the timer is dead.

        Raises:
            TypeError, ValueError: the name is not a string or empty.
        """
        if self._refuses():
            return BrickTimer(self._recorder, None)
        return BrickTimer(self._recorder, self._bare_site(name, exact=exact, argument="name"))

    def stop(
        self,
        timer: BrickTimer,
        elements: int = OMITTED,
        *,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
    ) -> None:
        """End a started brick with counts that may be known only now; a dead timer is ignored.

        Raises:
            TypeError, ValueError: a count is not an integer from 0 to 2**63 - 1; the timer goes on then.
        """
        if not isinstance(timer, BrickTimer):
            raise TypeError(f"timer must be a BrickTimer, not {type(timer).__name__} ({timer!r})")
        timer.stop(_tags(*_counts(elements, bytes_read, bytes_written)) if timer.running else ())

    stop_brick = stop

    def record_elapsed(
        self,
        name: BrickId | str,
        elapsed: int | timedelta,
        elements: int = OMITTED,
        *,
        category: BrickCategory | None = None,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
    ) -> None:
        """Record a brick that ends now and took `elapsed`, integer nanoseconds or a `timedelta`.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        nanoseconds = elapsed_argument(elapsed)
        tags = _tags(*_counts(elements, bytes_read, bytes_written))
        self._complete(self._bare_site(name, category, argument="name"), nanoseconds, tags)

    def record_elapsed_with_bytes(
        self,
        name: BrickId | str,
        elapsed: int | timedelta,
        elements: int,
        input_bytes: int,
        output_bytes: int,
    ) -> None:
        """Record a brick that read `input_bytes` and wrote them compressed as `output_bytes`.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is recorded then.
        """
        if self._refuses():
            return
        nanoseconds = elapsed_argument(elapsed)
        tags = _tags(
            count_argument("elements", elements),
            count_argument("input_bytes", input_bytes),
            count_argument("output_bytes", output_bytes),
        )
        self._complete(self._bare_site(name, argument="name"), nanoseconds, (*tags, TAG_COMPRESSED, 1))

    def add_tokens(self, count: int) -> None:
        """Add to the tokens of the current step; outside every step nothing is counted.

        Raises:
            TypeError, ValueError: `count` is not an integer from 0 to 2**63 - 1.
        """
        if self._refuses():
            return
        number = count_argument("count", count)
        lane = self._recorder.current.get()
        if not isinstance(lane, IdleLane):
            with lane.record.lock:
                lane.record.tokens += number

    def _bare_site(
        self,
        brick: BrickId | str,
        category: BrickCategory | None = None,
        *,
        exact: bool = False,
        argument: str = "brick",
    ) -> int:
        registry = self._recorder.registry
        described = registry.brick(brick, category, exact=exact, argument=argument)
        return registry.bare_site(registry.descriptor(described))

    def _complete(self, site: int, elapsed_ns: int, tags: tuple[int, ...]) -> None:
        end = self._recorder.clock.now()
        self._recorder.current.get().complete((site, end - elapsed_ns, ~site, end, *tags))


def _counts(elements: int, bytes_read: int, bytes_written: int) -> tuple[int, int, int]:
    """Check counts; an omitted one becomes -1."""
    return (
        NO_COUNT if elements is OMITTED else count_argument("elements", elements),
        NO_COUNT if bytes_read is OMITTED else count_argument("bytes_read", bytes_read),
        NO_COUNT if bytes_written is OMITTED else count_argument("bytes_written", bytes_written),
    )


def _tags(elements: int, bytes_read: int, bytes_written: int) -> tuple[int, ...]:
    """The tags that write counts into a log."""
    tags: tuple[int, ...] = ()
    if elements != NO_COUNT:
        tags = (TAG_ELEMENTS, elements)
    if bytes_read != NO_COUNT:
        tags = (*tags, TAG_BYTES_READ, bytes_read)
    if bytes_written != NO_COUNT:
        tags = (*tags, TAG_BYTES_WRITTEN, bytes_written)
    return tags
