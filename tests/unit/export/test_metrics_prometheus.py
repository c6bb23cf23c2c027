"""The Prometheus collector: its text as scrapers read it, and that names agree on all ways out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, MetricsData, Sum
from opentelemetry.sdk.resources import Resource

import otel_brick
from otel_brick import BrickProfiler, Phase, semconv
from otel_brick.export.metric_observe import observe
from otel_brick.export.metric_series import Exemplars, MetricSource
from otel_brick.export.metrics import metrics_data
from otel_brick.export.prometheus import BrickCollector
from otel_brick.stats.exemplars import Exemplars as ExemplarTables
from otel_brick.stats.reader import Tables
from otel_brick.testing import ManualClock

prometheus_client = pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

NOW = 1_700_000_060_123_456_789
MOST = (1 << 63) - 1


def reading(profiler: BrickProfiler, exemplars: Exemplars | None = None) -> MetricSource:
    """What a profiler has counted, as a copy."""
    with profiler.snapshot()._tables() as tables:
        return MetricSource(tables, profiler.losses(), exemplars)


@pytest.fixture
def busy(profiler: BrickProfiler, time: ManualClock) -> BrickProfiler:
    profiler.set_brick_budget('a "quoted"\\\nname', 2_000_000)
    for phase in ("prefill", "decode", "decode"):
        with profiler.step(phase=phase, tokens=7):
            with profiler.brick("RmsNorm", elements=64, bytes_read=10, bytes_written=20):
                time.advance(1_500)
            with profiler.brick('a "quoted"\\\nname'):
                time.advance(3_000_000)
    return profiler


def registry_of(source: MetricSource) -> Any:
    registry = prometheus_client.CollectorRegistry()
    registry.register(BrickCollector(lambda: source))
    return registry


def scraped(source: MetricSource) -> dict[str, Any]:
    """The metric families in the classic text format, as a scraper reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus_client.generate_latest(registry_of(source)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def scraped_open(source: MetricSource) -> dict[str, Any]:
    """The same in the OpenMetrics format."""
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    text = generate_latest(registry_of(source)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def translated(name: str, unit: str, *, monotonic: bool) -> str:
    """The Prometheus name of an OTLP metric by the OpenTelemetry collector's rules."""
    tokens = [token for token in re.split(r"[^a-zA-Z0-9:]+", name) if token]
    main = re.sub(r"\{[^}]*\}", "", unit)
    word = {"": "", "s": "seconds", "By": "bytes"}[main]
    if word and word not in tokens:
        tokens.append(word)
    if monotonic:
        tokens = [*(token for token in tokens if token != "total"), "total"]
    return "_".join(tokens)


def translated_names(data: MetricsData | None) -> dict[str, str]:
    """Prometheus names and descriptions of what an SDK reader or exporter got."""
    assert data is not None
    return {
        translated(metric.name, metric.unit or "", monotonic=isinstance(metric.data, Sum)): metric.description or ""
        for of in data.resource_metrics
        for scope_metrics in of.scope_metrics
        for metric in scope_metrics.metrics
    }


def sample_name(family: Any) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_names_and_descriptions_are_the_same_on_all_ways_out(busy: BrickProfiler) -> None:
    source = reading(busy)
    reader = InMemoryMetricReader()
    observe(MeterProvider([reader]), lambda: source)

    pushed = translated_names(metrics_data(source, resource=Resource({}), start_unix_ns=1, now_unix_ns=2))
    observed = translated_names(reader.get_metrics_data())

    for families in (scraped(source), scraped_open(source)):
        pulled = {sample_name(family): family.documentation for family in families.values()}
        assert pulled == pushed
        assert {name: said for name, said in pulled.items() if "duration" not in name} == observed
    assert set(pushed) == {
        *("brick_step_duration_seconds", "brick_duration_seconds", "brick_finalize_duration_seconds"),
        *("brick_time_seconds_total", "brick_calls_total", "brick_elements_total", "brick_io_bytes_total"),
        *("brick_tokens_total", "brick_records_dropped_total"),
        *("brick_budget_limit_seconds", "brick_budget_violations_total"),
    }


def test_labels_and_values_are_those_that_are_pushed(busy: BrickProfiler) -> None:
    source = reading(busy)
    data = metrics_data(source, resource=Resource({}), start_unix_ns=1, now_unix_ns=2)
    expected: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        is_sum = isinstance(metric.data, Sum)
        name = translated(metric.name, metric.unit or "", monotonic=is_sum)
        for point in metric.data.data_points:
            labels = {key.replace(".", "_"): str(value) for key, value in (point.attributes or {}).items()}
            key: Any = frozenset(labels.items())
            if is_sum or isinstance(metric.data, Gauge):
                expected[name, key] = point.value
                continue
            expected[f"{name}_count", key], expected[f"{name}_sum", key] = point.count, point.sum
            bounds = (*map(prometheus_client.utils.floatToGoString, point.explicit_bounds), "+Inf")
            for bound, below in zip(bounds, accumulate(point.bucket_counts), strict=True):
                expected[f"{name}_bucket", key | {("le", bound)}] = below

    for families in (scraped(source), scraped_open(source)):
        found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families.values()
            for sample in family.samples
        }
        assert found == expected


def test_units_are_named_where_the_format_has_them(busy: BrickProfiler) -> None:
    units = {family.name: family.unit for family in scraped_open(reading(busy)).values() if family.unit}

    assert units == {
        **dict.fromkeys(
            ("brick_step_duration_seconds", "brick_duration_seconds", "brick_finalize_duration_seconds"), "seconds"
        ),
        "brick_time_seconds": "seconds",
        "brick_io_bytes": "bytes",
        "brick_budget_limit_seconds": "seconds",
    }


def test_without_samples_the_text_is_empty() -> None:
    assert prometheus_client.generate_latest(registry_of(MetricSource(Tables(), {}))) == b""


def test_counts_beyond_63_bits_are_numbers_too(profiler: BrickProfiler) -> None:
    for _ in range(3):
        with profiler.step(phase="decode"), profiler.brick("B", elements=MOST):
            pass

    (sample,) = scraped(reading(profiler))["brick_elements"].samples
    assert sample.value == float(3 * MOST)


def test_exemplars_carry_ids_value_and_time(busy: BrickProfiler) -> None:
    tables = ExemplarTables()
    tables.bricks.grow(Phase.Decode + 1)
    for table, bucket, value_ns in ((tables.bricks, 1, 1_500), (tables.steps, 3, 3_001_500)):
        place = (int(Phase.Decode), bucket)
        table.span_id[place], table.trace_high[place], table.trace_low[place] = 0xAB, 0xC, 0xD
        table.value_ns[place], table.unix_ns[place] = value_ns, NOW

    families = scraped_open(reading(busy, tables))

    found = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in families.values()
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(found) == {("brick_duration_seconds_bucket", "2e-06"), ("brick_step_duration_seconds_bucket", "0.005")}
    for (name, bound), exemplar in found.items():
        assert exemplar.labels == {"trace_id": f"{0xC << 64 | 0xD:032x}", "span_id": f"{0xAB:016x}"}
        assert exemplar.value == (1.5e-6 if name.startswith("brick_duration") else 3.0015e-3) <= float(bound)
        assert (exemplar.timestamp.sec, exemplar.timestamp.nsec) == divmod(NOW, 10**9)


def test_registering_reads_nothing_and_finds_clashes() -> None:
    reads: list[int] = []

    def source() -> MetricSource:
        reads.append(1)
        return MetricSource(Tables(), {"log_full": 1})

    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    collector = BrickCollector(source)
    registry.register(collector)
    assert reads == []
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(BrickCollector(source))

    assert b'brick_records_dropped_total{brick_drop_reason="log_full"} 1.0' in prometheus_client.generate_latest(
        registry
    )
    registry.unregister(collector)
    assert prometheus_client.generate_latest(registry) == b""
    assert len(reads) == 1


def test_what_is_described_is_what_can_be_collected(busy: BrickProfiler) -> None:
    source = reading(busy)
    collector = BrickCollector(lambda: source)

    described = [(family.name, family.type, family.documentation, family.unit) for family in collector.describe()]

    assert described == [
        (family.name, family.type, family.documentation, family.unit) for family in collector.collect()
    ]
    assert all(family.samples == [] for family in collector.describe())


def test_a_source_that_raises_does_not_take_the_metrics_of_others_away(caplog: pytest.LogCaptureFixture) -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(BrickCollector(lambda: 1 // 0))  # pyright: ignore[reportArgumentType]
    prometheus_client.Counter("theirs", "of somebody else", registry=registry).inc()

    for _ in range(2):
        assert b"theirs_total 1.0" in prometheus_client.generate_latest(registry)
    assert [record.message for record in caplog.records] == ["statistics could not be read for Prometheus"]


def test_every_unit_of_ours_has_its_word() -> None:
    from otel_brick.export.prometheus import prometheus_name

    for metric in semconv.METRICS:
        if metric.instrument != "gauge" or metric.unit != "1":
            assert prometheus_name(metric) == translated(metric.name, metric.unit, monotonic=False)


def test_the_client_is_needed_only_to_collect() -> None:
    root = Path(otel_brick.__file__).parents[1]
    code = (
        "import sys; sys.modules['prometheus_client'] = None; from otel_brick.export.prometheus import BrickCollector"
    )
    subprocess.run(
        [sys.executable, "-c", f"{code}; BrickCollector(lambda: None)"],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_a_profiler_gives_a_collector_of_its_statistics() -> None:
    profiler = BrickProfiler.enabled()
    with profiler.step(phase="decode", tokens=3), profiler.brick("RmsNorm", elements=5):
        pass
    registry = prometheus_client.CollectorRegistry()
    registry.register(profiler.prometheus_collector())

    labels = {"brick_name": "RmsNorm", "brick_category": "norm", "brick_phase": "decode"}
    assert registry.get_sample_value("brick_calls_total", labels) == 1
    assert registry.get_sample_value("brick_tokens_total", {"brick_phase": "decode"}) == 3
    profiler.shutdown()
