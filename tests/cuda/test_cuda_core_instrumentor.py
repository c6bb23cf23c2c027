"""The instrumentor finds what programs have bound already, and puts everything back."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda.core
import pytest
from cuda.bindings import driver as cu
from cuda.core import LaunchConfig, Linker, ObjectCode, Program, Stream, launch

from otel_brick import BrickProfiler
from otel_brick.gpu.transfers import COPIES
from otel_brick.instrumentation.cuda_core import CudaCoreConfiguration, CudaCoreInstrumentor, register_module
from otel_brick.testing import InMemoryTraces

from .standin import Driver, ptx

ROOT = Path(__file__).parents[2]
ONE = LaunchConfig(grid=1, block=32)
PATCHED = ("cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuModuleUnload", "cuLibraryUnload", *COPIES)


@pytest.fixture
def profiled(driver: Driver, traces: InMemoryTraces) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(clock=driver.clock, tracer_provider=traces.provider, detail="all")
    yield profiler
    profiler.shutdown(1.0)


def everything() -> dict[str, Any]:
    """All that the instrumentor may replace, by where it stands."""
    launcher = importlib.import_module("cuda.core._launcher")
    found = {f"driver.{name}": getattr(cu, name) for name in PATCHED}
    found |= {f"core.{name}": getattr(cuda.core, name) for name in ("launch", "ObjectCode", "Program", "Linker")}
    here = {"launch": launch, "ObjectCode": ObjectCode, "Program": Program, "Linker": Linker}
    return found | {"launcher.launch": launcher.launch} | {f"here.{name}": value for name, value in here.items()}


def test_uninstrument_puts_everything_back_where_it_was(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    before = everything()
    instrumentor.instrument()
    during = everything()
    assert {name for name in before if before[name] is during[name]} == set()
    assert during["core.launch"] is during["here.launch"] is during["launcher.launch"]
    instrumentor.uninstrument()
    after = everything()
    assert {name for name in before if before[name] is not after[name]} == set()


def test_what_a_program_bound_while_instrumented_is_put_back_too(
    driver: Driver, instrumentor: CudaCoreInstrumentor, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = [cuda.core.launch]
    instrumentor.instrument()
    late = types.ModuleType("late")
    late.launch = cuda.core.launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late", late)
    instrumentor.uninstrument()
    assert late.launch is original[0]  # type: ignore[attr-defined]


def test_what_somebody_else_put_there_meanwhile_stays(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    instrumentor.instrument()
    ours = [cuda.core.launch]

    def theirs(*arguments: Any) -> Any:
        return ours[0](*arguments)

    original = [ours[0].__wrapped__]
    cuda.core.launch = theirs
    try:
        instrumentor.uninstrument()
        assert cuda.core.launch is theirs
    finally:
        cuda.core.launch = original[0]


def test_a_function_that_is_still_in_somebodys_hands_records_nothing_after_uninstrument(
    driver: Driver,
    stream: Stream,
    kernel: Any,
    instrumentor: CudaCoreInstrumentor,
    profiled: BrickProfiler,
    traces: InMemoryTraces,
) -> None:
    instrumentor.instrument(profiler=profiled)
    held, held_copy = [cuda.core.launch], [cu.cuMemcpyDtoD]
    noop = kernel("noop")
    with profiled.step():
        held[0](stream, ONE, noop)
        instrumentor.uninstrument()
        held[0](stream, ONE, noop)
        held_copy[0](0, 0, 0)
    held[0](stream, ONE, noop)
    profiled.finalize()
    assert profiled.flush(30)
    assert len(driver.launches()) == 3
    assert [span.name for span in traces.spans].count("noop") == 1


def test_instrument_twice_records_each_launch_once(
    driver: Driver,
    stream: Stream,
    kernel: Any,
    instrumentor: CudaCoreInstrumentor,
    profiled: BrickProfiler,
    traces: InMemoryTraces,
    caplog: pytest.LogCaptureFixture,
) -> None:
    instrumentor.instrument()
    CudaCoreInstrumentor().instrument()
    assert "already instrumented" in caplog.text
    noop = kernel("noop")
    with profiled.step():
        launch(stream, ONE, noop)
        cuda.core.launch(stream, ONE, noop)
    profiled.finalize()
    assert profiled.flush(30)
    assert len(driver.launches()) == [span.name for span in traces.spans].count("noop") == 2


def test_it_can_be_done_and_undone_again_and_again(
    driver: Driver,
    stream: Stream,
    kernel: Any,
    instrumentor: CudaCoreInstrumentor,
    profiled: BrickProfiler,
    traces: InMemoryTraces,
) -> None:
    noop = kernel("noop")
    before = everything()
    for _ in range(3):
        instrumentor.instrument()
        with profiled.step():
            launch(stream, ONE, noop)
        instrumentor.uninstrument()
        with profiled.step():
            launch(stream, ONE, noop)
    profiled.finalize()
    assert profiled.flush(30)
    assert [span.name for span in traces.spans].count("noop") == 3
    assert all(before[name] is value for name, value in everything().items())


def test_classes_that_stand_in_behave_like_the_originals(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    before = ObjectCode.from_ptx(ptx({"before": ()}))
    plain = [ObjectCode, Program]
    instrumentor.instrument()
    after = ObjectCode.from_ptx(ptx({"after": ()}))
    assert type(after) is type(before) is plain[0]
    assert isinstance(before, ObjectCode)
    assert isinstance(after, ObjectCode)
    assert isinstance(after, plain[0])
    assert not isinstance("text", ObjectCode)
    assert issubclass(plain[0], ObjectCode)
    assert issubclass(ObjectCode, plain[0])
    assert not issubclass(int, ObjectCode)
    assert (ObjectCode.__name__, ObjectCode.__module__) == ("ObjectCode", plain[0].__module__)

    class Own(Program):  # type: ignore[misc,valid-type]
        pass

    assert issubclass(Own, plain[1])
    assert not issubclass(plain[1], Own)


def test_parts_can_be_left_out(driver: Driver, instrumentor: CudaCoreInstrumentor) -> None:
    assert CudaCoreInstrumentor.configuration is CudaCoreConfiguration
    before = everything()
    for option, still in (
        ("launches", {"core.launch", "here.launch", "launcher.launch"}),
        ("transfers", {f"driver.{name}" for name in COPIES}),
        ("modules", {"core.ObjectCode", "core.Program", "core.Linker"}),
    ):
        instrumentor.instrument(**{option: False})
        during = everything()
        assert still <= {name for name in before if before[name] is during[name]}
        instrumentor.uninstrument()


def test_a_module_that_is_no_object_code_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError, match="module must be an ObjectCode, not str"):
        register_module("module")


def test_opentelemetry_finds_it_by_its_name() -> None:
    found = importlib.metadata.entry_points(group="opentelemetry_instrumentor", name="otel_brick_cuda_core")
    if not found:
        pytest.skip("the package was installed before it had the entry point")
    (entry,) = found
    assert entry.load() is CudaCoreInstrumentor
    assert list(CudaCoreInstrumentor().instrumentation_dependencies()) == []


def run(program: str) -> str:
    """What a program prints in a process of its own, without a driver."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_without_a_driver_nothing_hangs_and_errors_are_the_programs_own() -> None:
    program = """
from cuda.core import Device, LaunchConfig, ObjectCode, launch
from cuda.bindings import driver
from otel_brick import BrickProfiler
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor, register_module
early = ObjectCode.from_ptx(b".visible .entry early() { ret; }")
CudaCoreInstrumentor().instrument()
profiler = BrickProfiler.enabled()
with profiler.step(), profiler.brick("B"):
    late = ObjectCode.from_ptx(b".visible .entry late() { ret; }")
    register_module(late)
    for call in (
        lambda: Device(0),
        lambda: driver.cuInit(0),
        lambda: driver.cuLaunchKernel(1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0),
        lambda: driver.cuMemcpy(1, 2, 3),
        lambda: launch(None, None, None),
    ):
        try:
            call()
        except Exception as error:
            print(type(error).__name__, end=" ")
profiler.flush(10)
CudaCoreInstrumentor().uninstrument()
print(profiler.stats("B").count)
profiler.shutdown()
"""
    assert run(program).endswith(" 1")


