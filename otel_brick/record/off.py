"""What the verbs of a disabled profiler return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from .handles import decorate

P = ParamSpec("P")
R = TypeVar("R")


class OffScope:
    """A scope that does nothing; as a decorator it asks its verb again at each call."""

    __slots__ = ("_arguments", "_keywords", "_verb")

    def __init__(
        self,
        verb: Callable[..., AbstractContextManager[Any]],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        self._verb = verb
        self._arguments = arguments
        self._keywords = keywords

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return decorate(function, lambda: self._verb(*self._arguments, **self._keywords))

    def add_tokens(self, count: int) -> None:
        """Nothing is counted while the profiler is off."""

    def __enter__(self) -> OffScope:
        return self

    def __exit__(self, *error: object) -> None:
        pass
