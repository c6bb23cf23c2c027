"""Draws what Jaeger and Prometheus answer: `docs/jaeger-trace.svg` and `docs/prometheus-dashboard.svg`.

Start the servers of collector-config with a gateway, run an engine for some minutes, and ask while it still runs:

    OTEL_METRIC_EXPORT_INTERVAL=5000 \\
        python docs/server_load.py --endpoint http://localhost:24318 --minutes 8 --slow 2.5 4
    python docs/draw_servers.py --answers answers --minutes 7 \\
        --jaeger http://localhost:16686 --prometheus http://localhost:9090

The answers stay in the folder `answers`; without the two URLs they are read from there, and nobody is asked.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from draw_step import draw, read_steps
from drawing import CATEGORY_COLOURS, RIGHT, document, duration, round_interval, text

from otel_brick import BrickCategory

DOCS = Path(__file__).parent
LEFT = 66
PANEL_HEIGHT = 150
PANEL_GAP = 62
PANELS_TOP = 84
CELL_HEIGHT = 22
CELLS_LEFT = 150
TIMEOUT_S = 30.0
LINES = ("#3b8fd0", "#e69f00", "#1fa67a", "#cc79a7", "#d55e00", "#b8a800")
HEAT = CATEGORY_COLOURS[BrickCategory.Attention]

TOKENS = "sum by (brick_phase) (rate(brick_tokens_total{{{selected}}}[1m]))"
P99 = (
    "histogram_quantile(0.99,"
    ' sum by (brick_name, le) (rate(brick_duration_seconds_bucket{{{selected},brick_phase="decode"}}[1m])))'
)
LAYERS = (
    "sum by (brick_layer_index, brick_name) (increase(traces_span_metrics_duration_seconds_sum{{{layers}}}[{window}]))"
    " / (sum by (brick_layer_index, brick_name)"
    " (increase(traces_span_metrics_duration_seconds_count{{{layers}}}[{window}])) > 0)"
)
"""Metrics know no layers, so this one comes from spans, by way of `span_metrics` in the gateway."""


@dataclass(frozen=True)
class Answers:
    """The answers of both servers, by name of their file in a folder.

    Attributes:
        folder: where they are kept.
        jaeger: its base URL; empty to read what is kept.
        prometheus: likewise.
    """

    folder: Path
    jaeger: str
    prometheus: str

    def of_jaeger(self, name: str, path: str, **parameters: str) -> Any:
        """An answer of Jaeger."""
        return self._answer(name, self.jaeger, path, parameters)

    def of_prometheus(self, name: str, path: str, **parameters: str) -> list[Any]:
        """The series of an answer of Prometheus."""
        return self._answer(name, self.prometheus, f"/api/v1/{path}", parameters)["data"]["result"]

    def _answer(self, name: str, base: str, path: str, parameters: Mapping[str, str]) -> Any:
        file = self.folder / f"{name}.json"
        if base:
            url = f"{base.rstrip('/')}{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                content = json.load(answer)
            self.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))


def draw_trace(answers: Answers, service: str, minutes: float) -> str:
    """Of the slow decode steps that Jaeger finds, the one of median duration, and its longest layer."""
    now = time.time()
    found = answers.of_jaeger(
        "search",
        "/api/traces",
        service=service,
        tags=json.dumps({"brick.detail.reason": "slow", "brick.phase": "decode"}),
        start=str(int((now - 60 * minutes) * 1e6)),
        end=str(int(now * 1e6)),
        limit="200",
    )
    trace_id = sorted(found["data"], key=_duration_us)[len(found["data"]) // 2]["traceID"]
    trace = answers.of_jaeger("trace", f"/api/v3/traces/{trace_id}")
    (step,) = read_steps([json.dumps(trace["result"])])
    layer = max(step.below("layer"), key=lambda layer: layer.duration_ns)
    title = f"A slow {step.name.removeprefix('step ')} step, as Jaeger returns it"
    return draw(step, layer, title, "every bar is a span of its answer")


def _duration_us(trace: Mapping[str, Any]) -> int:
    """The duration of the longest span, which is the step."""
    return max(span["duration"] for span in trace["spans"])


@dataclass(frozen=True)
class Series:
    """One line of a chart: its name, and points of time (s) and value."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def highest(self) -> float:
        """The largest value."""
        return max(value for _, value in self.points)


