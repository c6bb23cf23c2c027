"""Device times that a review found wrong: whose stream a time is of, how long steps take, and what was waited for."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cuda.core
import pytest
from cuda.bindings import driver as cu
from cuda.core import PER_THREAD_DEFAULT_STREAM, Device, LaunchConfig, Stream, launch

from otel_brick import BrickProfiler, TimingSource
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces

from .standin import Driver

MS, US, S = 1_000_000, 1_000, 1_000_000_000
ONE = LaunchConfig(grid=1, block=32)
GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
HOST, SYNCED, EVENT = TimingSource.Host, TimingSource.SyncedHost, TimingSource.CudaEvent
Make = Callable[..., BrickProfiler]


class Torch(types.ModuleType):
    """As much of torch as is asked for its current stream, of each thread."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.ready = True
        self._of_thread = threading.local()
        self.cuda = types.SimpleNamespace(
            is_initialized=lambda: self.ready,
            current_stream=lambda: types.SimpleNamespace(cuda_stream=getattr(self._of_thread, "handle", 0)),
        )

    def use(self, stream: Stream) -> None:
        """Make a stream the calling thread's current one."""
        self._of_thread.handle = int(stream.handle)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def on_thread(work: Callable[..., object], *arguments: object) -> None:
    """Run to the end on a thread of its own, where the device is current."""
    failures: list[BaseException] = []

    def run() -> None:
        Device(0).set_current()
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def known(profiler: BrickProfiler) -> dict[str, tuple[int, TimingSource | None]]:
    return {brick.name: (brick.total_ns, brick.timing_source) for brick in profiler.all_brick_stats()}


def assert_own_or_hosts(profiler: BrickProfiler, durations: dict[str, int], host_ns: int) -> None:
    """Every row took what was launched in it, or has a time of the host that says so."""
    found = known(profiler)
    assert found.keys() == durations.keys()
    for name, (total, source) in found.items():
        if source is EVENT:
            assert total == durations[name], name
        else:
            assert source is HOST and 0 <= total <= host_ns, name


# --- whose stream a time is of ---


@pytest.mark.parametrize("closed_by", ["main", "thread"])
@pytest.mark.parametrize("after", [True, False], ids=["recorded after the launch", "recorded before it"])
def test_deferred_rows_of_threads_on_their_default_streams_never_have_another_streams_time(
    after: bool, closed_by: str, driver: Driver, make: Make, kernel: Any
) -> None:
    profiler = make(PER_THREAD_DEFAULT_STREAM)
    durations = {f"{thread}{number}": (7 * thread + number + 1) * MS for thread in range(3) for number in range(3)}
    kernels = {name: kernel(f"k{name}", duration_ns=duration) for name, duration in durations.items()}
    begin = driver.now_ns

    def work(thread: int) -> None:
        for name in [name for name in durations if name.startswith(str(thread))]:
            start = profiler.elapsed_ns()
            if not after:
                profiler.record_deferred_dynamic(name, start, 1)
            launch(PER_THREAD_DEFAULT_STREAM, ONE, kernels[name])
            driver.advance(10 * US)
            if after:
                profiler.record_deferred_dynamic(name, start, 1)
        if closed_by == "thread":
            profiler.finalize()

    for thread in range(3):
        on_thread(work, thread)
    profiler.finalize()
    assert_own_or_hosts(profiler, durations, driver.now_ns - begin)
    if closed_by == "thread":
        assert known(profiler) == {name: (duration, EVENT) for name, duration in durations.items()}


def test_a_thread_that_finalizes_the_rows_of_others_leaves_them_their_own_or_host_times(
    driver: Driver, make: Make, kernel: Any
) -> None:
    profiler = make(PER_THREAD_DEFAULT_STREAM)
    durations = {f"{thread}{number}": (7 * thread + number + 1) * MS for thread in range(3) for number in range(3)}
    kernels = {name: kernel(f"k{name}", duration_ns=duration) for name, duration in durations.items()}
    busy, together, begin = kernel("busy", duration_ns=3 * MS), threading.Barrier(3, timeout=30), driver.now_ns

    def work(thread: int) -> None:
        launch(PER_THREAD_DEFAULT_STREAM, ONE, busy)
        for number in range(3):
            together.wait()
            name = f"{thread}{number}"
            profiler.record_deferred_dynamic(name, profiler.elapsed_ns(), 1)
            launch(PER_THREAD_DEFAULT_STREAM, ONE, kernels[name])
            driver.advance(10 * US)
        together.wait()
        if thread == 0:
            profiler.finalize()
        together.wait()

    with ThreadPoolExecutor(3, initializer=Device(0).set_current) as pool:
        assert list(pool.map(work, range(3))) == [None] * 3
    profiler.finalize()
    assert_own_or_hosts(profiler, durations, driver.now_ns - begin)
    assert [known(profiler)[f"0{number}"] for number in range(3)] == [(n * MS, EVENT) for n in (1, 2, 3)]


