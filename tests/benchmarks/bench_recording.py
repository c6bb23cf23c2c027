"""What recording costs the user's thread, what a row costs the process until it is sent, and what it takes to wait.

Method
------
Recording: a step of 1,000 bricks with empty bodies, timed from its first brick to its last (wall time, inside the open
step), five steps a round. After each step everything is flushed before anything else is timed: what the worker does
then is part of the CPU table. The peer runs `with nvtx.annotate("x"): pass` as many times, with the NVTX library loaded
and no tool attached. In the row "steps back to back" nothing is flushed and the step scopes are timed too: there the
worker takes its share of the interpreter lock.

CPU: process time of all threads from the beginning of a step of 1,000 rows until all of it has been flushed. The peer
makes the same spans with `start_as_current_span`, its attributes in a dictionary made beforehand, through a
`BatchSpanProcessor` to an exporter that encodes with the official protobuf encoder, serialises, and throws the bytes
away. Ours with spans ends in a processor and exporter of the same kind. The peer's attributes are those of a span that
ours exported: a kernel with a launch signature and a count has 12, a brick with all its counts in a layer has 8. It is
checked that all spans of both sides were exported. The flush of every step, some 0.7 ms, is in all rows.

CPU, columnar route: the same, with rows that leave as encoded columns. "To bytes" puts requests together and throws
them away, on both sides; "sent" posts them with the real exporters, ours and the official one, to a collector in
another process on the loopback interface. Besides steps of 1,000 kernels, each flushed, as the peer's, there are steps
as a program has them, that follow each other and are flushed every few thousand rows, so that the worker takes as many
at a time as have come. All steps have detail, their spans included.

Encoder: process time of one span from a resolved batch to the bytes of a request, and of one from an SDK span object
by the official encoder. Both encode the very same kernel spans with 12 attributes.

Bytes: of a span in a request, everything around it included.

Memory: bytes that tracemalloc sees for a row that waits: in the list of an open step's lane, in the compact form that
a lane takes every 4,096 rows, and in a resolved batch in front of the exporter. The peer is an ended SDK span with the
kernel's 12 attributes in the queue of a `BatchSpanProcessor`; its name and the attributes' values exist once and are
not counted.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import harness
import numpy as np
import nvtx
from collectors import UP, Discard, DiscardRows, collector
from harness import Candidate, Table
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from otel_brick import BrickId, BrickProfiler
from otel_brick.export.columnar import ColumnarEncoder
from otel_brick.export.otlp import BrickOTLPExporter, Frame, packed
from otel_brick.export.readable import _Builder
from otel_brick.export.sender import MAX_REQUEST_BYTES
from otel_brick.record.batch import Batch

BRICKS = 1_000
STEPS = 5
BUFFERED = 4_097 * 5
"""A multiple of the rows after which a lane compacts its list, so that all rows are compact."""
NVTX = 'with nvtx.annotate("x")'
SDK_KERNEL = "SDK span, 12 attributes"
SDK_BRICK = "SDK span, 8 attributes"
SDK_BUFFERED = "ended SDK span in its queue"
SDK_SENT = "SDK span, 12 attributes, sent"
SHAPES = (
    ("steps of 1,000, each flushed", 1_000, 1),
    ("steps of 300, flushed every 9,000", 300, 30),
    ("steps of 2,000, flushed every 10,000", 1_999, 5),
)
"""Names, kernels in a step and steps between two flushes. 1,999 kernels and their brick are what a step may send."""
ENCODED = (300, 2_000, 20_000)
UNBOUNDED = {"max_rows_per_step": 1_000_000, "max_rows_per_trace": 1_000_000}


class Keep(SpanExporter):
    """Remembers the first span of each name."""

    def __init__(self) -> None:
        self.spans: dict[str, ReadableSpan] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            self.spans.setdefault(span.name, span)
        return SpanExportResult.SUCCESS


# --- recording ---


def recording(scale: float) -> Table:
    """Wall time of one brick on the user's thread."""
    profiler = BrickProfiler.enabled(tracer_provider=TracerProvider(), detail="none")
    handle = profiler.define(BrickId.RmsNorm, elements=768)
    off = BrickProfiler()
    off_handle = off.define(BrickId.RmsNorm, elements=768)

    def inside(loop: Callable[[], None]) -> float:
        spent = 0.0
        for _ in range(STEPS):
            with profiler.step(phase="decode"):
                spent += harness.per_operation(loop, BRICKS)
            profiler.flush()
        return spent / STEPS

    def outside(loop: Callable[[], None]) -> float:
        return sum(harness.per_operation(loop, BRICKS) for _ in range(STEPS)) / STEPS

    def empty() -> None:
        for _ in range(BRICKS):
            pass

    def annotate() -> None:
        for _ in range(BRICKS):
            with nvtx.annotate("x"):
                pass

    def with_handle() -> None:
        for _ in range(BRICKS):
            with handle:
                pass

    def with_verb() -> None:
        elements = 768
        for _ in range(BRICKS):
            with profiler.brick(BrickId.RmsNorm, elements=elements):
                pass

    def with_varying_verb() -> None:
        for elements in range(BRICKS):
            with profiler.brick(BrickId.RmsNorm, elements=elements):
                pass

    def with_off_handle() -> None:
        for _ in range(BRICKS):
            with off_handle:
                pass

    def with_off_verb() -> None:
        elements = 768
        for _ in range(BRICKS):
            with off.brick(BrickId.RmsNorm, elements=elements):
                pass

    def back_to_back() -> None:
        for _ in range(4 * STEPS):
            with profiler.step(phase="decode"):
                with_handle()

    def beside_worker() -> float:
        figure = harness.per_operation(back_to_back, 4 * STEPS * BRICKS)
        profiler.flush()
        return figure

    table = harness.compare(
        f"Recording: wall time of one brick, steps of {BRICKS:,}",
        [
            Candidate(NVTX, lambda: outside(annotate)),
            Candidate("with handle", lambda: inside(with_handle), NVTX, 1.1),
            Candidate("with profiler.brick(ID, elements=n)", lambda: inside(with_verb), NVTX, 1.8),
            Candidate("the same, 1,000 different n", lambda: inside(with_varying_verb), NVTX, 1.8),
            Candidate("with handle, disabled", lambda: outside(with_off_handle), NVTX, 0.25),
            Candidate("with profiler.brick(...), disabled", lambda: outside(with_off_verb), NVTX),
            Candidate("with handle, steps back to back", beside_worker, NVTX),
            Candidate("empty loop, part of each of the above", lambda: outside(empty), NVTX),
        ],
        rounds=max(5, round(150 * scale)),
    )
    profiler.shutdown()
    return table


