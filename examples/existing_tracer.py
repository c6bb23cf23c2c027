"""A service that already traces its requests: the steps of a model appear below the request's own span.

    python examples/existing_tracer.py

The service keeps its spans in memory and prints them as a tree; a real one has an OTLP exporter in that place.
"""

import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_brick import BrickCategory, BrickId, BrickProfiler
from otel_brick.testing import SpanNode, span_trees

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
    for root in span_trees(exporter.get_finished_spans()):
        print_tree(root)


def print_tree(node: SpanNode, depth: int = 0) -> None:
    shown = ("brick.token.count", "brick.layer.index", "brick.element.count")
    details = "  ".join(f"{name}={node.attributes[name]}" for name in shown if name in node.attributes)
    print(f"{'  ' * depth + node.name:<24} {node.duration_ns / 1000:9.1f} us  {details}".rstrip())
    for child in node.children:
        print_tree(child, depth + 1)


if __name__ == "__main__":
    main()
