"""Timers: bricks that two calls start and stop, on whatever thread and in whatever order."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from otel_brick import BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock


def on_a_thread(function: Callable[[], Any]) -> Any:
    """Run a function on a new thread, which sees no step, and return what it returned."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=30)
    return results[0]


def lost(profiler: BrickProfiler) -> dict[str, int]:
    """The losses that occurred."""
    return {reason: count for reason, count in profiler.losses().items() if count}


def durations(profiler: BrickProfiler) -> dict[str, tuple[int, int]]:
    """Calls and inclusive time by brick."""
    return {stats.name: (stats.count, stats.total_ns) for stats in profiler.all_brick_stats()}


def test_a_timer_measures_from_its_start_to_its_stop(profiler: BrickProfiler, time: ManualClock) -> None:
    by_id = profiler.start_brick(BrickId.QkvProjection)
    time.advance(10)
    profiler.stop_brick(by_id, 4)
    by_name = profiler.start("Residual1")
    time.advance(30)
    profiler.stop(by_name)
    by_alias = profiler.start("Qkv")
    time.advance(7)
    profiler.stop(by_alias, 6)

    assert durations(profiler) == {"QkvProjection": (2, 17), "Residual1": (1, 30)}
    assert profiler.stats("QkvProjection").total_elements == 10
    assert lost(profiler) == {}


