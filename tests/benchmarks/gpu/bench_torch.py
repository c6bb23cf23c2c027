"""Whether a kernel takes as long by our events as by the profiler of PyTorch, which has the GPU's own records.

Method
------
The kernels of one decode step of `examples/cuda_decoder.py`, and kernels that wait for 20 us, 100 us and 1 ms, are
launched by `cuda.core.launch` under `CudaCoreInstrumentor` with `kernel_events="all"`, and under `torch.profiler` at
the same time: both see the same launches. A kernel that takes 20 ms goes first, so that all others wait in the queue.
For each kernel, the median over its launches in a round is one figure; rounds begin with a new profiler of PyTorch. A
pair of events encloses the kernel, so that ours is longer by what starting and ending a kernel takes.

Without a GPU, or without a PyTorch that uses it, there is nothing to compare with, and the program only says so.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import engine  # first, since it finds the others
import harness
from engine import Engine
from harness import Candidate, Table

from otel_brick import BrickProfiler
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces, SpanNode

SPINS_US = (20, 100, 1_000)
REPEATS = 10


def torch_with_cuda() -> Any:
    """PyTorch, or None with a line that says why not."""
    try:
        import torch
    except ImportError:
        print("nothing is compared: torch is not installed")
        return None
    if not torch.cuda.is_available():
        print("nothing is compared: this torch can not use a GPU")
        return None
    torch.cuda.init()
    return torch


def kernels(node: SpanNode, found: dict[str, list[float]]) -> None:
    """The durations of the kernels below a span, in microseconds by name."""
    if node.attributes.get("brick.span.level") == "kernel":
        found[node.name].append(node.duration_ns / 1e3)
    for child in node.children:
        kernels(child, found)


def compare(torch: Any, device: Any, model: Engine, rounds: int) -> Table:
    """Medians by kernel, ours and those of PyTorch's profiler."""
    import cuda.core

    from tests.gpu.spin import Spins

    spins = Spins(device, None)
    stream = model.stream
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(
        stream=stream, kernel_events="all", tracer_provider=traces.provider, detail="all", max_rows_per_step=100_000
    )
    CudaCoreInstrumentor().instrument(profiler=profiler)
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as peer:
            with profiler.step(phase="decode"):
                spins(stream, 20_000)
                with profiler.brick("Kernels"):
                    for _ in range(REPEATS):
                        for us in SPINS_US:
                            spins(stream, us)
                        for layer in model.layers:
                            for _, launches in layer.bricks:
                                for config, kernel, arguments in launches:
                                    cuda.core.launch(stream, config, kernel, *arguments)
            stream.sync()
        profiler.finalize()
        profiler.flush()
        mine: dict[str, list[float]] = defaultdict(list)
        kernels(traces.trees()[-1], mine)
        traces.clear()
        peers: dict[str, list[float]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            peer.export_chrome_trace(str(path))
            for event in json.loads(path.read_text())["traceEvents"]:
                if event.get("cat") == "kernel":
                    peers[event["name"]].append(event["dur"])
        counts, their_counts = ({name: len(found) for name, found in seen.items()} for seen in (mine, peers))
        if counts != their_counts:
            sys.exit(f"the two did not see the same launches: {counts} and {their_counts}")
        if number >= 0:
            for name, durations in mine.items():
                ours[name].append(statistics.median(durations))
                theirs[name].append(statistics.median(peers[name]))
    CudaCoreInstrumentor().uninstrument()
    profiler.shutdown()
    candidates: list[Candidate] = []
    figures: dict[str, list[float]] = {}
    for name in sorted(ours, key=lambda name: statistics.median(theirs[name])):
        candidates += [Candidate(f"{name}, torch"), Candidate(f"{name}, ours", peer=f"{name}, torch")]
        figures |= {f"{name}, torch": theirs[name], f"{name}, ours": ours[name]}
    return harness.tabulate("Duration of a kernel", candidates, figures, unit="us")


def main() -> None:
    options = harness.arguments(__doc__ or "")
    torch = torch_with_cuda()
    if torch is None:
        return
    device, facts = engine.open_gpu()
    print(f"{facts['device']}, driver {facts['driver']}, CUDA {facts['cuda']}, torch {torch.__version__}")
    table = compare(torch, device, Engine(device), max(3, round(10 * options.scale)))
    harness.show(table)
    harness.finish("gpu_torch", __doc__ or "", {"gpu": facts, "kernels": table}, save=options.save)


if __name__ == "__main__":
    main()
