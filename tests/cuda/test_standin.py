"""The stand-in driver does what the tests of the CUDA parts rely on, as seen through cuda.core and cuda.bindings."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

core = pytest.importorskip("cuda.core")
cu = pytest.importorskip("cuda.bindings.driver")

from cuda.core import Device, EventOptions, LaunchConfig, ObjectCode, Stream, StreamOptions, launch  # noqa: E402

from tests.cuda.driver.build import SONAME, build  # noqa: E402
from tests.cuda.standin import FIRST_NS, NEVER_NS, Driver, ptx  # noqa: E402

MakeKernel = Callable[..., Any]
T = TypeVar("T")

ROOT = Path(__file__).parents[2]
R = cu.CUresult
GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
EXTERNAL = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
ONE = LaunchConfig(grid=1, block=32)
MS = 1_000_000


def ok(answer: tuple[Any, ...]) -> Any:
    """What a function of cuda.bindings gave besides CUDA_SUCCESS."""
    assert answer[0] == R.CUDA_SUCCESS
    return answer[1] if len(answer) == 2 else answer[1:]


def code(answer: tuple[Any, ...]) -> Any:
    return answer[0]


def timed_event(device: Device) -> Any:
    return device.create_event(options=EventOptions(timing_enabled=True))


def on_other_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def in_new_process(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


# Devices, launches


def test_cuda_core_takes_it_for_a_device(driver: Driver, device: Device) -> None:
    assert device.name == "Stand-in GPU 0"
    assert device.arch == "90"
    assert device.uuid == "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae00"
    assert device.properties.multiprocessor_count == 132
    assert int(ok(cu.cuCtxGetCurrent())) == int(ok(cu.cuStreamGetCtx(0)))
    assert int(ok(cu.cuCtxGetDevice())) == 0


def test_a_launch_is_traced_with_grid_cluster_shared_memory_stream_and_arguments(
    driver: Driver, kernel: MakeKernel, stream: Stream
) -> None:
    scale = kernel("_Z5scalePfifd", parameters=("u64", "u32", "f32", "f64"))
    launch(
        stream,
        LaunchConfig(grid=(4, 2), block=(32, 4), cluster=(2, 1, 1), shmem_size=512),
        scale,
        0x1000,
        np.int32(-3),
        np.float32(1.5),
        np.float64(0.25),
    )
    (call,) = driver.launches()
    assert call.function == "cuLaunchKernelEx"
    assert call.result == 0
    assert call.kernel == "_Z5scalePfifd"
    assert call.grid == (8, 2, 1)  # blocks, where cuda.core counts clusters
    assert call.block == (32, 4, 1)
    assert call.cluster == (2, 1, 1)
    assert call.shared_bytes == 512
    assert call.stream == int(stream.handle)
    assert call.thread == threading.get_native_id()
    assert struct.unpack("<Qifd", call.arguments) == (0x1000, -3, 1.5, 0.25)


def test_arguments_lie_where_ptx_puts_them(driver: Driver, kernel: MakeKernel) -> None:
    mixed = kernel("mixed", parameters=("f32", "u64", "u8", "align 8 .b8[24]", "u16"))
    assert [(each.offset, each.size) for each in mixed.arguments_info] == [(0, 4), (8, 8), (16, 1), (24, 24), (48, 2)]


def test_a_name_leads_from_a_kernel_to_its_library_and_from_a_function_to_its_module(
    driver: Driver, device: Device
) -> None:
    code_ = ObjectCode.from_ptx(ptx({"first": (), "_Z6secondIfEvPT_": ("u64",)}))
    kernel = code_.get_kernel("_Z6secondIfEvPT_")
    assert ok(cu.cuKernelGetName(kernel.handle)) == b"_Z6secondIfEvPT_"
    assert int(ok(cu.cuKernelGetLibrary(kernel.handle))) == int(code_.handle)
    function = ok(cu.cuKernelGetFunction(kernel.handle))
    assert ok(cu.cuFuncGetName(function)) == b"_Z6secondIfEvPT_"
    assert int(ok(cu.cuFuncGetModule(function))) == int(ok(cu.cuLibraryGetModule(code_.handle)))
    with pytest.raises(core._utils.cuda_utils.CUDAError):
        code_.get_kernel("third")


def test_what_was_unloaded_is_gone(driver: Driver, device: Device) -> None:
    with driver.no_leaks("libraries", "kernels", "modules", "functions"):
        library = ok(cu.cuLibraryLoadData(ptx({"work": ()}), [], [], 0, [], [], 0))
        kernel = ok(cu.cuLibraryGetKernel(library, b"work"))
        function = ok(cu.cuKernelGetFunction(kernel))
        ok(cu.cuLibraryUnload(library))
        for answer in (cu.cuKernelGetName(kernel), cu.cuFuncGetName(function), cu.cuLibraryUnload(library)):
            assert code(answer) == R.CUDA_ERROR_INVALID_HANDLE


def test_attributes_are_those_set_by_name(driver: Driver, kernel: MakeKernel) -> None:
    gemm = kernel("gemm", registers=168, static_shared_bytes=4096)
    driver.set_kernel("gemm", local_bytes=16, max_threads=256)
    assert gemm.attributes.num_regs == 168
    assert gemm.attributes.shared_size_bytes == 4096
    assert gemm.attributes.local_size_bytes == 16
    assert gemm.attributes.max_threads_per_block == 256
    assert gemm.attributes.ptx_version == 83
    function = ok(cu.cuKernelGetFunction(gemm.handle))
    registers = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    assert ok(cu.cuFuncGetAttribute(registers, function)) == 168
    assert ok(cu.cuKernelGetAttribute(registers, gemm.handle, 0)) == 168


def test_a_function_of_a_module_launches_through_the_older_call(driver: Driver, device: Device) -> None:
    module = ok(cu.cuModuleLoadData(ptx({"add": ("f32", "f32")})))
    function = ok(cu.cuModuleGetFunction(module, b"add"))
    arguments = np.array([np.float32(1), np.float32(2)], dtype=np.float32)
    pointers = np.array([arguments.ctypes.data, arguments.ctypes.data + 4], dtype=np.uint64)
    ok(cu.cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 128, 0, pointers.ctypes.data, 0))
    (call,) = driver.launches()
    assert (call.function, call.kernel, call.grid, call.block) == ("cuLaunchKernel", "add", (2, 1, 1), (64, 1, 1))
    assert (call.shared_bytes, call.stream, call.cluster) == (128, 0, None)
    assert struct.unpack("<ff", call.arguments) == (1, 2)
    ok(cu.cuModuleUnload(module))
    stale = cu.cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 128, 0, pointers.ctypes.data, 0)
    assert code(stale) == R.CUDA_ERROR_INVALID_HANDLE


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (LaunchConfig(grid=1, block=1025), R.CUDA_ERROR_INVALID_VALUE),
        (LaunchConfig(grid=1, block=512), R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES),
        (LaunchConfig(grid=1, block=1, shmem_size=50_000), R.CUDA_ERROR_INVALID_VALUE),
    ],
)
def test_a_launch_that_can_not_be_is_refused(
    driver: Driver, kernel: MakeKernel, stream: Stream, config: LaunchConfig, error: Any
) -> None:
    small = kernel("small")
    driver.set_kernel("small", max_threads=256)
    with pytest.raises(core._utils.cuda_utils.CUDAError):
        launch(stream, config, small)
    assert [call.result for call in driver.launches()] == [error]


def test_text_that_is_no_ptx_is_refused(driver: Driver, device: Device) -> None:
    assert code(cu.cuModuleLoadData(b"int main() {}\0")) == R.CUDA_ERROR_INVALID_PTX
    assert code(cu.cuLibraryLoadData(b"\0", [], [], 0, [], [], 0)) == R.CUDA_ERROR_INVALID_PTX


def test_a_function_that_it_does_not_have_raises_in_python(driver: Driver, device: Device) -> None:
    with pytest.raises(RuntimeError, match="cuTexRefCreate"):
        cu.cuTexRefCreate()


# Time


def test_ten_kernels_run_far_behind_the_host(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=MS)
    driver.set_cost("cuLaunchKernelEx", 6_000)
    events = [timed_event(device) for _ in range(11)]
    stream.record(events[0])
    for event in events[1:]:
        launch(stream, ONE, work)
        stream.record(event)
    assert driver.now_ns == FIRST_NS + 10 * 6_000
    assert [event.is_done for event in events] == [True] + 10 * [False]
    driver.advance(MS)
    assert [event.is_done for event in events] == [True, True] + 9 * [False]
    events[5].sync()
    assert driver.now_ns == FIRST_NS + 6_000 + 5 * MS
    stream.sync()
    assert driver.now_ns == FIRST_NS + 6_000 + 10 * MS
    # The first pair holds what the host took for the launch, for the stream was idle.
    assert events[1] - events[0] == pytest.approx(1.006)
    assert {later - event for event, later in pairwise(events[1:])} == {1.0}


def test_an_hour_passes_at_once(driver: Driver, kernel: MakeKernel, device: Device, stream: Stream) -> None:
    tick = kernel("tick", duration_ns=333)
    began = time.perf_counter()
    for _ in range(60):
        driver.advance(60 * 10**9)
        launch(stream, ONE, tick)
        stream.sync()
    assert driver.now_ns == FIRST_NS + 60 * (60 * 10**9 + 333)
    assert time.perf_counter() - began < 30


def test_elapsed_time_is_a_float32_of_milliseconds(driver: Driver, device: Device, stream: Stream) -> None:
    start, end = timed_event(device), timed_event(device)
    stream.record(start)
    driver.advance(3_600_000_000_000 + 123_456)
    stream.record(end)
    assert end - start == float(np.float32(3_600_000.123456)) != 3_600_000.123456
    assert start - end == -(end - start)


def test_the_clock_of_the_driver_is_one_for_a_profiler(driver: Driver) -> None:
    clock = driver.clock
    before = (clock.now(), clock.unix())
    driver.advance(42)
    assert (clock.now(), clock.unix()) == (before[0] + 42, before[1] + 42)
    assert clock.now() == driver.now_ns == FIRST_NS + 42


def test_drift_jumps_and_steps_of_the_devices_clock_show_in_elapsed_times(
    driver: Driver, device: Device, stream: Stream
) -> None:
    def second() -> float:
        start, end = timed_event(device), timed_event(device)
        stream.record(start)
        driver.advance(10**9 + 700)
        stream.record(end)
        return end - start

    assert second() == pytest.approx(1000.0007, abs=1e-4)
    driver.set_device_clock(ppm=50)
    assert second() == pytest.approx(1000.0507, abs=1e-4)
    driver.set_device_clock(ppm=-50)
    assert second() == pytest.approx(999.9507, abs=1e-4)
    driver.set_device_clock()
    driver.set_resolution(500)
    assert second() in {float(np.float32(1000.0005)), float(np.float32(1000.001))}
    start, end = timed_event(device), timed_event(device)
    stream.record(start)
    driver.set_device_clock(jump_ns=-5 * MS)
    stream.record(end)
    assert end - start == -5.0


def test_latencies_delay_the_device_and_what_the_host_sees_of_it(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    driver.set_latency(submit_ns=4_000, completion_ns=1_500)
    event = timed_event(device)
    launch(stream, ONE, kernel("work", duration_ns=10_000))
    stream.record(event)
    driver.advance(4_000 + 10_000)
    assert not event.is_done
    event.sync()
    assert driver.now_ns == FIRST_NS + 15_500


def test_with_the_real_clock_launches_return_at_once_and_waits_take_their_time(
    real_time_driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=50 * MS)
    start, end = timed_event(device), timed_event(device)
    began = time.perf_counter_ns()
    assert abs(real_time_driver.now_ns - began) < 10**9
    stream.record(start)
    launch(stream, ONE, work)
    stream.record(end)
    assert not end.is_done
    with pytest.raises(RuntimeError):
        end - start
    end.sync()
    assert time.perf_counter_ns() - began >= 50 * MS
    assert end.is_done
    assert end - start == pytest.approx(50, rel=0.5)


def test_a_wait_lets_other_threads_run_and_call(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    driver.set_waits_move_clock(False)
    launch(stream, ONE, kernel("work", duration_ns=MS))
    event = device.create_event()
    stream.record(event)
    waiter = threading.Thread(target=stream.sync)
    waiter.start()
    assert not event.is_done
    assert waiter.is_alive()
    driver.advance(MS)
    waiter.join(timeout=30)
    assert not waiter.is_alive()
    assert event.is_done


def test_work_that_never_ends_ends_a_wait_with_an_error(driver: Driver, kernel: MakeKernel, stream: Stream) -> None:
    launch(stream, ONE, kernel("hang", duration_ns=NEVER_NS))
    assert code(cu.cuStreamSynchronize(stream.handle)) == R.CUDA_ERROR_LAUNCH_TIMEOUT
    driver.advance(10**15)
    assert code(cu.cuStreamQuery(stream.handle)) == R.CUDA_ERROR_NOT_READY
    driver.set_waits_move_clock(False)
    driver.set_wait_limit(0.05)
    assert code(cu.cuStreamSynchronize(stream.handle)) == R.CUDA_ERROR_LAUNCH_TIMEOUT


# Events


def test_events_without_timing_or_record_have_no_elapsed_time(driver: Driver, device: Device, stream: Stream) -> None:
    timed, plain = timed_event(device), device.create_event()
    assert timed.is_done  # never recorded
    timed.sync()
    stream.record(plain)
    assert code(cu.cuEventElapsedTime(timed.handle, plain.handle)) == R.CUDA_ERROR_INVALID_HANDLE
    assert code(cu.cuEventElapsedTime(timed.handle, timed.handle)) == R.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(RuntimeError):
        plain - plain


def test_a_stream_waits_for_an_event_of_another(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work, other = kernel("work", duration_ns=MS), device.create_stream()
    start, end = timed_event(device), timed_event(device)
    other.record(start)
    launch(stream, ONE, work)
    other.wait(stream.record())
    launch(other, ONE, work)
    other.record(end)
    stream.sync()
    assert not end.is_done
    other.sync()
    assert end - start == 2.0


def test_a_destroyed_handle_is_invalid_even_after_its_place_was_reused(driver: Driver, device: Device) -> None:
    event = ok(cu.cuEventCreate(0))
    stale = cu.CUevent(int(event))
    ok(cu.cuEventDestroy(event))
    others = [ok(cu.cuEventCreate(0)) for _ in range(3)]
    for answer in (
        cu.cuEventQuery(stale),
        cu.cuEventRecord(stale, 0),
        cu.cuEventSynchronize(stale),
        cu.cuEventDestroy(stale),
        cu.cuEventQuery(cu.CUevent(0x1234)),
        cu.cuStreamQuery(cu.CUstream(int(others[0]))),
    ):
        assert code(answer) == R.CUDA_ERROR_INVALID_HANDLE
    for other in others:
        ok(cu.cuEventDestroy(other))


def test_events_disturbed_while_pending_are_counted(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    launch(stream, ONE, kernel("work"))
    event = timed_event(device)
    stream.record(event)
    assert (driver.pending_recorded, driver.pending_destroyed) == (0, 0)
    stream.record(event)
    event.close()
    assert (driver.pending_recorded, driver.pending_destroyed) == (1, 1)
    stream.sync()
    done = timed_event(device)
    stream.record(done)
    stream.record(done)
    done.close()
    assert (driver.pending_recorded, driver.pending_destroyed) == (1, 1)


def test_a_thread_without_a_context_creates_no_events_but_records_them(
    driver: Driver, device: Device, stream: Stream
) -> None:
    event = timed_event(device)

    def elsewhere() -> tuple[Any, Any, Any, int]:
        return (
            code(cu.cuEventCreate(0)),
            code(cu.cuEventRecord(event.handle, stream.handle)),
            code(cu.cuEventRecord(event.handle, 0)),
            int(ok(cu.cuCtxGetCurrent())),
        )

    without = R.CUDA_ERROR_INVALID_CONTEXT
    assert on_other_thread(elsewhere) == (without, R.CUDA_SUCCESS, without, 0)


# The legacy default stream and those of threads


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=MS)
    blocking = device.create_stream(options=StreamOptions(nonblocking=False))
    after_legacy, independent = timed_event(device), timed_event(device)
    launch(blocking, ONE, work)
    launch(device.default_stream, ONE, work)
    launch(blocking, ONE, work)
    blocking.record(after_legacy)
    launch(stream, ONE, work)
    stream.record(independent)
    independent.sync()
    assert driver.now_ns == FIRST_NS + MS
    assert code(cu.cuStreamQuery(cu.CUstream(0))) == R.CUDA_ERROR_NOT_READY
    after_legacy.sync()
    assert driver.now_ns == FIRST_NS + 3 * MS


def test_handles_0_and_1_are_one_stream_and_2_is_one_per_thread(driver: Driver, device: Device) -> None:
    def identifier(handle: int) -> int:
        return ok(cu.cuStreamGetId(cu.CUstream(handle)))

    def elsewhere() -> tuple[int, int]:
        device.set_current()
        return identifier(1), identifier(2)

    legacy, of_other_thread = on_other_thread(elsewhere)
    assert identifier(0) == identifier(1) == legacy
    assert len({legacy, identifier(2), of_other_thread}) == 3
    assert identifier(2) == identifier(2)


def test_a_per_thread_default_stream_can_be_the_default() -> None:
    program = """
