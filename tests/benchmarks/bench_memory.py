"""Whether memory stays flat over ten million rows, and whether all of them are counted.

Method
------
Ten million bricks without any work between them, with the worker running beside: once in steps of 1,000, once in a
single step that never ends. Resident memory comes from `/proc/self/statm`, so this runs on Linux only: it is printed
ten times, with the peak in between as a sampler saw it every 20 ms. Each scenario is a fresh process. Memory is flat if
the peak of the second half is not above that of the first: queues and backlogs have limits, and bricks that follow each
other this fast fill them. At the end everything is flushed, and the statistics must hold exactly the rows that were
recorded, by brick and phase, with their elements; if they do not, the exit status is 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness

from otel_brick import BrickId, BrickProfiler

ROWS = 10_000_000
STEP = 1_000
SCENARIOS = {"steps": "steps of 1,000 rows", "endless": "one step that never ends"}
PAGE = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


class Sampler(threading.Thread):
    """Remembers the largest resident size since it was last asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._largest = 0

    def run(self) -> None:
        while True:
            self._largest = max(self._largest, resident())
            time.sleep(0.02)

    def take(self) -> int:
        """The largest size in bytes since the last call."""
        largest, self._largest = max(self._largest, resident()), 0
        return largest


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(STATM.read_text().split()[1]) * PAGE


def run(scenario: str, rows: int) -> dict[str, object]:
    """Record the rows of one scenario; returns its samples and what was counted."""
    profiler = BrickProfiler.enabled(detail="none")
    first, second = profiler.define(BrickId.RmsNorm, elements=768), profiler.define("FusedGateUp", elements=3_072)
    sampler = Sampler()
    sampler.start()
    begin = time.perf_counter()
    samples: list[tuple[int, float, int, int]] = []

    def sample(done: int) -> None:
        samples.append((done, time.perf_counter() - begin, resident(), sampler.take()))

    def record(count: int) -> None:
        for _ in range(count // 2):
            with first:
                pass
            with second:
                pass

    sample(0)
    tenth = rows // 10
    if scenario == "steps":
        for number in range(1, 11):
            for _ in range(tenth // STEP):
                with profiler.step(phase="decode", tokens=1):
                    record(STEP)
            sample(number * tenth)
    else:
        with profiler.step(phase="decode", tokens=1):
            for number in range(1, 11):
                record(tenth)
                sample(number * tenth)
    profiler.flush(120.0)
    sample(rows)
    return {
        "samples": samples,
        "rows": rows,
        "counted": [_counted(profiler, name) for name in ("RmsNorm", "FusedGateUp")],
        "steps": profiler.step_count(),
        "losses": {reason: count for reason, count in profiler.losses().items() if count},
    }


def _counted(profiler: BrickProfiler, name: str) -> dict[str, int]:
    stats, in_phase = profiler.stats(name), profiler.stats(name, phase="decode")
    if stats is None or in_phase is None:
        return {"count": 0, "in_phase": 0, "elements": 0}
    return {"count": stats.count, "in_phase": in_phase.count, "elements": stats.total_elements}


def report(title: str, result: dict) -> bool:
    """Print one scenario; returns whether its totals are exact."""
    print(f"\n{title}, {result['rows']:,} rows")
    print(f"{'rows':>12}  {'seconds':>8}  {'RSS MiB':>8}  {'peak MiB':>8}")
    for done, seconds, size, peak in result["samples"]:
        print(f"{done:>12,}  {seconds:>8.1f}  {size / 2**20:>8.1f}  {peak / 2**20:>8.1f}")
    peaks = [peak / 2**20 for _, _, _, peak in result["samples"]]
    early, late = max(peaks[:6]), max(peaks[6:])
    print(f"peak {early:.1f} MiB in the first half, {late:.1f} MiB in the second: {late - early:+.1f} MiB")
    half = result["rows"] // 2
    exact = result["losses"] == {} and all(
        counted == {"count": half, "in_phase": half, "elements": half * elements}
        for counted, elements in zip(result["counted"], (768, 3_072), strict=True)
    )
    total = sum(counted["count"] for counted in result["counted"])
    print(f"counted {total:,} rows in {result['steps']:,} steps: {'exact' if exact else 'WRONG'}; {result['losses']}")
    return exact


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--child":
        json.dump(run(sys.argv[2], int(sys.argv[3])), sys.stdout)
        return
    options = harness.arguments(__doc__ or "")
    rows = max(20_000, round(ROWS * options.scale / 20_000) * 20_000)
    results: dict[str, object] = {}
    exact = True
    for scenario, title in SCENARIOS.items():
        child = subprocess.run(
            [sys.executable, __file__, "--child", scenario, str(rows)], stdout=subprocess.PIPE, check=True
        )
        results[scenario] = json.loads(child.stdout)
        exact = report(title, json.loads(child.stdout)) and exact
    harness.finish("memory", __doc__ or "", results, save=options.save)
    sys.exit(not exact)


if __name__ == "__main__":
    main()
