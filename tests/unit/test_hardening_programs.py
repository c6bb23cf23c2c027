"""What leaves, and what stays, at the edges of a program's life: exits, forks, first steps, files and odd messages."""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from otel_brick import BrickProfiler
from otel_brick.testing import InMemoryTraces


def nonzero(profiler: BrickProfiler) -> dict[str, int]:
    return {reason: count for reason, count in profiler.losses().items() if count}


def output_of(program: str) -> list[str]:
    """The lines that a program prints, in a process without a tracer provider."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


# --- odd messages ---


class Rows:
    """An `exporter=` that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []

    def submit(self, blocks: Sequence[NDArray[np.uint8]], resource: Any, losses: Any) -> None:
        self.entries += [row.tobytes() for block in blocks for row in block]

    def flush(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        pass


@pytest.mark.parametrize("columnar", [False, True])
def test_a_message_that_utf8_cannot_hold_is_escaped_and_costs_no_span(columnar: bool) -> None:
    traces, rows = InMemoryTraces(), Rows()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, exporter=rows if columnar else None, detail="all")
    with profiler.step(), profiler.brick("Good"):
        pass
    message = "cannot decode " + b"\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(ValueError, match="cannot decode"), profiler.step(), profiler.brick("Bad"):
        raise ValueError(message)
    assert profiler.shutdown(timeout_s=10)
    assert not nonzero(profiler)
    by_provider = encode_spans(traces.spans).SerializeToString()  # raises on what cannot be sent
    assert by_provider.count(b"cannot decode \\udcff") == (1 if columnar else 2)
    by_rows = [ScopeSpans.FromString(entry).spans[0] for entry in rows.entries]
    statuses = {span.name: span.status.message for span in by_rows}
    for span in traces.spans:
        if span.name != "step other":
            statuses[span.name] = span.status.description or ""
    assert statuses == {"Good": "", "Bad": "cannot decode \\udcff"}
    assert [span.status.description for span in traces.spans if span.name == "step other"] == [
        None,
        "cannot decode \\udcff",
    ]


# --- programs ---


def test_first_steps_at_the_same_time_share_one_provider_and_all_leave() -> None:
    program = """
import sys, threading
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
import otel_brick.export.providers as providers
from otel_brick import BrickProfiler

class Rows(SpanExporter):
    rows = steps = late = 0
    closed = False
    def export(self, spans):
        Rows.late += Rows.closed
        Rows.steps += len(spans)
        return SpanExportResult.SUCCESS
    def submit(self, blocks, resource, losses):
        Rows.rows += sum(map(len, blocks))
    def flush(self, timeout_s):
        return True
    def force_flush(self, timeout_millis=30_000):
        return True
    def shutdown(self, timeout_millis=30_000):
        Rows.closed = True

make, made = providers.tracer_provider, []
def counted(*arguments):
    made.append(make(*arguments))
    return made[-1]
providers.tracer_provider = counted

sys.setswitchinterval(1e-6)
profiler = BrickProfiler.enabled(exporter=Rows(), detail="all")
together = threading.Barrier(8)
def work():
    together.wait()
    with profiler.step(), profiler.brick("B"):
        pass
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(made), profiler.flush(10), Rows.steps, Rows.rows)
print(profiler.shutdown(10), Rows.steps, Rows.rows, Rows.late, sum(profiler.losses().values()))
"""
    assert output_of(program) == ["1 True 8 8", "True 8 8 0 0"]


