"""What the profiler adds to the time of a decode step on a GPU, by the mode in which device time is taken.

Method
------
One decode step of `examples/cuda_decoder.py` at its 64th position: 60 bricks in 4 layers, each of one or three kernels
that NVRTC compiled. What is launched is noted once. A round launches it for 20 tokens from a list, waits for the stream
after each token, as a decoder does that needs the token, and takes the wall time. Without profiler the same list is
gone through without a `with`. With one, each token is a step, each layer a layer, each brick a bound handle; the worker
counts the rows and sends them, all steps with detail, to a collector in another process. What a round leaves for it is
done behind the round, except in "finalized after each token", which calls `finalize` after the wait. In "kernels too"
`CudaCoreInstrumentor` records every launch; "with events" gives each a pair of events of its own.

The second table has the time that the calling thread takes until everything is launched, less that of the loop without
profiler in the same round, for each brick: what a scope costs the host. It is the only figure here that is a
difference.

Where there is no driver, the stand-in driver of `tests/cuda` takes its place, and the result says `driver: stand-in`.
Its kernels take no time, so that a step is nothing but host work: what is added is then what the host adds, and the
ratios are those of a decoder that never waits for its GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import engine  # first, since it finds the others
import harness
from collectors import UP, collector
from engine import Engine
from harness import Candidate, Table

from otel_brick import BrickProfiler, SyncMode
from otel_brick.export.otlp import BrickOTLPExporter

TOKENS = 20
BARE, AGAIN, OFF = "without profiler", "without profiler, once more", "disabled"
COUNTING, DEFERRED, PER_LAYER, IMMEDIATE = "no device time", "deferred", "per layer", "immediate"
FINALIZED = "deferred, finalized after each token"
KERNELS, EVENTS = "deferred, kernels too", "deferred, kernels too, with events"
MODES = {
    COUNTING: SyncMode.None_,
    DEFERRED: SyncMode.Deferred,
    PER_LAYER: SyncMode.PerLayer,
    IMMEDIATE: SyncMode.Immediate,
}


Round = Callable[[], tuple[float, float, float]]
"""Returns microseconds for each token: wall time, and of it launching and `finalize`."""


def bare(model: Engine) -> Round:
    """A round without profiler."""
    stream, launch, layers = model.stream, model.launch, model.layers

    def run() -> tuple[float, float, float]:
        launching = 0
        begin = time.perf_counter_ns()
        for _ in range(TOKENS):
            start = time.perf_counter_ns()
            for layer in layers:
                for _, launches in layer.bricks:
                    for config, kernel, arguments in launches:
                        launch(stream, config, kernel, *arguments)
            launching += time.perf_counter_ns() - start
            stream.sync()
        return (time.perf_counter_ns() - begin) / TOKENS / 1e3, launching / TOKENS / 1e3, 0.0

    return run


def profiled(model: Engine, profiler: BrickProfiler, launch: Any, *, finalize: bool = False) -> Round:
    """The same round with a profiler."""
    stream = model.stream
    handles = {brick: profiler.define(brick, elements=512) for layer in model.layers for brick, _ in layer.bricks}
    layers = [(layer.index, [(handles[brick], launches) for brick, launches in layer.bricks]) for layer in model.layers]

    def go(bricks: list[Any]) -> None:
        for handle, launches in bricks:
            with handle:
                for config, kernel, arguments in launches:
                    launch(stream, config, kernel, *arguments)

    def run() -> tuple[float, float, float]:
        launching = finalizing = 0
        begin = time.perf_counter_ns()
        for _ in range(TOKENS):
            start = time.perf_counter_ns()
            with profiler.step(phase="decode", tokens=1):
                for index, bricks in layers:
                    if index is None:
                        go(bricks)
                    else:
                        with profiler.layer(index, type="decoder"):
                            go(bricks)
                launching += time.perf_counter_ns() - start
                stream.sync()
            if finalize:
                start = time.perf_counter_ns()
                profiler.finalize()
                finalizing += time.perf_counter_ns() - start
        spent = time.perf_counter_ns() - begin
        profiler.flush()
        return spent / TOKENS / 1e3, launching / TOKENS / 1e3, finalizing / TOKENS / 1e3

    return run


def modes(model: Engine, scale: float) -> tuple[Table, Table, Table]:
    """Wall time of a token, what a brick adds on the host by mode, and the time of one `finalize`."""
    # Imported here: the instrumentor replaces what this module has of cuda.core, so it has nothing.
    import cuda.core

    from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor

    with collector(UP) as endpoint:
        profilers: dict[str, BrickProfiler] = {OFF: BrickProfiler(stream=model.stream)}
        more = dict.fromkeys((FINALIZED, KERNELS, EVENTS), SyncMode.Deferred)
        for name, mode in {**MODES, **more}.items():
            profilers[name] = BrickProfiler.enabled(
                exporter=BrickOTLPExporter(endpoint=endpoint),
                detail="all",
                stream=model.stream,
                sync_mode=mode,
                kernel_events="all" if name == EVENTS else "off",
            )
        plain = model.launch
        CudaCoreInstrumentor().instrument(profiler=profilers[OFF])
        recorded = cuda.core.launch
        runs = {BARE: bare(model), OFF: profiled(model, profilers[OFF], plain)}
        runs |= {name: profiled(model, profilers[name], plain) for name in MODES}
        runs[FINALIZED] = profiled(model, profilers[FINALIZED], plain, finalize=True)
        runs |= {name: profiled(model, profilers[name], recorded) for name in (KERNELS, EVENTS)}
        runs[AGAIN] = bare(model)
        figures = harness.interleave(runs, max(5, round(60 * scale)))
        CudaCoreInstrumentor().uninstrument()
        lost: dict[str, dict[str, int]] = {}
        for name, profiler in profilers.items():
            losses = {reason: count for reason, count in profiler.losses().items() if count}
            if losses:
                lost[name] = losses
            profiler.shutdown()
    if lost:
        raise RuntimeError(f"rows were lost: {lost}")
    wall = harness.tabulate(
        f"One decode step of {model.bricks} bricks and {model.launches} kernels: wall time",
        [
            Candidate(BARE),
            # The target is one of real work: on the stand-in driver kernels take no time.
            *(
                Candidate(
                    name, peer=BARE, target=1.03 if name == DEFERRED and engine.machine.standin() is None else None
                )
                for name in runs
                if name != BARE
            ),
        ],
        {name: [whole for whole, _, _ in own] for name, own in figures.items()},
        unit="us",
    )
    launching = {name: [spent for _, spent, _ in own] for name, own in figures.items()}
    added = {
        name: [1e3 * (mine - theirs) / model.bricks for mine, theirs in zip(own, launching[BARE], strict=True)]
        for name, own in launching.items()
        if name != BARE
    }
    host = harness.tabulate(
        "Time that a brick adds on the thread that launches, less the loop without profiler in the same round",
        [Candidate(name) for name in added],
        added,
    )
    once = harness.tabulate(
        "One call of finalize, after a step that the device is past",
        [Candidate(FINALIZED)],
        {FINALIZED: [finalizing for _, _, finalizing in figures[FINALIZED]]},
        unit="us",
    )
    return wall, host, once


def main() -> None:
    options = harness.arguments(__doc__ or "")
    device, facts = engine.open_gpu()
    print(f"{facts['device']}, driver {facts['driver']}, CUDA {facts['cuda']}")
    wall, host, once = modes(Engine(device), options.scale)
    for table in (wall, host, once):
        harness.show(table)
    name = "gpu_modes_standin" if facts["driver"] == "stand-in" else "gpu_modes"
    harness.finish(name, __doc__ or "", {"gpu": facts, "wall": wall, "host": host, "finalize": once}, save=options.save)


if __name__ == "__main__":
    main()
