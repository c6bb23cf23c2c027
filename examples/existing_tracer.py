"""A service that already traces its requests: the steps of a model appear below the request's own span.

    python examples/existing_tracer.py

The service keeps its spans in memory and prints them as a tree; a real one has an OTLP exporter in that place.
"""

from collections.abc import Sequence

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_brick import BrickCategory, BrickId, BrickProfiler

LAYERS, HIDDEN, PROMPT = 2, 512, 32


class Model:
    """Two layers of normalisation and a projection."""

    def __init__(self, profiler: BrickProfiler) -> None:
        self._profiler = profiler
        self._weights = np.random.default_rng(0).standard_normal((LAYERS, HIDDEN, HIDDEN), dtype=np.float32)

    def forward(self, x: np.ndarray) -> np.ndarray:
        profiler = self._profiler
        for index, weight in enumerate(self._weights):
            with profiler.layer(index, type="decoder"):
                with profiler.brick(BrickId.RmsNorm, elements=x.size):
                    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
                with profiler.brick("FusedMlp", elements=x.size, category=BrickCategory.Ffn):
                    x = np.tanh(x @ weight)
        return x


def main() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("my_service")

    # A provider that is global, as from trace.set_tracer_provider(), is found without the argument.
    profiler = BrickProfiler.enabled(tracer_provider=provider)
    model = Model(profiler)

    with tracer.start_as_current_span("POST /generate"):
        x = np.ones((PROMPT, HIDDEN), dtype=np.float32)
        with profiler.step(phase="prefill", tokens=PROMPT):
            x = model.forward(x)
        for _ in range(2):
            with profiler.step(phase="decode", tokens=1):
                x = model.forward(x[-1:])

    profiler.shutdown()  # before the provider: it hands over what has ended
    provider.shutdown()
    print_tree(exporter.get_finished_spans())


def print_tree(spans: Sequence[ReadableSpan], parent_id: int | None = None, depth: int = 0) -> None:
    for span in sorted(spans, key=lambda span: span.start_time):
        if (span.parent.span_id if span.parent else None) == parent_id:
            duration_us = (span.end_time - span.start_time) / 1000
            print(f"{'  ' * depth + span.name:<24} {duration_us:9.1f} us  {details(span)}".rstrip())
            print_tree(spans, span.context.span_id, depth + 1)


def details(span: ReadableSpan) -> str:
    shown = ("brick.token.count", "brick.layer.index", "brick.element.count")
    return "  ".join(f"{name}={span.attributes[name]}" for name in shown if name in span.attributes)


if __name__ == "__main__":
    main()