# --- CPU ---


def cpu(scale: float) -> Table:
    """Process time of one row from its scope to its bytes."""
    kernel, brick = _example_spans()
    return harness.compare(
        f"CPU: process time of one row, steps of {BRICKS:,}, scope to bytes",
        [
            Candidate(SDK_KERNEL, _through(lambda p: _sdk_step(p, kernel))),
            Candidate("kernel row, as SDK span object", _through(_kernel_step), SDK_KERNEL),
            Candidate(SDK_BRICK, _through(lambda p: _sdk_step(p, brick))),
            Candidate("brick row, as SDK span object", _through(_brick_step), SDK_BRICK),
            Candidate("brick row, statistics only", _through(lambda p: _brick_step(p, "none")), SDK_BRICK),
        ],
        rounds=max(5, round(40 * scale)),
    )


def _example_spans() -> tuple[ReadableSpan, ReadableSpan]:
    """A kernel and a brick that were exported."""
    keep = Keep()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(keep))
    kernels, bricks = _kernel_step(provider), _brick_step(provider)
    kernels()
    bricks()
    provider.shutdown()
    kernel, brick = keep.spans["gemv"], keep.spans["RmsNorm"]
    if len(kernel.attributes or {}) != 12 or len(brick.attributes or {}) != 8:
        raise RuntimeError("the rows do not have the attributes that the titles promise")
    return kernel, brick