from tests.cuda.standin import Driver
Driver.load()
from cuda.bindings import driver as cu
from cuda.core import Device
Device(0).set_current()
print(cu.cuStreamGetId(cu.CUstream(0)) == cu.cuStreamGetId(cu.CUstream(2)) != cu.cuStreamGetId(cu.CUstream(1)))
"""
    assert in_new_process(program, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1") == "True"


# Capture


@pytest.fixture
def capturing(device: Device, driver: Driver) -> Any:
    """A blocking stream; capture on it with `begin`."""
    stream = device.create_stream(options=StreamOptions(nonblocking=False))
    yield stream
    driver.reset()  # ends captures
    stream.close()


def begin(stream: Stream, mode: Any = GLOBAL) -> None:
    ok(cu.cuStreamBeginCapture(stream.handle, mode))


def status(stream: Stream) -> str:
    return ok(cu.cuStreamIsCapturing(stream.handle)).name.removeprefix("CU_STREAM_CAPTURE_STATUS_")


def end(stream: Stream) -> Any:
    """The result of ending the capture; a graph that it made is destroyed."""
    result, graph = cu.cuStreamEndCapture(stream.handle)
    if result == R.CUDA_SUCCESS:
        ok(cu.cuGraphDestroy(graph))
    return result


def test_a_captured_graph_is_timed_at_replay(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=MS, parameters=("u64", "f32"))
    start, done = timed_event(device), timed_event(device)
    with driver.no_leaks():
        builder = stream.create_graph_builder()
        builder.begin_building()
        launch(builder, ONE, work, 0x10, np.float32(1))
        left, right = builder.split(2)
        launch(left, ONE, work, 0x10, np.float32(1))
        launch(right, ONE, work, 0x10, np.float32(1))
        launch(right, ONE, work, 0x10, np.float32(1))
        graph = left.join(left, right).end_building().complete()
        driver.set_kernel("work", duration_ns=7)
        assert driver.now_ns == FIRST_NS
        stream.record(start)
        graph.launch(stream)
        graph.launch(stream)
        stream.record(done)
        stream.sync()
        assert done - start == 6.0  # twice the longer branch
        del graph, builder, left, right
    assert driver.calls("cuGraphLaunch") == 2


def test_an_external_event_is_recorded_by_each_replay(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=2 * MS)
    first, second = timed_event(device), timed_event(device)
    assert code(cu.cuEventRecordWithFlags(first.handle, stream.handle, EXTERNAL)) == R.CUDA_ERROR_INVALID_VALUE
    begin(stream)
    ok(cu.cuEventRecordWithFlags(first.handle, stream.handle, EXTERNAL))
    launch(stream, ONE, work)
    ok(cu.cuEventRecordWithFlags(second.handle, stream.handle, EXTERNAL))
    graph = ok(cu.cuStreamEndCapture(stream.handle))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    assert first.is_done and second.is_done  # never recorded yet
    for _ in range(2):
        ok(cu.cuGraphLaunch(executable, stream.handle))
        assert not second.is_done
        stream.sync()
        assert second - first == 2.0
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuGraphDestroy(graph))


def test_a_plain_event_in_a_capture_has_no_time_and_asking_for_it_spoils_the_capture(
    driver: Driver, device: Device, capturing: Stream
) -> None:
    event = timed_event(device)
    for ask in (
        lambda: cu.cuEventQuery(event.handle),
        lambda: cu.cuEventSynchronize(event.handle),
        lambda: cu.cuEventElapsedTime(event.handle, event.handle),
    ):
        begin(capturing, RELAXED)
        capturing.record(event)
        assert status(capturing) == "ACTIVE"
        assert code(ask()) == R.CUDA_ERROR_CAPTURED_EVENT
        assert status(capturing) == "INVALIDATED"
        assert code(cu.cuEventRecord(event.handle, capturing.handle)) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        assert status(capturing) == "NONE"
        assert code(ask()) == R.CUDA_ERROR_CAPTURED_EVENT
    capturing.record(event)
    assert event.is_done


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_waiting_for_a_capturing_stream_spoils_the_capture(driver: Driver, capturing: Stream, mode: Any) -> None:
    for ask in (cu.cuStreamQuery, cu.cuStreamSynchronize):
        begin(capturing, mode)
        assert code(ask(capturing.handle)) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    begin(capturing, mode)
    assert code(cu.cuCtxSynchronize()) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


UNSAFE = {
    "cuEventQuery": lambda event, stream: cu.cuEventQuery(event.handle),
    "cuEventSynchronize": lambda event, stream: cu.cuEventSynchronize(event.handle),
    "cuEventElapsedTime": lambda event, stream: cu.cuEventElapsedTime(event.handle, event.handle),
    "cuStreamQuery": lambda event, stream: cu.cuStreamQuery(stream.handle),
    "cuStreamSynchronize": lambda event, stream: cu.cuStreamSynchronize(stream.handle),
    "cuMemAlloc": lambda event, stream: cu.cuMemAlloc(16),
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize(
    ("capture_mode", "thread_mode", "same_thread", "spoiled"),
    [
        (GLOBAL, None, False, True),
        (GLOBAL, THREAD_LOCAL, False, False),
        (GLOBAL, RELAXED, False, False),
        (THREAD_LOCAL, None, False, False),
        (RELAXED, None, False, False),
        (GLOBAL, None, True, True),
        (GLOBAL, THREAD_LOCAL, True, True),
        (GLOBAL, RELAXED, True, False),
        (THREAD_LOCAL, None, True, True),
        (RELAXED, None, True, False),
    ],
)
def test_unsafe_calls_spoil_captures_as_the_modes_say(
    driver: Driver,
    device: Device,
    stream: Stream,
    capturing: Stream,
    name: str,
    capture_mode: Any,
    thread_mode: Any,
    same_thread: bool,
    spoiled: bool,
) -> None:
    event = timed_event(device)
    stream.record(event)
    begin(capturing, capture_mode)

    def attempt() -> Any:
        device.set_current()
        previous = None if thread_mode is None else ok(cu.cuThreadExchangeStreamCaptureMode(thread_mode))
        answer = UNSAFE[name](event, stream)
        if previous is not None:
            assert previous == GLOBAL
            assert ok(cu.cuThreadExchangeStreamCaptureMode(previous)) == thread_mode
        if name == "cuMemAlloc" and not spoiled:
            ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
            ok(cu.cuMemFree(answer[1]))
        return code(answer)

    result = attempt() if same_thread else on_other_thread(attempt)
    assert result == (R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if spoiled else R.CUDA_SUCCESS)
    assert end(capturing) == (R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED if spoiled else R.CUDA_SUCCESS)


def test_records_launches_and_new_events_elsewhere_do_not_spoil_a_capture(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream, capturing: Stream
) -> None:
    work = kernel("work")
    begin(capturing)

    def elsewhere() -> None:
        device.set_current()
        stream.record(timed_event(device))
        launch(stream, ONE, work)

    on_other_thread(elsewhere)
    elsewhere()
    assert end(capturing) == R.CUDA_SUCCESS


def test_the_legacy_stream_can_not_be_used_while_a_blocking_stream_captures(
    driver: Driver, kernel: MakeKernel, device: Device, capturing: Stream
) -> None:
    work, event = kernel("work"), timed_event(device)
    legacy = cu.CUstream(0)
    begin(capturing)
    assert code(cu.cuStreamIsCapturing(legacy)) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert code(cu.cuStreamGetCaptureInfo(legacy)) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert status(capturing) == "ACTIVE"
    assert code(cu.cuEventRecord(event.handle, legacy)) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    begin(capturing)
    with pytest.raises(core._utils.cuda_utils.CUDAError):
        launch(device.default_stream, ONE, work)
    assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert code(cu.cuStreamBeginCapture(legacy, GLOBAL)) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


def test_the_legacy_stream_is_free_while_a_nonblocking_stream_captures(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    begin(stream)
    launch(device.default_stream, ONE, kernel("work"))
    assert ok(cu.cuStreamIsCapturing(cu.CUstream(0))) == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    assert end(stream) == R.CUDA_SUCCESS


def test_streams_join_a_capture_and_must_be_joined(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream, capturing: Stream
) -> None:
    work, fork, join = kernel("work"), device.create_event(), device.create_event()
    begin(capturing)
    identifier = ok(cu.cuStreamGetCaptureInfo(capturing.handle))[1]
    capturing.record(fork)
    stream.wait(fork)
    assert status(stream) == "ACTIVE"
    assert int(ok(cu.cuStreamGetCaptureInfo(stream.handle))[1]) == int(identifier)
    launch(stream, ONE, work)
    assert end(stream) == R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert status(stream) == status(capturing) == "NONE"

    for joins in (True, False):
        begin(capturing)
        capturing.record(fork)
        stream.wait(fork)
        launch(stream, ONE, work)
        if joins:
            stream.record(join)
            capturing.wait(join)
        assert end(capturing) == (R.CUDA_SUCCESS if joins else R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)


def test_dependencies_do_not_cross_the_border_of_a_capture(
    driver: Driver, device: Device, stream: Stream, capturing: Stream
) -> None:
    outside, inside = device.create_event(), device.create_event()
    stream.record(outside)
    begin(capturing)
    waits = cu.cuStreamWaitEvent(capturing.handle, outside.handle, 0)
    assert code(waits) == R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    assert end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED

    begin(capturing)
    capturing.record(inside)
    begin(stream)
    waits = cu.cuStreamWaitEvent(stream.handle, inside.handle, 0)
    assert code(waits) == R.CUDA_ERROR_STREAM_CAPTURE_MERGE
    assert end(stream) == end(capturing) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    waits = cu.cuStreamWaitEvent(stream.handle, inside.handle, 0)
    assert code(waits) == R.CUDA_ERROR_CAPTURED_EVENT


def test_a_capture_ends_on_the_thread_that_began_it_unless_relaxed(driver: Driver, capturing: Stream) -> None:
    begin(capturing)
    assert on_other_thread(lambda: end(capturing)) == R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    assert code(cu.cuStreamBeginCapture(capturing.handle, GLOBAL)) == R.CUDA_ERROR_ILLEGAL_STATE
    assert end(capturing) == R.CUDA_SUCCESS
    begin(capturing, RELAXED)
    assert on_other_thread(lambda: end(capturing)) == R.CUDA_SUCCESS
    assert end(capturing) == R.CUDA_ERROR_ILLEGAL_STATE


# Memory


def test_copies_move_bytes_and_take_time_by_their_size(driver: Driver, device: Device, stream: Stream) -> None:
    driver.set_copies(least_ns=1_000, host_bytes_per_us=10_000, device_bytes_per_us=1_000_000)
    source, target = np.arange(10**6, dtype=np.uint8), np.zeros(10**6, dtype=np.uint8)
    with driver.no_leaks():
        first, second = ok(cu.cuMemAlloc(10**6)), ok(cu.cuMemAlloc(10**6))
        ok(cu.cuMemcpyHtoDAsync(first, source.ctypes.data, 10**6, stream.handle))
        ok(cu.cuMemcpyDtoDAsync(second, first, 10**6, stream.handle))
        ok(cu.cuMemcpyDtoHAsync(target.ctypes.data, second, 10**6, stream.handle))
        assert driver.now_ns == FIRST_NS
        stream.sync()
        assert driver.now_ns == FIRST_NS + 101_000 + 2_000 + 101_000
        assert (source == target).all()
        ok(cu.cuMemsetD8(first, 7, 10**6))
        ok(cu.cuMemcpyDtoH(target.ctypes.data, first, 10**6))
        assert driver.now_ns == FIRST_NS + 204_000 + 2_000 + 101_000
        assert set(target) == {7}
        beyond = cu.cuMemcpyHtoD(first, source.ctypes.data, 10**6 + 1)
        assert code(beyond) == R.CUDA_ERROR_INVALID_VALUE
        ok(cu.cuMemFree(first))
        assert code(cu.cuMemFree(first)) == R.CUDA_ERROR_INVALID_VALUE
        ok(cu.cuMemFree(second))


def test_buffers_of_cuda_core_work(driver: Driver, device: Device, stream: Stream) -> None:
    with driver.no_leaks():
        buffer, pinned = device.allocate(64, stream=stream), core.LegacyPinnedMemoryResource().allocate(64)
        view = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(int(pinned.handle)))
        view[:] = 9
        pinned.copy_to(buffer, stream=stream)
        view[:] = 0
        buffer.copy_to(pinned, stream=stream)
        stream.sync()
        assert set(view) == {9}
        del view
        buffer.close()
        pinned.close()


# Faults, counts


def test_the_wanted_call_fails_and_does_nothing(
    driver: Driver, kernel: MakeKernel, device: Device, stream: Stream
) -> None:
    work = kernel("work", duration_ns=MS)
    driver.fail("cuLaunchKernelEx", R.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, call=2)
    launch(stream, ONE, work)
    with pytest.raises(core._utils.cuda_utils.CUDAError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        launch(stream, ONE, work)
    launch(stream, ONE, work)
    stream.sync()
    assert driver.now_ns == FIRST_NS + 2 * MS
    assert driver.calls("cuLaunchKernelEx") == 3
    assert [call.result for call in driver.trace("cuLaunchKernelEx")] == [0, 701, 0]


def test_calls_fail_from_then_on_until_told_otherwise(driver: Driver, stream: Stream) -> None:
    driver.fail("cuStreamQuery", 700, call=2, always=True)
    results = [int(code(cu.cuStreamQuery(stream.handle))) for _ in range(4)]
    assert results == [0, 700, 700, 700]
    driver.succeed("cuStreamQuery")
    ok(cu.cuStreamQuery(stream.handle))
    driver.fail("*", 700, always=True)
    assert {int(code(cu.cuStreamQuery(stream.handle))), int(code(cu.cuEventCreate(0)))} == {700}


def test_a_name_that_no_function_has_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="cuEventRecrod"):
        driver.fail("cuEventRecrod", 1)
    with pytest.raises(ValueError, match="cuEventRecrod"):
        driver.calls("cuEventRecrod")


def test_a_leak_is_found(driver: Driver, device: Device) -> None:
    kept = []
    with pytest.raises(AssertionError, match="events"), driver.no_leaks():
        kept.append(device.create_event())
    with driver.no_leaks():
        device.create_event()
        device.create_stream()
        driver.kernel("passing", parameters=("u64",))
    with pytest.raises(AssertionError, match="libraries"), driver.no_leaks("libraries"):
        driver.kernel("passing")


def test_a_reset_takes_everything_back(driver: Driver, kernel: MakeKernel, device: Device, stream: Stream) -> None:
    launch(stream, ONE, kernel("work", duration_ns=NEVER_NS, registers=99))
    event = timed_event(device)
    stream.record(event)
    begin(stream, THREAD_LOCAL)
    ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    driver.fail("cuEventQuery", 700, always=True)
    driver.reset()
    assert driver.trace() == []
    assert driver.calls("*") == 0
    assert event.is_done
    assert status(stream) == "NONE"
    assert ok(cu.cuThreadExchangeStreamCaptureMode(GLOBAL)) == GLOBAL
    assert kernel("work").attributes.num_regs == 32
    assert abs(driver.now_ns - time.perf_counter_ns()) < 10**9


def test_tracing_can_be_off(driver: Driver, stream: Stream) -> None:
    driver.set_tracing(False)
    driver.clear_trace()
    cu.cuStreamQuery(stream.handle)
    assert driver.trace() == []
    assert driver.calls("cuStreamQuery") == 1
    driver.set_tracing(True)
    cu.cuStreamQuery(stream.handle)
    assert [call.function for call in driver.trace()] == ["cuStreamQuery"]
    driver.clear_trace()
    assert driver.trace() == []
    assert driver.trace_dropped == 0


def test_threads_may_call_at_once(real_time_driver: Driver, kernel: MakeKernel, device: Device) -> None:
    work = kernel("work", duration_ns=1_000)

    def steps(_: int) -> float:
        device.set_current()
        stream = device.create_stream()
        start, end = timed_event(device), timed_event(device)
        stream.record(start)
        for _ in range(200):
            launch(stream, ONE, work)
        stream.record(end)
        stream.sync()
        return end - start

    with real_time_driver.no_leaks():
        with ThreadPoolExecutor(8) as pool:
            times = list(pool.map(steps, range(16)))
    assert min(times) >= 0.2 - 1e-6
    assert real_time_driver.calls("cuLaunchKernelEx") == 16 * 200


# Processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork_the_child_can_not_use_the_driver(driver: Driver, device: Device, stream: Stream) -> None:
    stream_handle, event = stream.handle, timed_event(device)
    event_handle = event.handle
    child = os.fork()
    if not child:
        answers = (
            cu.cuInit(0),
            cu.cuEventQuery(event_handle),
            cu.cuEventRecord(event_handle, stream_handle),
            cu.cuCtxGetCurrent(),
        )
        os._exit(42 if {int(code(answer)) for answer in answers} == {3} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert event.is_done


def test_an_older_driver_lacks_the_newer_functions_and_there_may_be_two_devices() -> None:
    program = """
