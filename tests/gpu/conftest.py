"""Fixtures of the tests that need a GPU. Without one they are skipped, and a run in which all were skipped fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import machine

HERE = Path(__file__).parent

if TYPE_CHECKING:
    from cuda.core import Device, Stream

    from otel_brick import BrickProfiler
    from otel_brick.testing import InMemoryTraces
    from tests.cuda.standin import Driver

    from .spin import Spins

machine.standin()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error")):
        reporter.write_line("\nnothing ran: that is no proof of anything", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def standin() -> Driver | None:
    """The stand-in driver if it takes the place of a GPU."""
    return machine.standin()


@pytest.fixture
def real(standin: Driver | None) -> None:
    """For tests that the stand-in driver can not serve."""
    if standin is not None:
        pytest.skip("the stand-in driver runs no kernels")


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU."""
    try:
        return machine.open_gpu()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spins(gpu: Device, standin: Driver | None) -> Spins:
    """Kernels that take a known time."""
    from .spin import Spins

    return Spins(gpu, standin)


@pytest.fixture
def device(gpu: Device) -> Device:
    """The GPU, current on this thread."""
    gpu.set_current()
    return gpu


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    """A stream that does not synchronise with the legacy one."""
    stream = device.create_stream()
    yield stream
    stream.sync()
    stream.close()


@pytest.fixture
def traces() -> InMemoryTraces:
    from otel_brick.testing import InMemoryTraces

    return InMemoryTraces()


@pytest.fixture
def profile(traces: InMemoryTraces) -> Iterator[Callable[..., BrickProfiler]]:
    """Makes profilers that give all their spans to `traces`, and shuts them down."""
    from otel_brick import BrickProfiler

    made: list[BrickProfiler] = []

    def make(**arguments: Any) -> BrickProfiler:
        made.append(BrickProfiler.enabled(**{"tracer_provider": traces.provider, "detail": "all", **arguments}))
        return made[-1]

    yield make
    for profiler in made:
        profiler.shutdown(5.0)


@pytest.fixture
def profiled(profile: Callable[..., BrickProfiler], stream: Stream) -> BrickProfiler:
    """A profiler of the stream."""
    return profile(stream=stream)