def _through(make: Callable[[TracerProvider], Callable[[], int]]) -> Callable[[], float]:
    """A candidate that runs a step and everything behind it; `make` returns the spans that it promises."""
    exporter = Discard()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    step = make(provider)

    def run() -> float:
        before = exporter.spans
        begin = time.process_time_ns()
        promised = step()
        provider.force_flush()
        figure = (time.process_time_ns() - begin) / BRICKS
        if exporter.spans - before != promised:
            raise RuntimeError(f"{exporter.spans - before} spans were exported instead of {promised}")
        return figure

    return run


def _sdk_step(provider: TracerProvider, span: ReadableSpan) -> Callable[[], int]:
    tracer = provider.get_tracer("bench")
    name, attributes = span.name, dict(span.attributes or {})

    def step() -> int:
        with tracer.start_as_current_span("step"):
            for _ in range(BRICKS):
                with tracer.start_as_current_span(name, attributes=attributes):
                    pass
        return BRICKS + 1

    return step


def _kernel_step(provider: TracerProvider) -> Callable[[], int]:
    profiler = BrickProfiler.enabled(tracer_provider=provider, detail="all")
    brick = profiler.define("FusedGateUp")
    kernel = _kernel(profiler)

    def step() -> int:
        with profiler.step(phase="decode"), brick:
            for _ in range(BRICKS):
                with kernel:
                    pass
        profiler.flush()
        return BRICKS + 2

    return step


def _kernel(profiler: BrickProfiler) -> AbstractContextManager[Any]:
    return profiler.kernel(
        "gemv",
        ptx_hash=0x1234_5678_9ABC_DEF0,
        grid=(128, 1, 1),
        block=(256, 1, 1),
        shared_mem=4_096,
        elements=768,
    )


def _brick_step(provider: TracerProvider, detail: str = "all") -> Callable[[], int]:
    profiler = BrickProfiler.enabled(tracer_provider=provider, detail=detail)
    layer = profiler.layer(3)
    brick = profiler.define(BrickId.RmsNorm, elements=768, bytes_read=3_072, bytes_written=3_072)
    spans = BRICKS + 2 if detail == "all" else 1

    def step() -> int:
        with profiler.step(phase="decode"), layer:
            for _ in range(BRICKS):
                with brick:
                    pass
        profiler.flush()
        return spans

    return step


# --- columnar ---


