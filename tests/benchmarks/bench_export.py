"""Whether rows that differ cost more than rows that do not, and whether a collector that is down slows the steps.

Method
------
Churn: process time of one row on the columnar route from its scope to the bytes of a request, which are thrown away,
for steps of 2,000 rows with detail, flushed every 20,000 rows. Element counts: a million rows of one brick whose
counts are all the same or go through 100,000 different values in random order. Descriptors: kernels from 10 or from
10,000 names, one after the other; the first round, which is not shown, has met them all.

Collector: wall time of steps of 300 bricks, each of which multiplies a vector in numpy, on the columnar route, with
detail for every step. The collector, in another process, takes requests; or nothing listens and it refuses; or it
accepts connections and never answers. Each block of steps has a profiler and an exporter of its own, and blocks take
turns. The tables have the 50th and the 99th percentile of each block; the peer of both is the collector that is up. A
disabled profiler shows what the steps take by themselves. In the last blocks 5 ms pass between steps, as in a program
that waits for a GPU.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import harness
import numpy as np
from collectors import REFUSING, SILENT, UP, DiscardRows, collector
from harness import Candidate, Table
from numpy.typing import NDArray

from otel_brick import BrickId, BrickProfiler
from otel_brick.export.otlp import BrickOTLPExporter

ROWS = 1_000_000
STEP = 2_000
BETWEEN_FLUSHES = 20_000
DISTINCT = 100_000
FEW, MANY = 10, 10_000
CONSTANT = "the same count"
FEW_NAMES = f"{FEW} kernels"
BRICKS = 300
WIDTH = 8_192
STEPS = 200
PAUSE_S = 0.005
SHUTDOWN_S = 0.2
CONDITIONS = {UP: "collector up", REFUSING: "collector refuses", SILENT: "collector never answers"}
OFF = "profiler disabled"


def counts(scale: float) -> Table:
    """Process time of a row by whether its element count varies."""
    values = list(range(DISTINCT))
    random.Random(7).shuffle(values)
    rows = max(DISTINCT, round(ROWS * scale / DISTINCT) * DISTINCT)
    return harness.compare(
        f"Churn: process time of one row, {rows:,} rows a round",
        [
            Candidate(CONSTANT, _counted([768] * DISTINCT, rows)),
            Candidate(f"{DISTINCT:,} different counts", _counted(values, rows), CONSTANT, 3.0),
        ],
        rounds=3,
    )


def _counted(values: Sequence[int], rows: int) -> Callable[[], float]:
    profiler, exporter = _profiler()

    def step(first: int) -> None:
        with profiler.step(phase="decode"):
            for elements in values[first : first + STEP]:
                with profiler.brick(BrickId.RmsNorm, elements=elements):
                    pass

    return _timed(profiler, exporter, rows, len(values), step)


def descriptors(scale: float) -> Table:
    """Process time of a row by how many kernels there are."""
    rows = max(BETWEEN_FLUSHES, round(ROWS * scale / 4 / BETWEEN_FLUSHES) * BETWEEN_FLUSHES)
    return harness.compare(
        f"Churn: process time of one kernel row, {rows:,} rows a round",
        [
            Candidate(FEW_NAMES, _named(FEW, rows)),
            Candidate(f"{MANY:,} kernels", _named(MANY, rows), FEW_NAMES, 3.0),
        ],
        rounds=3,
    )


def _named(names: int, rows: int) -> Callable[[], float]:
    profiler, exporter = _profiler()
    kernels = [profiler.kernel(f"kernel_{number:05}", grid=(128, 1, 1), elements=768) for number in range(names)]
    kernels *= MANY // names

    def step(first: int) -> None:
        with profiler.step(phase="decode"):
            for kernel in kernels[first : first + STEP]:
                with kernel:
                    pass

    return _timed(profiler, exporter, rows, len(kernels), step)


def _profiler() -> tuple[BrickProfiler, DiscardRows]:
    exporter = DiscardRows()
    return BrickProfiler.enabled(exporter=exporter, detail="all"), exporter


def _timed(
    profiler: BrickProfiler, exporter: DiscardRows, rows: int, period: int, step: Callable[[int], None]
) -> Callable[[], float]:
    def run() -> float:
        before = exporter.rows
        begin = time.process_time_ns()
        for first in range(0, rows, STEP):
            step(first % period)
            if (first + STEP) % BETWEEN_FLUSHES == 0:
                profiler.flush()
        figure = (time.process_time_ns() - begin) / rows
        if exporter.rows - before != rows:
            raise RuntimeError(f"{exporter.rows - before} rows were exported instead of {rows}: {profiler.losses()}")
        return figure

    return run


def latency(scale: float, pause_s: float = 0.0) -> dict[str, Table]:
    """Wall time of a step by the state of the collector: the 50th and 99th percentile of each block."""
    with ExitStack() as stack:
        runs: dict[str, Callable[[], NDArray[np.int64]]] = {
            title: partial(_block, stack.enter_context(collector(kind)), pause_s) for kind, title in CONDITIONS.items()
        }
        runs[OFF] = partial(_block, None, pause_s)
        blocks = harness.interleave(runs, max(5, round((8 if pause_s else 16) * scale)))
    candidates = [
        Candidate(CONDITIONS[UP]),
        *(Candidate(title, peer=CONDITIONS[UP]) for title in runs if title != CONDITIONS[UP]),
    ]
    manner = f"{pause_s * 1e3:.0f} ms between steps" if pause_s else "steps back to back"
    return {
        f"p{percent}": harness.tabulate(
            f"Collector: wall time of a step of {BRICKS} bricks, {manner}, p{percent} of {STEPS} steps",
            candidates,
            {title: [float(np.percentile(block, percent)) / 1e3 for block in own] for title, own in blocks.items()},
            unit="us",
        )
        for percent in (50, 99)
    }


def _block(endpoint: str | None, pause_s: float) -> NDArray[np.int64]:
    """Nanoseconds of each step of a block."""
    profiler = BrickProfiler()
    if endpoint is not None:
        profiler = BrickProfiler.enabled(exporter=BrickOTLPExporter(endpoint=endpoint), detail="all")
    handle = profiler.define(BrickId.RmsNorm, elements=WIDTH)
    vector: NDArray[np.float32] = np.ones(WIDTH, np.float32)
    times = np.empty(STEPS, np.int64)
    for number in range(STEPS):
        begin = time.perf_counter_ns()
        with profiler.step(phase="decode"):
            for _ in range(BRICKS):
                with handle:
                    np.multiply(vector, vector, out=vector)
        times[number] = time.perf_counter_ns() - begin
        if pause_s:
            time.sleep(pause_s)
    profiler.shutdown(SHUTDOWN_S)
    if endpoint is not None and profiler.step_count() != STEPS:
        raise RuntimeError(f"{profiler.step_count()} steps were counted instead of {STEPS}")
    return times


def main() -> None:
    options = harness.arguments(__doc__ or "")
    logging.disable()  # of spans that are lost where the collector is down
    results: dict[str, object] = {}
    for name, table in (("counts", counts(options.scale)), ("descriptors", descriptors(options.scale))):
        harness.show(table)
        results[name] = table
    for name, pause_s in (("collector", 0.0), ("collector_paused", PAUSE_S)):
        for percentile, table in latency(options.scale, pause_s).items():
            harness.show(table)
            results[f"{name}_{percentile}"] = table
    harness.finish("export", __doc__ or "", results, save=options.save)


if __name__ == "__main__":
    main()
