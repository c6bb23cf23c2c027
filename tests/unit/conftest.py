"""Fixtures of the unit tests: a profiler on a manual clock whose spans stay in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_brick import BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.fixture
def traces() -> InMemoryTraces:
    return InMemoryTraces()


@pytest.fixture
def profiler(traces: InMemoryTraces, time: ManualClock) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider,
        clock=time.clock,
        detail="all",
        max_rows_per_step=65_536,
        max_rows_per_trace=10**6,
    )
    yield profiler
    assert profiler.shutdown(timeout_s=10)
