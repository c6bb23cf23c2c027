"""The run behind `otel-brick demo`: a decoder generates text under the profiler, leaves two files and sends the same.

Options come in, a `DemoResult` with everything that the report shows goes out. Nothing here prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]

from .. import BrickProfiler
from .decoder import PRESETS, Decoder, KvCache, Sampler, TokenArray, encode
from .sending import Sent
from .traces import TraceRecorder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from .. import BrickStats
    from .sending import Destination

SERVICE_NAME = "otel-brick-demo"
PROFILE_NAME = "brick_profile.json"
TRACE_NAME = "trace.jsonl"


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose; already checked."""

    preset: str
    prompt: str
    tokens: int
    """Tokens to generate: the first by the prefill step, each other by a decode step."""
    seed: int
    output: Path
    detail: str
    destination: Destination | None = None
    """Where spans and metrics are sent besides the files."""


@dataclass(frozen=True)
class PhaseTime:
    """Wall time of all steps of one phase."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        """None where the phase had no step."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class DemoResult:
    """What a run measured, and where it is."""

    text: str
    prefill: PhaseTime
    decode: PhaseTime
    bricks: Sequence[BrickStats]
    total_ns: int
    """Exclusive time of all bricks; a brick's share is of this."""
    coverage: float | None
    losses: Mapping[str, int]
    spans: Sequence[ReadableSpan]
    profile_path: Path
    trace_path: Path | None
    """None where OpenTelemetry's file exporter is not installed."""
    sent: Sent | None
    """None where nothing was to be sent."""


def run_demo(options: DemoOptions, on_token: Callable[[], None]) -> DemoResult:
    """Generate `options.tokens` tokens, profiled, and write both files into `options.output`.

    Args:
        options: the choices; the output directory exists.
        on_token: called after each token, between two steps.

    Raises:
        OSError: a file cannot be written.
    """
    destination = options.destination
    span_exporter = None if destination is None else destination.span_exporter()
    metric_exporter = None if destination is None else destination.metric_exporter()
    config = PRESETS[options.preset]
    prompt = encode(options.prompt)
    # BLAS threads that wait for each other on a busy machine would make short operations a hundred times slower.
    with (
        threadpool_limits(limits=1),
        TraceRecorder(options.output / TRACE_NAME, service_name=SERVICE_NAME, send_to=span_exporter) as traces,
    ):
        profiler = BrickProfiler.enabled(
            tracer_provider=traces.provider, metric_exporter=metric_exporter, detail=options.detail
        )
        try:
            decoder = Decoder(config, seed=options.seed, profiler=profiler)
            sampler = Sampler(config, seed=options.seed, profiler=profiler)
            _warm_up(decoder, profiler)
            capacity = prompt.size + options.tokens - 1
            generated, prefill, decode = _generate(
                decoder, sampler, profiler, prompt, KvCache(config, capacity), options.tokens, on_token
            )
            profiler.flush()
            profile_path = options.output / PROFILE_NAME
            profiler.write_json(profile_path)
            bricks = profiler.all_brick_stats()
            total_ns, coverage = profiler.total_ns(), profiler.coverage()
        finally:
            profiler.shutdown()
        trace_path = traces.commit()
        sent = None
        if destination is not None and metric_exporter is not None:
            spans = None if span_exporter is None else span_exporter.written
            lost = 0 if spans is None else len(traces.spans()) - spans
            sent = Sent(destination, spans, lost, metric_exporter.delivered)
        return DemoResult(
            text=bytes(generated).decode("ascii"),
            prefill=prefill,
            decode=decode,
            bricks=bricks,
            total_ns=total_ns,
            coverage=coverage,
            losses={reason: count for reason, count in profiler.losses().items() if count},
            spans=traces.spans(),
            profile_path=profile_path,
            trace_path=trace_path,
            sent=sent,
        )


def _warm_up(decoder: Decoder, profiler: BrickProfiler) -> None:
    """One step unseen by the profiler, so that what happens once only is nobody's brick."""
    profiler.disable()
    decoder.forward(encode("x"), KvCache(decoder.config, 1))
    profiler.enable()


def _generate(
    decoder: Decoder,
    sampler: Sampler,
    profiler: BrickProfiler,
    prompt: TokenArray,
    cache: KvCache,
    count: int,
    on_token: Callable[[], None],
) -> tuple[list[int], PhaseTime, PhaseTime]:
    """Prefill, then decode; spans leave between the steps, where exporting takes no time from a brick.

    An engine would not flush: it would record fewer steps in detail, or export on the columnar route.
    """
    start = time.perf_counter()
    with profiler.step(phase="prefill", tokens=prompt.size):
        generated = [sampler.sample(decoder.forward(prompt, cache))]
    prefill_s = time.perf_counter() - start
    profiler.flush()
    on_token()
    decode_s = 0.0
    while len(generated) < count:
        token = np.array(generated[-1:], dtype=np.int64)
        start = time.perf_counter()
        with profiler.step(phase="decode", tokens=1):
            generated.append(sampler.sample(decoder.forward(token, cache)))
        decode_s += time.perf_counter() - start
        profiler.flush()
        on_token()
    return generated, PhaseTime(prompt.size, prefill_s), PhaseTime(count - 1, decode_s)
