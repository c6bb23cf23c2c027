"""What device time makes of captures, faults, other clocks, forks and ends of programs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

from otel_brick import BrickId, BrickProfiler, TimingSource
from otel_brick.testing import InMemoryTraces

from .standin import NEVER_NS, Driver

MS, US, S = 1_000_000, 1_000, 1_000_000_000
ONE = LaunchConfig(grid=1, block=32)
ROOT = Path(__file__).parents[2]
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def begin_capture(stream: Stream) -> None:
    (error,) = cuda.cuStreamBeginCapture(stream.handle, GLOBAL)
    assert error == cuda.CUresult.CUDA_SUCCESS


def end_capture(stream: Stream) -> Any:
    error, graph = cuda.cuStreamEndCapture(stream.handle)
    assert error == cuda.CUresult.CUDA_SUCCESS, error
    return graph


def test_a_capture_of_the_users_survives_bricks_on_the_capturing_stream(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        begin_capture(stream)
        with profiled.layer(0), profiled.brick(BrickId.QkvProjection):
            launch(stream, ONE, gemv)
            driver.advance(6 * US)
            profiled.finalize()
        end_capture(stream)
    profiled.finalize()
    profiled.flush()
    (step,) = traces.trees()
    brick = step.children[0].children[0].span
    assert brick.attributes["brick.cuda.graph.captured"] is True
    assert brick.attributes["brick.timing.source"] == "host"
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.total_ns, stats.timing_source) == (6 * US, TimingSource.Host)


def test_a_capture_survives_reads_and_the_worker_on_other_threads(
    driver: Driver, device: Device, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    captured = device.create_stream()
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(), profiled.brick(BrickId.QkvProjection):
        launch(stream, ONE, gemv)
    driver.advance(2 * MS)
    begin_capture(captured)
    reader = threading.Thread(target=lambda: (profiled.flush(5.0), profiled.summary()))
    reader.start()
    reader.join()
    launch(captured, ONE, gemv)
    end_capture(captured)
    assert profiled.brick_stats(BrickId.QkvProjection).total_ns == MS


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventQuery", "cuEventElapsedTime", "cuStreamIsCapturing"])
def test_a_failing_call_of_the_driver_leaves_host_times_that_say_so(
    function: str, driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    driver.fail(function, 999, always=True)
    with profiled.step(), profiled.brick(BrickId.QkvProjection):
        launch(stream, ONE, gemv)
        driver.advance(7 * US)
    driver.advance(MS)
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert stats.count == 1
    assert profiled.losses()["device_error"] > 0
    if stats.timing_source is not TimingSource.CudaEvent:
        assert (stats.total_ns, stats.timing_source) == (7 * US, TimingSource.Host)
    driver.succeed(function)
    with profiled.step(), profiled.brick(BrickId.LmHead):
        launch(stream, ONE, gemv)
    profiled.finalize()
    assert profiled.brick_stats(BrickId.LmHead).total_ns == MS


def test_over_an_hour_of_drift_device_times_stay_within_the_error_that_they_say(
    driver: Driver, stream: Stream, kernel: Any, traces: InMemoryTraces
) -> None:
    profiler = BrickProfiler.enabled(stream=stream, clock=driver.clock, tracer_provider=traces.provider, detail="all")
    gemv = kernel("gemv", duration_ns=MS)
    driver.set_device_clock(ppm=40.0)
    worst = 0.0
    for _ in range(360):
        with profiler.step():
            with profiler.brick(BrickId.QkvProjection):
                begin = driver.now_ns
                launch(stream, ONE, gemv)
        profiler.finalize()
        profiler.flush()
        (step,) = traces.trees()
        brick = step.children[0].span
        off = abs(brick.start_time - driver.clock.unix() + driver.now_ns - begin)
        error_ns = step.span.attributes["brick.timing.error"] * 1e9
        assert off <= error_ns
        worst = max(worst, error_ns)
        traces.clear()
        driver.advance(10 * S)
    assert worst < 10 * US
    assert profiler.losses()["device_error"] == 0
    profiler.shutdown(1.0)


def test_two_overlapping_streams_have_the_right_sum_and_the_right_union(
    driver: Driver, device: Device, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    other = device.create_stream()
    gemv = kernel("gemv", duration_ns=4 * MS)
    with profiled.step():
        with profiled.brick(BrickId.QkvProjection):
            launch(stream, ONE, gemv)
        driver.advance(MS)
        with profiled.brick(BrickId.AttentionScore, stream=other):
            launch(other, ONE, gemv)
    profiled.finalize()
    assert profiled.total_ns() == 8 * MS
    assert profiled.union_ns() == 5 * MS
    assert profiled.coverage() is not None
    assert profiled.coverage() <= 1
    assert sum(brick.exclusive_ns for brick in profiled.all_brick_stats()) <= profiled.total_ns()


def test_events_are_used_again_and_none_is_destroyed_or_recorded_while_it_is_pending(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=10 * US)

    def steps(count: int) -> None:
        for _ in range(count):
            with profiled.step():
                for _ in range(20):
                    with profiled.brick(BrickId.QkvProjection):
                        launch(stream, ONE, gemv)
            profiled.finalize()
            profiled.step_count()

    steps(2)
    with driver.no_leaks():
        steps(50)
    assert (driver.pending_destroyed, driver.pending_recorded) == (0, 0)
    assert profiled.losses()["device_error"] == 0


def test_scopes_that_close_late_give_their_events_back(driver: Driver, stream: Stream, profiled: BrickProfiler) -> None:
    def late(count: int) -> None:
        for _ in range(count):
            step = profiled.step()
            step.__enter__()
            brick = profiled.brick(BrickId.QkvProjection)
            brick.__enter__()
            step.__exit__(None, None, None)
            brick.__exit__(None, None, None)
            profiled.finalize()
            profiled.step_count()

    late(3)
    with driver.no_leaks():
        late(50)


def test_a_step_whose_device_work_never_ends_leaves_with_host_times_after_the_limit(
    driver: Driver, device: Device, stream: Stream, kernel: Any, traces: InMemoryTraces
) -> None:
    profiler = BrickProfiler.enabled(stream=stream, clock=driver.clock, tracer_provider=traces.provider, detail="all")
    endless = kernel("endless", duration_ns=NEVER_NS)
    with profiler.step(), profiler.brick(BrickId.QkvProjection):
        launch(stream, ONE, endless)
        driver.advance(5 * US)
    profiler.finalize(wait=False)
    assert profiler._recorder.device.holds()
    driver.advance(31 * S)
    profiler.finalize(wait=False)
    profiler.flush()
    (step,) = traces.trees()
    assert step.span.attributes["brick.timing.source"] == "host"
    assert profiler.brick_stats(BrickId.QkvProjection).total_ns == 5 * US
    profiler.shutdown(1.0)


def run(program: str, *, standin: bool = True) -> subprocess.CompletedProcess[str]:
    head = "from tests.cuda.standin import Driver\ndriver = Driver.load()\n" if standin else ""
    return subprocess.run(
        # Newer Pythons warn of every fork beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", head + textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


USE = """
from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch
from otel_brick import BrickProfiler, BrickId
device = Device(0); device.set_current()
stream = device.create_stream()
profiler = BrickProfiler.enabled(stream=stream)
gemv = driver.kernel("gemv", duration_ns={duration})
with profiler.step(), profiler.brick(BrickId.LmHead):
    launch(stream, LaunchConfig(grid=1, block=32), gemv)
