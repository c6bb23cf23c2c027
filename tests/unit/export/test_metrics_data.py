"""Statistics as `MetricsData`, through the official encoder and back."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.resources import Resource

from otel_brick import BrickProfiler, Phase, semconv
from otel_brick.export.metric_series import DROP_REASONS, Exemplars, MetricSource, seconds
from otel_brick.export.metrics import metrics_data
from otel_brick.stats.exemplars import Exemplars as ExemplarTables
from otel_brick.stats.reader import Tables
from otel_brick.testing import InMemoryTraces, ManualClock
from otel_brick.version import __version__

MOST = (1 << 63) - 1
RESOURCE = Resource({"service.name": "engine"}, "https://example.org/schema")
START, NOW = 1_700_000_000_000_000_000, 1_700_000_060_000_000_000
BY_NAME = {metric.name: metric for metric in semconv.METRICS}
SENT_TODAY = {
    *("brick.step.duration", "brick.duration", "brick.finalize.duration", "brick.records.dropped"),
    *("brick.time", "brick.calls", "brick.elements", "brick.io", "brick.tokens"),
    *("brick.budget.limit", "brick.budget.violations"),
}

Points = dict[str, dict[tuple[str, ...], Any]]
"""Decoded points by metric and attribute values."""


def reading(profiler: BrickProfiler, exemplars: Exemplars | None = None) -> MetricSource:
    """What a profiler has counted, as a copy."""
    with profiler.snapshot()._tables() as tables:
        return MetricSource(tables, profiler.losses(), exemplars)


def sent(source: MetricSource, **options: Any) -> ExportMetricsServiceRequest:
    """What a collector receives."""
    data = metrics_data(source, resource=RESOURCE, start_unix_ns=START, now_unix_ns=NOW, **options)
    json.loads(data.to_json())
    return ExportMetricsServiceRequest.FromString(encode_metrics(data).SerializeToString())


def metrics_of(request: ExportMetricsServiceRequest) -> list[Any]:
    return [
        metric
        for of in request.resource_metrics
        for scope_metrics in of.scope_metrics
        for metric in scope_metrics.metrics
    ]


def points_of(request: ExportMetricsServiceRequest) -> Points:
    points: Points = {}
    for metric in metrics_of(request):
        kind = metric.WhichOneof("data")
        series = points.setdefault(metric.name, {})
        for point in getattr(metric, kind).data_points:
            values = tuple(attribute.value.string_value for attribute in point.attributes)
            assert values not in series
            series[values] = point
    return points


def value(point: Any) -> int | float:
    return getattr(point, point.WhichOneof("value"))


@pytest.fixture
def busy(profiler: BrickProfiler, time: ManualClock) -> BrickProfiler:
    """A profiler that has counted something of everything."""
    profiler.set_brick_budget("Fused", 2_000_000)
    for phase in ("prefill", "decode"):
        with profiler.step(phase=phase, tokens=7):
            with profiler.brick("RmsNorm", elements=64, bytes_read=10, bytes_written=20):
                time.advance(1_500)
            with profiler.brick("Fused"):
                time.advance(3_000_000)
    profiler.stop(profiler.start("Twice"))
    return profiler


# --- what is sent ---


def test_resource_scope_times_and_temporality_are_as_given(busy: BrickProfiler) -> None:
    (of,) = sent(reading(busy)).resource_metrics
    (scope_metrics,) = of.scope_metrics

    assert [(attribute.key, attribute.value.string_value) for attribute in of.resource.attributes] == [
        ("service.name", "engine")
    ]
    assert of.schema_url == "https://example.org/schema"
    assert (scope_metrics.scope.name, scope_metrics.scope.version) == ("otel_brick", __version__)
    for metric in scope_metrics.metrics:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        if kind == "gauge":
            assert [(point.start_time_unix_nano, point.time_unix_nano) for point in data.data_points] == [(0, NOW)]
            continue
        assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        assert kind == "histogram" or data.is_monotonic
        for point in data.data_points:
            assert (point.start_time_unix_nano, point.time_unix_nano) == (START, NOW)


@pytest.mark.parametrize("histograms", ["explicit", "exponential"])
def test_names_units_descriptions_and_attributes_are_those_of_semconv(busy: BrickProfiler, histograms: str) -> None:
    metrics = metrics_of(sent(reading(busy), histograms=histograms))

    assert {metric.name for metric in metrics} == SENT_TODAY
    assert [metric.name for metric in metrics] == [name for name in BY_NAME if name in SENT_TODAY]
    for metric in metrics:
        said = BY_NAME[metric.name]
        assert (metric.unit, metric.description) == (said.unit, said.description)
        kinds = {"sum": "counter", "gauge": "gauge"}
        assert kinds.get(metric.WhichOneof("data"), "histogram") == said.instrument
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            keys = [attribute.key for attribute in point.attributes]
            # Which error ended a step is not counted by phase.
            assert keys == [key for key in said.attributes if key != semconv.ERROR_TYPE]


def test_histograms_can_be_left_out(busy: BrickProfiler) -> None:
    names = {metric.name for metric in metrics_of(sent(reading(busy), histograms="none"))}

    assert names == {name for name in SENT_TODAY if BY_NAME[name].instrument != "histogram"}


def test_another_kind_of_histogram_is_refused(busy: BrickProfiler) -> None:
    with pytest.raises(ValueError, match="explicit, exponential, none; got 'native'"):
        sent(reading(busy), histograms="native")


def test_boundaries_are_those_of_semconv(busy: BrickProfiler) -> None:
    points = points_of(sent(reading(busy)))

    for name in ("brick.step.duration", "brick.duration", "brick.finalize.duration"):
        for point in points[name].values():
            assert tuple(point.explicit_bounds) == BY_NAME[name].buckets


def test_without_samples_nothing_is_sent() -> None:
    source = MetricSource(Tables(), BrickProfiler().losses())

    data = metrics_data(source, resource=RESOURCE, start_unix_ns=START, now_unix_ns=NOW)

    assert list(data.resource_metrics) == []


def test_only_what_was_counted_has_points(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("RmsNorm", 5)

    points = points_of(sent(reading(profiler)))

    everywhere = ("RmsNorm", "norm", "other")
    assert {name: set(series) for name, series in points.items() if name != "brick.records.dropped"} == {
        "brick.duration": {everywhere},
        "brick.time": {everywhere},
        "brick.calls": {everywhere},
    }


def test_a_brick_of_no_duration_is_a_sample(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("RmsNorm", 0)

    points = points_of(sent(reading(profiler)))

    key = ("RmsNorm", "norm", "other")
    assert value(points["brick.time"][key]) == 0.0
    duration = points["brick.duration"][key]
    assert (duration.count, duration.sum, duration.min, duration.max, duration.bucket_counts[0]) == (1, 0, 0, 0, 1)


def test_extremes_are_sent_where_they_are_kept(busy: BrickProfiler) -> None:
    points = points_of(sent(reading(busy)))

    brick = points["brick.duration"]["RmsNorm", "norm", "decode"]
    assert (brick.min, brick.max) == (1.5e-6, 1.5e-6)
    for name in ("brick.step.duration", "brick.finalize.duration"):
        for point in points[name].values():
            assert not point.HasField("min") and not point.HasField("max")


# --- budgets ---


def test_a_limit_is_sent_once_it_is_stated_and_violations_zeros_too_once_its_brick_has_samples(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    def budgets() -> dict[str, dict[tuple[str, ...], int | float]]:
        points = points_of(sent(reading(profiler)))
        return {
            name: {labels: value(point) for labels, point in points.get(name, {}).items()}
            for name in ("brick.budget.limit", "brick.budget.violations")
        }

    assert list(budgets().values()) == [{}, {}]
    profiler.set_brick_budget("B", 1_500)
    profiler.set_brick_budget("never seen \udcff", 1)
    limits = {("B",): 1.5e-6, ("never seen \\udcff",): 1e-9}
    assert list(budgets().values()) == [limits, {}]

    for phase, takes in (("decode", 1_500), ("prefill", 1_501)):
        with profiler.step(phase=phase), profiler.brick("B"), profiler.brick("Free"):
            time.advance(takes)
    assert list(budgets().values()) == [limits, {("B", "decode"): 0, ("B", "prefill"): 1}]

    profiler.set_brick_budget("B", None)
    del limits[("B",)]
    assert list(budgets().values()) == [limits, {("B", "prefill"): 1}]
    profiler.reset()
    assert list(budgets().values()) == [{}, {}]


# --- losses ---


def test_losses_are_sent_by_reason_and_zeros_from_the_first_sample_on(busy: BrickProfiler) -> None:
    series = points_of(sent(reading(busy)))["brick.records.dropped"]
    assert {reason: value(point) for (reason,), point in series.items()} == dict.fromkeys(DROP_REASONS, 0)

    source = MetricSource(Tables(), {**busy.losses(), "queue_full": 3, "closed_twice": 9})
    series = points_of(sent(source))["brick.records.dropped"]
    assert {reason: value(point) for (reason,), point in series.items()} == {
        **dict.fromkeys(DROP_REASONS, 0),
        "queue_full": 3,
    }


def test_every_reason_of_the_attribute_is_one_that_is_counted() -> None:
    assert set(DROP_REASONS) <= set(BrickProfiler().losses())


# --- values ---

BOUNDS_NS = [round(bound * 1e9) for bound in (*semconv.BRICK_DURATION_BUCKETS_S, *semconv.STEP_DURATION_BUCKETS_S)]
durations = st.one_of(
    st.integers(0, 40),
    st.sampled_from([bound + off for bound in BOUNDS_NS for off in (-1, 0, 1)]),
    st.integers(0, 10**11),
)
counts = st.one_of(st.just(0), st.integers(0, 10**6), st.sampled_from([MOST, MOST - 1]))
bricks = st.tuples(st.sampled_from(("RmsNorm", "SpMV", "Fused", "Residual")), durations, counts, counts, counts)
steps = st.tuples(st.sampled_from([phase.attribute_value for phase in Phase]), counts, st.lists(bricks, max_size=6))


def buckets(bounds_s: tuple[float, ...], samples_ns: list[int]) -> list[int]:
    """Counts in the explicit buckets, worked out from the data model: a boundary belongs to the bucket below it."""
    bounds_ns = [round(bound * 1e9) for bound in bounds_s]
    found = [0] * (len(bounds_ns) + 1)
    for sample in samples_ns:
        found[bisect_left(bounds_ns, sample)] += 1
    return found


def as_sent(exact: int) -> int | float:
    return exact if exact <= MOST else float(exact)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=5))
@example([("decode", MOST, [("RmsNorm", 1, MOST, MOST, 1)] * 3), ("decode", 1, [])])
def test_every_value_is_that_of_the_program(program: list[Any]) -> None:
    time = ManualClock()
    profiler = BrickProfiler.enabled(clock=time.clock, detail="none")
    of_bricks: dict[Any, list[Any]] = defaultdict(list)
    of_steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for phase, tokens, contents in program:
        start = time.now_ns
        with profiler.step(phase=phase, tokens=tokens):
            for name, duration, *amounts in contents:
                with profiler.brick(name, elements=amounts[0], bytes_read=amounts[1], bytes_written=amounts[2]):
                    time.advance(duration)
                of_bricks[name, phase].append((duration, *amounts))
        of_steps[phase].append((time.now_ns - start, tokens))
    source = reading(profiler)
    points, fine = points_of(sent(source)), points_of(sent(source, histograms="exponential"))
    assert profiler.shutdown(timeout_s=10)

    expected: dict[str, dict[tuple[str, ...], Any]] = defaultdict(dict)
    for (name, phase), samples in of_bricks.items():
        stats = profiler.stats(name, phase=phase)
        assert stats is not None
        key = (name, stats.category.attribute_value, phase)
        expected["brick.calls"][key] = stats.count
        expected["brick.time"][key] = stats.total_ns / 10**9
        if stats.total_elements:
            expected["brick.elements"][name, phase] = as_sent(stats.total_elements)
        for direction, amount in (("read", stats.bytes_read), ("write", stats.bytes_written)):
            if amount:
                expected["brick.io"][name, phase, direction] = as_sent(amount)
        took = [sample[0] for sample in samples]
        duration = points["brick.duration"][key]
        assert list(duration.bucket_counts) == buckets(semconv.BRICK_DURATION_BUCKETS_S, took)
        assert sum(duration.bucket_counts) == duration.count == len(took) == stats.count
        assert (duration.sum, duration.min, duration.max) == (
            sum(took) / 10**9,
            min(took) / 10**9,
            max(took) / 10**9,
        )
        assert_fine(fine["brick.duration"][key], took)
    for phase, samples in of_steps.items():
        if total := sum(tokens for _, tokens in samples):
            expected["brick.tokens"][(phase,)] = as_sent(total)
        took = [wall for wall, _ in samples]
        duration = points["brick.step.duration"][(phase,)]
        assert list(duration.bucket_counts) == buckets(semconv.STEP_DURATION_BUCKETS_S, took)
        assert (duration.count, duration.sum) == (len(took), sum(took) / 10**9)
        assert_fine(fine["brick.step.duration"][(phase,)], took)
    sums = ("brick.calls", "brick.time", "brick.elements", "brick.io", "brick.tokens")
    assert {
        name: {key: value(point) for key, point in points[name].items()} for name in sums if name in points
    } == expected
    assert set(points.get("brick.duration", {})) == set(expected.get("brick.calls", {}))
    assert {phase for (phase,) in points.get("brick.step.duration", {})} == set(of_steps)
    finalized = points.get("brick.finalize.duration", {}).get((), None)
    assert (0 if finalized is None else finalized.count) == len(program)
    assert finalized is None or sum(finalized.bucket_counts) == finalized.count


def assert_fine(point: Any, samples_ns: list[int]) -> None:
    """An exponential point holds these samples: each one in a bucket around it, 0 ns with 1 ns."""
    assert (point.scale, point.zero_count, len(point.negative.bucket_counts)) == (5, 0, 0)
    assert (point.count, point.sum) == (len(samples_ns), sum(samples_ns) / 10**9)
    assert point.positive.bucket_counts[0] and point.positive.bucket_counts[-1]
    where = [
        (2 ** ((point.positive.offset + index) / 32), 2 ** ((point.positive.offset + index + 1) / 32))
        for index, count in enumerate(point.positive.bucket_counts)
        for _ in range(count)
    ]
    for (lower, upper), sample in zip(where, sorted(max(sample, 1) / 10**9 for sample in samples_ns), strict=True):
        assert lower * (1 - 1e-9) < sample <= upper * (1 + 1e-9)


def test_counts_are_exact_integers_up_to_63_bits_and_floats_beyond(profiler: BrickProfiler) -> None:
    with profiler.step(phase="decode", tokens=MOST), profiler.brick("B", elements=MOST):
        pass
    points = points_of(sent(reading(profiler)))
    assert points["brick.elements"]["B", "decode"].as_int == points["brick.tokens"][("decode",)].as_int == MOST

    with profiler.step(phase="decode", tokens=1), profiler.brick("B", elements=1):
        pass
    points = points_of(sent(reading(profiler)))
    assert points["brick.elements"]["B", "decode"].as_double == points["brick.tokens"][("decode",)].as_double == 2.0**63


def test_a_sum_of_time_is_rounded_once() -> None:
    # As a float in nanoseconds the sum would round to an even number before it is divided.
    exact = (1 << 53) + 1
    assert seconds(exact) == 9007199.254740993
    assert math.isclose(seconds(10**30), 1e21)


def test_two_collections_only_grow(busy: BrickProfiler, time: ManualClock) -> None:
    before = points_of(sent(reading(busy)))
    with busy.step(phase="decode", tokens=1), busy.brick("RmsNorm", elements=3):
        time.advance(10)
    after = points_of(sent(reading(busy)))

    for name, series in before.items():
        for key, point in series.items():
            later = after[name][key]
            if BY_NAME[name].instrument == "counter":
                assert value(later) >= value(point)
            elif BY_NAME[name].instrument == "histogram":
                assert (later.count, later.sum) >= (point.count, point.sum)
                old, new = accumulate(point.bucket_counts), accumulate(later.bucket_counts)
                assert all(one <= other for one, other in zip(old, new, strict=True))
    key = ("RmsNorm", "norm", "decode")
    assert value(after["brick.calls"][key]) == value(before["brick.calls"][key]) + 1


def test_a_name_that_is_no_text_does_not_keep_the_others_from_leaving(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("half \udc80", 5)
    profiler.record_elapsed("Whole", 5)

    names = {name for name, *_ in points_of(sent(reading(profiler)))["brick.calls"]}

    assert names == {"half \\udc80", "Whole"}


# --- exemplars ---


def some_exemplars() -> tuple[ExemplarTables, dict[tuple[str, int], tuple[int, int, float, int]]]:
    """Exemplars of `RmsNorm` in decode and of decode steps; by metric and bucket their ids, value and time."""
    tables, expected = ExemplarTables(), {}
    tables.bricks.grow(Phase.Decode + 1)
    for name, table, bucket, value_ns in (
        ("brick.duration", tables.bricks, 1, 1_500),
        ("brick.duration", tables.bricks, 15, 60_000_000),
        ("brick.step.duration", tables.steps, 3, 3_001_500),
    ):
        trace_id, span_id, unix_ns = (0xFEDC << 112) + bucket, (1 << 63) + bucket, NOW - bucket
        place = (int(Phase.Decode), bucket)
        table.span_id[place] = span_id
        table.trace_high[place], table.trace_low[place] = trace_id >> 64, trace_id & MOST
        table.value_ns[place], table.unix_ns[place] = value_ns, unix_ns
        expected[name, bucket] = (trace_id, span_id, value_ns / 10**9, unix_ns)
    return tables, expected


@pytest.mark.parametrize("histograms", ["explicit", "exponential"])
def test_exemplars_carry_the_ids_values_and_times_they_were_given(busy: BrickProfiler, histograms: str) -> None:
    tables, expected = some_exemplars()

    points = points_of(sent(reading(busy, tables), histograms=histograms))

    found = {}
    for name in ("brick.duration", "brick.step.duration"):
        for key, point in points[name].items():
            for exemplar in point.exemplars:
                assert key in {("RmsNorm", "norm", "decode"), ("decode",)}
                bucket = bisect_left(BY_NAME[name].buckets, exemplar.as_double)
                found[name, bucket] = (
                    int.from_bytes(exemplar.trace_id, "big"),
                    int.from_bytes(exemplar.span_id, "big"),
                    exemplar.as_double,
                    exemplar.time_unix_nano,
                )
    assert found == expected


def test_an_exemplar_of_a_profiler_opens_the_span_that_was_measured(
    busy: BrickProfiler, traces: InMemoryTraces
) -> None:
    assert busy.flush(10)
    spans = {span.context.span_id: span for span in traces.spans if span.context is not None}

    points = points_of(sent(reading(busy, busy._pipeline.exemplars)))

    for name in ("brick.duration", "brick.step.duration"):
        for key, point in points[name].items():
            if key[0] == "Twice":  # outside of steps and spans
                assert not point.exemplars
                continue
            (exemplar,) = point.exemplars
            span = spans[int.from_bytes(exemplar.span_id, "big")]
            assert span.name == (key[0] if name == "brick.duration" else f"step {key[0]}")
            assert span.context is not None and span.start_time is not None
            assert span.context.trace_id == int.from_bytes(exemplar.trace_id, "big")
            assert span.end_time == exemplar.time_unix_nano
            assert span.end_time - span.start_time == round(exemplar.as_double * 1e9)
            assert point.bucket_counts[bisect_left(BY_NAME[name].buckets, exemplar.as_double)]


def test_keys_beyond_the_exemplars_have_none(busy: BrickProfiler) -> None:
    points = points_of(sent(reading(busy, ExemplarTables())))

    assert [point.exemplars for point in points["brick.duration"].values() if point.exemplars] == []
    assert np.shape(ExemplarTables().bricks.span_id) == (0, len(semconv.BRICK_DURATION_BUCKETS_S) + 1)
