"""Captures of the user's survive whatever we do, and replays are timed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from cuda.core import Device, Stream, StreamOptions

from otel_brick import BrickProfiler, TimingSource
from otel_brick.instrumentation.cuda_core import traced_replay
from otel_brick.testing import InMemoryTraces

from .spin import MS, US, Spins, assert_near

Profile = Callable[..., BrickProfiler]
GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    assert error == cuda.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None


class Capture:
    """A capture of a stream in the driver's strictest mode; the graph in it is launched with `replay`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> Capture:
        checked(cuda.cuStreamBeginCapture(self._stream.handle, GLOBAL))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        result = cuda.cuStreamEndCapture(self._stream.handle)
        if kind is None:
            self._graph = checked(result)
            self._executable = checked(cuda.cuGraphInstantiate(self._graph, 0))

    def replay(self, stream: Stream) -> None:
        """Launch the graph."""
        checked(cuda.cuGraphLaunch(self._executable, stream.handle))

    def close(self) -> None:
        """Destroy the graph."""
        checked(cuda.cuGraphExecDestroy(self._executable))
        checked(cuda.cuGraphDestroy(self._graph))


@pytest.fixture
def captured(device: Device) -> Iterator[Stream]:
    stream = device.create_stream()
    yield stream
    stream.close()


@pytest.fixture
def elsewhere(device: Device) -> Iterator[Callable[[Callable[[], object]], object]]:
    """Calls a function in another thread, on which the GPU is current, and raises what it raises."""
    with ThreadPoolExecutor(1, initializer=device.set_current) as pool:
        pool.submit(threading.get_ident).result(60)  # the thread is there before a capture begins
        yield lambda function: pool.submit(function).result(60)


def test_bricks_on_the_capturing_stream_leave_the_capture_whole_and_say_that_they_were_captured(
    stream: Stream, spins: Spins, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    capture = Capture(stream)
    with profiled.step():
        with capture:
            with profiled.layer(0), profiled.brick("Captured"):
                spins(stream, 1_000)
                profiled.finalize()
            profiled.finalize(wait=False)
    profiled.finalize()
    profiled.flush()
    (step,) = traces.trees()
    brick = step.children[0].children[0]
    assert brick.attributes["brick.cuda.graph.captured"] is True
    assert brick.attributes["brick.timing.source"] == "host"
    capture.replay(stream)
    stream.sync()
    assert profiled.losses()["device_error"] == 0
    capture.close()


def test_a_brick_around_a_replay_reads_the_time_of_the_graph(
    stream: Stream, spins: Spins, profiled: BrickProfiler, record_property: Callable[[str, object], None]
) -> None:
    with Capture(stream) as capture:
        for _ in range(3):
            spins(stream, 1_000)
    capture.replay(stream)  # the first one uploads it
    stream.sync()
    with profiled.step():
        spins(stream, 20_000)
        with profiled.brick("Replay"):
            capture.replay(stream)
    profiled.finalize()
    stats = profiled.stats("Replay")
    assert stats is not None and stats.timing_source is TimingSource.CudaEvent
    record_property("measured_ns", stats.total_ns)
    assert 3 * MS - 6 * US <= stats.total_ns <= 1.03 * 3 * MS + 40 * US
    capture.close()


def test_a_capture_survives_reads_and_the_worker_on_other_threads(
    stream: Stream,
    captured: Stream,
    spins: Spins,
    profiled: BrickProfiler,
    elsewhere: Callable[[Callable[[], object]], object],
) -> None:
    with profiled.step(), profiled.brick("Spin"):
        spin = spins(stream, 20_000)
    with Capture(captured) as capture:
        spins(captured, 100)
        elsewhere(lambda: (profiled.finalize(wait=False), profiled.flush(5.0), profiled.summary()))
        elsewhere(profiled.finalize)
        spins(captured, 100)
    capture.replay(captured)
    captured.sync()
    stats = profiled.stats("Spin")
    assert stats is not None and stats.timing_source is TimingSource.CudaEvent
    assert_near(stats.total_ns, spin.spent_ns)
    assert profiled.losses()["device_error"] == 0
    capture.close()


@pytest.mark.parametrize("same_thread", [True, False])
def test_a_capture_survives_steps_on_another_stream_whose_events_and_anchors_are_still_to_be_made(
    same_thread: bool,
    stream: Stream,
    captured: Stream,
    spins: Spins,
    profile: Profile,
    elsewhere: Callable[[Callable[[], object]], object],
) -> None:
    profilers: list[BrickProfiler] = []

    def work() -> None:
        profiler = profile(stream=stream)
        profilers.append(profiler)
        for _ in range(3):
            with profiler.step():
                for _ in range(10):
                    with profiler.brick("Spin"):
                        spins(stream, 100)
            profiler.finalize()
        profiler.flush(5.0)

    with Capture(captured) as capture:
        spins(captured, 100)
        if same_thread:
            work()
        else:
            elsewhere(work)
        spins(captured, 100)
    capture.replay(captured)
    captured.sync()
    stats = profilers[0].stats("Spin")
    assert stats is not None and (stats.count, stats.timing_source) == (30, TimingSource.CudaEvent)
    assert profilers[0].losses()["device_error"] == 0
    capture.close()


def test_a_capture_of_a_blocking_stream_survives_bricks_on_the_legacy_stream(
    device: Device, spins: Spins, profile: Profile, traces: InMemoryTraces
) -> None:
    blocking = device.create_stream(options=StreamOptions(nonblocking=False))
    profiler = profile()
    with profiler.step(), profiler.brick("Before", stream=0):
        pass
    profiler.finalize()
    with Capture(blocking) as capture:
        with profiler.step(), profiler.brick("During", stream=0):
            pass
        spins(blocking, 100)
        profiler.finalize(wait=False)
    capture.replay(blocking)
    blocking.sync()
    profiler.finalize()
    during = profiler.stats("During")
    assert during is not None and during.count == 1
    capture.close()
    blocking.close()


def test_a_graph_of_cuda_core_is_captured_and_its_replay_is_a_brick(
    device: Device, stream: Stream, spins: Spins, profiled: BrickProfiler
) -> None:
    builder = device.create_graph_builder()
    builder.begin_building()
    for _ in range(3):
        spins(builder, 1_000)
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
    with profiled.step():
        spins(stream, 20_000)
        with profiled.brick("Replay"):
            graph.launch(stream)
        traced_replay(graph, stream)
    profiled.finalize()
    for name in ("Replay", "CudaGraph"):
        stats = profiled.stats(name)
        assert stats is not None and (stats.count, stats.timing_source) == (1, TimingSource.CudaEvent)
        assert 3 * MS - 6 * US <= stats.total_ns <= 1.03 * 3 * MS + 40 * US
    stream.sync()