def test_a_stop_gives_counts_that_were_not_known_at_the_start(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step():
        profiler.stop(profiler.start("All"), 1, bytes_read=2, bytes_written=3)
        profiler.stop(profiler.start("None"))
        profiler.stop(profiler.start("Zero"), 0)
        profiler.stop(profiler.start("Written"), bytes_written=5)

    profiler.flush()

    names = ("brick.element.count", "brick.io.read.size", "brick.io.write.size", "brick.io.size")
    assert {
        span.name: tuple(span.attributes.get(name) for name in names)
        for span in traces.spans
        if span.name != "step other"
    } == {
        "All": (1, 2, 3, 5),
        "None": (None, None, None, None),
        "Zero": (0, None, None, None),
        "Written": (None, None, 5, 5),
    }
    stats = profiler.stats("All")
    assert (stats.total_elements, stats.bytes_read, stats.bytes_written) == (1, 2, 3)


def test_a_timer_nests_like_any_scope(profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock) -> None:
    with profiler.step(), profiler.layer(2):
        outer = profiler.start("Outer")
        time.advance(5)
        with profiler.brick("Inner"):
            inner = profiler.start("Innermost")
            time.advance(10)
            profiler.stop(inner)
        profiler.stop(outer)

    profiler.flush()

    (tree,) = traces.trees()
    assert tree.outline() == (
        "step other",
        15,
        (("layer", 15, (("Outer", 15, (("Inner", 10, (("Innermost", 10, ()),)),)),)),),
    )
    assert profiler.stats("Outer").exclusive_ns == 5
    assert lost(profiler) == {}


def test_a_second_stop_is_counted_and_changes_nothing(profiler: BrickProfiler, time: ManualClock) -> None:
    timer = profiler.start("B")
    time.advance(10)
    profiler.stop(timer, 3)
    before = durations(profiler)
    assert not timer.running

    for _ in range(2):
        time.advance(100)
        profiler.stop(timer, 3)

    assert lost(profiler) == {"closed_twice": 2}
    assert durations(profiler) == before == {"B": (1, 10)}
    assert profiler.stats("B").total_elements == 3


def test_a_timer_of_a_disabled_profiler_is_dead_even_if_it_is_enabled_before_the_stop(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    profiler.disable()
    timers = [profiler.start("B"), profiler.start_brick(BrickId.RmsNorm)]
    assert [timer.running for timer in timers] == [False, False]
    profiler.enable()
    time.advance(10)

    for timer in timers * 2:
        profiler.stop(timer, 1)

    assert (durations(profiler), lost(profiler)) == ({}, {})


def test_a_timer_started_on_counts_though_the_profiler_is_disabled_before_the_stop(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step():
        timer = profiler.start("B")
        time.advance(10)
        profiler.disable()
        profiler.stop(timer, 4)

    assert durations(profiler) == {"B": (1, 10)}
    assert profiler.stats("B").total_elements == 4


@pytest.mark.parametrize("in_step", [True, False])
def test_another_thread_may_stop_a_timer(
    in_step: bool, profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    def start_and_stop_elsewhere() -> None:
        timer = profiler.start("B")
        time.advance(10)
        on_a_thread(lambda: profiler.stop(timer, 7))

    if in_step:
        with profiler.step(), profiler.brick("Around"):
            start_and_stop_elsewhere()
    else:
        start_and_stop_elsewhere()

    assert durations(profiler)["B"] == (1, 10)
    assert profiler.stats("B").total_elements == 7
    assert lost(profiler) == {}
    if in_step:
        profiler.flush()
        (tree,) = traces.trees()
        assert tree.outline() == ("step other", 10, (("Around", 10, (("B", 10, ()),)),))


def test_two_threads_that_stop_one_timer_record_it_once(profiler: BrickProfiler) -> None:
    with profiler.step():
        for _ in range(50):
            timer = profiler.start("B")
            barrier = threading.Barrier(2)

            def stop(timer: Any = timer, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                profiler.stop(timer)

            threads = [threading.Thread(target=stop) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)

    assert profiler.stats("B").count == 50
    assert lost(profiler) == {"closed_twice": 50}


def test_timers_stopped_in_the_order_of_their_starts_are_counted_out_of_order_and_keep_their_times(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step():
        first = profiler.start("First")
        time.advance(10)
        second = profiler.start("Second")
        time.advance(20)
        profiler.stop(first)
        time.advance(30)
        profiler.stop(second)

    profiler.flush()

    assert durations(profiler) == {"First": (1, 30), "Second": (1, 50)}
    assert lost(profiler) == {"out_of_order": 1}
    (tree,) = traces.trees()
    assert [child.outline() for child in tree.children if child.name == "First"] == [("First", 30, ())]


def test_overlapping_timers_of_one_brick_keep_their_own_times_and_counts(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step():
        first = profiler.start("B")
        time.advance(10)
        second = profiler.start("B")
        time.advance(20)
        profiler.stop(first, 1)
        time.advance(30)
        profiler.stop(second, 2)

    profiler.flush()

    stats = profiler.stats("B")
    assert (stats.count, stats.total_ns, stats.min_ns, stats.max_ns) == (2, 80, 30, 50)
    assert sorted(
        (span.end_time - span.start_time, span.attributes["brick.element.count"])
        for span in traces.spans
        if span.name == "B"
    ) == [(30, 1), (50, 2)]


def test_a_timer_still_running_when_its_step_ends_is_counted_left_open_and_takes_no_part(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step():
        forgotten = profiler.start("Forgotten")
        with profiler.brick("B"):
            time.advance(10)
    assert durations(profiler) == {"B": (1, 10)}
    assert lost(profiler) == {"left_open": 1}
    time.advance(100)

    profiler.stop(forgotten)

    assert durations(profiler) == {"B": (1, 10)}
    assert lost(profiler) == {"left_open": 1, "out_of_order": 1}


def test_stopping_a_timer_from_outside_the_step_does_not_take_later_bricks_out_of_the_step(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    loading = profiler.start("Loading")
    with profiler.step():
        time.advance(10)
        profiler.stop(loading)
        with profiler.brick("Inside"):
            time.advance(30)

    profiler.flush()

    assert durations(profiler) == {"Loading": (1, 10), "Inside": (1, 30)}
    assert profiler.coverage() == 0.75
    assert lost(profiler) == {}
    assert [tree.outline() for tree in traces.trees()] == [("step other", 40, (("Inside", 30, ()),))]


def test_stopping_another_thread_s_timer_does_not_take_later_bricks_out_of_the_step(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    theirs = on_a_thread(lambda: profiler.start("Theirs"))
    with profiler.step():
        time.advance(10)
        profiler.stop(theirs)
        with profiler.brick("Inside"):
            time.advance(30)

    profiler.flush()

    assert durations(profiler) == {"Theirs": (1, 10), "Inside": (1, 30)}
    assert profiler.coverage() == 0.75
    assert [tree.outline() for tree in traces.trees()] == [("step other", 40, (("Inside", 30, ()),))]


def test_bricks_after_a_timer_that_nobody_stops_still_count(profiler: BrickProfiler, time: ManualClock) -> None:
    def engine() -> None:
        profiler.start("Abandoned")
        for _ in range(3):
            with profiler.brick("B"):
                time.advance(10)
        profiler.record_elapsed("Measured", 5)

    contextvars.copy_context().run(engine)

    assert durations(profiler) == {"B": (3, 30), "Measured": (1, 5)}


def test_a_timer_nobody_stops_outside_a_step_is_counted_left_open_by_shutdown(
    profiler: BrickProfiler,
) -> None:
    contextvars.copy_context().run(lambda: profiler.start("Abandoned"))

    profiler.shutdown()

    assert lost(profiler) == {"left_open": 1}


def test_a_stop_before_the_start_s_time_is_a_clock_anomaly_of_no_duration(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    timer = profiler.start("B")
    time.advance(-5)
    profiler.stop(timer)

    assert durations(profiler) == {"B": (1, 0)}
    assert lost(profiler) == {"clock_anomaly": 1}
