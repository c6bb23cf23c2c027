"""Columnar and official encodings of the same spans decode to equal messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from otel_brick import BrickCategory, BrickProfiler
from otel_brick.export.columnar import MAX_TEMPLATES, ColumnarEncoder, varint
from otel_brick.export.detail import DetailPolicy
from otel_brick.export.readable import Pace, _Builder
from otel_brick.export.spans import SpanSink
from otel_brick.record.batch import Batch
from otel_brick.record.recorder import Recorder
from otel_brick.testing import InMemoryTraces, ManualClock

Spans = dict[bytes, Any]


@dataclass
class BothRoutes:
    """Encodes what it gets in both ways."""

    recorder: Recorder
    columnar: Spans = field(default_factory=dict)
    official: Spans = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoder = ColumnarEncoder(self.recorder.registry)

    def send(self, batch: Batch, ends: NDArray[np.int64]) -> None:
        rows = np.flatnonzero(np.array([step.recording for step in batch.steps])[batch.step])
        blocks = self.encoder.encode(batch, rows, ends, batch.span_id)
        assert sum(len(block) for block in blocks) == len(rows)
        for span in ScopeSpans.FromString(b"".join(block.tobytes() for block in blocks)).spans:
            self.columnar[span.span_id] = span
        bounds = np.searchsorted(batch.step, np.arange(len(batch.steps) + 1)).tolist()
        builder = _Builder(self.recorder, batch, ends)
        for number, record in enumerate(batch.steps):
            own = range(bounds[number], bounds[number + 1])
            spans = list(builder.readable_spans(record, record.tracer, record.parent, own))
            if spans:
                for span in encode_spans(spans).resource_spans[0].scope_spans[0].spans:
                    self.official[span.span_id] = span

    def flush(self, timeout_s: float) -> bool:
        return True


def both(**arguments: Any) -> tuple[BrickProfiler, BothRoutes]:
    profiler = BrickProfiler.enabled(
        tracer_provider=InMemoryTraces().provider,
        detail="all",
        max_rows_per_step=10**6,
        max_rows_per_trace=10**6,
        **arguments,
    )
    routes = BothRoutes(profiler._recorder)
    detail = DetailPolicy(profiler.config, profiler._recorder.losses)
    profiler._pipeline.replace(detail, SpanSink(profiler._recorder, routes, Pace(profiler._recorder)))
    return profiler, routes


def assert_equal(profiler: BrickProfiler, routes: BothRoutes, rows: int) -> None:
    assert profiler.flush(timeout_s=60)
    assert len(routes.columnar) == len(routes.official) == rows
    for span_id, official in routes.official.items():
        assert routes.columnar[span_id] == official
    assert not any(profiler.losses().values())


counts = st.one_of(
    st.none(),
    st.sampled_from([0, 1, 127, 128, (1 << 14) - 1, 1 << 14, 1 << 35, 1 << 62, (1 << 63) - 1]),
    st.integers(0, (1 << 63) - 1),
)
names = st.one_of(st.sampled_from(["RmsNorm", "Qkv"]), st.text(st.characters(codec="utf-8"), min_size=1, max_size=80))


@dataclass
class Row:
    kind: str
    name: str
    index: int
    elements: int | None
    read: int | None
    written: int | None
    error: str | None
    takes: int
    children: list[Row]

    def count(self) -> int:
        return 1 + sum(child.count() for child in self.children)


def rows(children: st.SearchStrategy[list[Row]]) -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        kind=st.sampled_from(["brick", "brick", "kernel", "layer"]),
        name=names,
        index=st.sampled_from([0, 1, 127, 128, 16_384, (1 << 31) - 1]),
        elements=counts,
        read=counts,
        written=counts,
        error=st.one_of(st.none(), st.none(), st.text(max_size=10)),
        takes=st.integers(0, 300),
        children=children,
    )


trees = st.lists(
    st.recursive(rows(st.just([])), lambda inner: rows(st.lists(inner, max_size=3)), max_leaves=8), max_size=4
)
states = st.sampled_from(
    [None, TraceState([("vendor", "1")]), TraceState([("a", "x" * 200), ("b", "y")]), TraceState()]
)


class Planned(Exception):
    """Raised and caught by the programs themselves."""


def run(profiler: BrickProfiler, time: ManualClock, row: Row) -> None:
    given = {"elements": row.elements, "bytes_read": row.read, "bytes_written": row.written}
    known = {name: value for name, value in given.items() if value is not None}
    if row.kind == "layer":
        scope = profiler.layer(row.index, type=row.name)
    elif row.kind == "kernel":
        launch = {"ptx_hash": row.index, "grid": (row.index + 1, 2), "block": 256, "shared_mem": row.takes}
        scope = profiler.kernel(row.name, **known, **launch)
    else:
        scope = profiler.brick(row.name, **known)
    try:
        with scope:
            time.advance(row.takes)
            for child in row.children:
                run(profiler, time, child)
            if row.error is not None:
                raise Planned(row.error)
    except Planned:
        pass


budgets = st.dictionaries(st.sampled_from(["RmsNorm", "Qkv"]), st.one_of(st.none(), st.integers(1, 400)))


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(trees, states, st.sampled_from([1, 3]), budgets), min_size=1, max_size=4))
def test_random_trees_decode_to_what_the_official_encoder_makes(
    steps: list[tuple[list[Row], TraceState | None, int, dict[str, int | None]]],
) -> None:
    time = ManualClock()
    profiler, routes = both(clock=time.clock)
    for number, (program, state, flags, stated) in enumerate(steps):
        for name, budget_ns in stated.items():
            profiler.set_brick_budget(name, budget_ns)
        parent = SpanContext(0xA0 + number, 0xB0, True, TraceFlags(flags), state or TraceState())
        links = [SpanContext(7, 8, True)]
        context = set_span_in_context(NonRecordingSpan(parent))
        with profiler.step(phase="decode", parent=context if state is not None else None, links=links):
            for row in program:
                run(profiler, time, row)
    assert_equal(profiler, routes, sum(row.count() for program, *_ in steps for row in program))
    profiler.shutdown()


def test_bricks_below_a_users_span_decode_equally_too() -> None:
    profiler, routes = both()
    tracer = profiler._recorder.tracing.provider.get_tracer("app")
    with tracer.start_as_current_span("request"), profiler.brick("Outer", category=BrickCategory.Ffn):
        with profiler.kernel("k", grid=1):
            pass
    assert_equal(profiler, routes, 2)
    profiler.shutdown()


def test_bricks_over_and_under_their_budgets_decode_equally_and_so_do_those_whose_budget_changed() -> None:
    time = ManualClock()
    profiler, routes = both(clock=time.clock)
    profiler.set_brick_budget("RmsNorm", 100)
    profiler.set_brick_budget("Later", (1 << 53) - 1)
    for change in ({}, {"RmsNorm": 101, "Later": None}, {"RmsNorm": 1}):
        for name, budget_ns in change.items():
            profiler.set_brick_budget(name, budget_ns)
        with profiler.step():
            for takes in (100, 101, 100):
                with profiler.layer(3), profiler.brick("RmsNorm", elements=takes), profiler.kernel("k"):
                    time.advance(takes)
            with pytest.raises(Planned), profiler.brick("Later", bytes_read=1):
                raise Planned
            with profiler.brick("Free"):
                pass
            profiler.brick("RmsNorm", elements=7).__enter__()
    assert profiler.flush(timeout_s=60)
    assert len(routes.columnar) == len(routes.official) == 3 * 12
    assert routes.columnar == routes.official

    found: Counter[tuple[Any, ...]] = Counter()
    for span in routes.columnar.values():
        said = {attribute.key: attribute.value for attribute in span.attributes}
        limit, over = said.get("brick.budget.duration"), said.get("brick.budget.exceeded")
        if limit is not None:
            found[span.name, limit.double_value, None if over is None else over.bool_value] += 1
    assert found == {
        **{("RmsNorm", 1e-7, False): 2, ("RmsNorm", 1e-7, True): 1, ("RmsNorm", 1e-7, None): 1},
        **{("RmsNorm", 1.01e-7, False): 3, ("RmsNorm", 1.01e-7, None): 1},
        **{("RmsNorm", 1e-9, True): 3, ("RmsNorm", 1e-9, None): 1},
        ("Later", ((1 << 53) - 1) / 1e9, False): 1,
    }
    profiler.shutdown()


def test_a_budget_that_changes_all_the_time_needs_two_templates() -> None:
    time = ManualClock()
    profiler, routes = both(clock=time.clock)
    for number in range(200):
        profiler.set_brick_budget("B", 1 + number * 1_000)
        with profiler.step():
            for takes in (0, 1_000_000):
                with profiler.brick("B"):
                    time.advance(takes)
    assert_equal(profiler, routes, 400)
    assert len(routes.encoder._templates) == 2
    profiler.shutdown()


@pytest.mark.parametrize("descriptors", [10, 10_000])
def test_many_descriptors_decode_equally(descriptors: int) -> None:
    profiler, routes = both()
    with profiler.step():
        for number in range(descriptors):
            with profiler.kernel(f"kernel {number}", grid=(number + 1, 1, 1), block=128, elements=number):
                pass
    assert_equal(profiler, routes, descriptors)
    profiler.shutdown()


def test_templates_are_bounded() -> None:
    profiler, routes = both()
    with profiler.step():
        for number in range(MAX_TEMPLATES + 100):
            with profiler.kernel("k", grid=number + 1):
                pass
    assert_equal(profiler, routes, MAX_TEMPLATES + 100)
    assert len(routes.encoder._templates) == MAX_TEMPLATES
    profiler.shutdown()


def test_many_element_counts_share_templates() -> None:
    profiler, routes = both()
    with profiler.step():
        for number in range(3_000):
            with profiler.brick("B", elements=number):
                pass
    assert_equal(profiler, routes, 3_000)
    # One template for each width of the count, not for each count.
    assert len(routes.encoder._templates) == 2
    profiler.shutdown()


@pytest.mark.parametrize("limit", ["4", "7", "8"])
def test_the_environments_span_limits_hold_in_columns_too(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", limit)
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    profiler, routes = both()
    profiler.set_brick_budget("LongName", 5)
    with profiler.step(), profiler.layer(1), profiler.brick("LongName", elements=1 << 40, bytes_read=5):
        pass
    assert_equal(profiler, routes, 2)
    assert {len(span.attributes) for span in routes.columnar.values()} == {2, int(limit)}
    profiler.shutdown()


def test_spans_are_written_in_the_order_that_templates_expect() -> None:
    """Tells when a protobuf release lays messages out otherwise: placeholders are found by position."""
    profiler, routes = both()
    with profiler.step(), profiler.brick("B", elements=5):
        pass
    assert profiler.flush()
    (template,) = routes.encoder._templates.values()
    layout = template.layout
    assert template.entry[:1] == b"\x12"
    assert template.entry[layout.span : layout.span + 2] == b"\x0a\x10"
    assert template.entry[layout.start - 1] == 0x39
    assert [size for _, _, size in layout.patched] == [1]
    profiler.shutdown()


@given(st.integers(0, (1 << 64) - 1))
def test_varint_is_protobufs(value: int) -> None:
    from google.protobuf.internal.encoder import _VarintBytes

    assert varint(value) == _VarintBytes(value)
