"""Putting one object in place of another wherever modules have it by name, and back again.

A program that did `from cuda.core import launch` has the original in its own module, so all loaded modules are looked
through. What is in default arguments, closures and containers is out of reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def rebind(replacements: Mapping[int, tuple[object, object]], skip: Callable[[str], bool] = lambda name: False) -> None:
    """Give modules another object under the names that they have one under.

    Args:
        replacements: (what is there, what shall be there) by the `id` of the former.
        skip: tells by their names which modules to leave alone.
    """
    own = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == own or skip(name):
            continue
        # Not through the module, which may be one that is imported when it is first asked for something.
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        for key, value in list(names.items()):
            found = replacements.get(id(value))
            if found is not None and found[0] is value:
                names[key] = found[1]
