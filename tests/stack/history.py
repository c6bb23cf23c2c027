"""Hours of metrics from before the tests, for rules that look back: real series, written into Prometheus' folder.

A profiler's own page for Prometheus is taken once, and its counts are laid out over time as if every minute had been
like the first. `promtool` makes blocks of that, and then evaluates a recording rule over them.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from otel_brick import BrickProfiler
from tests.stack.engine import BRICKS_OF_LAYER
from tests.stack.processes import Binaries
from tests.stack.stack import CONFIGS, PrometheusServer

LONG_RUNNING, GONE = "engine", "engine-that-ended"
"""Services: one that was fast until 31 minutes ago and is there again now, one that ended 20 minutes ago."""
BEGAN_MINUTES = 180
ENDED_MINUTES = {LONG_RUNNING: 31, GONE: 20}
STEPS_PER_MINUTE = 60


def write_history(binaries: Binaries, prometheus: PrometheusServer) -> None:
    """Put the metrics of both services into the storage of a Prometheus that has not started yet."""
    now = int(time.time())
    text = prometheus.data.with_name("history.txt")
    text.write_text("\n".join([*_lines(now), "# EOF\n"]), encoding="utf-8")
    run_promtool(binaries, "tsdb", "create-blocks-from", "openmetrics", str(text), str(prometheus.data))


def evaluate_history(binaries: Binaries, prometheus: PrometheusServer) -> None:
    """Have the recording rules evaluated over that time; Prometheus finds the results within a minute."""
    now = int(time.time())
    run_promtool(
        binaries,
        "tsdb",
        "create-blocks-from",
        "rules",
        f"--start={now - 60 * (BEGAN_MINUTES - 30)}",
        f"--end={now - 60 * ENDED_MINUTES[LONG_RUNNING]}",
        f"--url=http://{prometheus.address}",
        f"--output-dir={prometheus.data}",
        str(CONFIGS / "rules" / "otel_brick.yml"),
    )


def _lines(now: int) -> list[str]:
    """The page in the OpenMetrics format, each sample once a minute."""
    profiler = BrickProfiler.enabled()
    for _ in range(STEPS_PER_MINUTE):
        with profiler.step(phase="decode", tokens=1):
            for name in BRICKS_OF_LAYER:
                with profiler.brick(name, elements=64, bytes_read=1024):
                    pass
    lines: list[str] = []
    for family in profiler.prometheus_collector().collect():
        if family.type not in ("counter", "histogram"):
            continue
        lines.append(f"# TYPE {family.name} {family.type}")
        for service, ended in ENDED_MINUTES.items():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = {**sample.labels, "job": service, "instance": "history"}
                text = ",".join(f'{key}="{value}"' for key, value in labels.items())
                lines += [
                    f"{sample.name}{{{text}}} {sample.value * (1 + minute)} {now - 60 * (BEGAN_MINUTES - minute)}"
                    for minute in range(BEGAN_MINUTES - ended)
                ]
    profiler.shutdown()
    return lines


def run_promtool(binaries: Binaries, *arguments: str, folder: Path | None = None) -> str:
    """Run promtool, which has to succeed, and give what it prints."""
    finished = subprocess.run(
        [binaries["promtool"], *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout
