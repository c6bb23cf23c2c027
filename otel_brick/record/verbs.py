"""The verbs that return scopes: steps, lanes, layers, bricks and kernels, and the switch that turns them off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    TAG_ELEMENTS,
    TAG_LAYER,
)
from .off import OffScope, OffStep
from .recorder import Recorder
from .scopes import LaneScope, StepScope
from .tracing import LinkLike, ParentLike, link_arguments, parent_argument

MAX_HANDLES: Final = 1 << 17
MAX_SEEN: Final = 1 << 16
"""Combinations of a brick and its counts that are remembered as seen once."""
MAX_KERNEL_NAME: Final = 128


class _Omitted(Enum):
    """The default of counts: unlike None, nobody passes it by mistake, and it equals no number."""

    omitted = "omitted"

    # Enum hashes in Python code; brick() hashes this on every call.
    __hash__ = object.__hash__


OMITTED: Final = cast("int", _Omitted.omitted)
"""Stands for a count that is not given; to a type checker it is an integer like the others."""


class ScopeVerbs:
    """The verbs that return scopes, for one recorder, on or off."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._enabled = False
        self._shut = False
        self._bricks: dict[tuple[Any, ...], Handle] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._layers: dict[tuple[Any, ...], Handle] = {}
        self._kernels: dict[tuple[Any, ...], Handle] = {}

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
        with self._recorder.switch_lock:
            if self._shut:
                return
            self._enabled = self._recorder.on = on
            self._recorder.launches.clear()
            for handle in list(self._recorder.handles):
                handle.switch(on)

    def _shut_down(self) -> bool:
        """Take no more steps and rows, and count those that come; False if that was so already."""
        with self._recorder.switch_lock:
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
        stream: object = None,
        exact: bool = False,
    ) -> Handle | OffScope:
        """A brick: a named operation, the unit of statistics.

        Args:
            brick: a known brick, its name or alias, or any other name for a dynamic brick.
            elements: elements processed.
            bytes_read, bytes_written: bytes moved.
            category: of a dynamic brick, fixed by its first use; default `BrickCategory.Other`.
            stream: the CUDA stream that the work is queued on, any object with `__cuda_stream__` or an integer handle;
                default the profiler's.
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
                stream=stream,
                exact=exact,
            )
        if stream is not None:
            return self._on_stream(stream, self.brick, brick, elements, bytes_read, bytes_written, category, exact)
        # Equal numbers of other types find the same handle, so only exact integers may take this way.
        if (
            (elements is OMITTED or elements.__class__ is int)
            and (bytes_read is OMITTED or bytes_read.__class__ is int)
            and (bytes_written is OMITTED or bytes_written.__class__ is int)
        ):
            key = (brick, elements, bytes_read, bytes_written, category, exact)
            try:
                handle = self._bricks.get(key) or self._passing(key)
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

    def _passing(self, key: tuple[Any, ...]) -> Handle | None:
        """A handle that nobody keeps, for counts that are new: only those that come again get a site of their own."""
        brick, elements, bytes_read, bytes_written, category, exact = key
        bare = self._bricks.get((brick, OMITTED, OMITTED, OMITTED, category, exact))
        if bare is None or key in self._seen:
            return None
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        tail = count_tags(*count_arguments(elements, bytes_read, bytes_written))
        return bare.with_tail(tail) if tail else None

    def _on_stream(
        self,
        stream: object,
        verb: Callable[..., Any],
        brick: BrickId | str,
        elements: int,
        bytes_read: int,
        bytes_written: int,
        category: BrickCategory | None,
        exact: bool,
    ) -> Handle:
        """The scope of a brick on a stream of its own, which switches device time on."""
        handle = verb(
            brick,
            elements=elements,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            category=category,
            exact=exact,
        )
        return self._bound(handle, stream)

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
        stream: object = None,
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
                stream=stream,
            )
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {type(name).__name__} ({name!r})")
        launch = launch_argument(ptx_hash, grid, block, shared_mem)
        counts = count_arguments(elements, bytes_read, bytes_written)
        key = (name, launch, *counts)
        handle = self._kernels.get(key) or self._handle(
            self._kernels, key, Descriptor(SpanLevel.Kernel, printable(name[:MAX_KERNEL_NAME]), launch=launch), *counts
        )
        if stream is None:
            return handle
        return self._bound(handle, stream)

    def define(
        self,
        brick: BrickId | str,
        *,
        elements: int = OMITTED,
        bytes_read: int = OMITTED,
        bytes_written: int = OMITTED,
        category: BrickCategory | None = None,
        stream: object = None,
        exact: bool = False,
    ) -> Handle:
        """Bind a brick and its counts to a handle, the fast form: `with handle:` or `@handle`.

        Takes the arguments of `brick`. A handle follows its profiler when that is enabled or disabled later.

        Raises:
            TypeError, ValueError: an argument is not what it should be.
        """
        if stream is not None:
            return self._on_stream(stream, self.define, brick, elements, bytes_read, bytes_written, category, exact)
        counts = count_arguments(elements, bytes_read, bytes_written)
        descriptor = self._recorder.registry.brick(brick, category, exact=exact)
        bare = (brick, OMITTED, OMITTED, OMITTED, category, exact)
        if counts != (NO_COUNT,) * 3 and bare not in self._bricks:
            # `brick` makes the handles of counts that it has not seen before from this one.
            self._handle(self._bricks, bare, descriptor)
        key = (brick, *(OMITTED if count == NO_COUNT else count for count in counts), category, exact)
        return self._bricks.get(key) or self._handle(self._bricks, key, descriptor, *counts)

    def _bound(self, handle: Handle, stream: object) -> Handle:
        """A handle for work on a stream, which begins device time."""
        bound = handle.on_stream(stream)
        self._recorder.device.look(stream)
        return bound

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
            tail = count_tags(elements, bytes_read, bytes_written)
            if layer != NO_COUNT:
                tail = (*tail, TAG_LAYER, layer)
        handle = Handle(self._recorder, site, descriptor.level, tail)
        with self._recorder.switch_lock:
            handle.switch(self._enabled or self._shut)
            self._recorder.handles.add(handle)
        if not tail and len(cache) < MAX_HANDLES and descriptor.name != OVERFLOW_NAME:
            cache[key] = handle
        return handle


def count_arguments(elements: int, bytes_read: int, bytes_written: int) -> tuple[int, int, int]:
    """Check counts; an omitted one becomes -1."""
    return (
        NO_COUNT if elements is OMITTED else count_argument("elements", elements),
        NO_COUNT if bytes_read is OMITTED else count_argument("bytes_read", bytes_read),
        NO_COUNT if bytes_written is OMITTED else count_argument("bytes_written", bytes_written),
    )


def count_tags(elements: int, bytes_read: int, bytes_written: int) -> tuple[int, ...]:
    """The tags that write counts into a log."""
    tags: tuple[int, ...] = ()
    if elements != NO_COUNT:
        tags = (TAG_ELEMENTS, elements)
    if bytes_read != NO_COUNT:
        tags = (*tags, TAG_BYTES_READ, bytes_read)
    if bytes_written != NO_COUNT:
        tags = (*tags, TAG_BYTES_WRITTEN, bytes_written)
    return tags
