"""What the benchmarks share: interleaved rounds, ratios to a peer, a plain table and an optional JSON file.

A machine drifts: its clock rate, its caches, its neighbours. So candidates are never timed one after another but in
rounds, each candidate once per round, the order reversed from one round to the next. What counts is the ratio of a
candidate to its peer within a round; the median of these ratios is the result, and the quartiles its spread. The first
round warms up and is thrown away. Nothing is subtracted, the garbage collector stays on, as in real programs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "numpy",
    "nvtx",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-http",
    "protobuf",
    "urllib3",
)


@dataclass(frozen=True)
class Candidate:
    """One thing to measure.

    Attributes:
        run: does one round and returns its figure for one operation, in the unit of the table; not used where the
            figures are given.
        peer: the name of the candidate that this one is compared with, None for no ratio.
        target: the largest ratio that we want; only printed.
    """

    name: str
    run: Callable[[], float] = lambda: 0.0
    peer: str | None = None
    target: float | None = None


@dataclass(frozen=True)
class Row:
    """A candidate's figures over all rounds; quartiles are (lower, upper)."""

    name: str
    median: float
    quartiles: tuple[float, float]
    minimum: float
    peer: str | None
    ratio: float | None
    ratio_quartiles: tuple[float, float] | None
    target: float | None


@dataclass(frozen=True)
class Table:
    """The rows of one comparison."""

    title: str
    unit: str
    rounds: int
    rows: list[Row]

    def row(self, name: str) -> Row:
        """The row of a candidate."""
        return next(row for row in self.rows if row.name == name)


def per_operation(function: Callable[[], object], operations: int) -> float:
    """Wall nanoseconds of one of the `operations` that a call of `function` does."""
    begin = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - begin) / operations


def compare(title: str, candidates: Sequence[Candidate], *, rounds: int, unit: str = "ns") -> Table:
    """Run all candidates in interleaved rounds."""
    runs = {candidate.name: candidate.run for candidate in candidates}
    return tabulate(title, candidates, interleave(runs, rounds), unit=unit)


def interleave(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each of some functions returns in each round."""
    figures: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        for name in runs if number % 2 else reversed(list(runs)):
            figure = runs[name]()
            if number >= 0:
                figures[name].append(figure)
    return figures


def tabulate(
    title: str, candidates: Sequence[Candidate], figures: Mapping[str, Sequence[float]], *, unit: str = "ns"
) -> Table:
    """A table of figures that interleaved rounds gave."""
    rounds = len(figures[candidates[0].name])
    return Table(title, unit, rounds, [_row(candidate, figures) for candidate in candidates])


def _row(candidate: Candidate, figures: Mapping[str, Sequence[float]]) -> Row:
    own = figures[candidate.name]
    ratio = ratio_quartiles = None
    if candidate.peer is not None:
        ratios = [mine / theirs for mine, theirs in zip(own, figures[candidate.peer], strict=True)]
        ratio, ratio_quartiles = statistics.median(ratios), _quartiles(ratios)
    return Row(
        candidate.name,
        statistics.median(own),
        _quartiles(own),
        min(own),
        candidate.peer,
        ratio,
        ratio_quartiles,
        candidate.target,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def show(table: Table) -> None:
    """Print a table as aligned text."""
    header = ("", table.unit, "quartiles", "min", "ratio", "quartiles", "target", "against")
    lines = [header, *(_cells(row) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{table.title} (medians of {table.rounds} rounds)")
    for name, *cells in lines:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[:-1], widths[1:-1], strict=True))
        print("  ".join((f"{name:<{widths[0]}}", *rest, cells[-1])).rstrip())


def _cells(row: Row) -> tuple[str, ...]:
    figures = (
        row.name,
        number(row.median),
        f"{number(row.quartiles[0])}..{number(row.quartiles[1])}",
        number(row.minimum),
    )
    if row.ratio is None or row.ratio_quartiles is None:
        return (*figures, "", "", "", "")
    return (
        *figures,
        f"{times(row.ratio)} x",
        f"{times(row.ratio_quartiles[0])}..{times(row.ratio_quartiles[1])}",
        "" if row.target is None else f"<= {times(row.target)} x",
        row.peer or "",
    )


def number(value: float) -> str:
    """A figure with three or more digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """A ratio; small ones as a fraction, so that they can be read: 1/60."""
    return f"1/{1 / ratio:.0f}" if 0 < ratio < 0.1 else f"{ratio:.3g}"


def arguments(description: str) -> argparse.Namespace:
    """The command line of every benchmark; `scale` shortens or lengthens it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write the result below {RESULTS}")
    parser.add_argument("--scale", type=float, default=1.0, help="more rounds or rows (default: 1)")
    return parser.parse_args()


def finish(name: str, method: str, results: dict[str, object], *, save: bool) -> None:
    """Say what was measured on, and write the results to `results/<name>.json` if asked to."""
    machine = environment()
    print(f"\n{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, Python {machine['python']}")
    if save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.json"
        document = {"benchmark": name, **machine, "method": method.strip(), "results": results}
        path.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
        print(f"written: {path}")


def _plain(value: object) -> object:
    if isinstance(value, (Table, Row)):
        return asdict(value)
    raise TypeError(type(value).__name__)


def environment() -> dict[str, object]:
    """The machine and the versions that a figure depends on."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": platform.system(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "versions": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