def test_a_short_program_without_a_provider_sends_its_metrics_at_exit() -> None:
    program = """
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from otel_brick import BrickProfiler

class Printed(MetricExporter):
    def export(self, metrics_data, timeout_millis=10_000, **arguments):
        for of_resource in metrics_data.resource_metrics:
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    if metric.name == "brick.step.duration":
                        print("steps", sum(point.count for point in metric.data.data_points), flush=True)
        return MetricExportResult.SUCCESS
    def force_flush(self, timeout_millis=10_000):
        return True
    def shutdown(self, timeout_millis=30_000, **arguments):
        print("closed", flush=True)

profiler = BrickProfiler.enabled(metric_exporter=Printed())
for _ in range(3):
    with profiler.step(), profiler.brick("B"):
        pass
print("end", flush=True)
"""
    assert output_of(program) == ["end", "steps 3", "closed"]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.PyDLL(None), "fork"),
    reason="the C library has no fork to call behind Python's back",
)
@pytest.mark.parametrize("used", [False, True])
def test_a_child_forked_without_pythons_hooks_has_ids_of_its_own_and_exports(used: bool) -> None:
    program = (
        f"used = {used}"
        + """
import ctypes, os, threading, time
from otel_brick import BrickProfiler
from otel_brick.export.ids import PrivateIdGenerator
from otel_brick.testing import InMemoryTraces

traces, generator = InMemoryTraces(), PrivateIdGenerator()
profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="all")
if used:
    with profiler.step(), profiler.brick("B"):
        pass
    assert profiler.flush(10)
    time.sleep(0.3)  # until the worker waits, so that it holds no lock of the interpreter's

def ids():
    row_ids = profiler._recorder.ids.span_ids(1).tolist()
    return generator.generate_trace_id(), generator.generate_span_id(), profiler._recorder.ids.span_id(), *row_ids

libc = ctypes.PyDLL(None)  # keeps the interpreter's lock in the child
for child in range(2):
    if libc.fork() == 0:
        print(*ids(), flush=True)
        traces.clear()
        for _ in range(3):
            with profiler.step(), profiler.brick("B"):
                pass
        print(profiler.flush(10), len(traces.spans), profiler.stats("B").count, flush=True)
        os._exit(0)
    os.wait()
print(*ids(), flush=True)
"""
    )
    first, exported, second, exported_too, parent = output_of(program)
    assert exported == exported_too == "True 6 3"
    assert len(set(f"{first} {second} {parent}".split())) == 12


# --- what stays ---


def test_bricks_of_a_task_that_outlives_its_profiler_are_counted_and_not_kept() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    handle = profiler.define("B")

    async def background(may_go_on: asyncio.Event) -> None:
        await may_go_on.wait()
        for _ in range(100):
            with handle:
                pass

    async def main() -> None:
        may_go_on = asyncio.Event()
        with profiler.step():
            task = asyncio.create_task(background(may_go_on))
            await asyncio.sleep(0)
        assert profiler.shutdown(timeout_s=10)
        may_go_on.set()
        await task

    asyncio.run(main())
    assert not profiler._recorder._open
    assert not profiler._recorder._pending
    assert nonzero(profiler) == {"already_shutdown": 100}
    assert profiler.step_count() == 1


def test_attached_rows_leave_beyond_the_limits_and_are_not_called_dropped() -> None:
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider, attach_context=True, detail="all", max_rows_per_step=1
    )
    with profiler.step():
        for _ in range(3):
            with profiler.brick("B"):
                pass
    assert profiler.shutdown(timeout_s=10)
    (step,) = traces.trees()
    assert [child.span.name for child in step.children] == ["B"] * 3
    assert "brick.dropped.count" not in step.attributes
    assert not nonzero(profiler)


def test_writing_a_profile_leaves_the_umask_alone_and_obeys_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = BrickProfiler.enabled(detail="none")
    with profiler.step():
        pass
    set_umask = os.umask
    before = set_umask(0o027)
    try:
        with monkeypatch.context() as patch:
            # It belongs to the process: even a moment with another one opens other threads' files to strangers.
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
            profiler.write_json(tmp_path / "new" / "profile.json")
            profiler.write_json(tmp_path / "new" / "profile.json")
        assert set_umask(0o027) == 0o027
    finally:
        set_umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "profile.json").stat().st_mode) == 0o640
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["profile.json"]
    assert profiler.shutdown(timeout_s=10)
