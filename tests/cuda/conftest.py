"""Fixtures of the tests on a stand-in CUDA driver.

The library stays in the process once it is loaded, so these tests run after all others, which may rely on there being
no driver. On a machine with a driver of its own the stand-in is loaded first, before anything can load the real one.
"""

from __future__ import annotations

import ctypes.util
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from otel_brick import BrickProfiler
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces

from .driver.build import BuildError
from .standin import Driver

if TYPE_CHECKING:
    from cuda.core import Device, Stream

HERE = Path(__file__).parent
Make = Callable[..., BrickProfiler]
RUNNABLE = sys.platform.startswith("linux") and find_spec("cuda") is not None and find_spec("cuda.core") is not None


class MakeKernel(Protocol):
    """`Driver.kernel` as a fixture."""

    def __call__(self, name: str, **settings: Any) -> Any: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    items[:] = [item for item in items if not item.path.is_relative_to(HERE)] + ours
    if ours and RUNNABLE and ctypes.util.find_library("cuda") is not None:
        try:
            Driver.load()
        except (BuildError, RuntimeError):
            pass  # the tests' fixture says so


@pytest.fixture(scope="session")
def loaded_driver() -> Driver:
    if not RUNNABLE:
        pytest.skip("the stand-in driver needs Linux and cuda-core")
    try:
        return Driver.load()
    except (BuildError, RuntimeError) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def real_time_driver(loaded_driver: Driver) -> Iterator[Driver]:
    """The stand-in driver with its first settings, on the real clock."""
    loaded_driver.reset()
    yield loaded_driver
    loaded_driver.reset()


@pytest.fixture
def driver(real_time_driver: Driver) -> Driver:
    """The stand-in driver with its first settings, on a clock that the test moves."""
    real_time_driver.use_virtual_clock()
    return real_time_driver


@pytest.fixture
def device(real_time_driver: Driver) -> Device:
    """The first device, current on this thread."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    """A stream that does not synchronise with the legacy one."""
    stream = device.create_stream()
    yield stream
    stream.close()


@pytest.fixture
def kernel(real_time_driver: Driver, device: Device) -> MakeKernel:
    """Makes kernels: `kernel("rms_norm", duration_ns=1_000_000, parameters=("u64", "f32"))`."""
    return real_time_driver.kernel


@pytest.fixture
def traces() -> InMemoryTraces:
    """Keeps the spans of the profilers that use its provider."""
    return InMemoryTraces()


@pytest.fixture
def make(driver: Driver, traces: InMemoryTraces) -> Iterator[Make]:
    """Makes profilers on the driver's clock."""
    made: list[BrickProfiler] = []

    def make(stream: Any = None, **settings: Any) -> BrickProfiler:
        made.append(
            BrickProfiler.enabled(
                stream=stream, clock=driver.clock, tracer_provider=traces.provider, detail="all", **settings
            )
        )
        return made[-1]

    yield make
    for profiler in made:
        profiler.shutdown(1.0)


@pytest.fixture
def profiled(make: Make, stream: Stream) -> BrickProfiler:
    """A profiler of the stream, on the driver's clock."""
    return make(stream)


@pytest.fixture
def instrumentor() -> Iterator[CudaCoreInstrumentor]:
    """Not at work yet; whatever a test lets it do is undone."""
    instrumentor = CudaCoreInstrumentor()
    yield instrumentor
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()
