"""Names keep the rules of OpenTelemetry and agree with one another and with the enums."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_brick import semconv, taxonomy
from otel_brick.record.losses import REASONS
from otel_brick.semconv import ATTRIBUTES, METRICS, Metric

NAMES = [attribute.name for attribute in ATTRIBUTES]
METRIC_NAMES = [metric.name for metric in METRICS]
PUBLIC_CONSTANTS = {
    key: value
    for key, value in vars(semconv).items()
    if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]*", key) and key != "SCOPE_NAME"
}
METRIC_CONSTANTS = {key: value for key, value in vars(semconv).items() if isinstance(value, Metric)}
METRICS_BY_NAME = pytest.mark.parametrize("metric", METRICS, ids=METRIC_NAMES)

NAME_SYNTAX = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*(?:\.[a-z][a-z0-9]*(?:_[a-z0-9]+)*)+")
BORROWED_NAMESPACES = {"code", "error", "hw", "thread"}


def prefixes(name: str) -> set[str]:
    """Every proper dotted prefix: `a.b.c` gives `a` and `a.b`."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES)


def test_no_name_is_the_namespace_of_another() -> None:
    for names in (set(NAMES), set(METRIC_NAMES)):
        assert {name: clash for name in names if (clash := prefixes(name) & names)} == {}


def test_names_are_lower_case_words_in_our_namespace_or_a_borrowed_one() -> None:
    assert [name for name in NAMES + METRIC_NAMES if not NAME_SYNTAX.fullmatch(name)] == []
    assert {name.partition(".")[0] for name in NAMES} == {"brick", *BORROWED_NAMESPACES}
    assert {name.partition(".")[0] for name in METRIC_NAMES} == {"brick"}


def test_the_identifier_of_every_constant_is_its_value_in_capitals() -> None:
    assert {key: value.replace(".", "_").upper() for key, value in PUBLIC_CONSTANTS.items()} == {
        key: key for key in PUBLIC_CONSTANTS
    }
    for identifier, metric in METRIC_CONSTANTS.items():
        assert identifier == "METRIC_" + metric.name.replace(".", "_").upper()


def test_every_constant_is_described_and_every_description_has_a_constant() -> None:
    assert sorted(PUBLIC_CONSTANTS.values()) == sorted(NAMES)
    assert list(METRIC_CONSTANTS.values()) == list(METRICS)


def test_only_numbers_have_units_and_sizes_and_counts_have_the_fitting_ones() -> None:
    for attribute in ATTRIBUTES:
        if attribute.type in {"string", "boolean"}:
            assert attribute.unit == "", attribute
        if attribute.name.startswith("brick.") and attribute.name.endswith(".count"):
            assert re.fullmatch(r"\{[a-z]+\}", attribute.unit), attribute
        if attribute.name.endswith(".size"):
            assert attribute.unit == ("{sequence}" if attribute.name == semconv.BRICK_BATCH_SIZE else "By")
        if attribute.type == "double":
            assert attribute.unit in {"s", "1"}, attribute


def test_every_attribute_says_where_it_appears_and_what_it_means() -> None:
    for attribute in ATTRIBUTES:
        assert attribute.levels, attribute
        assert len(set(attribute.levels)) == len(attribute.levels), attribute
        assert attribute.brief.endswith("."), attribute
        assert len(set(attribute.values)) == len(attribute.values), attribute


def test_the_attributes_of_metrics_are_exactly_those_marked_for_metrics() -> None:
    used = {name for metric in METRICS for name in metric.attributes + metric.opt_in_attributes}
    assert used == {attribute.name for attribute in ATTRIBUTES if "metric" in attribute.levels}


def test_no_metric_carries_an_identity_without_bound() -> None:
    unbounded = {
        *(semconv.BRICK_CUDA_PTX_HASH, semconv.BRICK_LAYER_INDEX, semconv.BRICK_STEP_INDEX),
        *(name for name in NAMES if re.match(r"brick\.cuda\.(grid|block|cluster)\.", name)),
        *(semconv.THREAD_ID, semconv.THREAD_NAME),
    }
    for metric in METRICS:
        assert unbounded.isdisjoint(metric.attributes + metric.opt_in_attributes), metric.name
        assert semconv.BRICK_CUDA_KERNEL_NAME not in metric.attributes, metric.name


def test_histograms_and_they_alone_have_buckets_and_these_increase_strictly_from_above_zero() -> None:
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.instrument == "histogram"), metric.name
        assert all(lower < upper for lower, upper in pairwise((0.0, *metric.buckets))), metric.name


@METRICS_BY_NAME
def test_name_and_unit_keep_the_syntax_of_instruments(metric: Metric) -> None:
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-/]{0,254}", metric.name)
    assert metric.unit.isascii()
    assert re.fullmatch(r"s|By|1|\{[a-z]+\}", metric.unit)


@METRICS_BY_NAME
def test_the_sdk_makes_the_instrument_and_exports_it_unchanged(metric: Metric) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = provider.get_meter(semconv.SCOPE_NAME)
    match metric.instrument:
        case "histogram":
            meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            ).record(1)
        case "counter":
            meter.create_counter(metric.name, metric.unit, metric.description).add(1)
        case "gauge":
            meter.create_gauge(metric.name, metric.unit, metric.description).set(1)

    data = reader.get_metrics_data()
    provider.shutdown()

    assert data is not None
    (exported,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (exported.name, exported.unit, exported.description) == (
        metric.name,
        metric.unit,
        metric.description,
    )
    point = exported.data.data_points[0]
    assert tuple(getattr(point, "explicit_bounds", ())) == metric.buckets


def test_closed_sets_of_values_are_those_of_the_enums() -> None:
    values = {attribute.name: attribute.values for attribute in ATTRIBUTES}
    assert values[semconv.BRICK_PHASE] == tuple(phase.attribute_value for phase in taxonomy.Phase)
    assert values[semconv.BRICK_SPAN_LEVEL] == tuple(level.attribute_value for level in taxonomy.SpanLevel)
    assert values[semconv.BRICK_TIMING_SOURCE] == tuple(source.attribute_value for source in taxonomy.TimingSource)
    assert values[semconv.BRICK_CATEGORY] == tuple(category.name.lower() for category in taxonomy.BrickCategory)


def test_every_drop_reason_has_a_loss_counter() -> None:
    values = {attribute.name: attribute.values for attribute in ATTRIBUTES}
    assert set(values[semconv.BRICK_DROP_REASON]) <= set(REASONS)
