"""What the worker pays for a row, when steps are tiny and when one step is huge; and what a step's own span adds.

Method
------
Process time of `Pipeline.collect`, which resolves the logs of ended steps and adds them to the statistics, divided by
the rows. No worker runs: the benchmark collects by itself, so that nothing else is measured. All bricks are flat and
have an element count. Big: one step of 300,000 rows, its limit raised. Small: steps of 3 rows, 100,000 of them in all
rounds together, collected as soon as the worker would be woken (`COALESCE_ROWS`), or in backlogs of 30,000 rows.
Between the two: steps of 1,000 rows, one at a time. OpenTelemetry is suppressed in all of these, so steps have no span.

The step's own span is quoted apart: process time from the beginning of a step of 3 bricks until its span has ended,
by step, for steps without a span, with one of an SDK provider that exports nothing, and with one that is exported to
bytes. The peers are bare `start_as_current_span`s of the same providers with as many attributes. Here the worker runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import harness
from collectors import Discard
from harness import Candidate, Table
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from otel_brick import BrickId, BrickProfiler
from otel_brick.pipeline import COALESCE_ROWS
from otel_brick.record.handles import Handle

BIG = 300_000
SMALL = 3
BACKLOG = 30_000
BIG_STEP = "one step of 300,000 rows"
SDK_SPAN = "SDK span, not exported"
SDK_SPAN_EXPORTED = "SDK span, exported to bytes"
SPAN_STEPS = 500
BRICKS = (BrickId.RmsNorm, BrickId.QkvProjection, BrickId.OutputProjection)


def worker(scale: float) -> Table:
    """Process time of resolving and counting, by row."""
    waking = -(-COALESCE_ROWS // (SMALL + 1))  # a step counts as one more row there
    rounds = max(5, round(20 * scale))
    batches = -(-100_000 // (waking * rounds)) if scale >= 1 else 10
    return harness.compare(
        f"Worker: process time of resolving and counting one row, {batches * waking * rounds:,} small steps",
        [
            Candidate(BIG_STEP, lambda: _collected(1, BIG, 1)),
            Candidate("steps of 1,000 rows", lambda: _collected(1, 999, 20), BIG_STEP),
            Candidate(
                "steps of 3 rows, as the worker is woken",
                lambda: _collected(waking, SMALL, batches),
                BIG_STEP,
                3.0,
            ),
            Candidate(
                "steps of 3 rows, backlog of 30,000 rows",
                lambda: _collected(BACKLOG // SMALL, SMALL, 2),
                BIG_STEP,
                3.0,
            ),
        ],
        rounds=rounds,
    )


def _collected(steps: int, rows: int, batches: int) -> float:
    """Process nanoseconds of collecting one row, `steps` steps of `rows` rows at a time."""
    profiler = BrickProfiler.enabled(max_rows_per_step=2 * BIG, detail="none")
    profiler._recorder.notify = lambda rows: None
    handles = [profiler.define(brick, elements=768) for brick in BRICKS]
    spent = 0
    with suppress_instrumentation():
        for _ in range(batches):
            for _ in range(steps):
                _step(profiler, handles, rows)
            begin = time.process_time_ns()
            profiler._pipeline.collect()
            spent += time.process_time_ns() - begin
    counted = sum(profiler.brick_stats(brick).count for brick in BRICKS)
    if counted != batches * steps * rows:
        raise RuntimeError(f"{counted} rows were counted instead of {batches * steps * rows}")
    return spent / counted


def _step(profiler: BrickProfiler, handles: list[Handle], rows: int) -> None:
    first, second, third = handles
    with profiler.step(phase="decode"):
        for _ in range(rows // 3):
            with first:
                pass
            with second:
                pass
            with third:
                pass


def spans(scale: float) -> Table:
    """Process time of one step of 3 bricks from beginning to end, and of one bare SDK span."""
    silent, exporting = TracerProvider(), TracerProvider()
    exporting.add_span_processor(BatchSpanProcessor(Discard()))

    def bare(provider: TracerProvider) -> Callable[[], float]:
        tracer = provider.get_tracer("bench")

        def run() -> float:
            begin = time.process_time_ns()
            for index in range(SPAN_STEPS):
                attributes = {
                    "brick.span.level": "step",
                    "brick.phase": "decode",
                    "brick.step.index": index,
                    "brick.timing.source": "host",
                    "brick.detail.reason": "none",
                }
                with tracer.start_as_current_span("step decode", attributes=attributes):
                    pass
            provider.force_flush()
            return (time.process_time_ns() - begin) / SPAN_STEPS

        return run

    def stepped(provider: TracerProvider | None) -> Callable[[], float]:
        profiler = BrickProfiler.enabled(tracer_provider=provider, detail="none")
        handles = [profiler.define(brick, elements=768) for brick in BRICKS]

        def steps() -> float:
            begin = time.process_time_ns()
            for _ in range(SPAN_STEPS):
                _step(profiler, handles, SMALL)
            profiler.flush()
            return (time.process_time_ns() - begin) / SPAN_STEPS

        def suppressed() -> float:
            with suppress_instrumentation():
                return steps()

        return suppressed if provider is None else steps

    return harness.compare(
        "Step: process time of one step of 3 bricks, scopes, worker and span together",
        [
            Candidate(SDK_SPAN, bare(silent)),
            Candidate(SDK_SPAN_EXPORTED, bare(exporting)),
            Candidate("step without a span", stepped(None), SDK_SPAN),
            Candidate("step with a span, not exported", stepped(silent), SDK_SPAN),
            Candidate("step with a span, exported to bytes", stepped(exporting), SDK_SPAN_EXPORTED),
        ],
        rounds=max(5, round(20 * scale)),
    )


def main() -> None:
    options = harness.arguments(__doc__ or "")
    results: dict[str, object] = {}
    for name, table in (("worker", worker(options.scale)), ("spans", spans(options.scale))):
        harness.show(table)
        results[name] = table
    harness.finish("worker", __doc__ or "", results, save=options.save)


if __name__ == "__main__":
    main()