from tests.cuda.standin import Driver
driver = Driver.load()
driver.set_version(12020)
driver.set_devices(2)
from cuda.bindings import driver as cu
from cuda.core import Device
devices = [Device(0), Device(1)]
streams = []
for device in devices:
    device.set_current()
    streams.append(device.create_stream())
assert [int(cu.cuCtxGetDevice()[1])] == [1]
assert len({int(cu.cuStreamGetCtx(stream.handle)[1]) for stream in streams}) == 2
event = devices[1].create_event()
assert int(cu.cuEventRecord(event.handle, streams[0].handle)[0]) == 400
try:
    cu.cuKernelGetName(0)
except RuntimeError as error:
    print(error)
"""
    assert "cuKernelGetName" in in_new_process(program)


def test_it_does_not_pretend_to_replace_a_driver_that_is_loaded() -> None:
    program = """
import ctypes
from tests.cuda.driver.build import build
from tests.cuda.standin import Driver
first = ctypes.CDLL(str(build()))
try:
    Driver.load()
except RuntimeError as error:
    print(error)
"""
    assert "another libcuda.so.1" in in_new_process(program)


def test_it_is_taken_where_the_machine_has_a_driver_of_its_own(driver: Driver, tmp_path: Path) -> None:
    # Another copy of the stand-in is what the dynamic linker would find.
    shutil.copy(build(), tmp_path / SONAME)
    program = """
