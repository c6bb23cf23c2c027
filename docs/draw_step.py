"""Draws `docs/step-tree.svg`: one step of a demo run on a time axis, from the spans that the run exported.

    otel-brick demo --output run
    python docs/draw_step.py run/trace.jsonl

The upper part shows the whole step with a row for each level. The lower part magnifies one layer, a row for each of
its bricks. Step and layer are the ones of median duration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from drawing import CATEGORY_COLOURS, CHARACTER_WIDTH, RIGHT, document, duration, round_interval, text

from otel_brick import BrickCategory, semconv

PICTURE = Path(__file__).with_name("step-tree.svg")

LEFT = 176
"""Where the time axes begin; they end at `RIGHT`."""
LEVELS_TOP = 58
LEVEL_HEIGHT = 26
BRICKS_TOP = 200
BRICK_HEIGHT = 21
GAP = 3


@dataclass
class Span:
    """One span of the file, with the spans below it in order of their start."""

    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    children: list[Span] = field(default_factory=list["Span"])

    @property
    def duration_ns(self) -> int:
        """End minus start."""
        return self.end_ns - self.start_ns

    @property
    def level(self) -> str:
        """`step`, `layer`, `brick` or `kernel`."""
        return str(self.attributes[semconv.BRICK_SPAN_LEVEL])

    @property
    def label(self) -> str:
        """The name, and which layer it is."""
        return f"{self.name} {self.attributes[semconv.BRICK_LAYER_INDEX]}" if self.level == "layer" else self.name

    @property
    def category(self) -> BrickCategory:
        """The category of a brick."""
        value = self.attributes[semconv.BRICK_CATEGORY]
        return next(category for category in BrickCategory if category.attribute_value == value)

    def below(self, level: str) -> Iterator[Span]:
        """All spans of a level below this one."""
        for child in self.children:
            if child.level == level:
                yield child
            yield from child.below(level)


def read_steps(lines: Sequence[str]) -> list[Span]:
    """The steps in OTLP JSON lines, each with everything below it."""
    spans = [
        Span(
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            name=span["name"],
            start_ns=int(span["startTimeUnixNano"]),
            end_ns=int(span["endTimeUnixNano"]),
            attributes={item["key"]: next(iter(item["value"].values())) for item in span.get("attributes", ())},
        )
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        if scope["scope"]["name"] == semconv.SCOPE_NAME
        for span in scope["spans"]
    ]
    by_id = {span.span_id: span for span in spans}
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.parent_id in by_id:
            by_id[span.parent_id].children.append(span)
    return [span for span in spans if span.level == "step"]


def median(spans: Sequence[Span]) -> Span:
    """The span of median duration."""
    return sorted(spans, key=lambda span: span.duration_ns)[len(spans) // 2]


def draw(step: Span, layer: Span, title: str, note: str) -> str:
    """A step, and magnified one of its layers, as an SVG document; the note says what its bars are."""
    layers, bricks = list(step.below("layer")), list(step.below("brick"))
    magnified = list(layer.below("brick"))
    height = BRICKS_TOP + 24 + BRICK_HEIGHT * len(magnified) + 44
    parts = [
        *_lens(step, layer),
        *_whole_step(step, layers, bricks),
        *_one_layer(layer, magnified),
        *_legend({brick.category for brick in bricks}, height - 20),
    ]
    return document(title, f"1 step, {len(layers)} layers and {len(bricks)} bricks; {note}", height, parts)


def _whole_step(step: Span, layers: Sequence[Span], bricks: Sequence[Span]) -> Iterator[str]:
    axis = _Axis(step)
    bottom = LEVELS_TOP + 3 * (LEVEL_HEIGHT + GAP)
    yield from axis.grid(LEVELS_TOP - 6, bottom, label_y=bottom + 16)
    for row, (level, spans) in enumerate((("step", [step]), ("layer", layers), ("brick", bricks))):
        top = LEVELS_TOP + row * (LEVEL_HEIGHT + GAP)
        yield text(20, top + LEVEL_HEIGHT / 2 + 4, level, "quiet")
        for span in spans:
            x, width = axis.extent(span)
            yield _bar(span, x, top, width, LEVEL_HEIGHT)
            label = f"{_short_label(span)}  {span.duration_ns / 1e6:.2f} ms"
            if len(label) * CHARACTER_WIDTH < width:
                yield text(x + width / 2, top + LEVEL_HEIGHT / 2 + 4, label, "inside middle")


def _lens(step: Span, layer: Span) -> Iterator[str]:
    """What leads the eye from the layer in the upper part to its magnified form."""
    x, width = _Axis(step).extent(layer)
    top = LEVELS_TOP + 3 * (LEVEL_HEIGHT + GAP)
    yield (
        f'<path class="lens" d="M{x:.1f} {top - 2 * GAP} V{top} L{LEFT} {BRICKS_TOP - 4} H{RIGHT}'
        f' L{x + width:.1f} {top} V{top - 2 * GAP} Z"/>'
    )


def _one_layer(layer: Span, bricks: Sequence[Span]) -> Iterator[str]:
    axis = _Axis(layer)
    rows_top = BRICKS_TOP + 24
    bottom = rows_top + BRICK_HEIGHT * len(bricks)
    yield from axis.grid(rows_top, bottom, label_y=BRICKS_TOP + 15)
    name = f"layer {layer.attributes[semconv.BRICK_LAYER_INDEX]}"
    yield text(20, BRICKS_TOP + 15, f"{name}, {duration(layer.duration_ns)}")
    for row, brick in enumerate(bricks):
        top = rows_top + row * BRICK_HEIGHT
        x, width = axis.extent(brick)
        time = duration(brick.duration_ns)
        yield text(20, top + 14, brick.label, "quiet")
        yield _bar(brick, x, top + GAP / 2, width, BRICK_HEIGHT - GAP)
        room = len(time) * CHARACTER_WIDTH + 6
        if x + width + room < RIGHT:
            yield text(x + width + 6, top + 14, time, "value")
        elif x - room > LEFT:
            yield text(x - 6, top + 14, time, "value end")
        else:
            yield text(x + width / 2, top + 14, time, "inside middle")


def _legend(categories: set[BrickCategory], y: float) -> Iterator[str]:
    x = float(LEFT)
    for category in sorted(categories, key=lambda category: category.value):
        yield f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{CATEGORY_COLOURS[category]}"/>'
        yield text(x + 17, y, category.label, "quiet")
        x += 17 + len(category.label) * CHARACTER_WIDTH + 24


@dataclass(frozen=True)
class _Axis:
    """The time of one span, from `LEFT` to `RIGHT`."""

    span: Span

    def extent(self, span: Span) -> tuple[float, float]:
        """Where a span begins, and how wide it is; never too narrow to be seen."""
        scale = (RIGHT - LEFT) / self.span.duration_ns
        x = LEFT + (span.start_ns - self.span.start_ns) * scale
        return x, max(span.duration_ns * scale, 0.75)

    def grid(self, top: float, bottom: float, *, label_y: float) -> Iterator[str]:
        """Vertical lines at round times, with their labels."""
        interval = round_interval(self.span.duration_ns)
        for time_ns in range(0, self.span.duration_ns + 1, interval):
            x = LEFT + time_ns * (RIGHT - LEFT) / self.span.duration_ns
            yield f'<path class="grid" d="M{x:.1f} {top} V{bottom}"/>'
            yield text(x, label_y, duration(time_ns, digits=0) if time_ns else "0", "quiet middle")


def _short_label(span: Span) -> str:
    """What tells a span from others in its row."""
    return f"#{span.attributes[semconv.BRICK_LAYER_INDEX]}" if span.level == "layer" else span.name


def _bar(span: Span, x: float, y: float, width: float, height: float) -> str:
    paint = f'fill="{CATEGORY_COLOURS[span.category]}"' if span.level == "brick" else f'class="{span.level}"'
    return (
        f'<rect {paint} x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" rx="{min(2, width / 4):.2f}">'
        f"<title>{escape(span.label)}  {duration(span.duration_ns)}</title></rect>"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Draw one step of a demo run.")
    parser.add_argument("trace", type=Path, help="the trace.jsonl that `otel-brick demo` wrote")
    parser.add_argument("--output", type=Path, default=PICTURE, help="the SVG file to write")
    options = parser.parse_args(arguments)
    steps = read_steps(options.trace.read_text(encoding="utf-8").splitlines())
    decode = [step for step in steps if step.attributes[semconv.BRICK_PHASE] == "decode"]
    step = median(decode)
    title = f"One {step.name.removeprefix('step ')} step of otel-brick demo"
    picture = draw(step, median(list(step.below("layer"))), title, "every bar is an exported span")
    options.output.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
