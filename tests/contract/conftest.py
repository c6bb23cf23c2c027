"""Fixtures of the contract tests: data files, and a profiler on a manual clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from otel_brick import BrickProfiler
from otel_brick.testing import ManualClock


def load(name: str) -> Any:
    """A data file beside this one; numbers with a point are exact decimals."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"), parse_float=Decimal)


@pytest.fixture
def vectors() -> Callable[[str], Any]:
    return load


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.fixture
def profiler(time: ManualClock) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(clock=time.clock)
    yield profiler
    profiler.shutdown(timeout_s=10)
