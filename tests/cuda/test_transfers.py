"""Copies become transfer rows with direction and bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cu
from cuda.core import Device, LegacyPinnedMemoryResource, Stream

from otel_brick import BrickProfiler
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor, traced_copy
from otel_brick.testing import InMemoryTraces, SpanNode

from .standin import Driver

SIZE = 1_000
SUCCESS = (cu.CUresult.CUDA_SUCCESS,)


@pytest.fixture(autouse=True)
def instrumented(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    instrumentor.instrument()


@pytest.fixture
def profiled(driver: Driver, traces: InMemoryTraces) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(
        clock=driver.clock, tracer_provider=traces.provider, detail="all", kernel_events="all"
    )
    yield profiler
    profiler.shutdown(1.0)


@pytest.fixture
def memory(device: Device) -> Iterator[tuple[Any, Any, int]]:
    """Two places on the device and one on the host."""
    host = ctypes.create_string_buffer(SIZE)
    first, second = cu.cuMemAlloc(SIZE)[1], cu.cuMemAlloc(SIZE)[1]
    yield first, second, ctypes.addressof(host)
    cu.cuMemFree(first)
    cu.cuMemFree(second)


def transfers(profiler: BrickProfiler, traces: InMemoryTraces) -> list[SpanNode]:
    profiler.finalize()
    assert profiler.flush(30)
    (step,) = traces.trees()
    return step.children


def test_a_copy_has_its_direction_its_bytes_and_its_device_time(
    driver: Driver, stream: Stream, memory: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    first, second, host = memory
    driver.set_copies(least_ns=1_000, host_bytes_per_us=1_000, device_bytes_per_us=10_000)
    with profiled.step():
        assert cu.cuMemcpyHtoDAsync(first, host, SIZE, stream.handle) == SUCCESS
        assert cu.cuMemcpyDtoDAsync(second, first, SIZE, stream.handle) == SUCCESS
        assert cu.cuMemcpyDtoHAsync(dstHost=host, srcDevice=second, ByteCount=SIZE, hStream=stream.handle) == SUCCESS
    found = transfers(profiled, traces)
    assert [(node.name, node.duration_ns) for node in found] == [
        ("transfer h2d", 2_000),
        ("transfer d2d", 1_100),
        ("transfer d2h", 2_000),
    ]
    assert found[0].attributes == {
        "brick.span.level": "transfer",
        "brick.transfer.direction": "h2d",
        "brick.io.size": SIZE,
    }


def test_a_copy_that_waits_is_recorded_too(memory: Any, profiled: BrickProfiler, traces: InMemoryTraces) -> None:
    first, second, host = memory
    with profiled.step():
        assert cu.cuMemcpyHtoD(first, host, 10) == SUCCESS
        assert cu.cuMemcpyDtoD(second, first, 20) == SUCCESS
        assert cu.cuMemcpyDtoH(host, second, 30) == SUCCESS
    found = transfers(profiled, traces)
    assert [(node.name, node.attributes["brick.io.size"]) for node in found] == [
        ("transfer h2d", 10),
        ("transfer d2d", 20),
        ("transfer d2h", 30),
    ]


def test_between_unified_addresses_the_driver_tells_the_direction(
    stream: Stream, memory: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    first, second, host = memory
    other = ctypes.create_string_buffer(SIZE)
    with profiled.step():
        assert cu.cuMemcpy(first, host, 10) == SUCCESS
        assert cu.cuMemcpyAsync(host, first, 20, stream.handle) == SUCCESS
        assert cu.cuMemcpy(second, first, 30) == SUCCESS
        assert cu.cuMemcpy(host, ctypes.addressof(other), 40) == SUCCESS
    assert [(node.name, node.attributes["brick.io.size"]) for node in transfers(profiled, traces)] == [
        ("transfer h2d", 10),
        ("transfer d2h", 20),
        ("transfer d2d", 30),
    ]


def test_a_copy_that_fails_is_a_failed_row_and_wrong_arguments_are_the_originals_to_refuse(
    memory: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    first, _, host = memory
    with profiled.step():
        assert cu.cuMemcpyHtoD(first, host, 10 * SIZE) == (cu.CUresult.CUDA_ERROR_INVALID_VALUE,)
        with pytest.raises(TypeError):
            cu.cuMemcpyHtoD(first)
        with pytest.raises((TypeError, ValueError, OverflowError)):
            cu.cuMemcpyHtoD(first, host, -1)
    (found,) = transfers(profiled, traces)
    assert found.attributes["error.type"] == "CUDA_ERROR_INVALID_VALUE"


def test_a_buffer_is_copied_and_recorded_by_traced_copy(
    driver: Driver, device: Device, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    on_device, on_host = device.allocate(64, stream=stream), LegacyPinnedMemoryResource().allocate(64)
    with profiled.step():
        assert traced_copy(on_host, on_device, stream=stream) is on_device
        assert traced_copy(on_device, on_host, stream=stream) is on_host
        copy = traced_copy(on_device, None, stream=stream)
    assert copy.size == 64
    assert driver.calls("cuMemcpyAsync") == 3
    found = transfers(profiled, traces)
    assert [(node.name, node.attributes["brick.io.size"]) for node in found] == [
        ("transfer h2d", 64),
        ("transfer d2h", 64),
        ("transfer d2d", 64),
    ]
    for buffer in (copy, on_device, on_host):
        buffer.close()


def test_without_transfers_copies_are_left_alone(
    instrumentor: CudaCoreInstrumentor, memory: Any, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.uninstrument()
    instrumentor.instrument(transfers=False)
    with profiled.step():
        cu.cuMemcpyHtoD(memory[0], memory[2], 10)
    assert transfers(profiled, traces) == []
