"""Random programs of nested, failing, repeated and empty scopes come out as they were written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_brick import BrickProfiler
from otel_brick.record.intervals import union_ns
from otel_brick.testing import InMemoryTraces, ManualClock, SpanNode

NAMES = ("RmsNorm", "Activation", "FusedGateUp", "Residual")


class Planned(Exception):
    """Raised and caught by the programs themselves."""


@dataclass
class Scope:
    """A scope of a program: `before` ns, then its children each followed by `after` ns."""

    kind: str
    name: str
    index: int
    before: int
    after: int
    fails: bool
    children: list[Scope]
    start: int = 0
    end: int = 0

    @property
    def span_name(self) -> str:
        return "layer decoder" if self.kind == "layer" else self.name

    def walk(self) -> Iterator[Scope]:
        yield self
        for child in self.children:
            yield from child.walk()


def scopes(children: st.SearchStrategy[list[Scope]]) -> st.SearchStrategy[Scope]:
    return st.builds(
        Scope,
        kind=st.sampled_from(("brick", "brick", "handle", "timer", "kernel", "layer")),
        name=st.sampled_from(NAMES),
        index=st.integers(0, 3),
        before=st.integers(0, 3),
        after=st.integers(0, 3),
        fails=st.booleans(),
        children=children,
    )


programs = st.lists(
    st.recursive(scopes(st.just([])), lambda inner: scopes(st.lists(inner, max_size=3)), max_leaves=12),
    max_size=4,
)


def run(profiler: BrickProfiler, time: ManualClock, scope: Scope) -> None:
    scope.start = time.now_ns
    if scope.kind == "timer":
        timer = profiler.start(scope.name)
        body(profiler, time, scope)
        profiler.stop(timer, 5)
    else:
        opened = {
            "brick": lambda: profiler.brick(scope.name, elements=5),
            "handle": lambda: profiler.define(scope.name, elements=5),
            "kernel": lambda: profiler.kernel(scope.name, grid=1),
            "layer": lambda: profiler.layer(scope.index, type="decoder"),
        }[scope.kind]()
        try:
            with opened:
                body(profiler, time, scope)
                if scope.fails:
                    raise Planned(scope.name)
        except Planned:
            pass
    scope.end = time.now_ns


def body(profiler: BrickProfiler, time: ManualClock, scope: Scope) -> None:
    time.advance(scope.before)
    for child in scope.children:
        run(profiler, time, child)
        time.advance(scope.after)


def written(scope: Scope) -> tuple[object, ...]:
    """A scope as its span should come out; children are a multiset, as empty ones have no order in time."""
    failed = scope.fails and scope.kind != "timer"
    children = Counter(written(child) for child in scope.children)
    return (scope.span_name, scope.start, scope.end, failed, frozenset(children.items()))


def exported(node: SpanNode, offset: int) -> tuple[object, ...]:
    children = Counter(exported(child, offset) for child in node.children)
    return (
        node.name,
        (node.span.start_time or 0) - offset,
        (node.span.end_time or 0) - offset,
        "error.type" in node.attributes,
        frozenset(children.items()),
    )


def is_brick(scope: Scope) -> bool:
    return scope.kind in ("brick", "handle", "timer")


def nearest_bricks(scope: Scope) -> Iterator[Scope]:
    for child in scope.children:
        if is_brick(child):
            yield child
        else:
            yield from nearest_bricks(child)


def duration(scope: Scope) -> int:
    return scope.end - scope.start


def exclusive(brick: Scope) -> int:
    return duration(brick) - sum(map(duration, nearest_bricks(brick)))


@settings(max_examples=150, deadline=None)
@given(st.lists(programs, min_size=1, max_size=3))
def test_spans_and_statistics_are_the_program(steps: list[list[Scope]]) -> None:
    time, traces = ManualClock(), InMemoryTraces()
    offset = time.clock.unix() - time.now_ns
    profiler = BrickProfiler.enabled(
        tracer_provider=traces.provider,
        clock=time.clock,
        detail="all",
        max_rows_per_step=65_536,
        max_rows_per_trace=10**6,
    )
    for program in steps:
        with profiler.step(phase="decode"):
            for scope in program:
                run(profiler, time, scope)
    assert profiler.shutdown(timeout_s=10)

    roots = traces.trees()
    assert [root.name for root in roots] == ["step decode"] * len(steps)
    for root, program in zip(roots, steps, strict=True):
        assert Counter(exported(child, offset) for child in root.children) == Counter(map(written, program))

    bricks = [scope for program in steps for top in program for scope in top.walk() if is_brick(scope)]
    by_name = {brick.name: brick for brick in profiler.all_brick_stats()}
    assert {name: stats.count for name, stats in by_name.items()} == Counter(brick.name for brick in bricks)
    for name, stats in by_name.items():
        own = [brick for brick in bricks if brick.name == name]
        assert stats.total_ns == sum(map(duration, own))
        assert stats.exclusive_ns == sum(map(exclusive, own))
        assert (stats.min_ns, stats.max_ns) == (min(map(duration, own)), max(map(duration, own)))
        assert stats.sum_of_squares == sum(duration(brick) ** 2 for brick in own)
        assert stats.total_elements == 5 * len(own)
        assert stats.failures == sum(brick.fails and brick.kind != "timer" for brick in own)
    assert profiler.total_ns() == profiler.union_ns() <= profiler.wall_ns()
    assert not any(profiler.losses().values())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50), st.integers(-5, 30)), max_size=40))
def test_union_is_the_number_of_covered_nanoseconds(intervals: list[tuple[int, int, int]]) -> None:
    columns = np.array(intervals, np.int64).reshape(-1, 3)
    groups, lengths = union_ns(columns[:, 0], columns[:, 1], columns[:, 1] + columns[:, 2])
    expected = {
        group: len({ns for g, start, length in intervals if g == group for ns in range(start, start + length)})
        for group, _, _ in intervals
    }
    assert dict(zip(groups.tolist(), lengths.tolist(), strict=True)) == expected