def test_without_cuda_python_it_does_nothing_and_says_so_once_for_who_asks() -> None:
    program = """
import logging, sys
for name in ("cuda.core", "cuda.bindings", "cuda.bindings.driver"):
    sys.modules[name] = None
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
CudaCoreInstrumentor().instrument()
CudaCoreInstrumentor().uninstrument()
"""
    lines = [line for line in run(program).splitlines() if line.startswith("otel_brick")]
    assert lines == ["otel_brick DEBUG cuda.core is not installed; kernel launches are not recorded"]


def test_cuda_core_is_not_imported_for_it_but_instrumented_once_the_program_imports_it() -> None:
    program = """
import sys
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
CudaCoreInstrumentor().instrument()
assert "cuda.core" not in sys.modules and "cuda.bindings.driver" not in sys.modules
import importlib.util
assert importlib.util.find_spec("cuda.core") is not None  # asks, and imports nothing
before = [type(finder).__name__ for finder in sys.meta_path]
from cuda.core import launch
assert "Arrivals" in before and "Arrivals" not in [type(finder).__name__ for finder in sys.meta_path]
from cuda.bindings import driver
assert launch.__wrapped__ and driver.cuLaunchKernel.__wrapped__
CudaCoreInstrumentor().uninstrument()
assert not hasattr(launch, "__wrapped__")
print("end")
"""
    assert run(program) == "end"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"profiler": 3}, "profiler"), ({"ptx_registry": "x"}, "ptx_registry"), ({"profilr": None}, "profilr")],
)
def test_a_bad_argument_is_an_error_that_names_it_and_instruments_nothing(
    arguments: dict[str, Any], named: str
) -> None:
    before = cuda.core.launch
    with pytest.raises(TypeError, match=named):
        CudaCoreInstrumentor().instrument(**arguments)
    assert cuda.core.launch is before
    assert not CudaCoreInstrumentor().is_instrumented_by_opentelemetry
