"""Names of C++ kernels for people: `_ZN2ns3fooILi4EfEEvPKf` is `ns::foo`.

Reads as much of the Itanium C++ ABI's mangling as names of kernels have: namespaces, classes and template arguments,
the latter only to leave them out. A name that has anything else stays as it is.
"""

from __future__ import annotations

import re
from typing import Final

from ..record.descriptors import printable

MAX_NAME: Final = 128
ANONYMOUS: Final = "(anonymous namespace)"
_BUILTIN: Final = frozenset("vwbcahstijlmxynofdegz")
_QUALIFIERS: Final = frozenset("PROKVrCG")
_STANDARD: Final = {
    "t": ("std",),
    "a": ("std", "allocator"),
    "b": ("std", "basic_string"),
    "s": ("std", "string"),
    "i": ("std", "istream"),
    "o": ("std", "ostream"),
    "d": ("std", "iostream"),
}
_SUBSTITUTION: Final = re.compile(r"S[0-9A-Z]*_|T[0-9]*_")
_LITERAL: Final = re.compile(r"n?[0-9a-f]*E")
_NUMBER: Final = re.compile(r"[0-9]*_")
_DISCRIMINATOR: Final = re.compile(r"_[0-9]|__[0-9]+_")
_BOUND: Final = re.compile(r"A[0-9]*_")


def kernel_name(mangled: str) -> str:
    """The name without template arguments and parameters, at most 128 characters of it."""
    name = mangled
    if mangled.startswith("_Z"):
        try:
            name = "::".join(_Reader(mangled).name())
        except (ValueError, IndexError, RecursionError):
            name = mangled
    return printable(name[:MAX_NAME])


class _Reader:
    """Reads one mangled name from left to right.

    Raises:
        ValueError, IndexError: what stands there is not understood.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = len("_Z")

    def name(self) -> list[str]:
        """The parts of the function's name."""
        if not self._takes("N"):
            parts = list(_STANDARD["t"]) if self._takes("St") else []
            parts.append(self._source_name())
            if self._peek("I"):
                self._arguments()
            return parts
        while self._text[self._at] in "rVK":
            self._at += 1
        parts: list[str] = []
        while not self._takes("E"):
            if self._peek("I"):
                self._arguments()
            elif self._at > len("_ZN") and self._peek("S") and self._text[self._at + 1] not in _STANDARD:
                self._match(_SUBSTITUTION)
            elif self._takes("S"):
                parts += _STANDARD[self._text[self._at]] if self._text[self._at] in _STANDARD else self._unknown()
                self._at += 1
            else:
                parts.append(self._source_name())
        return parts or self._unknown()

    def _source_name(self) -> str:
        self._takes("L")  # internal linkage
        begin = self._at
        while self._text[self._at].isdecimal():
            self._at += 1
        length = int(self._text[begin : self._at])
        name = self._text[self._at : self._at + length]
        self._at += length
        if len(name) != length or not length:
            self._unknown()
        while self._takes("B"):  # an ABI tag
            self._source_name()
        return ANONYMOUS if name.startswith("_GLOBAL__N") else name

    def _arguments(self) -> None:
        """Go past template arguments."""
        self._at += 1
        while not self._takes("E"):
            self._argument()

    def _argument(self) -> None:
        if self._peek("J"):
            self._arguments()
        elif self._takes("L"):
            self._type()
            self._match(_LITERAL)
        else:
            self._type()

    def _type(self) -> None:
        text = self._text
        while text[self._at] in _QUALIFIERS:
            self._at += 1
        first = text[self._at]
        if first in _BUILTIN:
            self._at += 1
        elif first.isdecimal():
            self._source_name()
        elif first == "N":
            self._at += 1
            self._nested_type()
            return
        elif first == "Z":
            self._at += 1
            self._local_type()
        elif first == "D":
            self._at += 2
            if text[self._at - 1] == "p":
                self._type()
            elif text[self._at - 1] not in "nihsudefa":
                self._unknown()
        elif first == "F":
            self._at += 1
            while not self._takes("E"):
                self._type()
        elif first == "A":
            self._match(_BOUND)
            self._type()
        elif first == "M":
            self._at += 1
            self._type()
            self._type()
        elif text.startswith("St", self._at) and text[self._at + 2].isdecimal():
            self._at += 2
            self._source_name()
        elif first == "S" and text[self._at + 1] in _STANDARD:
            self._at += 2
        else:
            self._match(_SUBSTITUTION)
        if self._peek("I"):
            self._arguments()

    def _nested_type(self) -> None:
        while self._text[self._at] in "rVK":
            self._at += 1
        while not self._takes("E"):
            if self._peek("I"):
                self._arguments()
            elif self._peek("S") and self._text[self._at + 1] in _STANDARD:
                self._at += 2
            elif self._peek("S") or self._peek("T"):
                self._match(_SUBSTITUTION)
            else:
                self._source_name()

    def _local_type(self) -> None:
        """Go past a type that a function has inside, such as that of a lambda."""
        self.name()
        while not self._takes("E"):
            self._type()
        if self._takes("Ul"):
            while not self._takes("E"):
                self._type()
            self._match(_NUMBER)
        else:
            self._source_name()
        if self._peek("_"):
            self._match(_DISCRIMINATOR)

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _match(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._unknown()
        else:
            self._at = found.end()

    def _unknown(self) -> list[str]:
        raise ValueError(f"not understood at character {self._at}: {self._text}")
