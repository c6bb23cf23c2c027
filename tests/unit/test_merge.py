"""Merging: the statistics of parts add up to those of the whole, whoever had which part and in whatever order."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_brick import (
    BrickBottleneck,
    BrickCategory,
    BrickId,
    BrickProfiler,
    BrickStats,
    Phase,
    Statistics,
    TimingSource,
)
from otel_brick.testing import ManualClock

NAMES = ("RmsNorm", "Softmax", "Residual1", "Residual2", "Fused", "__overflow__")
CATEGORIES = {"Fused": BrickCategory.Ffn}


@dataclass(frozen=True)
class Sample:
    """One brick of a program; with an inner one if `inner` is not 0."""

    name: str
    duration_ns: int
    elements: int
    bytes_read: int
    layer: int
    inner: int
    fails: bool


@dataclass(frozen=True)
class Step:
    """One step of a program; None as phase stands for bricks outside any step."""

    phase: Phase | None
    tokens: int
    samples: tuple[Sample, ...]
    idle_ns: int


class Planned(Exception):
    """Raised by the programs themselves."""


def run_sample(profiler: BrickProfiler, time: ManualClock, sample: Sample) -> None:
    def inside() -> None:
        with profiler.brick(
            sample.name,
            elements=sample.elements,
            bytes_read=sample.bytes_read,
            category=CATEGORIES.get(sample.name),
        ):
            time.advance(sample.duration_ns)
            if sample.inner:
                with profiler.brick("Inner"):
                    time.advance(sample.inner)
            if sample.fails:
                raise Planned

    try:
        if sample.layer < 0:
            inside()
        else:
            with profiler.layer(sample.layer):
                inside()
    except Planned:
        pass


def measured(*programs: list[Step]) -> Statistics:
    """The statistics of these programs, one after another on one profiler."""
    time = ManualClock()
    profiler = BrickProfiler.enabled(clock=time.clock, detail="none")
    for step in itertools.chain(*programs):
        if step.phase is None:
            for sample in step.samples:
                run_sample(profiler, time, sample)
            continue
        with profiler.step(phase=step.phase, tokens=step.tokens):
            time.advance(step.idle_ns)
            for sample in step.samples:
                run_sample(profiler, time, sample)
    profiler.shutdown()
    return profiler.snapshot()


def brick_figures(stats: BrickStats | None) -> Any:
    if stats is None:
        return None
    figures = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "_grid"}
    derived = ("avg_us", "std_us", "cv", "throughput", "throughput_gbps", "compression_ratio", "total_bytes")
    figures |= {name: getattr(stats, name) for name in derived}
    return figures | {percent: stats.percentile_us(percent) for percent in (0, 1, 25, 50, 90, 99, 100)}


def figures(statistics: Statistics) -> dict[str, Any]:
    """Everything that can be read, apart from the order of dynamic bricks."""
    matrix = statistics.layer_matrix()
    names = sorted(statistics.brick_names())
    return {
        "bricks": {name: brick_figures(statistics.stats(name, exact=True)) for name in names},
        "phases": {
            (name, phase): brick_figures(statistics.stats(name, phase=phase, exact=True))
            for name in names
            for phase in Phase
        },
        "categories": statistics.category_stats(),
        "layers": {
            (layer, name): (int(matrix.count[layer, column]), int(matrix.total_ns[layer, column]))
            for layer, (column, name) in itertools.product(range(len(matrix.count)), list(enumerate(matrix.bricks)))
            if matrix.count[layer, column]
        },
        "totals": [
            *(statistics.total_ns(), statistics.union_ns(), statistics.wall_ns(), statistics.step_count()),
            *(statistics.tokens(), statistics.total_tokens(), statistics.total_throughput()),
            *(statistics.tokens_per_sec(), statistics.coverage(), statistics.coverage(0)),
            *(statistics.phase_tokens_per_sec(phase) for phase in Phase),
        ],
    }


samples = st.builds(
    Sample,
    name=st.sampled_from(NAMES),
    duration_ns=st.one_of(st.integers(0, 2_000), st.integers(0, 1 << 50)),
    elements=st.one_of(st.integers(0, 100), st.just((1 << 63) - 1)),
    bytes_read=st.one_of(st.integers(0, 100), st.just((1 << 63) - 1)),
    layer=st.integers(-1, 3),
    inner=st.integers(0, 5),
    fails=st.booleans(),
)
steps = st.builds(
    Step,
    phase=st.sampled_from((None, Phase.Prefill, Phase.Decode, Phase.Other)),
    tokens=st.integers(0, 1 << 53),
    samples=st.lists(samples, max_size=5).map(tuple),
    idle_ns=st.integers(0, 1_000),
)
programs = st.lists(steps, max_size=4)


@settings(max_examples=40, deadline=None)
@given(programs, programs, programs)
def test_merging_is_associative_and_commutative_and_equals_one_run_of_all_parts(
    first: list[Step], second: list[Step], third: list[Step]
) -> None:
    a, b, c = measured(first), measured(second), measured(third)
    whole = figures(measured(first, second, third))

    assert figures(a.merge(b, c)) == whole
    assert figures(a.merge(b).merge(c)) == whole
    assert figures(a.merge(b.merge(c))) == whole
    assert figures(c.merge(b, a)) == whole
    assert figures(b.merge(c).merge(a)) == whole
    assert figures(Statistics().merge(a, b, c)) == whole
    assert figures(a.merge(Statistics(), b, Statistics(), c)) == whole


@settings(max_examples=15, deadline=None)
@given(programs, programs)
def test_merging_changes_none_of_its_operands(first: list[Step], second: list[Step]) -> None:
    a, b = measured(first), measured(second)
    before = figures(a), figures(b)

    merged = a.merge(b)
    merged.merge(a, b)
    a.merge(a)

    assert (figures(a), figures(b)) == before


def recorded(*bricks: tuple[str, int], category: BrickCategory | None = None) -> BrickProfiler:
    profiler = BrickProfiler.enabled(detail="none")
    for name, nanoseconds in bricks:
        profiler.record_elapsed(name, nanoseconds, 1, category=category)
    return profiler


def by_name(statistics: Statistics) -> dict[str, tuple[int, int]]:
    return {stats.name: (stats.count, stats.total_ns) for stats in statistics.all_brick_stats()}


def test_dynamic_bricks_are_matched_by_name_though_each_part_saw_them_in_another_order() -> None:
    names = ("X", "Y", "Z")
    orders = list(itertools.permutations(names))
    parts = [
        recorded(*((name, 10**place) for name in order for place in [names.index(name)])).snapshot() for order in orders
    ]

    merged = functools.reduce(Statistics.merge, parts)

    assert by_name(merged) == {"X": (6, 6), "Y": (6, 60), "Z": (6, 600)}


def test_a_part_may_have_more_dynamic_bricks_than_another() -> None:
    many = [(f"brick {number}", number + 1) for number in range(200)]
    few = [("brick 199", 5), ("only here", 7)]

    for first, second in ((many, few), (few, many)):
        merged = recorded(*first).snapshot().merge(recorded(*second).snapshot())

        expected = {name: (1, nanoseconds) for name, nanoseconds in many}
        expected |= {"brick 199": (2, 205), "only here": (1, 7)}
        assert by_name(merged) == expected


def test_categories_of_dynamic_bricks_survive_a_merge() -> None:
    known = recorded(("RmsNorm", 1)).snapshot()
    dynamic = recorded(("Fused", 10), category=BrickCategory.Ffn).snapshot()

    for merged in (known.merge(dynamic), dynamic.merge(known)):
        assert merged.stats("Fused").category is BrickCategory.Ffn
        assert merged.category_stats()[BrickCategory.Ffn].total_ns == 10


def test_the_category_of_a_brick_does_not_depend_on_the_order_of_a_merge() -> None:
    """Parts that contradict each other may be refused, but must not be added up in two ways."""
    ffn = recorded(("Fused", 10), category=BrickCategory.Ffn).snapshot()
    other = recorded(("Fused", 10)).snapshot()

    outcomes = []
    for first, second in ((ffn, other), (other, ffn)):
        try:
            outcomes.append(first.merge(second).stats("Fused").category)
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_the_first_stated_bottleneck_of_a_brick_is_kept() -> None:
    parts = []
    for bottleneck in (None, BrickBottleneck.Memory, BrickBottleneck.Compute):
        profiler = recorded(("B", 1))
        if bottleneck is not None:
            profiler.set_brick_bottleneck("B", bottleneck)
        parts.append(profiler.snapshot())
    none, memory, compute = parts

    assert none.merge(memory, compute).stats("B").bottleneck is BrickBottleneck.Memory
    assert none.merge(compute, memory).stats("B").bottleneck is BrickBottleneck.Compute
    assert compute.merge(none).stats("B").bottleneck is BrickBottleneck.Compute
    assert none.stats("B").bottleneck is BrickBottleneck.Unknown


def test_a_snapshot_no_longer_changes() -> None:
    profiler = recorded(("B", 10))
    profiler.set_brick_bottleneck("B", BrickBottleneck.Memory)
    snapshot = profiler.snapshot()
    before = figures(snapshot)

    profiler.record_elapsed("B", 20, 1)
    profiler.record_elapsed("C", 20, 1)
    profiler.set_brick_bottleneck("B", BrickBottleneck.Compute)
    with profiler.step(tokens=3), profiler.layer(1), profiler.brick("B"):
        pass

    assert figures(snapshot) == before
    assert by_name(snapshot) == {"B": (1, 10)}
    profiler.reset()
    assert figures(snapshot) == before


def test_a_snapshot_answers_as_its_profiler_does() -> None:
    time = ManualClock()
    profiler = BrickProfiler.enabled(clock=time.clock, detail="none")
    for phase in ("prefill", "decode"):
        with profiler.step(phase=phase, tokens=4), profiler.layer(1), profiler.brick(BrickId.RmsNorm):
            time.advance(700)

    assert figures(profiler.snapshot()) == figures(profiler)  # type: ignore[arg-type]
    assert profiler.snapshot().stats("RmsNorm").timing_source is TimingSource.Host


def test_statistics_without_samples_merge_to_statistics_without_samples() -> None:
    empty = Statistics().merge(Statistics(), BrickProfiler().snapshot())

    assert figures(empty) == figures(Statistics())
    assert (empty.all_brick_stats(), empty.step_count(), empty.coverage()) == ([], 0, None)


@pytest.mark.parametrize("bad", [None, 5, BrickProfiler(), "statistics"])
def test_only_statistics_can_be_merged(bad: Any) -> None:
    with pytest.raises(TypeError, match="Statistics"):
        Statistics().merge(bad)
