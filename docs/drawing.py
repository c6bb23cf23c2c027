"""What the pictures in this folder share: their frame, their colours, text, and times as a person writes them.

`draw_step.py` and `draw_servers.py` import it as scripts of the same folder do.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from otel_brick import BrickCategory

WIDTH = 920
RIGHT = 888
"""Where what is drawn ends."""
TITLE_Y = 34
CHARACTER_WIDTH = 6.2
"""Of text at 12 px, generously."""

CATEGORY_COLOURS = {
    BrickCategory.Norm: "#cc79a7",
    BrickCategory.Attention: "#3b8fd0",
    BrickCategory.Ffn: "#e69f00",
    BrickCategory.Other: "#1fa67a",
    BrickCategory.Sparse: "#d55e00",
    BrickCategory.Fft: "#56b4e9",
    BrickCategory.Solver: "#b8a800",
}

STYLE = """
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .quiet { fill: #59636e; }
  .end { text-anchor: end; }
  .middle { text-anchor: middle; }
  .inside { fill: #ffffff; }
  .value { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
  .card { fill: #ffffff; stroke: #d1d9e0; }
  .grid { stroke: #d1d9e0; }
  .lens { fill: #59636e; fill-opacity: 0.12; }
  .step { fill: #59636e; }
  .layer { fill: #6e7781; }
"""
DARK_STYLE = """
    text { fill: #f0f6fc; }
    .quiet { fill: #9198a1; }
    .value { stroke: #0d1117; }
    .card { fill: #0d1117; stroke: #3d444d; }
    .grid { stroke: #3d444d; }
    .lens { fill: #9198a1; fill-opacity: 0.2; }
"""


def document(title: str, description: str, height: float, parts: Iterable[str]) -> str:
    """An SVG document: a card with its title, `description` beside that, and the parts on it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}: {escape(description)}</title>',
        f"<style>{STYLE}  @media (prefers-color-scheme: dark) {{{DARK_STYLE}  }}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(20, TITLE_Y, title, "title"),
        text(RIGHT, TITLE_Y, description, "quiet end"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, content: str, style: str = "") -> str:
    """A line of text."""
    attribute = f' class="{style}"' if style else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def duration(nanoseconds: float, digits: int = 1) -> str:
    """A time with its unit, in microseconds or, from one on, milliseconds."""
    if nanoseconds >= 1_000_000:
        return f"{nanoseconds / 1e6:.{2 * digits}f} ms"
    return f"{nanoseconds / 1e3:.{digits}f} µs"


def round_interval(extent: float, parts: int = 7) -> int:
    """A round integer that divides an extent into at most so many parts."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if extent <= parts * factor * power:
                return factor * power
        power *= 10
