"""What rows say of their times where a review found it wrong, and that switches and handlers at any moment are safe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cuda.core
import pytest
from cuda.bindings import driver as cu
from cuda.core import Device, LaunchConfig, Stream, launch

from otel_brick import BrickProfiler, TimingSource
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces, SpanNode

from .standin import NEVER_NS, Driver

MS, US, S = 1_000_000, 1_000, 1_000_000_000
ONE = LaunchConfig(grid=1, block=32)
HOST, SYNCED, EVENT = TimingSource.Host, TimingSource.SyncedHost, TimingSource.CudaEvent
Make = Callable[..., BrickProfiler]


def known(profiler: BrickProfiler) -> dict[str, tuple[int, TimingSource | None]]:
    return {brick.name: (brick.total_ns, brick.timing_source) for brick in profiler.all_brick_stats()}


def nodes(traces: InMemoryTraces) -> dict[str, SpanNode]:
    """All spans by name."""
    found: dict[str, SpanNode] = {}
    waiting = traces.trees()
    while waiting:
        node = waiting.pop()
        waiting += node.children
        found[node.name] = node
    return found


def length(node: SpanNode) -> int:
    assert node.span.start_time is not None and node.span.end_time is not None
    return node.span.end_time - node.span.start_time


# --- what was waited for ---


def test_bricks_in_a_layer_that_was_waited_for_were_not_waited_for_themselves(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    profiled.set_sync_mode("per_layer")
    driver.fail("cuEventElapsedTime", 999, always=True)
    with profiled.step():
        for index in range(2):
            with profiled.layer(index):
                with profiled.brick("Inside"):
                    launch(stream, ONE, gemv)
                    driver.advance(7 * US)
        with profiled.brick("Outside"):
            launch(stream, ONE, gemv)
            driver.advance(7 * US)
    profiled.finalize()
    assert known(profiled) == {"Inside": (14 * US, HOST), "Outside": (7 * US, HOST)}
    profiled.flush()
    (step,) = traces.trees()
    usual = step.attributes["brick.timing.source"]
    said = [(length(row), row.attributes.get("brick.timing.source", usual)) for row in step.children]
    assert said == [(MS, "synced_host"), (MS, "synced_host"), (7 * US, "host")]


def test_rows_before_and_after_a_mode_that_waits_were_not_waited_for(
    driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    driver.fail("cuEventElapsedTime", 999, always=True)
    with profiled.step():
        for name, mode in (("Before", "deferred"), ("Waited for", "immediate"), ("After", "deferred")):
            profiled.set_sync_mode(mode)
            with profiled.brick(name):
                launch(stream, ONE, gemv)
                driver.advance(7 * US)
            timer = profiled.start(f"{name}, timer")
            launch(stream, ONE, gemv)
            driver.advance(7 * US)
            profiled.stop(timer)
    profiled.finalize()
    found = known(profiled)
    assert [found[name] for name in ("Before", "Before, timer", "After", "After, timer")] == [(7 * US, HOST)] * 4
    assert found["Waited for"] == (3 * MS - 14 * US, SYNCED)
    assert found["Waited for, timer"] == (MS, SYNCED)


@pytest.mark.parametrize("mode", ["immediate", "per_layer"])
def test_rows_whose_wait_failed_have_host_times_and_so_has_their_step(
    mode: str, driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces, kernel: Any
) -> None:
    profiled.set_sync_mode(mode)
    for function in ("cuEventElapsedTime", "cuEventSynchronize"):
        driver.fail(function, 999, always=True)
    driver.set_cost("cuEventSynchronize", 100)
    with profiled.step(), profiled.layer(0):
        with profiled.brick("Brick"):
            launch(stream, ONE, kernel("gemv", duration_ns=MS))
            driver.advance(7 * US)
    driver.advance(2 * MS)
    profiled.finalize()
    assert known(profiled)["Brick"][1] is HOST
    profiled.flush()
    assert {span.attributes.get("brick.timing.source", "host") for span in traces.spans} == {"host"}


def test_a_step_that_the_device_does_not_get_past_in_time_is_counted(
    driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any
) -> None:
    with profiled.step(), profiled.brick("Endless"):
        launch(stream, ONE, kernel("endless", duration_ns=NEVER_NS))
        driver.advance(5 * US)
    profiled.finalize(wait=False)
    assert profiled.losses()["device_error"] == 0
    driver.advance(31 * S)
    assert profiled.losses()["device_error"] > 0
    assert known(profiled) == {"Endless": (5 * US, HOST)}


# --- what was captured, and how long spans are ---


@pytest.mark.parametrize("kernel_events", ["off", "all"])
def test_all_rows_made_while_their_stream_captures_say_so_and_no_others(
    kernel_events: str,
    driver: Driver,
    stream: Stream,
    make: Make,
    traces: InMemoryTraces,
    kernel: Any,
    instrumentor: CudaCoreInstrumentor,
) -> None:
    profiler = make(stream, kernel_events=kernel_events)
    instrumentor.instrument(profiler=profiler)
    gemv = kernel("gemv", duration_ns=MS)

    def rows(when: str) -> None:
        with profiler.layer(0, type=when):
            with profiler.brick(f"Brick {when}"):
                cuda.core.launch(stream, ONE, gemv)
                cuda.core.launch(stream, ONE, kernel(f"other_{when}", duration_ns=MS))
            with profiler.kernel(f"by hand {when}", grid=1):
                driver.advance(3 * US)
            timer = profiler.start(f"Timer {when}")
            profiler.record_deferred_dynamic(f"Deferred {when}", profiler.elapsed_ns(), 1)
            cuda.core.launch(stream, ONE, gemv)
            profiler.stop(timer)
            profiler.finalize(wait=False)

    for when in ("before", "captured", "after"):
        with profiler.step(attributes={"when": when}):
            if when == "captured":
                cu.cuStreamBeginCapture(stream.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
            rows(when)
            if when == "captured":
                error, _ = cu.cuStreamEndCapture(stream.handle)
                assert error == cu.CUresult.CUDA_SUCCESS
    profiler.finalize()
    profiler.flush()
    assert len(traces.trees()) == 3
    for step in traces.trees():
        when = step.attributes["when"]
        found, waiting = [], list(step.children)
        while waiting:
            node = waiting.pop()
            waiting += node.children
            found.append(node)
        assert len(found) == 8
        for node in found:
            captured = node.attributes.get("brick.cuda.graph.captured")
            assert captured == (True if when == "captured" else None), node.name


def test_host_rows_in_a_lane_below_a_brick_with_device_times_keep_their_lengths_and_lie_in_it(
    driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces, kernel: Any
) -> None:
    busy, gemv = kernel("busy", duration_ns=5 * MS), kernel("gemv", duration_ns=MS)
    with profiled.step():
        launch(stream, ONE, busy)
        with profiled.brick("Outer"):
            launch(stream, ONE, gemv)
            with profiled.lane():
                with profiled.kernel("by hand", grid=1):
                    driver.advance(7 * US)
                driver.advance(9 * US)
                profiled.record_elapsed("Elapsed", 9 * US)
            with profiled.kernel("own lane", grid=1):
                driver.advance(5 * US)
    profiled.finalize()
    profiled.flush()
    found = nodes(traces)
    assert known(profiled) == {"Outer": (MS, EVENT), "Elapsed": (9 * US, HOST)}
    assert [length(found[name]) for name in ("Outer", "by hand", "Elapsed", "own lane")] == [MS, 7 * US, 9 * US, 5 * US]
    outer = found["Outer"].span
    for name in ("by hand", "Elapsed", "own lane"):
        span = found[name].span
        assert outer.start_time <= span.start_time <= span.end_time <= outer.end_time


@pytest.mark.parametrize("jump_ns", [-3 * MS, -50 * US, 3 * MS])
def test_deferred_rows_keep_their_lengths_when_the_devices_clock_jumps(
    jump_ns: int, driver: Driver, stream: Stream, profiled: BrickProfiler, traces: InMemoryTraces, kernel: Any
) -> None:
    gemv = kernel("gemv", duration_ns=MS)
    with profiled.step(), profiled.brick("Warm"):
        launch(stream, ONE, gemv)
    profiled.finalize()
    profiled.losses()
    driver.set_device_clock(jump_ns=jump_ns)
    driver.advance(10 * MS)
    with profiled.step(), profiled.layer(0):
        for name in ("First", "Second"):
            start = profiled.elapsed_ns()
            launch(stream, ONE, gemv)
            profiled.record_deferred_dynamic(name, start, 1)
        profiled.finalize()
        with profiled.brick("Brick"):
            launch(stream, ONE, gemv)
    profiled.finalize()
    profiled.flush()
    (layer,) = traces.trees()[-1].children
    assert {row.name: length(row) for row in layer.children} == {"First": MS, "Second": MS, "Brick": MS}
    for row in layer.children:
        assert known(profiled)[row.name] == (MS, EVENT)
        assert layer.span.start_time <= row.span.start_time <= row.span.end_time <= layer.span.end_time


# --- what records nothing ---


@pytest.mark.parametrize("attach", [True, False], ids=["attached to the context", "not attached"])
@pytest.mark.parametrize("state", ["mode none", "disabled", "shut down"])
def test_a_profiler_that_takes_no_device_time_records_no_event_through_any_handle(
    state: str, attach: bool, driver: Driver, device: Device, stream: Stream, make: Make, kernel: Any
) -> None:
    profiler, gemv = make(stream, attach_context=attach), kernel("gemv", duration_ns=MS)
    other = device.create_stream()
    handles = [
        profiler.define("Defined"),
        profiler.define("Defined", elements=5, stream=other),
        profiler.layer(0),
        profiler.kernel("by hand", grid=1),
        profiler.kernel("by hand", grid=1, stream=other),
        profiler.brick("Kept"),
        profiler.brick("Kept", stream=other),
        profiler.brick("Kept", elements=3, bytes_read=7, stream=stream),
    ]

    def use() -> None:
        for handle in handles:
            with handle:
                launch(stream, ONE, gemv)
                driver.advance(7 * US)

    with profiler.step():
        use()
    profiler.finalize()
    before = known(profiler)
    counts = {brick.name: brick.count for brick in profiler.all_brick_stats()}
    assert counts == {"Defined": 2, "Kept": 3}
    {
        "mode none": lambda: profiler.set_sync_mode("none"),
        "disabled": profiler.disable,
        "shut down": lambda: profiler.shutdown(1.0),
    }[state]()
    recorded = driver.calls("cuEventRecord")
    for _ in range(3):
        with profiler.step():
            use()
            profiler.stop(profiler.start("Timer"))
            profiler.record_deferred_dynamic("Deferred", profiler.elapsed_ns(), 1)
            profiler.finalize()
        use()
    assert driver.calls("cuEventRecord") == recorded
    if state == "mode none":
        assert profiler.stats("Kept").count == 3 + 18
        assert profiler.stats("Kept").total_ns == before["Kept"][0] + 18 * 7 * US
    else:
        assert known(profiler) == before


# --- switches and handlers at any moment ---


@pytest.mark.parametrize("read", ["losses", "step_count", "flush", "reset_stats", "finalize"])
def test_a_signal_handler_may_record_at_any_moment_of_a_read(
    read: str, driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any
) -> None:
    gemv, moments, steps = kernel("gemv", duration_ns=10 * US), 0, 0

    def handler(frame: Any, event: str, argument: Any) -> None:
        # Python calls this at every call and return, but not again while it runs.
        nonlocal moments, steps
        moments += 1
        if moments % 11 == 0 and steps < 200:
            steps += 1
            with profiled.step(), profiled.brick("Handler"):
                profiled.record_deferred_dynamic("Deferred", profiled.elapsed_ns(), 1)
            profiled.finalize(wait=False)

    for _ in range(10):
        for _ in range(5):
            with profiled.step(), profiled.brick("Outside"):
                launch(stream, ONE, gemv)
        driver.advance(MS)
        sys.setprofile(handler)
        try:
            getattr(profiled, read)()
        finally:
            sys.setprofile(None)
    profiled.finalize()
    assert steps > 20
    if read != "reset_stats":
        handled = profiled.stats("Handler")
        assert handled is not None
        assert handled.count >= steps  # nothing that was recorded is lost
        assert profiled.step_count() == 50 + handled.count


@pytest.mark.parametrize("mode", ["none", "deferred", "immediate"])
def test_handles_defined_while_the_mode_is_switched_all_follow_the_last_mode(
    mode: str, driver: Driver, stream: Stream, profiled: BrickProfiler, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv, handles, failures = kernel("gemv", duration_ns=US), [], []
    until = time.monotonic() + 0.8

    def define() -> None:
        try:
            while time.monotonic() < until and len(handles) < 3000:
                handles.append(profiled.define("Brick", elements=len(handles)))
                handles.append(profiled.brick("Brick", stream=stream))
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=define)
    thread.start()
    try:
        while thread.is_alive():
            for other in ("immediate", "none", "deferred"):
                profiled.set_sync_mode(other)
            profiled.set_sync_mode(mode)
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert failures == []
    begin, own = driver.now_ns, threading.get_native_id()
    with profiled.step():
        driver.clear_trace()
        for number, handle in enumerate(handles):
            with handle:
                launch(stream, ONE, gemv)
            assert driver.now_ns - begin == ((number + 1) * US if mode == "immediate" else 0)
        # The worker has events of its own.
        records = [call for call in driver.trace("cuEventRecord") if call.thread == own]
    assert len(records) == (0 if mode == "none" else 2 * len(handles))
