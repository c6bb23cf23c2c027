"""Where does a forward pass spend its time? Statistics and a JSON profile, without any OpenTelemetry set-up.

python examples/minimal.py [brick_profile.json]
"""

import sys

import numpy as np

from otel_brick import BrickId, BrickProfiler

LAYERS, HIDDEN, TOKENS = 4, 512, 100

profiler = BrickProfiler()

# Bricks whose counts never change are bound once. A handle is also a decorator.
norm = profiler.define(BrickId.RmsNorm, elements=HIDDEN)
projection = profiler.define(BrickId.UpProjection, elements=HIDDEN, bytes_read=4 * HIDDEN * HIDDEN)


@profiler.define(BrickId.Activation, elements=HIDDEN)
def activate(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def forward(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    for index in range(LAYERS):
        with profiler.layer(index):
            with norm:
                x = x / np.sqrt(np.mean(x * x))
            with projection:
                x = x @ weights[index]
            x = activate(x)
    return x


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "brick_profile.json"
    random = np.random.default_rng(0)
    weights = random.standard_normal((LAYERS, HIDDEN, HIDDEN), dtype=np.float32)
    x = random.standard_normal(HIDDEN, dtype=np.float32)

    forward(x, weights)  # the first run is slower than all others; a new profiler is off and does not see it
    profiler.enable()
    for _ in range(TOKENS):
        with profiler.step(phase="decode", tokens=1):
            x = forward(x, weights)

    print(profiler.summary())

    slowest = max(profiler.all_brick_stats(), key=lambda brick: brick.exclusive_ns)
    print(f"\n{slowest.name}: p50 {slowest.p50_us:.1f} us, p99 {slowest.p99_us:.1f} us, {slowest.count} calls")
    profiler.write_json(path)
    print(f"profile written to {path}")
    profiler.shutdown()


if __name__ == "__main__":
    main()
