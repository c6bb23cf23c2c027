"""A burst of rows reaches the exporter whole and leaves the user's own spans in the queue."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_brick import BrickProfiler

ROWS = 20_000


@pytest.mark.parametrize("queue_size", [None, "64"])
def test_a_burst_is_delivered_and_evicts_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, queue_size: str | None
) -> None:
    if queue_size is not None:
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", queue_size)
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    profiler = BrickProfiler.enabled(
        tracer_provider=provider, detail="all", max_rows_per_step=ROWS, max_rows_per_trace=ROWS
    )
    handle = profiler.define("B", elements=1)
    tracer = provider.get_tracer("app")
    stop = threading.Event()
    own = 0

    def user() -> None:
        nonlocal own
        while not stop.wait(0.002):
            with tracer.start_as_current_span("own"):
                own += 1

    thread = threading.Thread(target=user)
    thread.start()
    with profiler.step():
        for _ in range(ROWS):
            with handle:
                pass
    assert profiler.flush(timeout_s=60)
    stop.set()
    thread.join()
    provider.shutdown()
    names = Counter(span.name for span in exporter.get_finished_spans())
    assert names == {"step other": 1, "B": ROWS, "own": own}
    assert own > 0
    assert not any(profiler.losses().values())
    assert not [record for record in caplog.records if "Queue full" in record.getMessage()]


def test_many_small_steps_are_delivered_too() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    profiler = BrickProfiler.enabled(tracer_provider=provider, detail="all")
    for _ in range(1_000):
        with profiler.step():
            for _ in range(5):
                with profiler.brick("B"):
                    pass
    assert profiler.flush(timeout_s=60)
    provider.shutdown()
    assert Counter(span.name for span in exporter.get_finished_spans()) == {"step other": 1_000, "B": 5_000}
    profiler.shutdown()
