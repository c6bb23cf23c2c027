"""What device time does beside taking times, where a review found it wrong: captures, leaks, threads, switches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

from otel_brick import BrickProfiler, TimingSource
from otel_brick.gpu.cuda import CudaTimeline
from otel_brick.testing import InMemoryTraces

from .standin import Driver

MS, US, S = 1_000_000, 1_000, 1_000_000_000
ONE = LaunchConfig(grid=1, block=32)
HOST, EVENT = TimingSource.Host, TimingSource.CudaEvent
Make = Callable[..., BrickProfiler]


@pytest.fixture
def make(loaded_driver: Driver, traces: InMemoryTraces) -> Iterator[Make]:
    """Makes profilers, on the real clock unless a test has the driver's."""
    made: list[BrickProfiler] = []

    def make(stream: Any = None, **settings: Any) -> BrickProfiler:
        made.append(BrickProfiler.enabled(stream=stream, tracer_provider=traces.provider, detail="all", **settings))
        return made[-1]

    yield make
    for profiler in made:
        profiler.shutdown(1.0)


@pytest.fixture
def profiled(driver: Driver, stream: Stream, make: Make) -> BrickProfiler:
    return make(stream, clock=driver.clock)


def known(profiler: BrickProfiler) -> dict[str, tuple[int, TimingSource | None]]:
    return {brick.name: (brick.total_ns, brick.timing_source) for brick in profiler.all_brick_stats()}


# --- captures ---


def closed_late(driver: Driver, profiler: BrickProfiler) -> None:
    step = profiler.step()
    step.__enter__()
    brick = profiler.brick("Late")
    brick.__enter__()
    step.__exit__(None, None, None)
    brick.__exit__(None, None, None)


def starts_unused(driver: Driver, profiler: BrickProfiler) -> None:
    for _ in range(300):
        driver.advance(1)
        profiler.elapsed_ns()