@pytest.mark.parametrize("current_at_the_end", [0, 1, 2])
def test_deferred_rows_have_the_time_of_the_stream_that_was_torchs_when_they_were_recorded(
    current_at_the_end: int, driver: Driver, device: Device, make: Make, kernel: Any, torch: Torch
) -> None:
    streams = [device.create_stream() for _ in range(3)]
    profiler = make()
    durations = {f"{number % 2}, {number}": (5 + number) * MS for number in range(6)}
    with profiler.step():
        launch(streams[0], ONE, kernel("earlier", duration_ns=3 * MS))
        for number, (name, duration) in enumerate(durations.items()):
            torch.use(streams[number % 2])
            start = profiler.elapsed_ns()
            launch(streams[number % 2], ONE, kernel(f"k{number}", duration_ns=duration))
            driver.advance(10 * US)
            profiler.record_deferred_dynamic(name, start, 1)
        torch.use(streams[current_at_the_end])
        profiler.finalize()
    profiler.finalize()
    assert known(profiler) == {name: (duration, EVENT) for name, duration in durations.items()}
    assert profiler.losses()["clock_anomaly"] == 0


def test_deferred_rows_of_threads_with_streams_of_torch_of_their_own_are_told_apart(
    driver: Driver, device: Device, make: Make, kernel: Any, torch: Torch
) -> None:
    profiler = make()
    durations = {"long": 9 * MS, "short": MS}
    kernels = {name: kernel(name, duration_ns=duration) for name, duration in durations.items()}

    def work(name: str, stream: Stream) -> None:
        torch.use(stream)
        profiler.record_deferred_dynamic(name, profiler.elapsed_ns(), 1)
        launch(stream, ONE, kernels[name])
        driver.advance(10 * US)

    streams = [device.create_stream() for _ in durations]
    with profiler.step():  # which finds torch
        for name, stream in zip(durations, streams, strict=True):
            on_thread(work, name, stream)
    profiler.finalize()
    assert known(profiler) == {name: (duration, EVENT) for name, duration in durations.items()}


@pytest.mark.parametrize("started_on_thread", [True, False])
@pytest.mark.parametrize("busy", [True, False])
def test_a_timer_stopped_on_another_threads_default_stream_has_a_host_time(
    busy: bool, started_on_thread: bool, driver: Driver, make: Make, kernel: Any
) -> None:
    profiler = make(PER_THREAD_DEFAULT_STREAM)
    gemv = kernel("gemv", duration_ns=5 * MS)
    timers: list[Any] = []

    def start() -> None:
        if busy:
            launch(PER_THREAD_DEFAULT_STREAM, ONE, gemv)
        timers.append(profiler.start("Across"))
        launch(PER_THREAD_DEFAULT_STREAM, ONE, gemv)
        driver.advance(7 * US)

    with profiler.step():
        if started_on_thread:
            on_thread(start)
            profiler.stop(timers.pop())
        else:
            start()
            on_thread(lambda: profiler.stop(timers.pop()))
        own = profiler.start("Own")
        launch(PER_THREAD_DEFAULT_STREAM, ONE, gemv)
        profiler.stop(own)
    profiler.finalize()
    assert known(profiler) == {"Across": (7 * US, HOST), "Own": (5 * MS, EVENT)}


def test_scopes_in_which_torch_changes_its_stream_have_host_times(
    driver: Driver, device: Device, make: Make, kernel: Any, torch: Torch
) -> None:
    first, second = device.create_stream(), device.create_stream()
    profiler = make()
    with profiler.step():
        torch.use(first)
        timer = profiler.start("Timer")
        with profiler.brick("Brick"):
            launch(first, ONE, kernel("gemv", duration_ns=5 * MS))
            driver.advance(7 * US)
            torch.use(second)
        profiler.stop(timer)
    profiler.finalize()
    assert known(profiler) == {"Timer": (7 * US, HOST), "Brick": (7 * US, HOST)}


@pytest.mark.parametrize("begun_by", ["a stream", "a launch"])
def test_bricks_follow_a_torch_that_begins_after_device_time_did(
    begun_by: str, device: Device, make: Make, kernel: Any, torch: Torch, instrumentor: CudaCoreInstrumentor
) -> None:
    torch.ready = False
    first, second = device.create_stream(), device.create_stream()
    gemv = kernel("gemv", duration_ns=MS)
    profiler = make()
    defined = profiler.define("Defined")
    if begun_by == "a launch":
        instrumentor.instrument(profiler=profiler)
    with profiler.step(), profiler.brick("Early", **({"stream": first} if begun_by == "a stream" else {})):
        cuda.core.launch(first, ONE, gemv)
    profiler.finalize()
    profiler.losses()
    torch.ready = True
    for number, stream in enumerate((second, first)):
        torch.use(stream)
        with profiler.step():
            with profiler.brick(f"Later {number}"):
                cuda.core.launch(stream, ONE, kernel(f"k{number}", duration_ns=(5 + number) * MS))
            with defined:
                cuda.core.launch(stream, ONE, gemv)
    profiler.finalize()
    found = known(profiler)
    assert [found["Later 0"], found["Later 1"], found["Defined"]] == [(5 * MS, EVENT), (6 * MS, EVENT), (2 * MS, EVENT)]


