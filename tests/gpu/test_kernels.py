"""What `CudaCoreInstrumentor` says of kernels: what they are, when they ran, and what became of those that failed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, Stream, launch

from otel_brick import BrickProfiler
from otel_brick.gpu.ptx import PtxRegistry
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces

from .spin import MANGLED, US, Spins, assert_near
from .test_captures import Capture

Profile = Callable[..., BrickProfiler]


@pytest.fixture
def instrumented(profile: Profile, stream: Stream, spins: Spins) -> Iterator[BrickProfiler]:
    """A profiler whose kernels are recorded, with device times of their own."""
    profiler = profile(stream=stream, kernel_events="all")
    CudaCoreInstrumentor().instrument(profiler=profiler)
    yield profiler
    CudaCoreInstrumentor().uninstrument()


def test_a_kernel_has_its_name_its_launch_and_what_the_driver_knows_of_it(
    stream: Stream, spins: Spins, instrumented: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel = spins.kernel(MANGLED)
    with instrumented.step(), instrumented.brick("Spin"):
        spins(stream, 100, kernel=kernel, config=LaunchConfig(grid=(2, 3), block=(32, 2), shmem_size=512))
    instrumented.finalize()
    instrumented.flush()
    (row,) = traces.trees()[0].children[0].children
    assert row.name == "engine::spin"
    expected = {
        "brick.cuda.ptx.hash": f"{PtxRegistry.hash_ptx(spins.source):016x}",
        "brick.cuda.register.count": kernel.attributes.num_regs,
        "brick.cuda.shared_memory.dynamic.size": 512,
        "brick.cuda.grid.x": 2,
        "brick.cuda.grid.y": 3,
        "brick.cuda.block.x": 32,
        "brick.cuda.block.y": 2,
        "brick.cuda.device.index": 0,
    }
    assert {name: row.attributes.get(name) for name in expected} == expected
    assert row.attributes.get("brick.cuda.shared_memory.static.size", 0) == kernel.attributes.shared_size_bytes


def test_kernels_have_device_times_of_their_own_inside_their_brick(
    stream: Stream,
    spins: Spins,
    instrumented: BrickProfiler,
    traces: InMemoryTraces,
    record_property: Callable[[str, object], None],
) -> None:
    with instrumented.step():
        spins(stream, 20_000)
        with instrumented.brick("Spin"):
            launched = [spins(stream, 100) for _ in range(20)]
    instrumented.finalize()
    instrumented.flush()
    (brick,) = (node for node in traces.trees()[0].children if node.name == "Spin")
    assert [row.name for row in brick.children] == ["spin_100us"] * 20
    excess = [row.duration_ns - spin.spent_ns for row, spin in zip(brick.children, launched, strict=True)]
    record_property("excess_ns", {"median": statistics.median(excess), "min": min(excess), "max": max(excess)})
    for row, spin in zip(brick.children, launched, strict=True):
        assert row.attributes.get("brick.timing.source", "cuda_event") == "cuda_event"
        assert_near(row.duration_ns, spin.spent_ns)
        assert brick.span.start_time <= row.span.start_time <= row.span.end_time <= brick.span.end_time


def test_a_launch_that_the_driver_refuses_is_the_programs_error_and_a_failed_row(
    stream: Stream, spins: Spins, instrumented: BrickProfiler, traces: InMemoryTraces
) -> None:
    with instrumented.step():
        with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
            with instrumented.brick("Refused"):
                spins(stream, 100, config=LaunchConfig(grid=1, block=2048))
        spins(stream, 20_000)
        with instrumented.brick("Spin"):
            spin = spins(stream, 100)
    instrumented.finalize()
    instrumented.flush()
    (refused,) = (node for node in traces.trees()[0].children if node.name == "Refused")
    assert not refused.span.status.is_ok
    assert [row.span.status.is_ok for row in refused.children] == [False]
    stats = instrumented.stats("Spin")
    assert stats is not None
    # The events of the kernel lie between those of the brick.
    assert -2 * US <= stats.total_ns - spin.spent_ns <= 20 * US
    assert instrumented.losses()["device_error"] == 0


def test_captured_kernels_say_so_and_a_replay_is_a_brick_of_its_own(
    stream: Stream, spins: Spins, instrumented: BrickProfiler, traces: InMemoryTraces
) -> None:
    with instrumented.step():
        with instrumented.brick("Captured"), Capture(stream) as capture:
            spins(stream, 1_000)
            spins(stream, 1_000)
        spins(stream, 20_000)
        capture.replay(stream)
    instrumented.finalize()
    instrumented.flush()
    captured, _, replay = traces.trees()[0].children
    assert [row.attributes.get("brick.cuda.graph.captured") for row in captured.children] == [True, True]
    assert (replay.name, replay.attributes["brick.cuda.graph.replay"]) == ("CudaGraph", True)
    assert 2_000 * US - 4 * US <= replay.duration_ns <= 1.03 * 2_000 * US + 200 * US
    capture.close()


def test_copies_are_rows_with_their_bytes_and_a_plausible_time(
    device: Device,
    stream: Stream,
    spins: Spins,
    instrumented: BrickProfiler,
    traces: InMemoryTraces,
    record_property: Callable[[str, object], None],
) -> None:
    size = 64 << 20
    host, there = LegacyPinnedMemoryResource().allocate(size), device.allocate(size, stream=stream)
    addresses = int(there.handle), int(host.handle)
    with instrumented.step():
        spins(stream, 20_000)
        with instrumented.brick("Copies"):
            assert cuda.cuMemcpyHtoDAsync(*addresses, size, stream.handle)[0] == cuda.CUresult.CUDA_SUCCESS
            assert cuda.cuMemcpyDtoHAsync(*addresses[::-1], size, stream.handle)[0] == cuda.CUresult.CUDA_SUCCESS
    instrumented.finalize()
    instrumented.flush()
    (copies,) = (node for node in traces.trees()[0].children if node.name == "Copies")
    rows = {row.attributes["brick.transfer.direction"]: row for row in copies.children}
    assert {direction: row.attributes["brick.io.size"] for direction, row in rows.items()} == {"h2d": size, "d2h": size}
    bytes_per_s = {direction: size / row.duration_ns * 1e9 for direction, row in rows.items()}
    record_property("bytes_per_s", bytes_per_s)
    # From a virtual bus to the fastest link there is.
    assert all(1e8 < rate < 1e12 for rate in bytes_per_s.values())
    stream.sync()


def test_a_kernel_of_nvrtc_has_the_hash_of_its_ptx(
    device: Device, stream: Stream, instrumented: BrickProfiler, traces: InMemoryTraces, spins: Spins
) -> None:
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as missing:
        pytest.skip(f"NVRTC is not installed: {type(missing).__name__}")
    kind = "ptx" if 1000 * major + 10 * minor <= cuda.cuDriverGetVersion()[1] else "cubin"
    registry = PtxRegistry()
    CudaCoreInstrumentor().uninstrument()
    CudaCoreInstrumentor().instrument(profiler=instrumented, ptx_registry=registry)
    made: Any = Program(
        "template <typename T> __global__ void fill(T *x) { x[threadIdx.x] = 1; }",
        "c++",
        ProgramOptions(std="c++17", arch=f"sm_{device.arch}"),
    ).compile(kind, name_expressions=("fill<float>",))
    buffer = device.allocate(4 * 32, stream=stream)
    with instrumented.step(), instrumented.brick("Fill"):
        launch(stream, LaunchConfig(grid=1, block=32), made.get_kernel("fill<float>"), buffer)
    instrumented.finalize()
    instrumented.flush()
    (row,) = traces.trees()[0].children[0].children
    assert row.name == "fill"
    if kind == "ptx":
        assert registry.lookup(int(row.attributes["brick.cuda.ptx.hash"], 16)) == made.code.rstrip(b"\0").decode()
    else:
        assert len(row.attributes["brick.cuda.ptx.hash"]) == 16
    stream.sync()
