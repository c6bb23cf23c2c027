"""Having a function called with a module as soon as the program imports it, which may be never.

Unlike hooks that go by the name that a module has when it is ready, this one goes by the name it is imported by:
`cuda.core` takes on another name while it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Function = Callable[[Any], None]


class Arrivals:
    """A finder that finds nothing itself; it is on `sys.meta_path` only while something is awaited."""

    def __init__(self) -> None:
        self._awaited: dict[str, Function] = {}
        self._looking: set[str] = set()

    def when_imported(self, name: str, function: Function) -> None:
        """Call a function with a module: now if it is imported, else once it is ready. It must not raise."""
        module = sys.modules.get(name)
        if module is not None:
            function(module)
            return
        self._awaited[name] = function
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self) -> None:
        """Wait no longer."""
        self._awaited.clear()
        self._leave()

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find; the loader of an awaited module tells when it is done."""
        if fullname not in self._awaited or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    self._announce(fullname, spec.loader)
                    return spec
        finally:
            self._looking.discard(fullname)
        return None

    def _announce(self, name: str, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def execute_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            # Only now: whoever asks where a module is does not import it.
            function = self._awaited.pop(name, None)
            if not self._awaited:
                self._leave()
            if function is not None:
                function(module)

        loader.exec_module = execute_and_tell
