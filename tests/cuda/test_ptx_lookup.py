"""From a kernel's span back to its source: modules are seen when they are made, and loaded by nobody else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.core import LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, launch

from otel_brick import BrickProfiler
from otel_brick.gpu.kernels import identities
from otel_brick.gpu.ptx import PtxRegistry
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor, register_module
from otel_brick.testing import InMemoryTraces

from .standin import Driver, ptx

ONE = LaunchConfig(grid=1, block=32)


@pytest.fixture
def profiled(driver: Driver, traces: InMemoryTraces) -> Iterator[BrickProfiler]:
    identities.clear()
    profiler = BrickProfiler.enabled(clock=driver.clock, tracer_provider=traces.provider, detail="all")
    yield profiler
    profiler.shutdown(1.0)


def hash_told(profiler: BrickProfiler, traces: InMemoryTraces, stream: Any, kernel: Any) -> str | None:
    """Launch a kernel; the hash that its span has."""
    traces.clear()
    with profiler.step():
        launch(stream, ONE, kernel)
    profiler.finalize()
    assert profiler.flush(30)
    (span,) = [span for span in traces.spans if (span.attributes or {}).get("brick.span.level") == "kernel"]
    told = (span.attributes or {}).get("brick.cuda.ptx.hash")
    return None if told is None else str(told)


def test_a_span_leads_to_the_source_of_its_kernel(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    registry = PtxRegistry()
    instrumentor.instrument(ptx_registry=registry)
    source = ptx({"known": ()})
    module = ObjectCode.from_ptx(source, name="my_module")
    told = hash_told(profiled, traces, stream, module.get_kernel("known"))
    assert told == f"{PtxRegistry.hash_ptx(module):016x}"
    assert registry.lookup(int(told, 16)) == source.decode()
    assert registry.lookup_name(int(told, 16)) == "my_module"


def test_a_module_from_a_file_is_registered_with_its_path_and_one_that_can_not_be_read_is_told_of(
    instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = PtxRegistry()
    instrumentor.instrument(ptx_registry=registry)
    file = tmp_path / "filed.ptx"
    file.write_bytes(ptx({"filed": ()}))
    modules = [ObjectCode.from_ptx(str(file)), ObjectCode.from_ptx(str(tmp_path / "gone.ptx"), name="gone")]
    with profiled.step():
        pass
    identities.describe(profiled._recorder.losses)
    assert profiled.flush(30)
    assert registry.lookup_path(PtxRegistry.hash_ptx(modules[0])) == file
    assert "the code of the module 'gone' could not be hashed" in caplog.text


def test_a_module_that_was_loaded_before_us_is_found(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    source = ptx({"earlier": ()})
    module = ObjectCode.from_ptx(source)
    kernel = module.get_kernel("earlier")
    instrumentor.instrument()
    assert hash_told(profiled, traces, stream, kernel) == f"{PtxRegistry.hash_ptx(source):016x}"


def test_a_kernel_whose_module_was_dropped_is_told_by_its_name_if_that_is_only_one(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.instrument()
    source = ptx({"only": ()})
    kernel = ObjectCode.from_ptx(source).get_kernel("only")
    gc.collect()
    assert hash_told(profiled, traces, stream, kernel) == f"{PtxRegistry.hash_ptx(source):016x}"
    twins = [ObjectCode.from_ptx(ptx({"twin": types})).get_kernel("twin") for types in ((), ("u64",))]
    gc.collect()
    assert hash_told(profiled, traces, stream, twins[0]) is None


def test_of_modules_with_kernels_of_one_name_each_kernel_has_the_hash_of_its_own(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.instrument()
    sources = [ptx({"same": (), f"other{number}": ()}) for number in range(3)]
    modules = [ObjectCode.from_ptx(source) for source in sources]
    for module, source in zip(modules, sources, strict=True):
        assert hash_told(profiled, traces, stream, module.get_kernel("same")) == f"{PtxRegistry.hash_ptx(source):016x}"


def test_modules_without_the_kernel_are_not_loaded_for_it(
    driver: Driver, stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.instrument()
    unused = [ObjectCode.from_ptx(ptx({f"unused{number}": ()})) for number in range(5)]
    kernel = ObjectCode.from_ptx(ptx({"used": ()})).get_kernel("used")
    hash_told(profiled, traces, stream, kernel)
    assert driver.calls("cuLibraryLoadData") == 1
    assert len(unused) == 5


def test_a_module_that_could_not_be_seen_can_be_registered(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.instrument(modules=False)
    source = ptx({"registered": ()})
    module = ObjectCode.from_ptx(source)
    assert hash_told(profiled, traces, stream, module.get_kernel("registered")) is None
    source = ptx({"registered_before": ()})
    module = ObjectCode.from_ptx(source)
    register_module(module)
    told = hash_told(profiled, traces, stream, module.get_kernel("registered_before"))
    assert told == f"{PtxRegistry.hash_ptx(source):016x}"


def test_a_program_that_is_compiled_has_the_hash_of_what_came_out(
    stream: Stream, instrumentor: CudaCoreInstrumentor, profiled: BrickProfiler, traces: InMemoryTraces
) -> None:
    instrumentor.instrument()
    code = 'extern "C" __global__ void compiled() {}'
    try:
        module = Program(code, "c++", ProgramOptions(std="c++17", arch="compute_90")).compile("ptx")
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {type(error).__name__}")
    assert module.code.endswith(b"\0")
    told = hash_told(profiled, traces, stream, module.get_kernel("compiled"))
    assert told == f"{PtxRegistry.hash_ptx(module.code.rstrip(bytes(1))):016x}"