def draw_dashboard(answers: Answers, service: str, minutes: float) -> str:
    """Tokens per second, 99th percentiles by brick, and mean times by layer and brick, of the last minutes."""
    selected = f'job="{service}"'
    layers = f'{selected},brick_span_level="brick",brick_layer_index!=""'
    now = time.time()
    span = {"start": f"{now - 60 * minutes:.0f}", "end": f"{now:.0f}", "step": "5"}
    tokens = answers.of_prometheus("tokens", "query_range", query=TOKENS.format(selected=selected), **span)
    p99 = answers.of_prometheus("p99", "query_range", query=P99.format(selected=selected), **span)
    query = LAYERS.format(layers=layers, window=f"{60 * minutes:.0f}s")
    cells = answers.of_prometheus("layers", "query", query=query, time=span["end"])
    charts = [
        Chart("Tokens per second by phase", _series(tokens, "brick_phase"), logarithmic=False),
        Chart("99th percentile of a call in decode steps by brick", _series(p99, "brick_name"), logarithmic=True),
    ]
    parts: list[str] = []
    top = PANELS_TOP
    for chart in charts:
        parts += chart.draw(top)
        top += PANEL_HEIGHT + PANEL_GAP
    matrix = Matrix.of(cells)
    parts += matrix.draw(top - 14)
    height = top + 34 + CELL_HEIGHT * len(matrix.bricks)
    return document(f"{minutes:.0f} minutes of a decoder", "answers of Prometheus", height, parts)


def _series(result: Sequence[Mapping[str, Any]], label: str) -> list[Series]:
    """The series of a range, highest first, without values that are none."""
    found = [
        Series(one["metric"][label], [(at, float(value)) for at, value in one["values"] if value != "NaN"])
        for one in result
    ]
    return sorted((one for one in found if one.points), key=lambda one: one.highest, reverse=True)


@dataclass(frozen=True)
class Chart:
    """Lines over time. The highest have a colour and a name, in order of their ends; the others are grey."""

    title: str
    series: Sequence[Series]
    logarithmic: bool

    def draw(self, top: float) -> Iterator[str]:
        """The chart below its title."""
        right = RIGHT - 150
        start = min(series.points[0][0] for series in self.series)
        end = max(series.points[-1][0] for series in self.series)
        low, high = self._bounds()

        def place(at: float, value: float) -> tuple[float, float]:
            x = LEFT + (at - start) * (right - LEFT) / (end - start)
            share = (self._scaled(value) - self._scaled(low)) / (self._scaled(high) - self._scaled(low))
            return x, top + PANEL_HEIGHT * (1 - min(max(share, 0.0), 1.0))

        yield text(20, top - 14, self.title)
        for value in self._ticks(low, high):
            y = place(start, value)[1]
            yield f'<path class="grid" d="M{LEFT} {y:.1f} H{right}"/>'
            yield text(LEFT - 8, y + 4, self._named(value), "quiet end")
        minutes = (end - start) / 60
        for minute in range(0, int(minutes) + 1, round_interval(minutes, 12)):
            x = place(start + 60 * minute, low)[0]
            yield text(x, top + PANEL_HEIGHT + 17, f"{minute} min" if minute else "0", "quiet middle")
        coloured = self.series[: len(LINES)]
        for series in reversed(self.series):
            path = " L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in series.points))
            paint = f'stroke="{LINES[coloured.index(series)]}"' if series in coloured else 'class="grid"'
            width = 1.8 if series in coloured else 1
            name = f"<title>{series.name}</title>"
            yield f'<path {paint} fill="none" stroke-width="{width}" stroke-linejoin="round" d="M{path}">{name}</path>'
        ends = sorted((place(*series.points[-1])[1], index) for index, series in enumerate(coloured))
        for y, index in _apart(ends, 15, top + PANEL_HEIGHT):
            yield f'<rect x="{right + 10}" y="{y - 5:.1f}" width="10" height="10" rx="2" fill="{LINES[index]}"/>'
            yield text(right + 26, y + 4, coloured[index].name, "quiet")

    def _bounds(self) -> tuple[float, float]:
        high = max(series.highest for series in self.series)
        if not self.logarithmic:
            return 0.0, high * 1.05
        return min(value for series in self.series for _, value in series.points), high * 1.1

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def _ticks(self, low: float, high: float) -> Iterator[float]:
        if not self.logarithmic:
            yield from range(0, int(high) + 1, round_interval(high, 5))
            return
        factors = (1, 2, 5) if high < 100 * low else (1,)
        for power in range(-9, 4):
            yield from (factor * 10**power for factor in factors if low <= factor * 10**power <= high)

    def _named(self, value: float) -> str:
        return duration(value * 1e9, digits=0) if self.logarithmic else f"{value:,.0f}"


