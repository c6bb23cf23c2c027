"""The statistics as `MetricsData` of the OpenTelemetry SDK, ready for any `MetricExporter`.

A `MetricSource` flows in and cumulative data points flow out, those that the SDK's own instruments would have
produced if every brick had called them. Nothing here runs for each brick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast, get_args

import numpy as np

from .. import semconv
from ..stats import histogram
from ..version import __version__
from .metric_series import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Distribution,
    MetricSource,
    distributions,
    levels,
    number,
    seconds,
    totals,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import Exemplar
    from opentelemetry.sdk.metrics.export import (
        ExponentialHistogramDataPoint,
        HistogramDataPoint,
        Metric,
        MetricsData,
    )
    from opentelemetry.sdk.resources import Resource

Histograms = Literal["explicit", "exponential", "none"]
HISTOGRAM_KINDS: Final[tuple[Histograms, ...]] = get_args(Histograms)


def metrics_data(
    source: MetricSource,
    *,
    resource: Resource,
    start_unix_ns: int,
    now_unix_ns: int,
    histograms: Histograms = "explicit",
) -> MetricsData:
    """Everything counted so far.

    Counts are exact integers up to 2**63 - 1 and floats beyond, sums of time are in seconds, rounded once. A series
    without samples has no point, a metric without points is left out, and without metrics the result is empty.

    Args:
        source: the statistics; nobody may change them until this returns.
        resource: what the metrics are said to come from.
        start_unix_ns: since when the statistics count; it moves on when they are forgotten.
        now_unix_ns: when they were read.
        histograms: `"explicit"` for the buckets of `semconv`; `"exponential"` for buckets of 2.2 % at scale 5, of
            which the first holds 0 ns too and the last everything above 73 minutes; `"none"` for none.
            `brick.finalize.duration` has explicit buckets in both forms.

    Raises:
        ValueError: `histograms` is none of these.
    """
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    if histograms not in HISTOGRAM_KINDS:
        raise ValueError(f"histograms must be one of {', '.join(HISTOGRAM_KINDS)}; got {histograms!r}")
    metrics = _counters(source, start_unix_ns, now_unix_ns) | _gauges(source, now_unix_ns)
    if histograms != "none":
        metrics |= _histograms(source, start_unix_ns, now_unix_ns, exponential=histograms == "exponential")
    ordered = [metrics[metric.name] for metric in semconv.METRICS if metric.name in metrics]
    if not ordered:
        return MetricsData([])
    scope = InstrumentationScope(semconv.SCOPE_NAME, __version__)
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, ordered, "")], resource.schema_url)])


def _counters(source: MetricSource, start_unix_ns: int, now_unix_ns: int) -> dict[str, Metric]:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Metric, NumberDataPoint, Sum

    found = totals(source)
    metrics: dict[str, Metric] = {}
    for metric in COUNTERS:
        points = [
            NumberDataPoint(total.attributes, start_unix_ns, now_unix_ns, number(metric, total.exact))
            for total in found[metric]
        ]
        if points:
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
            metrics[metric.name] = Metric(metric.name, metric.description, metric.unit, data)
    return metrics


def _gauges(source: MetricSource, now_unix_ns: int) -> dict[str, Metric]:
    from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint

    found = levels(source)
    metrics: dict[str, Metric] = {}
    for metric in GAUGES:
        # A gauge has no beginning; 0 stands for that.
        points = [
            NumberDataPoint(level.attributes, 0, now_unix_ns, number(metric, level.exact)) for level in found[metric]
        ]
        if points:
            metrics[metric.name] = Metric(metric.name, metric.description, metric.unit, Gauge(points))
    return metrics


def _histograms(source: MetricSource, start_unix_ns: int, now_unix_ns: int, *, exponential: bool) -> dict[str, Metric]:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, ExponentialHistogram, Histogram, Metric

    found = distributions(source)
    metrics: dict[str, Metric] = {}
    for metric in HISTOGRAMS:
        series = found[metric]
        if not series:
            continue
        data: Histogram | ExponentialHistogram
        if exponential and all(one.grid is not None for one in series):
            fine = [_exponential_point(one, start_unix_ns, now_unix_ns) for one in series]
            data = ExponentialHistogram(fine, AggregationTemporality.CUMULATIVE)
        else:
            points = [_explicit_point(metric.buckets, one, start_unix_ns, now_unix_ns) for one in series]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        metrics[metric.name] = Metric(metric.name, metric.description, metric.unit, data)
    return metrics


def _explicit_point(
    bounds: tuple[float, ...], series: Distribution, start_unix_ns: int, now_unix_ns: int
) -> HistogramDataPoint:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    return HistogramDataPoint(
        series.attributes,
        start_unix_ns,
        now_unix_ns,
        count=series.count,
        sum=seconds(series.sum_ns),
        bucket_counts=series.buckets,
        explicit_bounds=bounds,
        min=_extreme(series.min_ns),
        max=_extreme(series.max_ns),
        exemplars=_exemplars(series),
    )


def _exponential_point(series: Distribution, start_unix_ns: int, now_unix_ns: int) -> ExponentialHistogramDataPoint:
    from opentelemetry.sdk.metrics.export import Buckets, ExponentialHistogramDataPoint

    assert series.grid is not None
    used = np.flatnonzero(series.grid)
    first, last = int(used[0]), int(used[-1])
    return ExponentialHistogramDataPoint(
        series.attributes,
        start_unix_ns,
        now_unix_ns,
        count=series.count,
        sum=seconds(series.sum_ns),
        scale=histogram.SCALE,
        zero_count=0,
        positive=Buckets(histogram.OFFSET + first, series.grid[first : last + 1].tolist()),
        negative=Buckets(0, []),
        flags=0,
        min=_extreme(series.min_ns),
        max=_extreme(series.max_ns),
        exemplars=_exemplars(series),
    )


def _extreme(ns: int | None) -> float:
    """An extreme in seconds; one that is not known is not sent, for which the encoders take None."""
    return cast("float", None) if ns is None else seconds(ns)


def _exemplars(series: Distribution) -> list[Exemplar]:
    from opentelemetry.sdk.metrics import Exemplar

    return [
        Exemplar({}, seconds(mark.value_ns), mark.unix_ns, mark.span_id, mark.trace_id)
        for mark in series.marks.values()
    ]
