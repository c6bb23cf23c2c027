"""Words for a person that depend on a number."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """`1 span`, `2,020 spans`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
