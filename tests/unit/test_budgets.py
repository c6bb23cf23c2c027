"""Budgets: which samples violate one, when it holds, where it appears, and what it does not touch."""

from __future__ import annotations

import contextvars
import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_brick import BrickCategory, BrickId, BrickProfiler, Phase
from otel_brick.record.batch import Batch
from otel_brick.record.descriptors import MAX_DYNAMIC_BRICKS
from otel_brick.stats.table import Table
from otel_brick.testing import InMemoryTraces, ManualClock

LIMITS = "brick.budget.duration", "brick.budget.exceeded"


def budget(profiler: Any, name: BrickId | str = "B", **which: Any) -> tuple[int | None, int]:
    stats = profiler.stats(name, **which)
    return stats.budget_ns, stats.budget_violations


def timed(profiler: BrickProfiler, time: ManualClock, name: BrickId | str, ns: int) -> None:
    with profiler.brick(name):
        time.advance(ns)


# --- what is counted ---


def test_only_samples_that_take_longer_than_the_budget_violate_it(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("B", 1_000)

    with profiler.step():
        for duration in (0, 999, 1_000, 1_001, 5_000):
            timed(profiler, time, "B", duration)
            timed(profiler, time, "Other", duration)

    assert budget(profiler, "B") == (1_000, 2)
    assert budget(profiler, "Other") == (None, 0)


def test_inclusive_time_is_what_counts(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("Outer", 100)

    with profiler.step(), profiler.brick("Outer"):
        timed(profiler, time, "Inner", 101)

    assert profiler.stats("Outer").exclusive_ns == 0
    assert budget(profiler, "Outer") == (100, 1)


@pytest.mark.parametrize("enabled_first", [False, True])
def test_a_budget_may_be_stated_before_its_brick_is_seen(enabled_first: bool) -> None:
    profiler = BrickProfiler()
    if enabled_first:
        profiler.enable()
    profiler.set_brick_budget("New", 10)
    profiler.enable()

    assert profiler.brick_names() == []
    assert profiler.brick_stats(BrickId.RmsNorm).budget_ns is None
    # Its category is still free to choose.
    profiler.record_elapsed("New", 11, category=BrickCategory.Ffn)
    profiler.record_elapsed("New", 10)
    assert budget(profiler, "New") == (10, 1)


@pytest.mark.parametrize("name", [BrickId.AttentionSoftmax, "AttentionSoftmax", "Softmax"])
def test_a_known_brick_has_one_budget_under_all_its_names(name: BrickId | str, profiler: BrickProfiler) -> None:
    profiler.set_brick_budget(name, 10)
    profiler.record_elapsed("Softmax", 11)
    profiler.record_elapsed(BrickId.AttentionSoftmax, 12)
    with profiler.brick("Softmax", exact=True):
        pass

    assert budget(profiler, BrickId.AttentionSoftmax) == (10, 2)
    assert profiler.brick_stats(BrickId.AttentionSoftmax).budget_ns == 10
    assert budget(profiler, "Softmax", exact=True) == (None, 0)


def test_every_way_to_record_is_held_to_it(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("B", timedelta(microseconds=1))
    timer = profiler.start("B")
    time.advance(1_001)
    profiler.stop(timer)
    timed(profiler, time, "B", 1_001)
    profiler.record_elapsed("B", 1_001)
    profiler.record_elapsed_with_bytes("B", timedelta(seconds=1), 1, 2, 1)
    with pytest.raises(ZeroDivisionError), profiler.step(), profiler.lane(), profiler.brick("B"):
        time.advance(1_001)
        raise ZeroDivisionError

    assert budget(profiler) == (1_000, profiler.stats("B").count) == (1_000, 5)


def test_violations_are_kept_by_phase(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("B", 10)
    for phase, durations in (("prefill", (5, 20, 30)), ("decode", (11, 10))):
        with profiler.step(phase=phase):
            for duration in durations:
                timed(profiler, time, "B", duration)

    assert budget(profiler, phase="prefill") == (10, 2)
    assert budget(profiler, phase=Phase.Decode) == (10, 1)
    assert budget(profiler) == (10, 3)


def test_the_budget_in_force_when_a_step_ends_holds_for_all_of_it(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("B", 100)
    with profiler.step():
        timed(profiler, time, "B", 50)
    # Nobody has read the step so far.
    profiler.set_brick_budget("B", 40)
    assert budget(profiler) == (40, 0)

    with profiler.step():
        timed(profiler, time, "B", 30)
        profiler.set_brick_budget("B", 20)
    assert budget(profiler) == (20, 1)

    profiler.set_brick_budget("B", None)
    profiler.record_elapsed("B", 1_000)
    assert budget(profiler) == (None, 1)
    profiler.set_brick_budget("Never stated", None)


def test_a_brick_left_open_is_no_sample_and_violates_nothing(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.set_brick_budget("Open", 1)
    with profiler.step():
        profiler.brick("Open").__enter__()
        time.advance(1_000)

    assert profiler.stats("Open") is None
    assert profiler.losses()["left_open"] == 1


def test_rows_that_leave_a_long_step_early_are_counted(time: ManualClock) -> None:
    profiler = BrickProfiler.enabled(clock=time.clock, detail="none")
    profiler.set_brick_budget("B", 1)
    brick = profiler.define("B")
    with profiler.step():
        for _ in range(70_000):
            with brick:
                time.advance(2)

    assert profiler.losses()["log_full"] == 0
    assert budget(profiler) == (1, 70_000)


def test_budgets_of_dynamic_names_are_bounded_and_those_of_known_bricks_always_fit(profiler: BrickProfiler) -> None:
    for number in range(MAX_DYNAMIC_BRICKS + 3):
        profiler.set_brick_budget(f"brick {number}", 5)
    assert profiler.losses()["name_overflow"] == 3

    profiler.set_brick_budget(BrickId.RmsNorm, 5)
    profiler.set_brick_budget("brick 0", 7)
    profiler.set_brick_budget("brick 1", None)
    profiler.set_brick_budget("in its place", 5)

    assert profiler.losses()["name_overflow"] == 3
    for name in ("RmsNorm", "brick 0", "brick 1", "in its place", f"brick {MAX_DYNAMIC_BRICKS}"):
        profiler.record_elapsed(name, 6)
    assert {stats.name: (stats.budget_ns, stats.budget_violations) for stats in profiler.all_brick_stats()} == {
        "RmsNorm": (5, 1),
        "brick 0": (7, 0),
        "brick 1": (None, 0),
        "in its place": (5, 1),
        f"brick {MAX_DYNAMIC_BRICKS}": (None, 0),
    }


def test_recording_knows_nothing_of_budgets_and_batches_carry_none_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs: list[list[int]] = []
    for stated in (False, True):
        time = ManualClock()
        profiler = BrickProfiler.enabled(clock=time.clock)
        if stated:
            profiler.set_brick_budget("B", 1)
        with profiler.step():
            timed(profiler, time, "B", 5)
            logs.append(list(profiler._recorder.current.get()))
    assert logs[0] == logs[1] != []

    seen: list[Batch] = []
    monkeypatch.setattr(Table, "add", lambda self, batch, registry: seen.append(batch))
    unlimited = BrickProfiler.enabled()
    unlimited.set_brick_budget("B", 1)
    unlimited.set_brick_budget("B", None)
    unlimited.record_elapsed("B", 5)
    unlimited.stats("B")
    assert [batch.budgets for batch in seen] == [None]


# --- what forgets and what adds up ---


def test_reset_stats_forgets_violations_and_keeps_budgets_and_reset_forgets_both(profiler: BrickProfiler) -> None:
    profiler.set_brick_budget("B", 10)
    profiler.record_elapsed("B", 11)
    assert budget(profiler) == (10, 1)

    profiler.reset_stats()
    profiler.record_elapsed("B", 9)
    assert budget(profiler) == (10, 0)

    profiler.reset()
    profiler.record_elapsed("B", 11)
    assert budget(profiler) == (None, 0)


def test_merging_adds_violations_by_name_and_keeps_the_first_stated_budget() -> None:
    parts = []
    for budget_ns, names in ((10, ("A", "B")), (20, ("B", "A")), (None, ("C", "B"))):
        profiler = BrickProfiler.enabled()
        profiler.set_brick_budget("B", budget_ns)
        for number, name in enumerate((*(f"filler {number}" for number in range(40)), *names)):
            profiler.record_elapsed(name, 15 + number % 2)
        profiler.record_elapsed("B", 25)
        parts.append(pickle.loads(pickle.dumps(profiler.snapshot())))
    ten, twenty, none = parts
    assert [budget(part) for part in parts] == [(10, 2), (20, 1), (None, 0)]

    assert budget(none.merge(twenty, ten)) == (20, 3)
    assert budget(ten.merge(none.merge(twenty))) == (10, 3)
    assert budget(ten.merge(twenty), "A") == (None, 0)
    assert [budget(part) for part in parts] == [(10, 2), (20, 1), (None, 0)]


def test_a_snapshot_keeps_the_budgets_it_was_taken_with(profiler: BrickProfiler) -> None:
    profiler.set_brick_budget("B", 10)
    profiler.record_elapsed("B", 11)
    snapshot = profiler.snapshot()

    profiler.set_brick_budget("B", 1)
    profiler.record_elapsed("B", 11)

    assert (budget(snapshot), budget(profiler)) == ((10, 1), (1, 2))


# --- arguments ---


@pytest.mark.parametrize("bad", [1.0, "1000", float("nan"), [1], b"1", object()])
def test_a_budget_is_integer_nanoseconds_or_a_timedelta(bad: Any, profiler: BrickProfiler) -> None:
    with pytest.raises(TypeError, match=r"\bbudget\b"):
        profiler.set_brick_budget("B", bad)
    profiler.record_elapsed("B", 1)
    assert budget(profiler) == (None, 0)


@pytest.mark.parametrize("bad", [0, -1, 1 << 53, timedelta(0), timedelta(microseconds=-1), timedelta(days=365)])
def test_a_budget_is_from_1_ns_to_104_days(bad: Any, profiler: BrickProfiler) -> None:
    with pytest.raises(ValueError, match=r"\bbudget\b"):
        profiler.set_brick_budget("B", bad)
    profiler.set_brick_budget("B", (1 << 53) - 1)
    profiler.set_brick_budget("B", 1)


@pytest.mark.parametrize("bad", [None, 5, b"B", ("B",)])
def test_the_error_for_a_budget_s_brick_calls_it_name(bad: Any, profiler: BrickProfiler) -> None:
    with pytest.raises(TypeError, match=r"\bname\b"):
        profiler.set_brick_budget(bad, 1)
    with pytest.raises(ValueError, match=r"\bname\b"):
        profiler.set_brick_budget("", 1)


# --- reports ---


def test_the_summary_mentions_violations_only_where_there_are_any(profiler: BrickProfiler) -> None:
    profiler.set_brick_budget("A", 10)
    profiler.set_brick_budget("B", 10)
    profiler.record_elapsed("A", 10)
    profiler.record_elapsed("B", 9)
    assert "budget" not in profiler.summary()

    profiler.record_elapsed("B", 11)
    profiler.record_elapsed("B", 12)

    lines = profiler.summary().splitlines()
    assert [line.split()[0] for line in lines if line.endswith("3 (2 over budget)")] == ["B"]
    assert sum("budget" in line for line in lines) == 1


def test_the_profile_has_budgets_and_violations_of_every_brick(profiler: BrickProfiler) -> None:
    profiler.set_brick_budget("A", timedelta(microseconds=2))
    profiler.record_elapsed("A", 2_001)
    profiler.record_elapsed("B", 1)

    bricks = json.loads(profiler.to_json())["bricks"]
    assert {brick["name"]: (brick["budget_ns"], brick["budget_violations"]) for brick in bricks} == {
        "A": (2_000, 1),
        "B": (None, 0),
    }
    assert list(bricks[0])[-2:] == ["budget_ns", "budget_violations"]


# --- spans ---


def test_spans_of_bricks_with_a_budget_carry_it_and_whether_they_exceeded_it(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    profiler.set_brick_budget("B", 1_500)
    for _ in range(2):
        with profiler.step():
            timed(profiler, time, "B", 1_500)
            timed(profiler, time, "B", 1_501)
            with profiler.layer(0), profiler.brick("Free"), profiler.kernel("k"):
                time.advance(5_000)
            left = profiler.brick("B")
            left.__enter__()
            time.advance(5_000)
        profiler.set_brick_budget("B", timedelta(milliseconds=2))
    assert profiler.flush()

    found = [
        (span.name, tuple(span.attributes[name] for name in LIMITS if name in span.attributes))
        for span in sorted(traces.spans, key=lambda span: span.start_time)
        if span.attributes["brick.span.level"] in {"brick", "kernel", "layer"}
    ]
    assert sorted(found) == sorted(
        [
            *[("B", (1.5e-6, False)), ("B", (1.5e-6, True)), ("B", (1.5e-6,))],
            *[("B", (0.002, False)), ("B", (0.002, False)), ("B", (0.002,))],
            *[("Free", ()), ("k", ()), ("layer", ())] * 2,
        ]
    )


def test_what_lanes_add_to_a_span_for_display_does_not_exceed_a_budget(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    profiler.set_brick_budget("Parent", 10)
    lane, child = profiler.lane(), profiler.brick("Child")
    with profiler.step():
        with profiler.brick("Parent"):
            beside = contextvars.copy_context()
            beside.run(lane.__enter__)
            beside.run(child.__enter__)
            time.advance(10)
        time.advance(100)
        beside.run(child.__exit__, None, None, None)
        beside.run(lane.__exit__, None, None, None)
    assert profiler.flush()

    (parent,) = (span for span in traces.spans if span.name == "Parent")
    assert parent.end_time - parent.start_time == 110
    assert [parent.attributes[name] for name in LIMITS] == [1e-8, False]
    assert budget(profiler, "Parent") == (10, 0)


# --- metrics ---


def test_a_meter_provider_of_the_user_s_reports_limit_and_violations(time: ManualClock) -> None:
    reader = InMemoryMetricReader()
    profiler = BrickProfiler.enabled(clock=time.clock, meter_provider=MeterProvider([reader]))

    def points(name: str) -> dict[tuple[Any, ...], int | float]:
        data = reader.get_metrics_data()
        return {
            tuple(point.attributes.values()): point.value
            for of in ([] if data is None else data.resource_metrics)
            for metric in of.scope_metrics[0].metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    assert points("brick.budget.limit") == {}
    profiler.set_brick_budget("B", timedelta(milliseconds=1))
    assert points("brick.budget.limit") == {("B",): 0.001}
    assert points("brick.budget.violations") == {}
    profiler.record_elapsed("B", 10)
    assert points("brick.budget.violations") == {("B", "other"): 0}
    profiler.record_elapsed("B", 2_000_000)
    profiler.set_brick_budget("B", None)
    assert points("brick.budget.limit") == {}
    assert points("brick.budget.violations") == {("B", "other"): 1}
    profiler.reset_stats()
    assert points("brick.budget.violations") == {("B", "other"): 1}
    profiler.shutdown()
