"""Beside PyTorch: its current stream is found, and its profiler agrees with us."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda.core import Device, Stream

from otel_brick import BrickProfiler, TimingSource
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces

from .spin import US, Spins

Profile = Callable[..., BrickProfiler]
pytestmark = pytest.mark.usefixtures("real", "gpu")


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    torch.cuda.init()
    return torch


def test_the_current_stream_of_torch_is_found_and_followed(torch: Any, profile: Profile) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            _ = x @ x
    torch.cuda.synchronize()
    profiler = profile()
    read: dict[str, float] = {}
    for name, stream in (("Default", torch.cuda.current_stream()), ("Side", side)):
        with torch.cuda.stream(stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with profiler.step(), profiler.brick(name):
                begin.record()
                for _ in range(10):
                    _ = x @ x
                end.record()
        profiler.finalize()
        read[name] = begin.elapsed_time(end) * 1e6
    for name, theirs in read.items():
        stats = profiler.stats(name)
        assert stats is not None and stats.timing_source is TimingSource.CudaEvent
        assert theirs - 2 * US <= stats.total_ns <= 1.02 * theirs + 60 * US


def test_kernels_take_as_long_for_us_as_for_the_profiler_of_torch(
    torch: Any,
    device: Device,
    stream: Stream,
    spins: Spins,
    profile: Profile,
    traces: InMemoryTraces,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    profiler = profile(stream=stream, kernel_events="all")
    CudaCoreInstrumentor().instrument(profiler=profiler)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as theirs:
            with profiler.step():
                spins(stream, 20_000)
                with profiler.brick("Spin"):
                    for _ in range(50):
                        spins(stream, 100)
            stream.sync()
    finally:
        CudaCoreInstrumentor().uninstrument()
    profiler.finalize()
    profiler.flush()
    theirs.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    peer = [1000 * event["dur"] for event in events if event.get("cat") == "kernel" and event["name"] == "spin_100us"]
    (brick,) = (node for node in traces.trees()[0].children if node.name == "Spin")
    ours = [row.duration_ns for row in brick.children]
    assert len(ours) == len(peer) == 50
    more = statistics.median(ours) - statistics.median(peer)
    record_property("ours_ns", statistics.median(ours))
    record_property("torch_ns", statistics.median(peer))
    assert -2 * US <= more <= 8 * US
