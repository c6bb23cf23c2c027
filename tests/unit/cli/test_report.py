"""The demo's report: spans arranged as trees, long models shortened, files whole or not there."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console, RenderableType

from otel_brick import BrickId, BrickProfiler
from otel_brick.cli import traces
from otel_brick.cli.report import brick_table, span_trees, step_tree, typical_step
from otel_brick.cli.traces import TraceRecorder

EPOCH_NS = 1_700_000_000_000_000_000


def rendered(renderable: RenderableType) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=80).print(renderable)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def step_spans(*, layers: int, phase: str = "decode", duration_us: int = 500) -> Sequence[ReadableSpan]:
    """A step with a brick, `layers` layers of one brick each, and a last brick; 10 us for each brick."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    now = EPOCH_NS

    def brick(name: str, parent: trace.Span) -> None:
        nonlocal now
        context = trace.set_span_in_context(parent)
        span = tracer.start_span(name, context, attributes={"brick.span.level": "brick"}, start_time=now)
        now += 10_000
        span.end(now)

    step = tracer.start_span(
        f"step {phase}", attributes={"brick.span.level": "step", "brick.phase": phase}, start_time=now
    )
    brick("Embedding", step)
    for index in range(layers):
        layer = tracer.start_span(
            "layer decoder",
            trace.set_span_in_context(step),
            attributes={"brick.span.level": "layer", "brick.layer.index": index},
            start_time=now,
        )
        brick("RmsNorm", layer)
        layer.end(now)
    brick("LmHead", step)
    step.end(EPOCH_NS + 1000 * duration_us)
    return exporter.get_finished_spans()


def test_a_tree_shows_the_first_layer_and_leaves_out_the_middle_ones() -> None:
    (step,) = span_trees(step_spans(layers=6, duration_us=1234))
    assert rendered(step_tree(step, micro="us")) == [
        "step decode                        1.23 ms",
        "├── Embedding                      10.0 us",
        "├── layer decoder 0                10.0 us",
        "│   └── RmsNorm                    10.0 us",
        "├── ... 4 more layers",
        "├── layer decoder 5                10.0 us",
        "└── LmHead                         10.0 us",
    ]


@pytest.mark.parametrize(
    ("layers", "line"),
    [(0, None), (1, None), (2, None), (3, "├── ... 1 more layer"), (4, "├── ... 2 more layers")],
)
def test_a_tree_says_how_many_layers_it_leaves_out(layers: int, line: str | None) -> None:
    (step,) = span_trees(step_spans(layers=layers))
    left_out = [text for text in rendered(step_tree(step, micro="us")) if "..." in text]
    assert left_out == ([] if line is None else [line])


def test_the_typical_step_is_the_median_decode_step() -> None:
    spans = [
        span
        for phase, duration_us in (("prefill", 9000), ("decode", 900), ("decode", 300), ("decode", 400))
        for span in step_spans(layers=1, phase=phase, duration_us=duration_us)
    ]
    steps = span_trees(spans)
    assert len(steps) == 4
    step = typical_step(steps)
    assert step is not None
    assert (step.name, step.duration_ns) == ("step decode", 400_000)


def test_the_typical_step_is_any_step_without_decode_steps_and_none_without_steps() -> None:
    step = typical_step(span_trees(step_spans(layers=1, phase="prefill")))
    assert step is not None
    assert step.name == "step prefill"
    assert typical_step(span_trees(())) is None


def test_the_table_has_the_costliest_brick_first_and_no_figures_where_there_are_no_counts() -> None:
    profiler = BrickProfiler.enabled()
    profiler.record_elapsed(BrickId.RmsNorm, 10_000)
    profiler.record_elapsed(BrickId.LmHead, 30_000, bytes_read=20_000, bytes_written=10_000)
    lines = rendered(brick_table(profiler.all_brick_stats(), profiler.total_ns(), micro="us"))
    profiler.shutdown()
    rows = [line.split() for line in lines if "Norm" in line or "LmHead" in line]
    assert [(row[0], row[-2], row[-1]) for row in rows] == [
        ("LmHead", "75.0", "1.0"),
        ("RmsNorm", "25.0", "-"),
    ]


class FailingExporter(InMemorySpanExporter):
    def __init__(self, path: Path) -> None:
        super().__init__()
        path.touch()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_an_incomplete_file_is_an_error_and_keeps_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "_file_exporter_class", lambda: FailingExporter)
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier", encoding="utf-8")
    with TraceRecorder(path, service_name="test") as recorder:
        recorder.provider.get_tracer("test").start_span("lost").end()
        with pytest.raises(OSError, match="1 of 1 spans could not be written"):
            recorder.commit()
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == {"trace.jsonl": "earlier"}
