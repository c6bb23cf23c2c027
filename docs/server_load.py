"""Runs the demonstration's decoder for minutes and sends what it records, so that servers have something to show.

    python docs/server_load.py --endpoint http://localhost:4318 --minutes 8 --slow 2.5 4

From minute 2.5 to minute 4 the weights of one projection in one layer are of a type that BLAS does not know. numpy then
multiplies without it, and promotes what follows: all of the next layer and the head get slow too. `draw_servers.py`
draws what the servers have of that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]

import otel_brick
from otel_brick.cli.decoder import PRESETS, Decoder, KvCache, Sampler, encode

PROMPT = "The quick brown fox jumps over the lazy dog."
TOKENS = 48
"""Of a request: one by its prefill step, the others by a decode step each."""
SLOW_LAYER = 4
PAUSE_S = 0.01
"""Between two steps, to leave the machine to others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Generate text for minutes, profiled.")
    parser.add_argument("--endpoint", required=True, help="OTLP over HTTP, such as http://localhost:4318")
    parser.add_argument("--minutes", type=float, default=8, help="how long it runs")
    parser.add_argument("--slow", type=float, nargs=2, default=(2.5, 4), metavar="MINUTE", help="when a layer is slow")
    parser.add_argument("--service", default="decoder", help="its service.name")
    options = parser.parse_args(arguments)

    profiler = otel_brick.configure(service_name=options.service, endpoint=options.endpoint)
    config, prompt = PRESETS["default"], encode(PROMPT)
    decoder = Decoder(config, seed=0, profiler=profiler)
    sampler = Sampler(config, seed=0, profiler=profiler)
    usual = decoder.layers
    slow = list(usual)
    slow[SLOW_LAYER] = replace(slow[SLOW_LAYER], down=slow[SLOW_LAYER].down.astype(np.longdouble))
    begin, end = (60 * minute for minute in options.slow)
    start = time.monotonic()
    with threadpool_limits(limits=1):
        while (elapsed := time.monotonic() - start) < 60 * options.minutes:
            decoder.layers = tuple(slow) if begin <= elapsed < end else usual
            cache = KvCache(config, prompt.size + TOKENS - 1)
            with profiler.step(phase="prefill", tokens=prompt.size):
                token = sampler.sample(decoder.forward(prompt, cache))
            for _ in range(TOKENS - 1):
                with profiler.step(phase="decode", tokens=1):
                    token = sampler.sample(decoder.forward(np.array([token]), cache))
                time.sleep(PAUSE_S)
    profiler.shutdown()
    print(profiler.summary())
    print({reason: count for reason, count in profiler.losses().items() if count} or "nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
