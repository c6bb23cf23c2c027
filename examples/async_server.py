"""Concurrent requests in asyncio: every request has its own steps, and what runs side by side has its own lane.

python examples/async_server.py
"""

import asyncio
from collections import Counter

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_brick import BrickId, BrickProfiler
from otel_brick.testing import SpanNode, span_trees

REQUESTS, TOKENS, EXPERTS = 8, 3, 4

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
tracer = provider.get_tracer("my_server")
profiler = BrickProfiler.enabled(tracer_provider=provider, detail="all")

attention = profiler.define(BrickId.AttentionOutput)
mixture = profiler.define("MixtureOfExperts")


async def handle_request() -> None:
    with tracer.start_as_current_span("request"):
        for _ in range(TOKENS):
            with profiler.step(phase="decode", tokens=1):
                with attention:
                    await asyncio.sleep(0.002)
                with mixture:
                    await asyncio.gather(*(run_expert(number) for number in range(EXPERTS)))


async def run_expert(number: int) -> None:
    # Without a lane, the experts of one step would seem to be nested in each other.
    with profiler.lane(), profiler.brick("Expert"):
        await asyncio.sleep(0.001 * (number + 1))


async def serve() -> None:
    await asyncio.gather(*(handle_request() for _ in range(REQUESTS)))


def main() -> None:
    asyncio.run(serve())
    profiler.shutdown()
    provider.shutdown()

    print(profiler.summary())
    print()

    edges = Counter[str]()
    for root in span_trees(exporter.get_finished_spans()):
        count_edges(root, edges)
    for edge, count in sorted(edges.items()):
        print(f"{count:4} x {edge}")

    assert edges["MixtureOfExperts > Expert"] == REQUESTS * TOKENS * EXPERTS
    assert profiler.step_count() == profiler.tokens() == REQUESTS * TOKENS
    assert not any(profiler.losses().values())
    print("every expert is below the mixture of its own step, and nothing was lost")


def count_edges(node: SpanNode, edges: Counter[str]) -> None:
    for child in node.children:
        edges[f"{node.name} > {child.name}"] += 1
        count_edges(child, edges)


if __name__ == "__main__":
    main()
