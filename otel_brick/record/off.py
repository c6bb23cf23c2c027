"""What the verbs of a disabled profiler return."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .handles import decorate

P = ParamSpec("P")
R = TypeVar("R")

Verb = Callable[..., AbstractContextManager[Any]]


class OffScope(tuple[Verb, tuple[Any, ...], Mapping[str, Any]]):
    """A scope that does nothing; as a decorator it asks its verb again at each call.

    It holds a verb, its arguments and its keyword arguments. A tuple whose scope methods are C builtins costs half of
    an object with attributes and methods of its own.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Any: ...

        def __exit__(self, *error: object) -> None: ...

    else:
        __enter__ = itertools.repeat(None).__next__
        __exit__ = "".format

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        verb, arguments, keywords = self
        return decorate(function, lambda: verb(*arguments, **keywords))


class OffStep(OffScope):
    """A step that does nothing."""

    __slots__ = ()

    def __enter__(self) -> OffStep:
        return self

    def add_tokens(self, count: int) -> None:
        """Nothing is counted while the profiler is off."""