class Counted(SpanExporter):
    """Counts the spans that an exporter delivers."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.spans = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self.spans += len(spans) if result is SpanExportResult.SUCCESS else 0
        return result


def columnar(scale: float) -> Table:
    """Process time of one row that leaves as an encoded column."""
    kernel, _ = _example_spans()
    with collector(UP) as endpoint:
        return harness.compare(
            "CPU, columnar route: process time of one kernel row with 12 attributes, scope to bytes or to the socket",
            [
                Candidate(SDK_KERNEL, _sdk_exported(kernel, Discard())),
                *(
                    Candidate(f"{name}, to bytes", _columns(DiscardRows(), rows, steps), SDK_KERNEL, 1 / 60)
                    for name, rows, steps in SHAPES
                ),
                Candidate(SDK_SENT, _sdk_exported(kernel, Counted(OTLPSpanExporter(endpoint=endpoint)))),
                *(
                    Candidate(f"{name}, sent", _columns(BrickOTLPExporter(endpoint=endpoint), rows, steps), SDK_SENT)
                    for name, rows, steps in SHAPES
                ),
            ],
            rounds=max(5, round(40 * scale)),
        )


def _sdk_exported(span: ReadableSpan, exporter: Discard | Counted) -> Callable[[], float]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    step = _sdk_step(provider, span)

    def run() -> float:
        before = exporter.spans
        begin = time.process_time_ns()
        promised = step()
        provider.force_flush()
        figure = (time.process_time_ns() - begin) / BRICKS
        if exporter.spans - before != promised:
            raise RuntimeError(f"{exporter.spans - before} spans were exported instead of {promised}")
        return figure

    return run


def _columns(exporter: DiscardRows | BrickOTLPExporter, rows: int, steps: int) -> Callable[[], float]:
    """A candidate that runs some steps of as many kernels and waits until all of it has left."""
    profiler = BrickProfiler.enabled(exporter=exporter, detail="all")
    brick, kernel = profiler.define("FusedGateUp"), _kernel(profiler)

    def run() -> float:
        begin = time.process_time_ns()
        for _ in range(steps):
            with profiler.step(phase="decode"), brick:
                for _ in range(rows):
                    with kernel:
                        pass
        delivered = profiler.flush()
        figure = (time.process_time_ns() - begin) / (rows * steps)
        lost = {reason: count for reason, count in profiler.losses().items() if count}
        if not delivered or lost:
            raise RuntimeError(f"rows were lost: {lost}")
        return figure

    return run


def encoder(scale: float) -> Table:
    """Process time of encoding one span."""
    candidates: list[Candidate] = []
    for count in ENCODED:
        official, ours = _encoders(count)
        peer = f"official encoder, {count:,} spans"
        candidates += [Candidate(peer, official), Candidate(f"columnar encoder, {count:,} spans", ours, peer)]
    return harness.compare(
        "Encoder: process time of one span of 12 attributes, to the bytes of a request",
        candidates,
        rounds=max(5, round(15 * scale)),
    )


class Capture:
    """A route that keeps what comes."""

    def __init__(self) -> None:
        self.sent: list[tuple[Batch, NDArray[np.int64]]] = []

    def send(self, batch: Batch, ends: NDArray[np.int64]) -> None:
        self.sent.append((batch, ends))

    def flush(self, timeout_s: float) -> bool:
        return True


def _encoders(count: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Encode `count` kernel spans, officially and as columns; both as often as makes 2,000 spans or more."""
    profiler = BrickProfiler.enabled(tracer_provider=TracerProvider(), detail="all", **UNBOUNDED)
    recorder, capture = profiler._recorder, Capture()
    profiler._pipeline._sink._route = capture
    kernel = _kernel(profiler)
    with profiler.step(phase="decode"), profiler.define("FusedGateUp"):
        for _ in range(count):
            with kernel:
                pass
    profiler.flush()
    ((batch, ends),) = capture.sent
    record = batch.steps[0]
    assert record.parent is not None
    builder = _Builder(recorder, batch, ends)
    spans = list(builder.readable_spans(record, record.tracer, record.parent, range(len(batch))))[1:]
    rows, columns, frame = np.arange(1, count + 1), ColumnarEncoder(recorder.registry), Frame.of(spans[0].resource)
    times = -(-2_000 // count)

    def official() -> int:
        return len(encode_spans(spans).SerializeToString())

    def ours() -> int:
        blocks = columns.encode(batch, rows, ends, batch.span_id)
        return sum(len(payload.body()) for payload in packed(frame, blocks, MAX_REQUEST_BYTES))

    def timed(encode: Callable[[], int]) -> float:
        begin = time.process_time_ns()
        for _ in range(times):
            encode()
        return (time.process_time_ns() - begin) / (times * count)

    if not 0.99 < ours() / official() < 1.01:
        raise RuntimeError(f"{ours()} bytes instead of {official()}")
    return lambda: timed(official), lambda: timed(ours)


def size() -> Table:
    """Bytes of one span in a request."""
    kernel, _ = _example_spans()
    sdk, columns = Discard(), DiscardRows()
    _sdk_exported(kernel, sdk)()
    _columns(columns, 1_999, 1)()
    return harness.compare(
        "Bytes: size of one kernel span with 12 attributes in a request",
        [
            Candidate(SDK_KERNEL, lambda: sdk.bytes / sdk.spans),
            Candidate("columnar", lambda: columns.row_bytes / columns.rows, SDK_KERNEL),
        ],
        rounds=1,
        unit="bytes",
    )


# --- memory ---


def memory() -> Table:
    """Bytes of one row that waits."""
    return harness.compare(
        "Memory: bytes of one waiting row",
        [
            Candidate(SDK_BUFFERED, lambda: _traced(_buffer_spans, 4_000)),
            Candidate("row in an open step's list", lambda: _traced(_fill_list, 4_000), SDK_BUFFERED, 1 / 40),
            Candidate("row in an open step, compact", lambda: _traced(_fill_lane, BUFFERED), SDK_BUFFERED, 1 / 40),
            Candidate("resolved row", lambda: _traced(_fill_queue, BUFFERED), SDK_BUFFERED, 1 / 40),
        ],
        rounds=3,
        unit="bytes",
    )


def _traced(prepare: Callable[[], tuple[Callable[[int], object], Callable[[], object]]], rows: int) -> float:
    """Bytes that `fill(rows)` leaves behind, by row; `close` is called when that is known."""
    fill, close = prepare()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    fill(rows)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    close()
    return (after - before) / rows


def _buffer_spans() -> tuple[Callable[[int], object], Callable[[], object]]:
    provider = TracerProvider()
    for_ever_ms = 10**9
    provider.add_span_processor(
        BatchSpanProcessor(
            Discard(),
            max_queue_size=1 << 20,
            max_export_batch_size=1 << 20,
            schedule_delay_millis=for_ever_ms,
        )
    )
    keep = Keep()
    other = TracerProvider()
    other.add_span_processor(BatchSpanProcessor(keep))
    _kernel_step(other)()
    other.shutdown()
    tracer, attributes = provider.get_tracer("bench"), dict(keep.spans["gemv"].attributes or {})

    def fill(rows: int) -> None:
        for _ in range(rows):
            with tracer.start_as_current_span("gemv", attributes=attributes):
                pass

    return fill, provider.shutdown


def _fill_list() -> tuple[Callable[[int], object], Callable[[], object]]:
    return _open_step(compact=False)


def _fill_lane() -> tuple[Callable[[int], object], Callable[[], object]]:
    return _open_step(compact=True)


def _open_step(*, compact: bool) -> tuple[Callable[[int], object], Callable[[], object]]:
    profiler = BrickProfiler.enabled(tracer_provider=TracerProvider())
    kernel = _kernel(profiler)
    step = profiler.step()
    step.__enter__()
    lane = profiler._recorder.current.get()

    def fill(rows: int) -> None:
        for _ in range(rows):
            with kernel:
                pass
        if len(lane) != (0 if compact else 4 * rows):
            raise RuntimeError(f"{len(lane)} numbers are in the list")

    def close() -> None:
        step.__exit__(None, None, None)
        profiler.shutdown()

    return fill, close


def _fill_queue() -> tuple[Callable[[int], object], Callable[[], object]]:
    profiler = BrickProfiler.enabled(tracer_provider=TracerProvider(), detail="all", **UNBOUNDED)
    profiler._recorder.notify = lambda rows: None  # no worker: what we collect stays in the queue
    kernel = _kernel(profiler)

    def fill(rows: int) -> None:
        with profiler.step():
            for _ in range(rows):
                with kernel:
                    pass
        profiler._pipeline.collect()
        if profiler._pipeline._queued_rows != rows:
            raise RuntimeError(f"{profiler._pipeline._queued_rows} rows are in the queue")

    return fill, profiler._pipeline._queue.clear


def main() -> None:
    options = harness.arguments(__doc__ or "")
    results: dict[str, object] = {}
    for name, table in (
        ("recording", recording(options.scale)),
        ("cpu", cpu(options.scale)),
        ("columnar", columnar(options.scale)),
        ("encoder", encoder(options.scale)),
        ("bytes", size()),
        ("memory", memory()),
    ):
        harness.show(table)
        results[name] = table
    harness.finish("recording", __doc__ or "", results, save=options.save)


if __name__ == "__main__":
    main()