from pathlib import Path
from tests.cuda.standin import Driver
driver = Driver.load()
from cuda.bindings import driver as cu
cu.cuInit(0)
lines = Path("/proc/self/maps").read_text().splitlines()
print(driver.calls("cuInit"), *{line.split()[-1] for line in lines if "libcuda.so.1" in line})
"""
    assert in_new_process(program, LD_LIBRARY_PATH=str(tmp_path)) == f"1 {build()}"


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="this machine has a driver")
def test_it_can_be_loaded_after_calls_that_found_no_driver() -> None:
    program = """
from cuda.bindings import driver as cu
from tests.cuda.standin import Driver
for _ in range(2):
    try:
        cu.cuInit(0)
    except RuntimeError:
        print("none", end=" ")
Driver.load()
print(int(cu.cuInit(0)[0]))
"""
    assert in_new_process(program) == "none none 0"


def test_a_process_with_loaded_kernels_and_pending_work_ends_quietly() -> None:
    program = """
from tests.cuda.standin import Driver
driver = Driver.load()
from cuda.core import Device, EventOptions, LaunchConfig, launch
device = Device(0)
device.set_current()
stream = device.create_stream()
kernel = driver.kernel("work", duration_ns=10**12)
launch(stream, LaunchConfig(grid=1, block=1), kernel)
event = stream.record(options=EventOptions(timing_enabled=True))
print("end")
"""
    assert in_new_process(program) == "end"
