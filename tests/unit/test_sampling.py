"""Where no span may leave, statistics are complete, nothing hangs below a step and a brick costs no object."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from opentelemetry import trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
)
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from otel_brick import BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces


class RecordOnly(Sampler):
    """Records every span and samples none."""

    def should_sample(self, *args: object, **kwargs: object) -> SamplingResult:  # type: ignore[override]
        return SamplingResult(Decision.RECORD_ONLY)

    def get_description(self) -> str:
        return "RecordOnly"


REMOTE_UNSAMPLED = SpanContext(0x1234, 0x5678, True, TraceFlags(0))


@contextlib.contextmanager
def unsampled_parent() -> Iterator[None]:
    with trace.use_span(NonRecordingSpan(REMOTE_UNSAMPLED)):
        yield


CASES: dict[str, tuple[Callable[[], InMemoryTraces], Callable[[], AbstractContextManager[object]]]] = {
    "always_off": (lambda: InMemoryTraces(ALWAYS_OFF), contextlib.nullcontext),
    "record_only": (lambda: InMemoryTraces(RecordOnly()), contextlib.nullcontext),
    "remote_unsampled": (lambda: InMemoryTraces(ParentBased(ALWAYS_ON)), unsampled_parent),
    "sdk_disabled": (InMemoryTraces, contextlib.nullcontext),
    "suppressed": (InMemoryTraces, suppress_instrumentation),
}


def run_step(profiler: BrickProfiler, bricks: int) -> None:
    handle = profiler.define(BrickId.RmsNorm, elements=64)
    with profiler.step(phase="decode", tokens=1), profiler.layer(0):
        for _ in range(bricks):
            with handle:
                pass


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryTraces]:
    if request.param == "sdk_disabled":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    make, around = CASES[request.param]
    traces = make()
    with around():
        yield traces


def test_statistics_are_complete_and_nothing_leaves(case: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=case.provider)
    for _ in range(5):
        run_step(profiler, 10)
    assert profiler.shutdown(timeout_s=10)
    assert case.spans == []
    stats = profiler.brick_stats(BrickId.RmsNorm)
    assert (stats.count, stats.total_elements) == (50, 3_200)
    assert (profiler.step_count(), profiler.total_tokens()) == (5, 5)
    assert profiler.layer_matrix().count.tolist() == [[50]]
    assert not any(profiler.losses().values())


def test_a_brick_costs_no_object(case: InMemoryTraces) -> None:
    """Ten thousand more bricks leave no more objects behind; what waits is integers, and goes with the read."""
    profiler = BrickProfiler.enabled(tracer_provider=case.provider)

    def blocks(bricks: int) -> int:
        tracemalloc.start(1)
        try:
            before = sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename"))
            run_step(profiler, bricks)
            profiler.losses()
            return sum(stat.count for stat in tracemalloc.take_snapshot().statistics("filename")) - before
        finally:
            tracemalloc.stop()

    blocks(10), blocks(10_000)
    assert blocks(10_000) - blocks(10) < 100
    profiler.shutdown(timeout_s=10)


def test_a_record_only_step_still_ends_for_its_processors() -> None:
    seen: list[tuple[str, bool]] = []

    class Watcher(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            seen.append((span.name, span.attributes["brick.detail.reason"] == "unsampled"))  # type: ignore[index]

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True  # older SDKs do not give this

    provider = TracerProvider(sampler=RecordOnly())
    provider.add_span_processor(Watcher())
    profiler = BrickProfiler.enabled(tracer_provider=provider)
    run_step(profiler, 3)
    assert profiler.shutdown(timeout_s=10)
    assert seen == [("step decode", True)]


def test_an_unsampled_step_is_current_so_that_others_see_the_decision() -> None:
    profiler = BrickProfiler.enabled(tracer_provider=InMemoryTraces(ALWAYS_OFF).provider)
    with profiler.step():
        context = trace.get_current_span().get_span_context()
        assert context.is_valid
        assert not context.trace_flags.sampled
    assert not trace.get_current_span().get_span_context().is_valid
    profiler.shutdown(timeout_s=10)


def test_without_any_provider_statistics_are_complete() -> None:
    code = """
from otel_brick import BrickProfiler
profiler = BrickProfiler.enabled()
with profiler.step(), profiler.brick("B", elements=3):
    pass
assert profiler.flush()
print(profiler.stats("B").count, profiler.stats("B").total_elements, profiler.step_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1 3 1", "")


def test_a_provider_that_becomes_global_later_is_used() -> None:
    code = """
from opentelemetry import trace
from otel_brick import BrickProfiler
from otel_brick.testing import InMemoryTraces
profiler = BrickProfiler.enabled()
with profiler.step(phase="prefill"):
    pass
traces = InMemoryTraces()
trace.set_tracer_provider(traces.provider)
with profiler.step(phase="decode"), profiler.brick("B"):
    pass
assert profiler.flush()
print([span.name for span in traces.spans])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['step decode', 'B']"


def test_detail_none_sends_steps_only(traces: InMemoryTraces) -> None:
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="none")
    run_step(profiler, 3)
    assert profiler.shutdown(timeout_s=10)
    (span,) = traces.spans
    assert span.attributes is not None
    assert (span.name, span.attributes["brick.detail.reason"]) == ("step decode", "none")
    assert profiler.brick_stats(BrickId.RmsNorm).count == 3