"""


def test_a_program_may_end_with_work_pending() -> None:
    done = run(USE.format(duration=20_000_000))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_child_of_a_fork_after_a_step_has_host_times_and_ends_normally() -> None:
    done = run(
        USE.format(duration=1000)
        + """
import os
child = os.fork()
if not child:
    with profiler.step(), profiler.brick(BrickId.RmsNorm):
        pass
    print(int(profiler.brick_stats(BrickId.RmsNorm).timing_source), profiler.losses()["device_error"])
    raise SystemExit
print("child", os.waitpid(child, 0)[1])
print(int(profiler.brick_stats(BrickId.LmHead).timing_source))
"""
    )
    assert done.stderr == ""
    assert sorted(done.stdout.split("\n")) == ["", "0 0", "2", "child 0"]


def test_without_a_driver_everything_has_host_times_and_one_debug_line_says_so() -> None:
    done = run(
        """
        import logging
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
        from otel_brick import BrickProfiler, BrickId
        profilers = [BrickProfiler.enabled(stream=7) for _ in range(3)]
        for profiler in profilers:
            with profiler.step(), profiler.brick(BrickId.LmHead, stream=9):
                pass
            profiler.finalize()
            assert profiler.brick_stats(BrickId.LmHead).timing_source == 0
        """,
        standin=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DEBUG otel_brick no CUDA driver") == 1
    assert "WARNING" not in done.stderr


def test_a_device_clock_that_reads_3_ms_behind_leaves_children_inside_their_parents(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    gemv = kernel("gemv", duration_ns=MS)

    def step() -> None:
        with profiled.step(), profiled.layer(0):
            for _ in range(2):
                with profiled.brick(BrickId.QkvProjection):
                    launch(stream, ONE, gemv)
        profiled.finalize()
        profiled.step_count()

    step()
    driver.set_device_clock(jump_ns=-3 * MS)
    driver.advance(10 * MS)
    begin = driver.clock.unix()
    traces.clear()
    step()
    profiled.flush()
    root = traces.trees()[-1]
    (layer,) = root.children
    assert root.span.start_time == begin
    for parent in (root, layer):
        for child in parent.children:
            assert parent.span.start_time <= child.span.start_time <= child.span.end_time <= parent.span.end_time
    assert [brick.span.end_time - brick.span.start_time for brick in layer.children] == [MS, MS]
    assert root.span.attributes["brick.timing.error"] >= 3e-3


def test_threads_on_the_per_thread_default_stream_are_told_apart(
    driver: Driver, device: Device, kernel: Any, traces: InMemoryTraces
) -> None:
    profiler = BrickProfiler.enabled(
        stream=PER_THREAD_DEFAULT_STREAM, clock=driver.clock, tracer_provider=traces.provider, detail="all"
    )
    durations = {f"gemv{number}": (number + 1) * MS for number in range(3)}
    kernels = {name: kernel(name, duration_ns=duration) for name, duration in durations.items()}

    def work(name: str) -> None:
        device.set_current()
        with profiler.step(), profiler.brick(name):
            launch(PER_THREAD_DEFAULT_STREAM, ONE, kernels[name])

    threads = [threading.Thread(target=work, args=(name,)) for name in durations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiler.finalize()
    assert {brick.name: brick.total_ns for brick in profiler.all_brick_stats()} == durations
    profiler.shutdown(1.0)


def test_a_brick_on_the_legacy_stream_is_measured_under_both_of_its_names(
    driver: Driver, device: Device, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    for name, stream in (("zero", 0), ("one", LEGACY_DEFAULT_STREAM)):
        with profiled.step(), profiled.brick(name, stream=stream):
            launch(LEGACY_DEFAULT_STREAM, ONE, gemv)
    profiled.finalize()
    assert {brick.name: brick.total_ns for brick in profiled.all_brick_stats()} == {"zero": MS, "one": MS}


def test_a_long_step_hands_rows_over_before_it_ends_with_their_device_times(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=2 * US)
    driver.set_tracing(False)
    with profiled.step():
        with profiled.layer(0), profiled.brick("Outer"):
            for number in range(30_000):
                with profiled.brick(BrickId.QkvProjection):
                    launch(stream, ONE, gemv)
                if number % 1000 == 0:
                    profiled.finalize()
            for _ in range(40_000):
                with profiled.brick(BrickId.LmHead):
                    launch(stream, ONE, gemv)
                driver.advance(2 * US)
    profiled.finalize()
    outer = profiled.stats("Outer")
    assert outer is not None
    # A difference over so long a time is a float32 count of milliseconds.
    assert outer.total_ns == pytest.approx(70_000 * 2 * US, abs=16)
    known = [profiled.brick_stats(brick) for brick in (BrickId.QkvProjection, BrickId.LmHead)]
    assert sum(brick.count for brick in known) == 70_000
    assert all(2 * US - 2 <= brick.min_ns <= brick.max_ns <= 2 * US + 2 for brick in known)
    assert profiled.losses()["device_error"] == 0


def test_events_are_bounded_and_rows_beyond_the_bound_are_counted(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otel_brick.gpu.cuda.MAX_EVENTS", 40)
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        for _ in range(100):
            with profiled.brick(BrickId.QkvProjection):
                launch(stream, ONE, gemv)
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.max_ns) == (100, MS)
    assert profiled.losses()["device_error"] >= 200 - 40


def test_outside_steps_bricks_have_device_times_too(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    for _ in range(3):
        with profiled.brick("Loose"):
            launch(stream, ONE, gemv)
            driver.advance(5 * US)
    profiled.finalize()
    loose = profiled.stats("Loose")
    assert loose is not None
    assert (loose.count, loose.min_ns, loose.max_ns) == (3, MS, MS)


def test_host_rows_inside_device_rows_keep_their_durations_and_lie_inside(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        for _ in range(2):
            with profiled.brick("Outer"):
                with profiled.kernel("gemv", grid=1, block=32):
                    launch(stream, ONE, gemv)
                    driver.advance(7 * US)
    profiled.finalize()
    profiled.flush()
    (root,) = traces.trees()
    for outer in root.children:
        (by_hand,) = outer.children
        assert outer.span.start_time <= by_hand.span.start_time <= by_hand.span.end_time <= outer.span.end_time
        assert by_hand.span.end_time - by_hand.span.start_time == 7 * US
        assert by_hand.span.attributes["brick.timing.source"] == "host"
        assert outer.span.end_time - outer.span.start_time == MS


def test_the_code_of_the_page_on_device_time_runs_from_top_to_bottom() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "times: 32 of CUDA events" in done.stdout