def _apart(places: Sequence[tuple[float, int]], distance: float, bottom: float) -> list[tuple[float, int]]:
    """The same in order, none nearer to the one above it, the last not below the bottom."""
    moved = list(places)
    for above, below in pairwise(range(len(moved))):
        moved[below] = max(moved[below][0], moved[above][0] + distance), moved[below][1]
    limit = bottom
    for index in range(len(moved) - 1, -1, -1):
        moved[index] = min(moved[index][0], limit), moved[index][1]
        limit = moved[index][0] - distance
    return moved


@dataclass(frozen=True)
class Matrix:
    """Mean times by brick (rows) and layer (columns); the darker a cell, the longer beside its row's median."""

    layers: Sequence[int]
    bricks: Sequence[str]
    seconds: Mapping[tuple[str, int], float]

    @classmethod
    def of(cls, result: Sequence[Mapping[str, Any]]) -> Matrix:
        """The matrix of an answer, bricks by their total time."""
        seconds = {
            (one["metric"]["brick_name"], int(one["metric"]["brick_layer_index"])): float(one["value"][1])
            for one in result
        }
        layers = sorted({layer for _, layer in seconds})
        total = {name: sum(seconds.get((name, layer), 0.0) for layer in layers) for name, _ in seconds}
        return cls(layers, sorted(total, key=lambda name: -total[name]), seconds)

    def draw(self, top: float) -> Iterator[str]:
        """The matrix below its title."""
        width = (RIGHT - CELLS_LEFT) / len(self.layers)
        yield text(20, top, "Mean time by brick and layer, in µs; the darker, the slower beside the other layers")
        for column, layer in enumerate(self.layers):
            yield text(CELLS_LEFT + (column + 0.5) * width, top + 22, f"layer {layer}", "quiet middle")
        for row, brick in enumerate(self.bricks):
            y = top + 30 + row * CELL_HEIGHT
            yield text(20, y + 14, brick, "quiet")
            usual = median(self.seconds[brick, layer] for layer in self.layers if (brick, layer) in self.seconds)
            for column, layer in enumerate(self.layers):
                value = self.seconds.get((brick, layer))
                if value is None:
                    continue
                depth = min(max(0.12 + 0.5 * math.log2(value / usual), 0.05), 0.85)
                x = CELLS_LEFT + column * width
                yield (
                    f'<rect x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="{CELL_HEIGHT - 2}" rx="2"'
                    f' fill="{HEAT}" fill-opacity="{depth:.2f}"><title>{brick}, layer {layer}</title></rect>'
                )
                yield text(x + width / 2, y + 14, f"{value * 1e6:.1f}", "middle")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Draw what Jaeger and Prometheus answer.")
    parser.add_argument("--answers", type=Path, required=True, help="the folder where answers are kept")
    parser.add_argument("--jaeger", default="", metavar="URL", help="ask this Jaeger")
    parser.add_argument("--prometheus", default="", metavar="URL", help="ask this Prometheus")
    parser.add_argument("--service", default="decoder", help="service.name of the engine")
    parser.add_argument("--minutes", type=float, default=7, help="how far back")
    parser.add_argument("--output", type=Path, default=DOCS, help="the folder for the pictures")
    options = parser.parse_args(arguments)
    answers = Answers(options.answers, options.jaeger, options.prometheus)
    for name, draw_it in (("jaeger-trace", draw_trace), ("prometheus-dashboard", draw_dashboard)):
        picture = draw_it(answers, options.service, options.minutes)
        (options.output / f"{name}.svg").write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
