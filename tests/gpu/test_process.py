"""Programs that end, fork or break while the GPU works for them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAD = """
from tests.gpu.machine import open_gpu, standin
device = open_gpu()
from tests.gpu.spin import HEAD, ONE, Spins
from cuda.core import ObjectCode, launch
from otel_brick import BrickId, BrickProfiler, TimingSource
stream = device.create_stream()
spins = Spins(device, standin())
profiler = BrickProfiler.enabled(stream=stream)
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


pytestmark = pytest.mark.usefixtures("gpu")


def test_a_program_may_end_with_work_pending() -> None:
    done = run(
        """
        with profiler.step(), profiler.brick(BrickId.LmHead):
            spins(stream, 200_000)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_may_end_inside_a_step_by_an_exception() -> None:
    done = run(
        """
        with profiler.step(), profiler.brick(BrickId.LmHead):
            spins(stream, 200_000)
            raise SystemExit(3)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_child_of_a_fork_has_host_times_and_ends_normally_and_the_parent_goes_on() -> None:
    done = run(
        """
        import os
        with profiler.step(), profiler.brick(BrickId.LmHead):
            spins(stream, 1_000)
        child = os.fork()
        if not child:
            with profiler.step(), profiler.brick(BrickId.RmsNorm):
                pass
            profiler.finalize()
            print("child", profiler.brick_stats(BrickId.RmsNorm).timing_source is TimingSource.Host, flush=True)
            raise SystemExit
        print("ended", os.waitpid(child, 0)[1])
        with profiler.step(), profiler.brick(BrickId.RmsNorm):
            spins(stream, 1_000)
        profiler.finalize()
        print("parent", profiler.brick_stats(BrickId.RmsNorm).timing_source is TimingSource.CudaEvent)
        """
    )
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == ["child True", "ended 0", "parent True"]


def test_the_default_stream_is_the_threads_own_where_cuda_python_is_told_so() -> None:
    done = run(
        """
        plain = BrickProfiler.enabled(stream=device.default_stream)
        with plain.step():
            spins(device.default_stream, 20_000)
            with plain.brick(BrickId.LmHead):
                spin = spins(device.default_stream, 1_000)
        plain.finalize()
        stats = plain.brick_stats(BrickId.LmHead)
        print(stats.timing_source is TimingSource.CudaEvent, -2_000 <= stats.total_ns - spin.spent_ns <= 40_000)
        print(int(device.default_stream.handle))
        """,
        CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1",
    )
    assert (done.stdout.split(), done.stderr) == (["True", "True", "2"], "")


@pytest.mark.usefixtures("real")
def test_a_kernel_that_breaks_the_context_is_the_programs_error_and_nothing_of_ours_raises_or_hangs() -> None:
    done = run(
        """
        trap = ObjectCode.from_ptx((HEAD + ".visible .entry broken() { trap; }").encode()).get_kernel("broken")
        with profiler.step(), profiler.brick(BrickId.LmHead):
            spins(stream, 1_000)
        profiler.finalize()
        with profiler.step(), profiler.brick(BrickId.RmsNorm):
            launch(stream, ONE, trap)
        profiler.finalize()
        for _ in range(3):
            with profiler.step(), profiler.brick(BrickId.RmsNorm):
                pass
            profiler.finalize()
        print(profiler.brick_stats(BrickId.LmHead).timing_source is TimingSource.CudaEvent)
        print(profiler.brick_stats(BrickId.RmsNorm).count, profiler.losses()["device_error"] > 0)
        try:
            stream.sync()
        except Exception as error:
            print(type(error).__name__)
        """
    )
    assert done.stdout.splitlines() == ["True", "4 True", "CUDAError"], done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
