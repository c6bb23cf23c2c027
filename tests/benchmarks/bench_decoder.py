"""What the profiler adds to a model: a decoder of GPT-2-small shape in numpy, every operation of every step recorded.

Method
------
Wall time of one decode step of `otel-brick demo`'s model, which reads some 500 MB of weights for each token, with BLAS
on one thread. With the profiler, each of the 196 rows of a step (184 bricks and 12 layers) is recorded, counted,
encoded and sent to a collector in another process, all steps with detail, the exporter's threads running beside.
Without it, the same decoder runs with scopes that do nothing. Rounds of 6 tokens take turns; each begins with an empty
cache and a prompt of 8 tokens, which is not timed. What a round leaves to send is sent in the row "with its flush"
within the time, otherwise behind it, where it disturbs nobody. Needs 1.5 GB of memory.

Between two of its bricks such a model drives megabytes of weights through the caches, so that the instructions and
data of a scope come from memory each time: a scope costs several times what it costs in the tight loops of
`bench_recording.py`.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import harness
import numpy as np
from collectors import UP, collector
from harness import Candidate, Table

from otel_brick import BrickProfiler
from otel_brick.cli.bricks import StepBricks
from otel_brick.cli.decoder import PRESETS, Decoder, KvCache, Sampler, encode
from otel_brick.export.otlp import BrickOTLPExporter

TOKENS = 6
PROMPT = encode("a prompt")
CONFIG = PRESETS["gpt2-small"]
BARE = "without profiler"
AGAIN = "without profiler, once more"
PROFILED = "with profiler"
FLUSHED = "with profiler, with its flush"


class NoProfiler:
    """Scopes that do nothing."""

    def __init__(self) -> None:
        self._scope = nullcontext()

    def define(self, *_: Any, **__: Any) -> nullcontext[None]:
        return self._scope

    brick = layer = step = define

    def flush(self) -> None:
        pass


def decoder(scale: float) -> Table:
    """Wall time of a decode step with and without profiler."""
    bare = cast("BrickProfiler", NoProfiler())
    model = Decoder(CONFIG, seed=1, profiler=bare)
    with collector(UP) as endpoint:
        profiler = BrickProfiler.enabled(exporter=BrickOTLPExporter(endpoint=endpoint), detail="all")
        profiled = copy.copy(model)
        profiled._profiler, profiled._one_token = profiler, StepBricks(profiler, CONFIG, tokens=1)
        runs = {
            BARE: _round(model, bare),
            PROFILED: _round(profiled, profiler),
            AGAIN: _round(model, bare),
        }
        figures = harness.interleave(runs, max(5, round(40 * scale)))
        lost = {reason: count for reason, count in profiler.losses().items() if count}
        rows = sum(stats.count for stats in profiler.all_brick_stats()) / profiler.step_count()
        profiler.shutdown()
    if lost:
        raise RuntimeError(f"rows were lost: {lost}")
    times = {name: [steps for steps, _ in own] for name, own in figures.items()}
    times[FLUSHED] = [whole for _, whole in figures[PROFILED]]
    return harness.tabulate(
        f"Decoder of GPT-2-small shape: wall time of one decode step of {rows:.0f} bricks",
        [
            Candidate(BARE),
            Candidate(PROFILED, peer=BARE, target=1.01),
            Candidate(FLUSHED, peer=BARE, target=1.01),
            Candidate(AGAIN, peer=BARE),
        ],
        times,
        unit="us",
    )


def _round(model: Decoder, profiler: BrickProfiler) -> Callable[[], tuple[float, float]]:
    """A round that returns the time of one step, without and with a flush at the end."""
    sampler = Sampler(CONFIG, seed=1, profiler=profiler)

    def run() -> tuple[float, float]:
        cache = KvCache(CONFIG, PROMPT.size + TOKENS)
        with profiler.step(phase="prefill", tokens=PROMPT.size):
            token = sampler.sample(model.forward(PROMPT, cache))
        profiler.flush()
        begin = time.perf_counter()
        for _ in range(TOKENS):
            with profiler.step(phase="decode", tokens=1):
                token = sampler.sample(model.forward(np.array([token], np.int64), cache))
        steps = time.perf_counter() - begin
        profiler.flush()
        whole = time.perf_counter() - begin
        return steps / TOKENS * 1e6, whole / TOKENS * 1e6

    return run


def main() -> None:
    options = harness.arguments(__doc__ or "")
    table = decoder(options.scale)
    harness.show(table)
    harness.finish("decoder", __doc__ or "", {"decoder": table}, save=options.save)


if __name__ == "__main__":
    main()
