"""Ids do not repeat in programs that reseed random generators, nor across processes."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider

from otel_brick import BrickProfiler
from otel_brick.record.ids import IdSource
from otel_brick.testing import InMemoryTraces

PROGRAM = """
import random
import numpy
from otel_brick import BrickProfiler
from otel_brick.testing import InMemoryTraces
traces = InMemoryTraces()
profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="all")
for step in range(20):
    random.seed(0)
    numpy.random.seed(0)
    with profiler.step(), profiler.layer(0), profiler.brick("B"), profiler.kernel("k"):
        pass
assert profiler.flush()
for span in traces.spans:
    print(span.name.split()[0], f"{span.context.trace_id:x}", f"{span.context.span_id:x}")
"""


def test_ids_are_distinct_across_reseeded_steps_and_processes() -> None:
    lines: list[list[str]] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
        lines += [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * 20 * 4
    spans = {span for _, _, span in lines}
    assert len(spans) == len(lines)
    assert "0" not in spans
    traces = {trace for _, trace, _ in lines}
    assert len(traces) == 2 * 20
    assert "0" not in traces


def test_the_source_is_not_reached_by_seeds() -> None:
    import random

    import numpy as np

    def draw() -> list[int]:
        random.seed(0)
        np.random.seed(0)
        source = IdSource()
        return [source.span_id(), source.trace_id(), *source.span_ids(3).tolist()]

    first, second = draw(), draw()
    assert not set(first) & set(second)
    assert all(0 < number < 1 << 64 for number in (*first[:1], *first[2:]))


def test_whose_ids_a_step_has_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otel_brick.record.tracing._told_route", False)
    with caplog.at_level(logging.INFO, "otel_brick"):
        for _ in range(2):
            profiler = BrickProfiler.enabled(tracer_provider=TracerProvider())
            for _ in range(3):
                with profiler.step():
                    pass
            profiler.shutdown(timeout_s=10)
    told = [record.getMessage() for record in caplog.records if "id generator" in record.getMessage()]
    assert len(told) == 1


def test_children_carry_the_trace_flags_and_state_of_the_step() -> None:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    parent = SpanContext(0xABC, 0xDEF, True, TraceFlags(0x03), TraceState([("vendor", "1")]))
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="all")
    with profiler.step(parent=set_span_in_context(NonRecordingSpan(parent))), profiler.brick("B"):
        pass
    assert profiler.shutdown(timeout_s=10)
    step, brick = traces.spans
    assert brick.context.trace_id == step.context.trace_id == 0xABC
    assert brick.context.trace_flags == step.context.trace_flags
    assert brick.context.trace_state == step.context.trace_state == TraceState([("vendor", "1")])
