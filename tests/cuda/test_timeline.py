"""Device times through the real cuda-python: what scopes, deferred rows and steps say of work on streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from cuda.core import PER_THREAD_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

from otel_brick import BrickId, BrickProfiler, SyncMode, TimingSource
from otel_brick.testing import InMemoryTraces

from .standin import Driver

MS, US = 1_000_000, 1_000
ONE = LaunchConfig(grid=1, block=32)


def test_ten_kernels_of_a_millisecond_launched_6_us_apart_take_ten_times_a_millisecond_each_in_its_brick(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(phase="decode", tokens=1):
        for _ in range(10):
            with profiled.brick(BrickId.QkvProjection):
                launch(stream, ONE, gemv)
                driver.advance(6 * US)
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.min_ns, stats.max_ns, stats.total_ns) == (10, MS, MS, 10 * MS)
    assert stats.timing_source is TimingSource.CudaEvent
    assert profiled.total_ns() == 10 * MS


def test_ten_kernels_recorded_before_their_launch_with_record_deferred_take_a_millisecond_each(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        for _ in range(10):
            profiled.record_deferred(BrickId.QkvProjection, profiled.elapsed_ns(), 1)
            launch(stream, ONE, gemv)
            driver.advance(6 * US)
        assert profiled.pending_count() == 10
        profiled.finalize()
        assert not profiled.has_pending()
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.min_ns, stats.max_ns, stats.total_ns) == (10, MS, MS, 10 * MS)


def test_ten_kernels_recorded_after_their_launch_with_record_deferred_take_a_millisecond_each(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        for _ in range(10):
            start = profiled.elapsed_ns()
            launch(stream, ONE, gemv)
            driver.advance(6 * US)
            profiled.record_deferred(BrickId.QkvProjection, start, 1)
        profiled.finalize()
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.min_ns, stats.max_ns, stats.total_ns) == (10, MS, MS, 10 * MS)


def test_a_brick_of_100_us_after_40_us_of_work_outside_bricks_reads_100_us(
    stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    before, inside = kernel("embed", duration_ns=40 * US), kernel("rms_norm", duration_ns=100 * US)
    with profiled.step():
        launch(stream, ONE, before)
        with profiled.brick(BrickId.RmsNorm):
            launch(stream, ONE, inside)
    profiled.finalize()
    assert profiled.brick_stats(BrickId.RmsNorm).total_ns == 100 * US


def test_a_brick_on_a_stream_of_its_own_reads_the_time_of_that_stream(
    device: Device, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    other = device.create_stream()
    attention, busy = kernel("attention", duration_ns=250 * US), kernel("busy", duration_ns=5 * MS)
    with profiled.step():
        launch(stream, ONE, busy)
        with profiled.brick(BrickId.AttentionScore, stream=other):
            launch(other, ONE, attention)
    profiled.finalize()
    assert profiled.brick_stats(BrickId.AttentionScore).total_ns == 250 * US


def test_spans_of_a_deferred_step_leave_with_device_times_after_finalize_and_lie_in_each_other(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(phase="decode"):
        with profiled.layer(0):
            for _ in range(3):
                with profiled.brick(BrickId.QkvProjection):
                    launch(stream, ONE, gemv)
                    driver.advance(6 * US)
        assert traces.spans == []
    assert traces.spans == []
    profiled.finalize()
    profiled.flush()
    (step,) = traces.trees()
    (layer,) = step.children
    assert step.span.attributes["brick.timing.source"] == "cuda_event"
    assert [brick.span.end_time - brick.span.start_time for brick in layer.children] == [MS] * 3
    for parent in (step, layer):
        for child in parent.children:
            assert parent.span.start_time <= child.span.start_time <= child.span.end_time <= parent.span.end_time
    assert step.span.end_time - step.span.start_time >= 3 * MS
    assert "brick.timing.source" not in layer.children[0].span.attributes


@pytest.mark.parametrize("mode", [SyncMode.Immediate, SyncMode.PerLayer])
def test_modes_that_synchronise_wait_at_the_end_of_their_scope(
    mode: SyncMode, driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    profiled.set_sync_mode(mode)
    gemv = kernel("gemv", duration_ns=MS)
    elapsed: list[int] = []
    with profiled.step():
        begin = driver.now_ns
        with profiled.layer(0):
            for _ in range(2):
                with profiled.brick(BrickId.QkvProjection):
                    launch(stream, ONE, gemv)
                elapsed.append(driver.now_ns - begin)
        elapsed.append(driver.now_ns - begin)
    assert elapsed == ([MS, 2 * MS, 2 * MS] if mode is SyncMode.Immediate else [0, 0, 2 * MS])
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.min_ns, stats.max_ns, stats.timing_source) == (MS, MS, TimingSource.CudaEvent)


def test_without_a_sync_mode_nothing_is_recorded_on_the_stream_and_times_are_the_hosts(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    profiled.set_sync_mode(SyncMode.None_)
    gemv = kernel("gemv", duration_ns=MS)
    driver.clear_trace()
    with profiled.step(), profiled.brick(BrickId.QkvProjection):
        launch(stream, ONE, gemv)
        driver.advance(6 * US)
    assert driver.trace("cuEventRecord") == []
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.total_ns, stats.timing_source) == (6 * US, TimingSource.Host)


def test_a_stream_given_inside_an_open_step_begins_device_time_there(
    driver: Driver, stream: Stream, kernel: Any, traces: InMemoryTraces
) -> None:
    profiler = BrickProfiler.enabled(clock=driver.clock, tracer_provider=traces.provider, detail="all")
    gemv = kernel("gemv", duration_ns=MS)
    with profiler.step():
        with profiler.brick("Before"):
            driver.advance(3 * US)
        with profiler.brick("On stream", stream=stream):
            launch(stream, ONE, gemv)
    profiler.finalize()
    found = {brick.name: (brick.total_ns, brick.timing_source) for brick in profiler.all_brick_stats()}
    assert found == {"Before": (3 * US, TimingSource.Host), "On stream": (MS, TimingSource.CudaEvent)}
    profiler.shutdown(1.0)


def test_a_reset_after_warming_up_forgets_steps_that_the_device_is_still_at(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(), profiled.brick("WarmUp"):
        launch(stream, ONE, gemv)
    profiled.finalize(wait=False)
    driver.advance(2 * MS)
    profiled.reset()
    with profiled.step(), profiled.brick("Real"):
        launch(stream, ONE, gemv)
    profiled.finalize()
    assert (profiled.brick_names(), profiled.step_count()) == (["Real"], 1)


def test_finalize_with_an_end_is_launch_spacing_and_says_so(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step():
        for _ in range(10):
            profiled.record_deferred(BrickId.QkvProjection, profiled.elapsed_ns(), 1)
            launch(stream, ONE, gemv)
            driver.advance(6 * US)
        profiled.finalize(profiled.elapsed_ns() + 10 * MS)
    profiled.finalize()
    stats = profiled.brick_stats(BrickId.QkvProjection)
    assert (stats.count, stats.launch_spacing, stats.timing_source) == (10, 10, TimingSource.Host)
    assert (stats.min_ns, stats.max_ns) == (6 * US, 6 * US + 10 * MS)
    assert "times: 10 launch spacing (no device time)" in profiled.summary()


def test_with_a_common_end_deferred_bricks_overlap_as_in_the_reference(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    for number in range(10):
        profiled.record_deferred(BrickId.QkvProjection, number * MS, 1)
    profiled.finalize(10 * MS, attribution="common_end")
    assert profiled.brick_stats(BrickId.QkvProjection).total_ns == 55 * MS


def test_deferred_bricks_are_right_on_the_real_clock_whether_recorded_before_or_after_their_launch(
    real_time_driver: Driver, stream: Stream, kernel: Any
) -> None:
    profiler = BrickProfiler.enabled(stream=stream)
    durations = {"A": 3 * MS, "B": MS, "C": 2 * MS}
    kernels = {name: kernel(name, duration_ns=duration) for name, duration in durations.items()}
    # With work before them, no time is measured in which the stream waits for the host.
    launch(stream, ONE, kernel("before", duration_ns=200 * MS))
    for name, launched in kernels.items():
        start = profiler.elapsed_ns()
        launch(stream, ONE, launched)
        profiler.record_deferred_dynamic(f"{name} after", start)
    for name, launched in kernels.items():
        profiler.record_deferred_dynamic(f"{name} before", profiler.elapsed_ns())
        launch(stream, ONE, launched)
    profiler.finalize()
    for brick in profiler.all_brick_stats():
        assert brick.total_ns == pytest.approx(durations[brick.name[0]], abs=100 * US), brick.name
    profiler.shutdown(1.0)


def test_a_deferred_brick_on_a_stream_of_its_own_begins_at_the_mark_on_that_stream(
    driver: Driver, device: Device, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    other = device.create_stream()
    busy, attention = kernel("busy", duration_ns=9 * MS), kernel("attention", duration_ns=250 * US)
    launch(stream, ONE, busy)
    start = profiled.elapsed_ns(stream=other)
    launch(other, ONE, attention)
    driver.advance(US)
    profiled.record_deferred(BrickId.AttentionScore, start, 1, stream=other)
    profiled.finalize()
    assert profiled.brick_stats(BrickId.AttentionScore).total_ns == 250 * US


def test_starts_that_nobody_records_do_not_use_up_events(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    for _ in range(300):
        driver.advance(1)
        profiled.elapsed_ns()
    before = driver.live()["events"]
    for _ in range(3000):
        driver.advance(1)
        profiled.elapsed_ns()
    assert driver.live()["events"] <= before


def test_nested_steps_and_steps_on_streams_side_by_side_count_their_whole_time(
    driver: Driver, stream: Stream, kernel: Any, profiled: BrickProfiler
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(phase="prefill"), profiled.brick("Outer"):
        launch(stream, ONE, gemv)
        with profiled.step(phase="decode", tokens=1), profiled.brick("Inner"):
            launch(stream, ONE, gemv)
    profiled.finalize()
    assert profiled.wall_ns() == 2 * MS + MS
    assert profiled.phase_tokens_per_sec("decode") == pytest.approx(1000)


def test_threads_that_come_and_go_do_not_use_up_the_streams(
    driver: Driver, device: Device, kernel: Any, traces: InMemoryTraces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otel_brick.gpu.cuda.MAX_STREAMS", 16)
    profiler = BrickProfiler.enabled(
        stream=PER_THREAD_DEFAULT_STREAM, clock=driver.clock, tracer_provider=traces.provider
    )
    gemv = kernel("gemv", duration_ns=MS)

    def work() -> None:
        device.set_current()
        with profiler.step(), profiler.brick("B"):
            launch(PER_THREAD_DEFAULT_STREAM, ONE, gemv)
        profiler.finalize()
        profiler.step_count()

    for _ in range(100):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    found = profiler.stats("B")
    assert found is not None
    assert (found.count, found.total_ns, found.timing_source) == (100, 100 * MS, TimingSource.CudaEvent)
    profiler.shutdown(1.0)
