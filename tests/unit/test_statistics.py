"""Statistics: exact sums and extremes, percentiles within a bucket, coverage, layers, and bounds without loss."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable
from contextvars import copy_context
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_brick import BrickCategory, BrickId, BrickProfiler, BrickStats, Clock, Phase, TimingSource
from otel_brick.record.descriptors import MAX_DESCRIPTORS, MAX_DYNAMIC_BRICKS, MAX_SITES
from otel_brick.stats.table import MAX_LAYERS
from otel_brick.testing import InMemoryTraces, ManualClock

MOST = (1 << 63) - 1
LONGEST = (1 << 53) - 1
BUCKET = 2 ** (1 / 32)
"""By what factor the bounds of a histogram bucket grow: 2.2 %."""


def recorded(*nanoseconds: int) -> BrickStats:
    """The statistics of one brick with these durations."""
    profiler = BrickProfiler.enabled(detail="none")
    for duration in nanoseconds:
        profiler.record_elapsed("B", duration)
    stats = profiler.stats("B")
    profiler.shutdown()
    assert stats is not None
    return stats


def lost(profiler: BrickProfiler) -> dict[str, int]:
    """The losses that occurred."""
    return {reason: count for reason, count in profiler.losses().items() if count}


def durations(profiler: BrickProfiler) -> dict[str, tuple[int, int]]:
    """Calls and inclusive time by brick."""
    return {stats.name: (stats.count, stats.total_ns) for stats in profiler.all_brick_stats()}


# --- one brick ---


def test_without_samples_every_figure_that_needs_one_is_none() -> None:
    stats = BrickProfiler().brick_stats(BrickId.RmsNorm)

    assert (stats.name, stats.category, stats.count, stats.total_ns, stats.exclusive_ns) == (
        *("RmsNorm", BrickCategory.Norm),
        *(0, 0, 0),
    )
    assert (stats.total_elements, stats.total_bytes, stats.failures, stats.sum_of_squares) == (0, 0, 0, 0)
    figures = ("min_ns", "max_ns", "min_us", "max_us", "avg_us", "std_us", "cv", "p50_us", "p99_us")
    figures += ("throughput", "throughput_gbps", "compression_ratio", "timing_source")
    assert {name: getattr(stats, name) for name in figures} == dict.fromkeys(figures)
    assert stats.percentile_us(0) is None


def test_without_samples_the_profiler_s_figures_are_zero_or_none() -> None:
    profiler = BrickProfiler.enabled()

    assert profiler.stats("RmsNorm") is profiler.stats("never seen") is None
    assert (profiler.all_brick_stats(), profiler.brick_names(), profiler.layer_matrix().bricks) == ([], [], ())
    assert (profiler.total_ns(), profiler.union_ns(), profiler.wall_ns(), profiler.step_count()) == (0, 0, 0, 0)
    assert (profiler.tokens(), profiler.total_tokens()) == (0, 0)
    assert (profiler.total_throughput(), profiler.tokens_per_sec(), profiler.coverage()) == (None, None, None)
    assert profiler.phase_tokens_per_sec("decode") is None
    assert [category.count for category in profiler.category_stats()] == [0] * 7


def test_a_sample_of_no_time_and_no_elements_has_no_rates() -> None:
    stats = recorded(0)

    assert (stats.count, stats.min_ns, stats.max_ns, stats.avg_us, stats.std_us) == (1, 0, 0, 0.0, 0.0)
    assert (stats.cv, stats.throughput, stats.throughput_gbps) == (None, None, None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 100), st.integers(10**6, 10**6 + 5), st.integers(0, LONGEST)), min_size=1, max_size=30
    )
)
def test_count_sum_minimum_maximum_and_spread_are_exact(nanoseconds: list[int]) -> None:
    stats = recorded(*nanoseconds)

    count, total = len(nanoseconds), sum(nanoseconds)
    assert (stats.count, stats.total_ns, stats.min_ns, stats.max_ns) == (
        *(count, total),
        *(min(nanoseconds), max(nanoseconds)),
    )
    assert stats.exclusive_ns == total
    assert stats.sum_of_squares == sum(duration**2 for duration in nanoseconds)
    assert (stats.min_us, stats.max_us, stats.avg_us) == (
        *(min(nanoseconds) / 1000, max(nanoseconds) / 1000),
        total / count / 1000,
    )
    variance = Fraction(sum(duration**2 for duration in nanoseconds), count) - Fraction(total, count) ** 2
    assert stats.std_us == pytest.approx(math.sqrt(variance) / 1000, rel=1e-14, abs=0)
    if total:
        assert stats.cv == pytest.approx(math.sqrt(variance) / (total / count), rel=1e-14, abs=0)


def test_the_spread_of_long_and_nearly_equal_durations_is_not_lost_in_rounding() -> None:
    base = 1 << 52

    stats = recorded(base, base + 2)

    assert (stats.std_us, stats.cv) == (0.001, pytest.approx(1 / (base + 1), rel=1e-12))


def test_timing_source_failures_and_category_come_with_the_samples(profiler: BrickProfiler, time: ManualClock) -> None:
    for fails in (True, False, True):
        try:
            with profiler.brick("B", category=BrickCategory.Ffn):
                time.advance(10)
                if fails:
                    raise KeyError("theirs")
        except KeyError:
            pass

    stats = profiler.stats("B")
    assert (stats.count, stats.failures, stats.total_ns) == (3, 2, 30)
    assert (stats.timing_source, stats.category) == (TimingSource.Host, BrickCategory.Ffn)


def test_snapshots_are_frozen(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("B", 10, 1)
    stats = profiler.stats("B")

    with pytest.raises(AttributeError):
        stats.count = 5
    with pytest.raises(AttributeError):
        profiler.category_stats()[0].count = 5
    profiler.record_elapsed("B", 10, 1)
    assert (stats.count, profiler.stats("B").count) == (1, 2)


def test_a_profiler_reads_time_from_the_clock_that_it_was_given(traces: InMemoryTraces) -> None:
    readings = itertools.chain((900, 1_000, 1_010, 1_040), itertools.repeat(1_100))
    clock = Clock(now=lambda: next(readings), unix=lambda: 1_700_000_000_000_000_000)
    profiler = BrickProfiler.enabled(clock=clock, tracer_provider=traces.provider)
    with profiler.step(), profiler.brick("B"):
        pass

    profiler.flush()

    assert (profiler.wall_ns(), profiler.stats("B").total_ns) == (100, 30)
    assert {span.name: (span.start_time, span.end_time) for span in traces.spans} == {
        "step other": (1_700_000_000_000_000_000, 1_700_000_000_000_000_100),
        "B": (1_700_000_000_000_000_010, 1_700_000_000_000_000_040),
    }
    profiler.shutdown()


# --- percentiles ---


@pytest.mark.parametrize("shape", ["lognormal", "uniform", "two peaks"])
def test_percentiles_of_random_durations_are_within_a_bucket_of_the_true_ones(shape: str) -> None:
    random = np.random.default_rng(7)
    nanoseconds = {
        "lognormal": random.lognormal(math.log(50_000), 1.5, 20_000),
        "uniform": random.uniform(1_000, 100_000, 20_000),
        "two peaks": np.concatenate((random.normal(20_000, 500, 10_000), random.normal(3e6, 1e5, 10_000))),
    }[shape].astype(np.int64)

    stats = recorded(*nanoseconds.tolist())

    for percent in (1, 5, 25, 49, 51, 75, 90, 95, 99):
        true_us = np.percentile(nanoseconds, percent) / 1000
        assert true_us / BUCKET <= stats.percentile_us(percent) <= true_us * BUCKET, percent
    assert stats.percentile_us(0) == nanoseconds.min() / 1000
    assert stats.percentile_us(100) == nanoseconds.max() / 1000
    assert (stats.p50_us, stats.p99_us) == (stats.percentile_us(50), stats.percentile_us(99))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 100), st.integers(0, 1 << 42)), min_size=1, max_size=30),
    st.floats(0, 100),
)
def test_a_percentile_is_within_a_bucket_and_a_nanosecond_of_a_duration_of_that_rank(
    nanoseconds: list[int], percent: float
) -> None:
    value = recorded(*nanoseconds).percentile_us(percent) * 1000

    rank = percent / 100 * len(nanoseconds)
    ordered = sorted(nanoseconds)
    lowest, highest = (ordered[min(max(math.ceil(rank + slack), 1), len(ordered)) - 1] for slack in (-1e-9, 1e-9))
    assert lowest / BUCKET - 1 <= value <= highest * BUCKET + 1


def test_a_percentile_whose_rank_is_a_whole_number_is_the_sample_of_that_rank() -> None:
    stats = recorded(*(1_000 * rank for rank in range(1, 101)))

    for percent in range(1, 101):
        assert percent / BUCKET <= stats.percentile_us(percent) <= percent * BUCKET, percent


def test_percentiles_of_equal_durations_are_exact() -> None:
    stats = recorded(*[123_457] * 9)

    assert {stats.percentile_us(percent) for percent in (0, 10, 50, 99, 100)} == {123.457}


def test_percentiles_see_a_change_of_five_percent() -> None:
    before, after = recorded(*range(99_000, 101_000, 20)), recorded(*range(103_950, 106_050, 21))

    assert 1.025 < after.p50_us / before.p50_us < 1.075


def test_durations_longer_than_the_histogram_stay_within_the_extremes() -> None:
    stats = recorded(1 << 45, 1 << 50, LONGEST)

    for percent in (0, 50, 100):
        assert (1 << 45) / 1000 <= stats.percentile_us(percent) <= LONGEST / 1000
    assert stats.percentile_us(100) == LONGEST / 1000


# --- wide sums ---


def test_sums_of_the_largest_counts_are_exact(profiler: BrickProfiler) -> None:
    handle = profiler.define("B", elements=MOST, bytes_read=MOST - 1, bytes_written=MOST - 2)
    with profiler.step():
        for _ in range(1_000):
            with handle:
                pass
    profiler.record_elapsed("B", 1, 5, bytes_read=7, bytes_written=9)

    stats = profiler.stats("B")
    assert (stats.total_elements, stats.bytes_read, stats.bytes_written) == (
        *(1_000 * MOST + 5, 1_000 * (MOST - 1) + 7),
        1_000 * (MOST - 2) + 9,
    )
    assert stats.total_bytes == 1_000 * (2 * MOST - 3) + 16
    assert profiler.total_tokens() == 1_000 * MOST + 5
    assert [type(value) for value in (stats.total_elements, stats.bytes_read, stats.total_ns)] == [int] * 3


def test_sums_of_compressed_bytes_are_exact(profiler: BrickProfiler) -> None:
    for _ in range(3):
        profiler.record_elapsed_with_bytes("B", 1, 1, MOST, MOST - 1)

    stats = profiler.stats("B")
    assert (stats.uncompressed_bytes, stats.compressed_bytes) == (3 * MOST, 3 * (MOST - 1))
    assert stats.total_bytes == 3 * MOST


def test_sums_of_the_longest_durations_are_exact(profiler: BrickProfiler) -> None:
    for name in ("A", "B", "RmsNorm"):
        for _ in range(5):
            profiler.record_elapsed(name, LONGEST)

    for name in ("A", "B", "RmsNorm"):
        stats = profiler.stats(name)
        assert (stats.total_ns, stats.exclusive_ns, stats.sum_of_squares) == (
            *(5 * LONGEST, 5 * LONGEST),
            5 * LONGEST**2,
        )
        assert (stats.std_us, stats.min_ns, stats.max_ns) == (0.0, LONGEST, LONGEST)
    assert profiler.total_ns() == 15 * LONGEST
    assert profiler.category_stats()[BrickCategory.Other].total_ns == 10 * LONGEST


def test_tokens_of_many_steps_are_exact(profiler: BrickProfiler) -> None:
    for _ in range(3):
        with profiler.step(tokens=MOST) as step:
            step.add_tokens(MOST)
            profiler.add_tokens(MOST)

    assert profiler.tokens() == profiler.total_tokens() == 9 * MOST


def test_sums_of_the_longest_durations_by_layer_are_exact(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.layer(1):
        for _ in range(5):
            profiler.record_elapsed("B", LONGEST)

    assert profiler.layer_matrix().total_ns.tolist() == [[0], [5 * LONGEST]]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_covered_times_of_many_steps_with_the_longest_durations_are_exact(
    one_by_one: bool, profiler: BrickProfiler, time: ManualClock
) -> None:
    for number in range(5):
        with profiler.step():
            time.advance(1)
            profiler.record_elapsed("B", LONGEST)
        if one_by_one:
            assert profiler.step_count() == number + 1

    assert (profiler.union_ns(), profiler.wall_ns()) == (5 * LONGEST, 5)
    assert profiler.coverage() == profiler.coverage(0) == LONGEST


# --- totals, categories, phases ---


def test_nested_bricks_count_once_in_totals_and_shares(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step():
        time.advance(100)
        with profiler.brick(BrickId.AttentionScore):
            time.advance(300)
            with profiler.brick("Inner", category=BrickCategory.Ffn):
                time.advance(500)
                with profiler.brick(BrickId.RmsNorm):
                    time.advance(100)

    assert durations(profiler) == {"RmsNorm": (1, 100), "AttentionScore": (1, 900), "Inner": (1, 600)}
    assert {stats.name: stats.exclusive_ns for stats in profiler.all_brick_stats()} == {
        **{"RmsNorm": 100, "AttentionScore": 300, "Inner": 500},
    }
    assert (profiler.total_ns(), profiler.union_ns(), profiler.wall_ns()) == (900, 900, 1_000)
    shares = [category.percentage(profiler.total_ns()) for category in profiler.category_stats()]
    assert shares == pytest.approx([100 / 9, 300 / 9, 500 / 9, 0, 0, 0, 0])


def test_a_brick_is_read_over_all_phases_or_in_one(profiler: BrickProfiler, time: ManualClock) -> None:
    for phase, nanoseconds in (("prefill", 1_000), ("decode", 10), ("decode", 30), (None, 500)):
        with profiler.step(phase=phase, tokens=2), profiler.brick("B", elements=1):
            time.advance(nanoseconds)
    profiler.record_elapsed("B", 7, 1)

    def of(phase: Phase | str | None) -> tuple[int, int, int, int]:
        stats = profiler.stats("B", phase=phase)
        return stats.count, stats.total_ns, stats.min_ns, stats.max_ns

    assert of(None) == (5, 1_547, 7, 1_000)
    assert of("prefill") == of(Phase.Prefill) == (1, 1_000, 1_000, 1_000)
    assert of("decode") == (2, 40, 10, 30)
    assert of(Phase.Other) == (2, 507, 7, 500)
    assert profiler.stats("B", phase="mixed") is None
    assert profiler.phase_tokens_per_sec("decode") == 4 * 1e9 / 40
    assert profiler.phase_tokens_per_sec("mixed") is None


def test_tokens_per_second_are_of_step_time_and_throughput_is_of_brick_time(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step(tokens=3) as step:
        step.add_tokens(1)
        profiler.add_tokens(4)
        with profiler.brick("B", elements=100):
            time.advance(2_000)
        time.advance(2_000)

    assert (profiler.tokens(), profiler.total_tokens()) == (8, 8)
    assert profiler.tokens_per_sec() == 2_000_000.0
    assert profiler.total_throughput() == 4_000_000.0


def test_without_tokens_there_are_no_tokens_per_second(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step(), profiler.brick("B", elements=100):
        time.advance(2_000)

    assert (profiler.tokens(), profiler.total_tokens(), profiler.tokens_per_sec()) == (0, 100, None)


def test_all_stats_gives_dynamic_bricks_only_and_warns(profiler: BrickProfiler) -> None:
    for name in ("RmsNorm", "X", "Softmax", "Y"):
        profiler.record_elapsed(name, 1, 1)

    with pytest.warns(DeprecationWarning, match="all_brick_stats"):
        found = profiler.all_stats()

    assert {name: stats.count for name, stats in found.items()} == {"X": 1, "Y": 1}
    assert profiler.brick_names() == ["RmsNorm", "AttentionSoftmax", "X", "Y"]


# --- layers ---


def test_the_layer_matrix_has_calls_and_time_of_each_brick_in_each_layer(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    for _ in range(2):
        with profiler.step():
            for index in (0, 2):
                with profiler.layer(index):
                    with profiler.brick("B"):
                        time.advance(10 * (index + 1))
                        with profiler.brick(BrickId.RmsNorm):
                            time.advance(1)
                    with profiler.kernel("no brick"):
                        time.advance(5)
            with profiler.brick("Head"):
                time.advance(100)

    matrix = profiler.layer_matrix()
    assert matrix.bricks == ("RmsNorm", "B")
    assert matrix.count.tolist() == [[2, 2], [0, 0], [2, 2]]
    assert matrix.total_ns.tolist() == [[2, 22], [0, 0], [2, 62]]


def test_a_brick_belongs_to_the_nearest_layer_around_it(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step(), profiler.layer(1, type="encoder"):
        with profiler.brick("Outer"):
            time.advance(1)
            with profiler.layer(3), profiler.brick("Inner"):
                time.advance(10)
        with profiler.brick("Outer"):
            time.advance(100)

    matrix = profiler.layer_matrix()
    assert matrix.bricks == ("Outer", "Inner")
    assert matrix.count.tolist() == [[0, 0], [2, 0], [0, 0], [0, 1]]
    assert matrix.total_ns.tolist() == [[0, 0], [111, 0], [0, 0], [0, 10]]


def test_a_layer_beyond_the_matrix_still_counts_in_the_statistics(profiler: BrickProfiler) -> None:
    with profiler.step():
        for index in (MAX_LAYERS - 1, MAX_LAYERS, (1 << 31) - 1):
            with profiler.layer(index), profiler.brick("B"):
                pass

    matrix = profiler.layer_matrix()
    assert matrix.count.shape == (MAX_LAYERS, 1)
    assert matrix.count.sum() == 1
    assert profiler.stats("B").count == 3


# --- coverage ---


def test_coverage_is_the_share_of_all_step_time_in_which_a_brick_was_open(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    for covered, idle in ((30, 10), (0, 60)):
        with profiler.step():
            time.advance(idle)
            with profiler.brick("B"):
                time.advance(covered)

    assert (profiler.union_ns(), profiler.wall_ns(), profiler.coverage()) == (30, 100, 0.3)


def test_bricks_outside_steps_have_no_part_in_coverage(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.brick("Loose"):
        time.advance(1_000)
    assert profiler.coverage() is None
    with profiler.step():
        time.advance(50)
        with profiler.brick("B"):
            time.advance(50)

    assert (profiler.union_ns(), profiler.wall_ns(), profiler.coverage()) == (50, 100, 0.5)


def test_layers_kernels_and_nested_bricks_add_nothing_to_coverage(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step(), profiler.layer(0):
        with profiler.kernel("k"):
            time.advance(50)
        with profiler.brick("Outer"):
            time.advance(10)
            with profiler.brick("Inner"):
                time.advance(40)

    assert profiler.coverage() == 0.5


def test_lanes_are_covered_one_by_one_and_in_all(profiler: BrickProfiler, time: ManualClock) -> None:
    """On lane 0 a brick covers 0..40, on lane 1 one covers 20..80 of a step of 100 ns."""
    with profiler.step():
        first_brick = profiler.start("First")
        time.advance(20)
        second = copy_context()
        lane = profiler.lane()
        second.run(lane.__enter__)
        second_brick = second.run(lambda: profiler.start("Second"))
        time.advance(20)
        profiler.stop(first_brick)
        time.advance(40)
        second.run(lambda: profiler.stop(second_brick))
        second.run(lambda: lane.__exit__(None, None, None))
        third = copy_context()
        idle_lane = profiler.lane()
        third.run(idle_lane.__enter__)
        third.run(lambda: idle_lane.__exit__(None, None, None))
        time.advance(20)

    assert durations(profiler) == {"First": (1, 40), "Second": (1, 60)}
    assert profiler.union_ns() == 80
    assert [profiler.coverage(lane) for lane in (None, 0, 1)] == [0.8, 0.4, 0.6]
    assert profiler.coverage(2) in (None, 0.0)
    assert profiler.coverage(3) is None
    assert lost(profiler) == {}


def test_a_lane_s_coverage_counts_steps_in_which_it_had_no_brick(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step(), profiler.brick("B"):
        time.advance(25)
    with profiler.step():
        time.advance(75)

    assert profiler.coverage() == 0.25
    assert profiler.coverage(0) == 0.25


@pytest.mark.parametrize("bricks", [65_551, 65_552, 65_553, 70_000])
def test_a_step_that_hands_its_rows_over_early_is_covered_like_any_other(
    bricks: int, profiler: BrickProfiler, time: ManualClock
) -> None:
    handle = profiler.define("B", elements=3)
    with profiler.step(), profiler.layer(1), profiler.brick("Around"):
        for _ in range(bricks):
            with handle:
                time.advance(3)
            time.advance(1)

    assert durations(profiler) == {"B": (bricks, 3 * bricks), "Around": (1, 4 * bricks)}
    assert profiler.stats("Around").exclusive_ns == bricks
    assert profiler.stats("B").total_elements == 3 * bricks
    matrix = profiler.layer_matrix()
    assert dict(zip(matrix.bricks, matrix.count[1].tolist(), strict=True)) == {"B": bricks, "Around": 1}
    assert [profiler.coverage(lane) for lane in (None, 0)] == [1.0, 1.0]


def test_rows_handed_over_early_leave_nothing_uncovered_at_the_step_s_end(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    """The step ends when the last of its rows has just been handed over."""
    handle = profiler.define("B")
    with profiler.step():
        for _ in range(65_552):
            with handle:
                time.advance(3)
            time.advance(1)

    assert [profiler.coverage(lane) for lane in (None, 0)] == [0.75, 0.75]


def test_lanes_that_hand_their_rows_over_early_cover_their_common_time_once(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    handle = profiler.define("B")
    with profiler.step():
        beside = copy_context()
        lane = profiler.lane()
        beside.run(lane.__enter__)

        def both() -> None:
            with handle:
                beside.run(inner)

        def inner() -> None:
            with handle:
                time.advance(3)

        for _ in range(40_000):
            both()
            time.advance(1)

    assert profiler.stats("B").count == 80_000
    assert [profiler.coverage(lane) for lane in (None, 0, 1)] == [0.75, 0.75, 0.75]


def test_a_measured_duration_that_reaches_outside_its_step_is_flagged_everywhere(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step():
        time.advance(100)
        profiler.record_elapsed("B", 250)

    assert (profiler.union_ns(), profiler.wall_ns(), profiler.coverage()) == (250, 100, 2.5)
    steps = json.loads(profiler.to_json())["steps"]
    assert (steps["coverage"], steps["coverage_above_one"]) == (2.5, True)
    assert "above 1" in profiler.summary()


def test_a_coverage_of_exactly_one_is_not_flagged(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step(), profiler.brick("B"):
        time.advance(100)

    assert profiler.coverage() == 1.0
    assert json.loads(profiler.to_json())["steps"]["coverage_above_one"] is False
    assert "above 1" not in profiler.summary()


def test_measured_durations_that_overlap_cover_their_time_once(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step():
        time.advance(100)
        for nanoseconds in (10, 40, 20):
            profiler.record_elapsed("B", nanoseconds)

    assert (profiler.total_ns(), profiler.union_ns(), profiler.coverage()) == (70, 40, 0.4)


# --- bounds ---


def test_beyond_1024_dynamic_bricks_further_names_share_one_entry_and_every_call_is_counted(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    names = [f"dynamic {number}" for number in range(MAX_DYNAMIC_BRICKS + 50)]
    kept, beyond = names[:MAX_DYNAMIC_BRICKS], names[MAX_DYNAMIC_BRICKS:]
    assert len(kept) == 1_024
    for _ in range(2):
        for name in names:
            with profiler.brick(name, elements=2):
                time.advance(1)
    assert lost(profiler) == {"name_overflow": 100}
    for name in (BrickId.RmsNorm, "Softmax", "dynamic 0"):
        profiler.record_elapsed(name, 10)

    assert durations(profiler) == {
        **{"RmsNorm": (1, 10), "AttentionSoftmax": (1, 10)},
        **{name: (2, 2) for name in kept},
        **{"dynamic 0": (3, 12), "__overflow__": (2 * len(beyond), 2 * len(beyond))},
    }
    assert profiler.stats("__overflow__").total_elements == 4 * len(beyond)
    assert profiler.stats(beyond[0]) is None
    assert lost(profiler) == {"name_overflow": 100}


def test_a_handle_beyond_the_bound_is_counted_once_and_records_every_time(profiler: BrickProfiler) -> None:
    for number in range(MAX_DYNAMIC_BRICKS):
        profiler.define(f"dynamic {number}")

    handle = profiler.define("beyond", category=BrickCategory.Ffn)
    for _ in range(5):
        with handle:
            pass

    assert (durations(profiler).keys(), profiler.stats("__overflow__").count) == ({"__overflow__"}, 5)
    assert lost(profiler) == {"name_overflow": 1}


@pytest.fixture(scope="module")
def crowded() -> tuple[BrickProfiler, ManualClock, InMemoryTraces, int]:
    """A profiler that has seen more element counts and more kernels than it has places for."""
    time, traces = ManualClock(), InMemoryTraces()
    profiler = BrickProfiler.enabled(clock=time.clock, tracer_provider=traces.provider, detail="none")
    sites = MAX_SITES + 500
    with profiler.step(phase="prefill"), profiler.layer(0):
        for number in range(sites):
            with profiler.brick("B", elements=number):
                time.advance(2)
    for number in range(MAX_DESCRIPTORS + 300):
        profiler.kernel(f"kernel {number}")
    return profiler, time, traces, sites


Crowded = tuple[BrickProfiler, ManualClock, InMemoryTraces, int]


def test_beyond_65536_element_counts_sums_stay_exact_and_nothing_is_lost(crowded: Crowded) -> None:
    profiler, _, _, sites = crowded

    stats = profiler.stats("B", phase="prefill")
    assert sites > 65_536
    assert (stats.name, stats.count, stats.total_ns, stats.min_ns, stats.max_ns) == ("B", sites, 2 * sites, 2, 2)
    assert stats.total_elements == sites * (sites - 1) // 2
    assert profiler.coverage() == 1.0
    matrix = profiler.layer_matrix()
    assert matrix.count[0, matrix.bricks.index("B")] == sites


def test_beyond_65536_kernels_further_ones_are_counted_as_overflow(crowded: Crowded) -> None:
    profiler, _, _, _ = crowded

    # The layer and the brick have a descriptor each; what is left of the places belongs to kernels.
    assert lost(profiler) == {"name_overflow": 300 + 2}


def test_rows_without_a_place_of_their_own_keep_names_counts_and_layers(crowded: Crowded) -> None:
    profiler, time, _, _ = crowded
    full = InMemoryTraces()
    other = BrickProfiler.enabled(clock=time.clock, tracer_provider=full.provider, detail="all")
    for number in range(MAX_SITES):
        other.define("Filler", elements=number)

    def program(profiler: BrickProfiler) -> None:
        with profiler.step(phase="decode"), profiler.layer(77, type="decoder"):
            with profiler.brick("Late", elements=1, bytes_read=2, bytes_written=3):
                time.advance(10)
                with profiler.kernel("late kernel", grid=(1, 2, 3), elements=7):
                    time.advance(5)
            try:
                with profiler.brick(BrickId.RmsNorm, elements=1 << 40):
                    time.advance(1)
                    raise KeyError("theirs")
            except KeyError:
                pass

    program(profiler)
    program(other)
    assert other.flush()

    for filled in (profiler, other):
        late = filled.stats("Late", phase="decode")
        assert (late.count, late.total_ns, late.total_elements, late.bytes_read, late.bytes_written) == (
            *(1, 15, 1, 2),
            3,
        )
        norm = filled.stats("RmsNorm", phase="decode")
        assert (norm.count, norm.failures, norm.total_elements) == (1, 1, 1 << 40)
        matrix = filled.layer_matrix()
        assert [int(matrix.count[77, matrix.bricks.index(name)]) for name in ("RmsNorm", "Late")] == [1, 1]
    (tree,) = full.trees()
    assert tree.outline() == (
        *("step decode", 16),
        (("layer decoder", 16, (("Late", 15, (("late kernel", 5, ()),)), ("RmsNorm", 1, ()))),),
    )
    layer, late_span, kernel = (
        next(s for s in full.spans if s.name == n) for n in ("layer decoder", "Late", "late kernel")
    )
    assert layer.attributes["brick.layer.index"] == late_span.attributes["brick.layer.index"] == 77
    assert [late_span.attributes[f"brick.{name}"] for name in ("element.count", "io.read.size", "io.write.size")] == [
        *(1, 2, 3),
    ]
    assert (kernel.attributes["brick.element.count"], kernel.attributes["brick.cuda.grid.z"]) == (7, 3)
    assert lost(other) == {}
    other.shutdown()


def test_a_kernel_without_a_place_of_its_own_is_a_span_named_overflow(crowded: Crowded) -> None:
    _, time, _, _ = crowded
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(clock=time.clock, tracer_provider=traces.provider, detail="all")
    for number in range(MAX_DESCRIPTORS):
        profiler.kernel(f"kernel {number}")

    with profiler.step():
        with profiler.kernel("beyond", grid=5, elements=3):
            time.advance(5)
        with profiler.kernel("kernel 0"), profiler.brick("New brick", elements=1):
            time.advance(7)

    assert profiler.flush()
    (tree,) = traces.trees()
    assert tree.outline() == (
        *("step other", 12),
        (("__overflow__", 5, ()), ("kernel 0", 7, (("New brick", 7, ()),))),
    )
    assert durations(profiler) == {"New brick": (1, 7)}
    assert lost(profiler)["name_overflow"] >= 1
    profiler.shutdown()


def test_threads_that_read_while_others_record_see_every_sample_once(profiler: BrickProfiler) -> None:
    handles = [profiler.define(name) for name in ("A", "B")]

    def run(target: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=target)
        thread.start()
        return thread

    def record() -> None:
        for _ in range(100):
            with profiler.step():
                for handle in handles:
                    with handle:
                        pass

    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            stats = {stats.name: stats.count for stats in profiler.all_brick_stats()}
            assert stats.get("A", 0) == stats.get("B", 0)
            seen.append(stats.get("A", 0))

    reader, recorders = run(read), [run(record) for _ in range(3)]
    for thread in recorders:
        thread.join(timeout=60)
    done.set()
    reader.join(timeout=60)

    assert seen == sorted(seen)
    assert {name: count for name, (count, _) in durations(profiler).items()} == {"A": 300, "B": 300}


def test_counts_seen_for_the_first_time_are_exact_and_switch_off_with_their_profiler(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step():
        for elements in (5, 6, 7, 6, 7, 7):
            with profiler.brick("B", elements=elements, bytes_read=2 * elements):
                time.advance(1)
    decorated = profiler.brick("B", elements=9)(lambda: time.advance(1))
    profiler.disable()
    decorated()
    profiler.enable()
    decorated()
    stats = profiler.stats("B")
    assert stats is not None
    assert (stats.count, stats.total_elements, stats.bytes_read, stats.total_ns) == (7, 38 + 9, 76, 7)
    for bad in (5.0, "5", None, -1):
        with pytest.raises((TypeError, ValueError), match=r"\Aelements\b"):
            profiler.brick("B", elements=bad)  # type: ignore[arg-type]
    assert profiler.stats("B").count == 7  # type: ignore[union-attr]


def test_print_category_stats_prints_the_categories_that_have_samples(
    profiler: BrickProfiler, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler.record_elapsed("RmsNorm", 250, 1)
    profiler.record_elapsed("FusedGateUp", 750, 1, category=BrickCategory.Ffn)

    profiler.print_category_stats()

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["category", "avg", "us", "share", "calls"],
        ["Norm", "0.25", "25.0%", "1"],
        ["FFN", "0.75", "75.0%", "1"],
    ]
