"""What device times say of kernels whose duration is known."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Device, EventOptions, Stream

from otel_brick import BrickId, BrickProfiler, SyncMode, TimingSource
from otel_brick.testing import InMemoryTraces

from .spin import MS, US, S, Spins, assert_near

if TYPE_CHECKING:
    from tests.cuda.standin import Driver

Record = Callable[[str, object], None]
Profile = Callable[..., BrickProfiler]
CLOCKS_NS = 50 * US
"""How far `time.time_ns` and the clock of spans may be apart: another process may run between two readings."""


@pytest.mark.parametrize("us", [100, 1_000])
def test_bricks_around_queued_kernels_read_the_time_of_their_kernel(
    us: int, stream: Stream, spins: Spins, profiled: BrickProfiler, traces: InMemoryTraces, record_property: Record
) -> None:
    with profiled.step():
        spins(stream, 20_000)  # while this runs, the rest is queued
        launched = []
        for _ in range(50):
            with profiled.brick("Spin"):
                launched.append(spins(stream, us))
    profiled.finalize()
    profiled.flush()
    (step,) = traces.trees()
    measured = [brick.duration_ns for brick in step.children]
    excess = [own - spin.spent_ns for own, spin in zip(measured, launched, strict=True)]
    record_property("excess_ns", {"median": statistics.median(excess), "min": min(excess), "max": max(excess)})
    stats = profiled.stats("Spin")
    assert stats is not None and stats.timing_source is TimingSource.CudaEvent and stats.count == 50
    assert_near(statistics.median(measured), statistics.median(spin.spent_ns for spin in launched))
    assert min(excess) >= -2 * US


def test_a_brick_after_work_outside_bricks_does_not_read_that_work(
    stream: Stream, spins: Spins, profiled: BrickProfiler, record_property: Record
) -> None:
    with profiled.step():
        spins(stream, 20_000)
        with profiled.brick(BrickId.RmsNorm):
            inside = spins(stream, 100)
    profiled.finalize()
    record_property("measured_ns", profiled.brick_stats(BrickId.RmsNorm).total_ns)
    assert_near(profiled.brick_stats(BrickId.RmsNorm).total_ns, inside.spent_ns)


def test_an_idle_stream_adds_the_launch_of_the_first_kernel_and_not_more(
    stream: Stream, spins: Spins, profiled: BrickProfiler, record_property: Record
) -> None:
    for _ in range(20):
        with profiled.step(), profiled.brick("Spin"):
            spin = spins(stream, 100)
        profiled.finalize()
    stats = profiled.stats("Spin")
    assert stats is not None
    record_property("excess_ns", stats.min_ns - spin.spent_ns)
    assert -2 * US <= stats.min_ns - spin.spent_ns <= 60 * US


def test_a_brick_on_a_stream_of_its_own_reads_the_time_of_that_stream(
    device: Device, stream: Stream, spins: Spins, profiled: BrickProfiler
) -> None:
    other = device.create_stream()
    with profiled.step():
        spins(stream, 20_000)
        spins(other, 20_000)
        with profiled.brick(BrickId.AttentionScore, stream=other):
            inside = spins(other, 250)
    profiled.finalize()
    assert_near(profiled.brick_stats(BrickId.AttentionScore).total_ns, inside.spent_ns)


def test_two_streams_side_by_side_have_the_right_sum_and_union(
    device: Device, stream: Stream, spins: Spins, profiled: BrickProfiler, record_property: Record
) -> None:
    other = device.create_stream()
    with profiled.step():
        with profiled.brick("One"):
            first = spins(stream, 20_000)
        with profiled.brick("Two", stream=other):
            second = spins(other, 20_000)
    profiled.finalize()
    total, union = profiled.total_ns(), profiled.union_ns()
    record_property("total_ns", total)
    record_property("union_ns", union)
    assert_near(total, first.spent_ns + second.spent_ns)
    assert 20 * MS <= union <= 25 * MS
    coverage = profiled.coverage()
    assert coverage is not None and coverage <= 1


@pytest.mark.parametrize("after", [False, True])
def test_rows_of_record_deferred_read_the_time_of_their_kernel(
    after: bool, stream: Stream, spins: Spins, profiled: BrickProfiler
) -> None:
    with profiled.step():
        launched = []
        for _ in range(10):
            start = profiled.elapsed_ns()
            if not after:
                profiled.record_deferred(BrickId.QkvProjection, start, 1)
            launched.append(spins(stream, 1_000))
            if after:
                profiled.record_deferred(BrickId.QkvProjection, start, 1)
        profiled.finalize()
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.timing_source) == (10, TimingSource.CudaEvent)
    assert_near(stats.min_ns, min(spin.spent_ns for spin in launched))
    assert stats.total_ns <= 1.03 * sum(spin.spent_ns for spin in launched) + 100 * US


@pytest.mark.parametrize("mode", [SyncMode.Immediate, SyncMode.PerLayer, SyncMode.Deferred])
def test_the_calling_thread_waits_where_its_mode_says(
    mode: SyncMode, stream: Stream, spins: Spins, profiled: BrickProfiler
) -> None:
    profiled.set_sync_mode(mode)
    begin = time.perf_counter_ns()
    with profiled.step():
        with profiled.layer(0):
            with profiled.brick("Spin"):
                spin = spins(stream, 20_000)
            after_brick = time.perf_counter_ns() - begin
        after_layer = time.perf_counter_ns() - begin
    assert (after_brick >= 20 * MS) is (mode is SyncMode.Immediate)
    assert (after_layer >= 20 * MS) is (mode is not SyncMode.Deferred)
    profiled.finalize()
    stats = profiled.stats("Spin")
    assert stats is not None and stats.timing_source is TimingSource.CudaEvent
    assert -2 * US <= stats.total_ns - spin.spent_ns <= 300 * US


def test_without_a_sync_mode_times_are_the_hosts(stream: Stream, spins: Spins, profiled: BrickProfiler) -> None:
    profiled.set_sync_mode(SyncMode.None_)
    with profiled.step(), profiled.brick("Spin"):
        spins(stream, 20_000)
    stats = profiled.stats("Spin")
    assert stats is not None and stats.timing_source is TimingSource.Host
    assert stats.total_ns < 20 * MS


def test_events_are_used_again(stream: Stream, spins: Spins, profiled: BrickProfiler, record_property: Record) -> None:
    def steps(count: int) -> int:
        for _ in range(count):
            with profiled.step():
                for _ in range(20):
                    with profiled.brick("Spin"):
                        spins(stream, 20)
            profiled.finalize()
            profiled.step_count()  # which counts what has ended, and so gives the events back
        timeline: Any = profiled._recorder.device.timeline
        return timeline._made

    made = steps(3)
    record_property("events", made)
    assert steps(100) == made
    assert profiled.losses()["device_error"] == 0


def test_for_20_seconds_device_times_lie_between_the_calls_of_the_host(
    stream: Stream,
    spins: Spins,
    profiled: BrickProfiler,
    traces: InMemoryTraces,
    standin: Driver | None,
    record_property: Record,
) -> None:
    deadline = time.monotonic() + (20 if standin is None else 3)
    early: list[float] = []
    late: list[float] = []
    errors: list[float] = []
    while time.monotonic() < deadline:
        with profiled.step():
            begin = time.time_ns()
            with profiled.brick("Spin"):
                spins(stream, 1_000)
        stream.sync()
        end = time.time_ns()
        profiled.finalize()
        profiled.flush()
        (step,) = traces.trees()
        (brick,) = step.children
        traces.clear()
        errors.append(step.attributes["brick.timing.error"] * 1e9)
        assert brick.span.start_time is not None and brick.span.end_time is not None
        early.append(brick.span.start_time - begin)
        late.append(end - brick.span.end_time)
        time.sleep(0.2)
    record_property("error_ns", {"median": statistics.median(errors), "max": max(errors)})
    record_property("start_after_call_ns", {"median": statistics.median(early), "min": min(early)})
    record_property("end_before_sync_ns", {"median": statistics.median(late), "min": min(late)})
    for error, first, last in zip(errors, early, late, strict=True):
        assert first >= -error - CLOCKS_NS
        assert last >= -error - CLOCKS_NS
    assert statistics.median(errors) < 200 * US
    assert statistics.median(late) < MS


def test_the_clock_of_the_gpu_runs_as_fast_as_that_of_the_host_within_50_ppm(
    stream: Stream, standin: Driver | None, record_property: Record
) -> None:
    def both() -> tuple[Any, int, int]:
        """An event, and the two host times that it lies between: the closest of ten."""
        found = []
        for _ in range(10):
            stream.sync()
            before = time.perf_counter_ns()
            event = stream.record(options=EventOptions(timing_enabled=True))
            event.sync()
            found.append((event, before, time.perf_counter_ns()))
        return min(found, key=lambda one: one[2] - one[1])

    first, *begin = both()
    time.sleep(20 if standin is None else 2)
    last, *end = both()
    device_ns = (last - first) * 1e6
    host_ns = (sum(end) - sum(begin)) / 2
    unsure_ns = (end[1] - end[0] + begin[1] - begin[0]) / 2 + 4 * US
    record_property("ppm", {"device_fast_by": 1e6 * (device_ns / host_ns - 1), "unsure_by": 1e6 * unsure_ns / host_ns})
    assert abs(device_ns - host_ns) <= 50e-6 * host_ns + unsure_ns


def test_finalize_waits_without_the_interpreter_lock(stream: Stream, spins: Spins, profiled: BrickProfiler) -> None:
    ticks: list[int] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.perf_counter_ns())

    thread = threading.Thread(target=tick)
    thread.start()
    with profiled.step(), profiled.brick("Spin"):
        spins(stream, 200_000)
    begin = time.perf_counter_ns()
    profiled.finalize()
    end = time.perf_counter_ns()
    ended.set()
    thread.join()
    assert end - begin >= 150 * MS
    assert sum(begin < at < end for at in ticks) >= 20


def test_elapsed_times_have_a_sign_and_span_streams(
    device: Device, stream: Stream, spins: Spins, record_property: Record
) -> None:
    timed = EventOptions(timing_enabled=True)
    other = device.create_stream()
    first = stream.record(options=timed)
    spin = spins(stream, 1_000)
    second = stream.record(options=timed)
    other.wait(second)
    third = other.record(options=timed)
    third.sync()
    forward, backward = (second - first) * 1e6, (first - second) * 1e6
    record_property("forward_ns", forward)
    record_property("backward_ns", backward)
    record_property("across_streams_ns", (third - first) * 1e6)
    assert (first - first) == 0
    assert -2 * US <= forward - spin.spent_ns <= 60 * US
    assert abs(forward + backward) <= US
    assert (third - first) * 1e6 >= forward - US


def test_threads_on_their_own_default_stream_are_told_apart(device: Device, spins: Spins, profile: Profile) -> None:
    profiler = profile(stream=PER_THREAD_DEFAULT_STREAM)
    durations = {"A": 1_000, "B": 4_000, "C": 20_000}

    def work(name: str) -> None:
        device.set_current()
        with profiler.step(), profiler.brick(name):
            spins(PER_THREAD_DEFAULT_STREAM, durations[name])

    threads = [threading.Thread(target=work, args=(name,)) for name in durations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiler.finalize()
    for name, us in durations.items():
        stats = profiler.stats(name)
        assert stats is not None and stats.timing_source is TimingSource.CudaEvent
        assert us * US - 2 * US <= stats.total_ns <= 1.03 * us * US + 500 * US


def test_the_legacy_stream_is_measured_under_both_of_its_names(stream: Stream, spins: Spins, profile: Profile) -> None:
    profiler = profile()
    with profiler.step():
        for name, given in (("zero", 0), ("one", LEGACY_DEFAULT_STREAM)):
            spins(LEGACY_DEFAULT_STREAM, 4_000)
            with profiler.brick(name, stream=given):
                spins(LEGACY_DEFAULT_STREAM, 250)
    profiler.finalize()
    for name in ("zero", "one"):
        stats = profiler.stats(name)
        assert stats is not None and stats.timing_source is TimingSource.CudaEvent
        assert_near(stats.total_ns, 250 * US)


def test_children_lie_in_their_parents_and_steps_in_the_order_of_their_work(
    stream: Stream, spins: Spins, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    for _ in range(5):
        with profiled.step():
            for index in range(3):
                with profiled.layer(index):
                    with profiled.brick("Outer"):
                        spins(stream, 20)
                        with profiled.brick("Inner"):
                            spins(stream, 100)
    profiled.finalize()
    profiled.flush()
    steps = traces.trees()
    assert len(steps) == 5

    def check(node: Any) -> None:
        for child in node.children:
            assert node.span.start_time <= child.span.start_time <= child.span.end_time <= node.span.end_time
            check(child)

    for step in steps:
        check(step)
    inner = [layer.children[0].children[0].span for step in steps for layer in step.children]
    assert all(before.end_time <= after.start_time + 2 * US for before, after in pairwise(inner))
    assert S > inner[-1].end_time - inner[0].start_time >= 15 * 120 * US - 20 * US
