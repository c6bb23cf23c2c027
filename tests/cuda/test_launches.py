"""Launches of cuda.core and of the driver's bindings become kernel rows with their launch signature."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

from otel_brick import BrickProfiler, SyncMode
from otel_brick.gpu.ptx import PtxRegistry
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor, traced_launch, traced_replay
from otel_brick.testing import InMemoryTraces, SpanNode
from tests.unit.export.test_columnar import assert_equal, both

from .standin import Driver, ptx

MS, US = 1_000_000, 1_000
MANGLED = "_ZN2ns3fooILi4EfEEvPKf"
ONE = LaunchConfig(grid=1, block=32)


@pytest.fixture(autouse=True)
def instrumented(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    instrumentor.instrument()


@pytest.fixture
def profiled(driver: Driver, traces: InMemoryTraces) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(clock=driver.clock, tracer_provider=traces.provider, detail="all")
    yield profiler
    profiler.shutdown(1.0)


def send(profiler: BrickProfiler) -> None:
    """Let the device do its work, and all spans leave."""
    profiler.finalize()
    assert profiler.flush(30)


def kernels(profiler: BrickProfiler, traces: InMemoryTraces) -> list[SpanNode]:
    """All kernel spans that have left, in order of their start."""
    send(profiler)
    found: list[SpanNode] = []
    waiting = traces.trees()
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if node.attributes["brick.span.level"] == "kernel":
            found.append(node)
    return sorted(found, key=lambda node: node.span.start_time or 0)


def load(name: str, parameters: tuple[str, ...] = ()) -> tuple[Any, int]:
    code = ptx({name: parameters})
    return ObjectCode.from_ptx(code).get_kernel(name), PtxRegistry.hash_ptx(code)


def test_a_launch_is_a_kernel_below_the_open_brick_with_its_whole_signature(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    driver.set_kernel(MANGLED, registers=40, static_shared_bytes=512)
    kernel, ptx_hash = load(MANGLED)
    with profiled.step(phase="decode"), profiled.layer(3), profiled.brick("Gemv"):
        launch(stream, LaunchConfig(grid=(4, 3, 2), block=(64, 2, 1), shmem_size=1024), kernel)
    send(profiled)
    (step,) = traces.trees()
    (layer,) = step.children
    (brick,) = layer.children
    (found,) = brick.children
    assert found.name == "ns::foo"
    stream_id = found.attributes.pop("brick.cuda.stream.id")
    assert stream_id >= 0
    attributes = found.attributes
    del attributes["brick.cuda.stream.id"], attributes["brick.timing.source"]
    assert attributes == {
        "brick.span.level": "kernel",
        "brick.name": "Gemv",
        "brick.cuda.kernel.name": "ns::foo",
        "brick.cuda.ptx.hash": f"{ptx_hash:016x}",
        "brick.cuda.grid.x": 4,
        "brick.cuda.grid.y": 3,
        "brick.cuda.grid.z": 2,
        "brick.cuda.block.x": 64,
        "brick.cuda.block.y": 2,
        "brick.cuda.block.z": 1,
        "brick.cuda.shared_memory.dynamic.size": 1024,
        "brick.cuda.shared_memory.static.size": 512,
        "brick.cuda.register.count": 40,
        "brick.cuda.device.index": 0,
    }
    assert [call.grid for call in driver.launches()] == [(4, 3, 2)]


def test_both_encoders_say_the_same_of_launches_replays_and_copies(
    driver: Driver, device: Device, stream: Stream
) -> None:
    profiler, routes = both(clock=driver.clock)
    kernel, _ = load(MANGLED)
    memory = cu.cuMemAlloc(256)[1]
    host = ctypes.create_string_buffer(256)
    graph = captured(stream, kernel)
    with profiler.step(phase="decode"), profiler.brick("Gemv"):
        launch(stream, LaunchConfig(grid=2, block=32, shmem_size=16), kernel)
        launch(stream, LaunchConfig(grid=2, block=32, shmem_size=16), kernel)
        with pytest.raises(TypeError):
            launch(stream, ONE, kernel, object())
        traced_replay(graph, stream)
        cu.cuMemcpyHtoD(memory, ctypes.addressof(host), 256)
    send(profiler)
    assert_equal(profiler, routes, 6)
    names = {span.name for span in routes.columnar.values()}
    assert names == {"Gemv", "ns::foo", "CudaGraph", "transfer h2d"}
    cu.cuMemFree(memory)
    profiler.shutdown()


def test_a_cluster_multiplies_the_grid_and_is_told(
    stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("clustered")
    with profiled.step():
        launch(stream, LaunchConfig(grid=(4, 3, 1), cluster=(2, 1, 1), block=32), kernel)
    (found,) = kernels(profiled, traces)
    told = {key: value for key, value in found.attributes.items() if ".grid." in key or ".cluster." in key}
    assert told == {
        "brick.cuda.grid.x": 8,
        "brick.cuda.grid.y": 3,
        "brick.cuda.grid.z": 1,
        "brick.cuda.cluster.x": 2,
        "brick.cuda.cluster.y": 1,
        "brick.cuda.cluster.z": 1,
    }


def test_a_configuration_that_is_changed_and_used_again_tells_what_it_was_at_each_launch(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("reused")
    config = LaunchConfig(grid=1, block=32)
    expected = []
    with profiled.step(), profiled.brick("B"):
        for grid, block, shared in ((1, 32, 0), (1, 32, 0), (7, 32, 0), (7, 64, 0), (7, 64, 9), (1, 32, 0), (1, 32, 0)):
            config.grid, config.block, config.shmem_size = (grid, 1, 1), (block, 1, 1), shared
            launch(stream, config, kernel)
            driver.advance(US)
            expected.append((grid, block, shared))
        launch(stream, LaunchConfig(grid=1, block=32), kernel)
        expected.append((1, 32, 0))
    keys = ("brick.cuda.grid.x", "brick.cuda.block.x", "brick.cuda.shared_memory.dynamic.size")
    assert [tuple(node.attributes[key] for key in keys) for node in kernels(profiled, traces)] == expected


def test_keywords_and_arguments_reach_the_kernel_as_they_are(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("arguments", ("u64", "u64"))
    with profiled.step():
        for _ in range(2):
            launch(stream, ONE, kernel, 5, 7)
            driver.advance(US)
        launch(stream=stream, config=ONE, kernel=load("none")[0])
    first, second, third = driver.launches()
    assert first.arguments == second.arguments == (5).to_bytes(8, "little") + (7).to_bytes(8, "little")
    assert third.kernel == "none"
    assert [node.name for node in kernels(profiled, traces)] == ["arguments", "arguments", "none"]


def test_without_marks_a_launch_asks_the_driver_for_nothing_else(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    kernel, _ = load("quiet")
    with profiled.step():
        launch(stream, ONE, kernel)
    send(profiled)
    with profiled.step():
        driver.clear_trace()
        for _ in range(3):
            launch(stream, ONE, kernel)
        assert [call.function for call in driver.trace()] == ["cuLaunchKernelEx"] * 3


def test_a_kernel_is_described_once_and_outside_the_launch(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    kernel, _ = load("once")
    for already in (0, 1, 1):
        with profiled.step():
            launch(stream, ONE, kernel)
            assert driver.calls("cuKernelGetName") == already
        send(profiled)
    assert driver.calls("cuKernelGetName") == 1
    assert driver.calls("cuKernelGetLibrary") == 1


def test_with_kernel_events_each_launch_has_the_device_time_of_its_own_stream(
    driver: Driver, device: Device, stream: Stream, traces: InMemoryTraces
) -> None:
    driver.set_kernel("slow", duration_ns=3 * MS)
    driver.set_kernel("fast", duration_ns=2 * US)
    slow, fast = load("slow")[0], load("fast")[0]
    other = device.create_stream()
    profiler = BrickProfiler.enabled(
        clock=driver.clock, tracer_provider=traces.provider, detail="all", kernel_events="all"
    )
    with profiler.step():
        launch(stream, ONE, slow)
        driver.advance(US)
        launch(other, ONE, fast)
        driver.advance(US)
        launch(stream, ONE, fast)
    found = kernels(profiler, traces)
    assert [(node.name, node.duration_ns) for node in found] == [("slow", 3 * MS), ("fast", 2 * US), ("fast", 2 * US)]
    assert found[2].span.start_time == found[0].span.end_time
    assert len({node.attributes["brick.cuda.stream.id"] for node in found}) == 2
    profiler.shutdown()
    other.close()


def test_the_first_launch_seen_switches_device_time_on(driver: Driver, stream: Stream, profiled: BrickProfiler) -> None:
    kernel, _ = load("first")
    assert profiled._recorder.device.timeline is None
    with profiled.step():
        launch(stream, ONE, kernel)
    assert profiled._recorder.device.timeline is not None


def test_device_time_that_is_switched_on_after_the_first_launch_is_taken(
    driver: Driver, stream: Stream, traces: InMemoryTraces
) -> None:
    profiler = BrickProfiler.enabled(
        clock=driver.clock, tracer_provider=traces.provider, sync_mode="none", kernel_events="all"
    )
    kernel, _ = load("later")
    with profiler.step():
        launch(stream, ONE, kernel)
    send(profiler)
    assert profiler._recorder.device.timeline is None
    profiler.set_sync_mode(SyncMode.Deferred)
    with profiler.step():
        launch(stream, ONE, kernel)
    send(profiler)
    assert profiler._recorder.device.timeline is not None
    profiler.shutdown()


def test_a_captured_launch_is_marked_so_and_its_capture_survives(
    driver: Driver, device: Device, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("captured")
    with profiled.step(), profiled.brick("Capture"):
        graph = captured(stream, kernel)
    with profiled.step(), profiled.brick("Replay"):
        graph.launch(stream)
    (found,) = kernels(profiled, traces)
    assert found.attributes["brick.cuda.graph.captured"] is True
    assert driver.calls("cuGraphLaunch") == 1


def captured(stream: Any, kernel: Any) -> Any:
    builder = stream.create_graph_builder()
    builder.begin_building()
    launch(builder, ONE, kernel)
    builder.end_building()
    return builder.complete()


def test_a_replay_is_a_brick_with_the_device_time_of_the_whole_graph(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    driver.set_kernel("replayed", duration_ns=MS)
    graph = captured(stream, load("replayed")[0])
    send(profiled)
    traces.clear()
    with profiled.step(), profiled.brick("Decode"):
        traced_replay(graph, stream)
    send(profiled)
    (step,) = traces.trees()
    (brick,) = step.children
    (replay,) = brick.children
    assert (replay.name, replay.duration_ns) == ("CudaGraph", MS)
    assert replay.attributes["brick.cuda.graph.replay"] is True
    assert replay.attributes["brick.span.level"] == "brick"
    assert profiled.stats("CudaGraph").total_ns == MS


def test_a_replay_through_the_bindings_is_such_a_brick_too(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    graph = captured(stream, load("bound")[0])
    with profiled.step():
        assert cu.cuGraphLaunch(graph.handle, stream.handle) == (cu.CUresult.CUDA_SUCCESS,)
        assert cu.cuGraphLaunch(hGraphExec=graph.handle, hStream=stream.handle) == (cu.CUresult.CUDA_SUCCESS,)
    send(profiled)
    assert profiled.stats("CudaGraph").count == 2


def test_a_launch_that_fails_is_a_failed_row_and_the_exception_is_the_callers_own(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("failing")
    for _ in range(2):  # of a kernel that is unknown, and of one that is known
        with profiled.step(), pytest.raises(TypeError) as refused:
            launch(stream, ONE, kernel, object())
        driver.advance(US)
        driver.fail("cuLaunchKernelEx", cu.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
        with profiled.step(), pytest.raises(Exception, match="OUT_OF_RESOURCES") as failed:
            launch(stream, ONE, kernel)
        driver.succeed("cuLaunchKernelEx")
        driver.advance(US)
        with profiled.step():
            launch(stream, ONE, kernel)
        driver.advance(US)
    found = kernels(profiled, traces)
    assert [node.attributes.get("error.type") for node in found] == 2 * [
        "TypeError",
        f"{failed.type.__module__}.{failed.type.__qualname__}",
        None,
    ]
    assert "argument" in str(refused.value)
    assert not any(profiled.losses().values())


def test_arguments_that_are_no_launch_are_left_to_the_original(
    stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("strict")
    with profiled.step():
        launch(stream, ONE, kernel)
        wrong = ((stream, {"grid": 1}, kernel), (stream, ONE, "kernel"), ("stream", ONE, kernel), (None, None, None))
        for arguments in wrong:
            with pytest.raises((TypeError, AttributeError)):
                launch(*arguments)
        with pytest.raises(TypeError):
            launch(stream)
    assert len(kernels(profiled, traces)) == 1
    assert not any(profiled.losses().values())


def test_what_fails_in_us_does_not_reach_the_caller(
    driver: Driver, stream: Stream, profiled: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, _ = load("unlucky")
    monkeypatch.setattr("otel_brick.gpu.launches._prepared", lambda *_: 1 / 0)
    with profiled.step():
        for _ in range(3):
            launch(stream, ONE, kernel)
    assert len(driver.launches()) == 3
    monkeypatch.undo()
    monkeypatch.setattr("otel_brick.gpu.kernels.KernelIdentities._fill", lambda *_: 1 / 0)
    with profiled.step():
        launch(stream, ONE, kernel)
    send(profiled)


def test_a_kernel_that_can_not_be_described_is_a_cuda_kernel(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    driver.fail("cuKernelGetName", cu.CUresult.CUDA_ERROR_INVALID_HANDLE)
    with profiled.step():
        launch(stream, ONE, load("nameless")[0])
    (found,) = kernels(profiled, traces)
    assert found.name == "cuda kernel"
    assert "brick.cuda.kernel.name" not in found.attributes
    driver.succeed("cuKernelGetName")


def test_a_disabled_profiler_records_no_launch_and_an_enabled_one_does_again(
    stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("switched")
    with profiled.step():
        launch(stream, ONE, kernel)
        profiled.disable()
        launch(stream, ONE, kernel)
        profiled.enable()
        launch(stream, ONE, kernel)
    profiled.disable()
    with profiled.step():
        launch(stream, ONE, kernel)
    assert len(kernels(profiled, traces)) == 2


def test_a_launch_goes_to_the_profiler_whose_step_is_open(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    other_traces = InMemoryTraces()
    other = BrickProfiler.enabled(clock=driver.clock, tracer_provider=other_traces.provider, detail="all")
    kernel, _ = load("shared")
    with profiled.step(phase="decode"):
        launch(stream, ONE, kernel)
        with other.step(phase="prefill"):
            launch(stream, ONE, kernel)
            launch(stream, ONE, kernel)
        launch(stream, ONE, kernel)
    assert len(kernels(profiled, traces)) == 2
    assert len(kernels(other, other_traces)) == 2
    other.shutdown()


def test_outside_every_step_a_launch_goes_to_the_instrumentors_profiler(
    driver: Driver, stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("outside")
    tracer = traces.provider.get_tracer("test")
    with tracer.start_as_current_span("request"):
        launch(stream, ONE, kernel)
        instrumentor.uninstrument()
        instrumentor.instrument(profiler=profiled)
        launch(stream, ONE, kernel)
        with profiled.brick("Loose"):
            launch(stream, ONE, kernel)
        launch(stream, ONE, kernel)
    send(profiled)
    (request,) = [node for node in traces.trees() if node.name == "request"]
    found = [(node.name, len(node.children)) for node in request.children]
    assert found == [("outside", 0), ("Loose", 1), ("outside", 0)]
    assert not any(profiled.losses().values())


def test_lanes_of_tasks_and_threads_have_their_own_launches(
    stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("laned")

    async def expert(number: int) -> None:
        with profiled.lane(), profiled.brick(f"Expert{number}"):
            await asyncio.sleep(0)
            launch(stream, ONE, kernel)

    async def step() -> None:
        with profiled.step(), profiled.brick("Mixture"):
            await asyncio.gather(*(expert(number) for number in range(4)))

    asyncio.run(step())
    send(profiled)
    (tree,) = traces.trees()
    (mixture,) = tree.children
    assert sorted((node.name, len(node.children)) for node in mixture.children) == [(f"Expert{i}", 1) for i in range(4)]


def test_threads_with_steps_of_their_own_launch_side_by_side(
    driver: Driver, device: Device, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    loaded = [load(f"parallel{number}")[0] for number in range(4)]

    def run(number: int) -> None:
        device.set_current()
        for _ in range(50):
            with profiled.step(), profiled.brick(f"Brick{number}"):
                launch(stream, ONE, loaded[number])
                launch(stream, ONE, loaded[(number + 1) % 4])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = kernels(profiled, traces)
    assert len(found) == 400
    for node in found:
        number = int(node.attributes["brick.name"][-1])
        assert node.name in (f"parallel{number}", f"parallel{(number + 1) % 4}")
    assert not any(profiled.losses().values())


def test_more_launches_than_a_list_holds_are_all_there(stream: Stream, driver: Driver) -> None:
    profiler, routes = both(clock=driver.clock)
    kernel, _ = load("many")
    with profiler.step():
        for _ in range(10_000):
            launch(stream, ONE, kernel)
    profiler.finalize()
    assert_equal(profiler, routes, 10_000)
    profiler.shutdown()


def test_new_objects_for_one_kernel_share_what_is_known_of_it(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    module = ObjectCode.from_ptx(ptx({"temporary": ()}))
    for _ in range(3):
        with profiled.step():
            for _ in range(5):
                launch(stream, ONE, module.get_kernel("temporary"))
        send(profiled)
    assert {node.name for node in kernels(profiled, traces)} == {"temporary"}
    assert len([found for found in profiled._recorder.registry.descriptors if found.launch is not None]) == 1


def test_kernels_modules_and_streams_are_not_kept_alive(
    driver: Driver, device: Device, profiled: BrickProfiler
) -> None:
    module = ObjectCode.from_ptx(ptx({"mortal": ()}))
    kernel, stream = module.get_kernel("mortal"), device.create_stream()
    with profiled.step():
        launch(stream, ONE, kernel)
        launch(stream, ONE, kernel)
    send(profiled)
    gone = [weakref.ref(kernel), weakref.ref(module), weakref.ref(stream)]
    number = id(kernel)
    del kernel, module, stream
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert number not in profiled._recorder.launches
    assert number not in profiled._recorder.captured.kernels


def test_launches_of_the_bindings_are_recorded_with_their_result_untouched(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    driver.set_kernel(MANGLED, registers=24)
    kernel, ptx_hash = load(MANGLED)
    function = cu.cuKernelGetFunction(kernel.handle)[1]
    success = (cu.CUresult.CUDA_SUCCESS,)
    with profiled.step():
        assert cu.cuLaunchKernel(function, 2, 1, 1, 32, 1, 1, 64, stream.handle, 0, 0) == success
        rest = {"hStream": stream.handle, "kernelParams": 0, "extra": 0}
        assert cu.cuLaunchKernel(kernel.handle, 3, 1, 1, 32, 1, 1, 0, **rest) == success
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 4, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
        config.hStream = stream.handle
        assert cu.cuLaunchKernelEx(config, function, 0, 0) == success
        driver.fail("cuLaunchKernel", cu.CUresult.CUDA_ERROR_INVALID_VALUE)
        refused = cu.cuLaunchKernel(function, 5, 1, 1, 32, 1, 1, 0, stream.handle, 0, 0)
        driver.succeed("cuLaunchKernel")
        assert refused == (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        with pytest.raises(TypeError):
            cu.cuLaunchKernel(function)
    found = kernels(profiled, traces)
    assert sorted((node.attributes["brick.cuda.grid.x"], node.name) for node in found) == [
        (number, "ns::foo") for number in (2, 3, 4, 5)
    ]
    by_grid = {node.attributes["brick.cuda.grid.x"]: node.attributes for node in found}
    assert by_grid[2]["brick.cuda.shared_memory.dynamic.size"] == 64
    assert by_grid[2]["brick.cuda.register.count"] == 24
    assert by_grid[3]["brick.cuda.ptx.hash"] == f"{ptx_hash:016x}"
    failed = {number: attributes["error.type"] for number, attributes in by_grid.items() if "error.type" in attributes}
    assert failed == {5: "CUDA_ERROR_INVALID_VALUE"}


def test_a_handle_that_comes_again_after_a_module_was_unloaded_is_asked_for_again(
    driver: Driver, stream: Stream, profiled: BrickProfiler
) -> None:
    module = cu.cuModuleLoadData(ptx({"unloaded": ()}) + b"\0")[1]
    function = cu.cuModuleGetFunction(module, b"unloaded")[1]
    with profiled.step():
        cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream.handle, 0, 0)
        cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream.handle, 0, 0)
        assert driver.calls("cuFuncGetName") == 1
        cu.cuModuleUnload(module)
        module = cu.cuModuleLoadData(ptx({"loaded": ()}) + b"\0")[1]
        again = cu.cuModuleGetFunction(module, b"loaded")[1]
        cu.cuLaunchKernel(again, 1, 1, 1, 32, 1, 1, 0, stream.handle, 0, 0)
        assert driver.calls("cuFuncGetName") == 2


def test_traced_launch_records_once_with_and_without_the_instrumentor(
    driver: Driver, stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    kernel, _ = load("explicit")
    with profiled.step():
        traced_launch(stream, ONE, kernel)
        instrumentor.uninstrument()
        traced_launch(stream, ONE, kernel)
        traced_launch(stream, ONE, kernel)
    assert len(kernels(profiled, traces)) == len(driver.launches()) == 3