def test_rows_on_streams_beyond_the_number_that_is_kept_have_host_times(
    driver: Driver, device: Device, profiled: BrickProfiler, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otel_brick.gpu.cuda.MAX_STREAMS", 4)
    streams = [device.create_stream() for _ in range(7)]
    durations = {str(number): (number + 1) * MS for number in range(7)}
    for _ in range(2):
        profiled.reset()
        with profiled.step():
            for stream, (name, duration) in zip(streams, durations.items(), strict=True):
                with profiled.brick(name, stream=stream):
                    launch(stream, ONE, kernel(f"k{name}", duration_ns=duration))
                    driver.advance(7 * US)
        profiled.finalize()
        assert_own_or_hosts(profiled, durations, 7 * US)
        found = known(profiled)
        assert (found["0"], found["6"]) == ((MS, EVENT), (7 * US, HOST))


def test_calls_that_fail_do_not_use_up_the_events_that_there_may_be(
    driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otel_brick.gpu.cuda.MAX_EVENTS", 100)
    for function in ("cuEventRecord", "cuEventCreate", "cuStreamIsCapturing"):
        driver.fail(function, 999, always=True)
        for _ in range(60):
            with profiled.step(), profiled.brick("Failed"):
                profiled.elapsed_ns()
        driver.succeed(function)
        profiled.finalize()
        profiled.losses()
        with profiled.step(), profiled.brick(function):
            launch(stream, ONE, kernel("gemv", duration_ns=MS))
        profiled.finalize()
        assert known(profiled)[function] == (MS, EVENT)


# --- steps that queue up ---


@pytest.mark.parametrize("together", [True, False], ids=["counted together", "counted one by one"])
def test_ten_steps_of_10_ms_queued_ahead_take_100_ms_and_idle_time_between_steps_is_nobodys(
    together: bool, driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=10 * MS)
    begin = driver.clock.unix()
    for _ in range(2):
        for _ in range(5):
            with profiled.step(phase="decode", tokens=1), profiled.brick("Gemv"):
                launch(stream, ONE, gemv)
                driver.advance(10 * US)
        if not together:
            for _ in range(5):
                driver.advance(10 * MS)
                profiled.losses()  # counts what has ended, and waits for nothing
        profiled.finalize()
        driver.advance(500 * MS)
    assert profiled.wall_ns() == pytest.approx(100 * MS, rel=1e-3)
    assert profiled.coverage() == pytest.approx(1.0, abs=2e-3)
    assert profiled.coverage() <= 1 and profiled.coverage(0) <= 1
    assert profiled.tokens_per_sec() == pytest.approx(100.0, rel=1e-3)
    assert profiled.phase_tokens_per_sec("decode") == pytest.approx(100.0, rel=1e-3)
    profiled.flush()
    steps = sorted(traces.trees(), key=lambda node: node.span.start_time or 0)[:5]
    for number, step in enumerate(steps):
        assert step.span.start_time == begin + number * 10 * US
        assert step.span.end_time == pytest.approx(begin + (number + 1) * 10 * MS, abs=50 * US)


def test_the_steps_of_one_profiler_do_not_shorten_those_of_another(
    driver: Driver, device: Device, make: Make, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=10 * MS)
    streams = [device.create_stream() for _ in range(2)]
    profilers = [make(stream) for stream in streams]
    for _ in range(3):
        for profiler, stream in zip(profilers, streams, strict=True):
            with profiler.step(), profiler.brick("Gemv"):
                launch(stream, ONE, gemv)
    for profiler in profilers:
        profiler.finalize()
        assert profiler.wall_ns() == pytest.approx(30 * MS, rel=1e-3)


@pytest.mark.parametrize("late_ns", [MS, 5 * MS, 20 * MS])
@pytest.mark.parametrize("late_one", ["first", "second"])
def test_an_anchor_seen_late_does_not_change_a_kernels_duration(
    late_one: str, late_ns: int, driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=100 * MS)
    for which in ("first", "second"):
        with profiled.step(), profiled.brick(which):
            launch(stream, ONE, gemv)
        profiled.finalize()
        driver.advance(50 * MS)
        if which == late_one:
            driver.set_latency(completion_ns=late_ns)
            driver.advance(late_ns)
        driver.set_cost("cuEventQuery", 100 * US)  # or a loop that waits for an event would never end
        profiled.losses()
        driver.set_cost("cuEventQuery", 0)
        driver.set_latency()
        driver.advance(S)
    assert known(profiled).keys() == {"first", "second"}
    for total, source in known(profiled).values():
        assert source is EVENT
        assert total == pytest.approx(100 * MS, rel=50e-6)
