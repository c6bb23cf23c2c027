"""What it costs the launching thread that `cuda.core.launch` is recorded.

Method
------
The driver is the stand-in of `tests/cuda`, whose kernels do nothing: what is compared is the work of Python and of
cuda.core, and on a real driver, where a launch takes longer, the ratios are smaller. Each round launches a kernel
without arguments 1,000 times inside one brick of an open step, on one stream with one `LaunchConfig`, and times the
loop. The peer is the original `launch`, called in the same place. After each step everything is flushed before
anything else is timed. The ratio is of the whole call; what recording adds is the ratio less 1.

"4 arguments" is the same with four arguments, against the original with the same four. "new LaunchConfig" makes an
equal configuration for each launch, on both sides. "kernel_events" marks each launch with two timed events of the
stand-in driver.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]  # the harness, and the driver

import harness  # noqa: E402
import numpy as np  # noqa: E402
from harness import Candidate  # noqa: E402

from otel_brick import BrickProfiler  # noqa: E402
from otel_brick.gpu.capture import Capture  # noqa: E402
from otel_brick.gpu.launches import launch_recorder  # noqa: E402
from tests.cuda.standin import Driver  # noqa: E402

LAUNCHES = 1_000
ARGUMENTS = (1, 2, np.float32(3.0), 4)
PARAMETERS = ("u64", "u64", "f32", "u32")

Launch = Callable[..., Any]


def repeat(launch: Launch, stream: Any, config: Any, kernel: Any) -> None:
    for _ in range(LAUNCHES):
        launch(stream, config, kernel)


def repeat_with_arguments(launch: Launch, stream: Any, config: Any, kernel: Any) -> None:
    a, b, c, d = ARGUMENTS
    for _ in range(LAUNCHES):
        launch(stream, config, kernel, a, b, c, d)


def repeat_with_new_config(launch: Launch, stream: Any, make: Callable[[], Any], kernel: Any) -> None:
    for _ in range(LAUNCHES):
        launch(stream, make(), kernel)


def main() -> None:
    given = harness.arguments(__doc__ or "")
    driver = Driver.load()
    driver.set_tracing(False)
    from cuda import core

    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    config = core.LaunchConfig(grid=(4, 2, 1), block=256)
    bare = driver.kernel("bare", duration_ns=0)
    with_arguments = driver.kernel("with_arguments", duration_ns=0, parameters=PARAMETERS)
    original = core.launch
    recorded = launch_recorder(original, Capture(None), core)
    profilers = {events: BrickProfiler.enabled(kernel_events=events, detail="none") for events in ("off", "all")}
    profilers["disabled"] = BrickProfiler()

    def timed(profiler: BrickProfiler, loop: Callable[..., None], *arguments: Any) -> Callable[[], float]:
        def run() -> float:
            with profiler.step(phase="decode"), profiler.brick("Launches"):
                begin = time.perf_counter_ns()
                loop(*arguments)
                duration = (time.perf_counter_ns() - begin) / LAUNCHES
            profiler.flush()
            stream.sync()
            return duration

        return run

    off, everything = profilers["off"], profilers["all"]

    def make_config() -> Any:
        return core.LaunchConfig(grid=(4, 2, 1), block=256)

    table = harness.compare(
        "one launch",
        [
            Candidate("launch", timed(off, repeat, original, stream, config, bare)),
            Candidate("recorded", timed(off, repeat, recorded, stream, config, bare), "launch", 2.5),
            Candidate("kernel_events=all", timed(everything, repeat, recorded, stream, config, bare), "launch"),
            Candidate(
                "profiler disabled", timed(profilers["disabled"], repeat, recorded, stream, config, bare), "launch"
            ),
            Candidate(
                "launch, 4 arguments", timed(off, repeat_with_arguments, original, stream, config, with_arguments)
            ),
            Candidate(
                "recorded, 4 arguments",
                timed(off, repeat_with_arguments, recorded, stream, config, with_arguments),
                "launch, 4 arguments",
            ),
            Candidate(
                "launch, new LaunchConfig", timed(off, repeat_with_new_config, original, stream, make_config, bare)
            ),
            Candidate(
                "recorded, new LaunchConfig",
                timed(off, repeat_with_new_config, recorded, stream, make_config, bare),
                "launch, new LaunchConfig",
            ),
        ],
        rounds=max(3, int(60 * given.scale)),
    )
    harness.show(table)
    for name in ("recorded", "kernel_events=all"):
        row = table.row(name)
        assert row.ratio is not None
        print(f"{name}: adds {row.ratio - 1:.2f} x a launch")
    harness.finish("launch", (__doc__ or "").partition("------")[2], {"launch": table}, save=given.save)
    for profiler in profilers.values():
        profiler.shutdown()


if __name__ == "__main__":
    main()