@pytest.mark.parametrize("by", ["the capturing thread", "another thread"])
@pytest.mark.parametrize("leave", [closed_late, starts_unused])
def test_a_capture_survives_bricks_on_a_free_stream_whatever_events_were_set_aside(
    leave: Callable[..., None],
    by: str,
    driver: Driver,
    device: Device,
    stream: Stream,
    profiled: BrickProfiler,
    kernel: Any,
) -> None:
    captured, gemv = device.create_stream(), kernel("gemv", duration_ns=MS)
    leave(driver, profiled)
    profiled.finalize(wait=False)

    def work() -> None:
        with profiled.step(), profiled.layer(0):
            for _ in range(60):  # more than there can be free events for
                with profiled.brick("Free"):
                    launch(stream, ONE, gemv)
                profiled.stop(profiled.start("Timer"))
                profiled.record_deferred_dynamic("Deferred", profiled.elapsed_ns(), 1)
            profiled.finalize(wait=False)
        profiled.losses()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(device.set_current).result()
        (error,) = cu.cuStreamBeginCapture(captured.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        assert error == cu.CUresult.CUDA_SUCCESS
        launch(captured, ONE, gemv)
        if by == "another thread":
            pool.submit(work).result()
        else:
            work()
        launch(captured, ONE, gemv)
    error, _ = cu.cuStreamEndCapture(captured.handle)
    assert error == cu.CUresult.CUDA_SUCCESS
    profiled.finalize()
    assert known(profiled)["Free"] == (60 * MS, EVENT)


# --- events ---


CLOSES: dict[str, Callable[[BrickProfiler], object]] = {
    "at an end": lambda profiler: profiler.finalize(profiler.elapsed_ns()),
    "at an end in common": lambda profiler: profiler.finalize(profiler.elapsed_ns(), attribution="common_end"),
    "now, in common": lambda profiler: profiler.finalize(attribution="common_end"),
    "on the device": lambda profiler: profiler.finalize(),
    "by a reset": lambda profiler: profiler.reset(),
    "by a reset when finalized": lambda profiler: (profiler.finalize(wait=False), profiler.reset()),
}


@pytest.mark.parametrize("room", [1 << 16, 4], ids=["room for all rows", "room for four rows"])
@pytest.mark.parametrize("close", CLOSES)
def test_however_deferred_rows_are_closed_their_events_are_used_again(
    close: str,
    room: int,
    driver: Driver,
    stream: Stream,
    profiled: BrickProfiler,
    kernel: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("otel_brick.record.deferred.MAX_PENDING", room)
    gemv = kernel("gemv", duration_ns=10 * US)

    def rounds(count: int) -> None:
        for _ in range(count):
            with profiled.step():
                for _ in range(10):
                    driver.advance(1)
                    profiled.record_deferred_dynamic("Row", profiled.elapsed_ns(), 1)
                    launch(stream, ONE, gemv)
                CLOSES[close](profiled)
            driver.advance(110 * US)
            profiled.finalize()
            profiled.losses()

    rounds(300)  # more than there are starts that wait for a row to name them
    before = driver.live()["events"]
    rounds(300)
    assert driver.live()["events"] <= before + 20  # the worker has some in hand now and then
    assert driver.pending_recorded == 0


@pytest.mark.parametrize(
    "function",
    [
        "cuEventRecord",
        "cuEventQuery",
        "cuEventCreate",
        "cuEventElapsedTime",
        "cuEventSynchronize",
        "cuStreamIsCapturing",
    ],
)
def test_no_event_is_recorded_anew_while_the_device_may_not_have_passed_it_whichever_call_fails(
    function: str, driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any
) -> None:
    busy = kernel("busy", duration_ns=5 * MS)
    for call in range(1, 25):
        launch(stream, ONE, busy)
        driver.fail(function, 999, call=call)
        with profiled.step():
            profiled.record_deferred_dynamic("Row", profiled.elapsed_ns(), 1)
            launch(stream, ONE, busy)
            profiled.finalize(wait=False)
            profiled.losses()
            for _ in range(4):
                with profiled.brick("Inside"):
                    pass
        for _ in range(3):
            profiled.losses()
            with profiled.brick("Loose"):
                launch(stream, ONE, busy)
        driver.succeed(function)
        assert driver.pending_recorded == 0, call
        if call % 5 == 0:
            profiled.finalize()
            profiled.losses()


# --- threads ---


def test_flush_and_reads_wait_for_what_had_ended_and_not_for_a_device_that_is_never_idle(
    real_time_driver: Driver, device: Device, stream: Stream, make: Make, kernel: Any
) -> None:
    profiler, gemv = make(stream), kernel("gemv", duration_ns=20 * MS)
    ended, stop = 0, threading.Event()

    def serve() -> None:
        nonlocal ended
        device.set_current()
        ahead: deque[Any] = deque()
        while not stop.is_set():
            with profiler.step(), profiler.brick("Gemv"):
                launch(stream, ONE, gemv)
            ended += 1
            ahead.append(stream.record())
            if len(ahead) > 5:
                ahead.popleft().sync()

    server = threading.Thread(target=serve)
    server.start()
    try:
        time.sleep(0.5)
        for wait in (lambda: profiler.flush(5.0), profiler.step_count, profiler.summary, profiler.finalize):
            before, begin = ended, time.monotonic()
            result = wait()
            assert time.monotonic() - begin < 2.0
            if wait == profiler.step_count:
                assert result >= before
            else:
                assert result is not False
    finally:
        stop.set()
        server.join()


@pytest.mark.parametrize("given", ["a stream", "legacy", "per thread"])
@pytest.mark.parametrize("first", ["brick", "deferred"])
def test_a_thread_without_a_context_may_be_the_first_to_mark(
    first: str, given: str, driver: Driver, stream: Stream, make: Make, kernel: Any
) -> None:
    used = {"a stream": stream, "legacy": LEGACY_DEFAULT_STREAM, "per thread": PER_THREAD_DEFAULT_STREAM}[given]
    profiler, gemv = make(used, clock=driver.clock), kernel("gemv", duration_ns=MS)

    def work() -> None:
        with profiler.step():
            start = profiler.elapsed_ns()
            if first == "deferred":
                profiler.record_deferred_dynamic("Thread", start, 1)
            with profiler.brick("Thread") if first == "brick" else profiler.layer(0):
                if given == "a stream":
                    launch(stream, ONE, gemv)
                driver.advance(7 * US)
            profiler.finalize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for _ in range(2):
        with profiler.step(), profiler.brick("Main"):
            launch(used, ONE, gemv)
        profiler.finalize()
    assert known(profiler) == {
        "Thread": (MS, EVENT) if given == "a stream" else (7 * US, HOST),
        "Main": (2 * MS, EVENT),
    }


def test_starts_and_deferred_rows_do_not_wait_while_another_thread_places_marks(
    driver: Driver, profiled: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    placing, place = threading.Event(), CudaTimeline.place

    def slow(self: CudaTimeline, *arguments: Any, **keywords: Any) -> Any:
        placing.set()
        time.sleep(0.3)
        return place(self, *arguments, **keywords)

    with profiled.step():
        profiled.record_deferred_dynamic("Row", profiled.elapsed_ns(), 1)
        profiled.finalize()
        monkeypatch.setattr(CudaTimeline, "place", slow)
        reader = threading.Thread(target=profiled.losses)
        reader.start()
        assert placing.wait(10)
        begin = time.monotonic()
        profiled.record_deferred_dynamic("Row", profiled.elapsed_ns(), 1)
        profiled.finalize(wait=False)
        assert time.monotonic() - begin < 0.1
        reader.join()


def test_the_worker_rests_while_the_device_is_seen_late(
    real_time_driver: Driver, stream: Stream, make: Make, kernel: Any
) -> None:
    profiler, gemv = make(stream), kernel("gemv", duration_ns=MS)
    with profiler.step(), profiler.brick("Gemv"):
        launch(stream, ONE, gemv)
    profiler.finalize()
    real_time_driver.set_latency(completion_ns=400 * MS)
    begin = time.process_time()
    for _ in range(40):
        with profiler.step(), profiler.brick("Gemv"):
            launch(stream, ONE, gemv)
        time.sleep(0.05)
    assert time.process_time() - begin < 0.2 * 2
    real_time_driver.set_latency()


# --- switches and the end ---


def test_switching_with_a_handle_of_a_closed_stream_raises_nothing(
    driver: Driver, device: Device, stream: Stream, profiled: BrickProfiler
) -> None:
    closed = device.create_stream()
    handles = [profiled.define("Defined", stream=closed), profiled.brick("Kept", elements=3, stream=closed)]
    for handle in handles:
        with profiled.step(), handle:
            pass
    profiled.finalize()
    closed.close()
    for switch in (
        *(lambda mode=mode: profiled.set_sync_mode(mode) for mode in ("immediate", "per_layer", "none", "deferred")),
        profiled.disable,
        profiled.enable,
    ):
        switch()
        for handle in handles:
            with profiled.step(), handle:
                pass
    profiled.finalize()
    assert profiled.step_count() == 2 * 6


def test_a_shutdown_at_any_moment_of_the_workers_round_raises_nothing(
    real_time_driver: Driver, stream: Stream, make: Make, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv, failures, lines = kernel("gemv", duration_ns=MS), [], 0
    monkeypatch.setattr(threading, "excepthook", failures.append)
    moment = 0

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name != "work" or not frame.f_code.co_filename.endswith("pipeline.py"):
            return None
        nonlocal lines
        lines += 1
        if lines == moment:
            stopper.start()
            stopper.join(0.3)
        return tracer

    while moment < 30:
        moment, lines = moment + 1, 0
        profiler = make(stream)
        stopper = threading.Thread(target=profiler.shutdown, args=(0.02,))
        threading.settrace(tracer)
        try:
            with profiler.step(), profiler.brick("Gemv"):
                launch(stream, ONE, gemv)
            profiler.flush(1.0)
        finally:
            threading.settrace(None)  # pyright: ignore
        profiler.shutdown(1.0)
        if stopper.ident is not None:
            stopper.join()
    assert failures == []
