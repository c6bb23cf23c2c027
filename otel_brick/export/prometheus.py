"""Metrics for a Prometheus that scrapes this process: a collector for the registry of `prometheus_client`.

A `MetricSource` flows in at each scrape. Names, labels, units and help texts flow out exactly as the OpenTelemetry
collector translates those that are sent by OTLP, so that a query works whichever way its data came.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from .metric_series import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    NS_PER_S,
    Distribution,
    distributions,
    levels,
    number,
    seconds,
    totals,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric as Family
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Exemplar

    from ..semconv import Metric
    from .metric_series import Labels, Level, MetricSource, Total
else:
    Collector = object  # registries take whatever has its methods

logger = logging.getLogger("otel_brick")

_UNITS: Final = {"s": "seconds", "By": "bytes"}
"""Words of the UCUM units that we use; annotations in braces have none."""


class BrickCollector(Collector):
    """The statistics of a source as Prometheus metrics: `registry.register(BrickCollector(source))`.

    Histograms have the classic buckets of `semconv` and, in the OpenMetrics format, exemplars with `trace_id` and
    `span_id`. A series without samples is absent. A source that raises is logged the first time and leaves our metrics
    out of the scrape, not those of others.
    """

    def __init__(self, source: Callable[[], MetricSource]) -> None:
        """Make a collector.

        Args:
            source: gives a reading, called at each scrape on the scraping thread; nobody may change what it returned.
        """
        self._source = source
        self._warned = False

    def describe(self) -> Iterable[Family]:
        """What there can be, without samples; lets a registry find clashing names without reading anything."""
        yield from (_histogram(metric, []) for metric in HISTOGRAMS)
        yield from (_counter(metric, []) for metric in COUNTERS)
        yield from (_gauge(metric, []) for metric in GAUGES)

    def collect(self) -> Iterable[Family]:
        """The metrics that have samples."""
        try:
            source = self._source()
            found_totals, found_levels, found_distributions = totals(source), levels(source), distributions(source)
        except Exception:
            if not self._warned:
                self._warned = True
                logger.exception("statistics could not be read for Prometheus")
            return
        yield from (_histogram(metric, series) for metric, series in found_distributions.items() if series)
        yield from (_counter(metric, series) for metric, series in found_totals.items() if series)
        yield from (_gauge(metric, series) for metric, series in found_levels.items() if series)


def prometheus_name(metric: Metric) -> str:
    """A metric's name in Prometheus, without the suffixes of its samples."""
    name = metric.name.replace(".", "_")
    unit = _UNITS.get(metric.unit)
    return name if unit is None else f"{name}_{unit}"


def _counter(metric: Metric, series: Sequence[Total]) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    keys, labels = _labels(metric, [total.attributes for total in series])
    family = CounterMetricFamily(
        prometheus_name(metric), metric.description, labels=labels, unit=_UNITS.get(metric.unit, "")
    )
    for total in series:
        family.add_metric(_values(keys, total.attributes), number(metric, total.exact))
    return family


def _gauge(metric: Metric, series: Sequence[Level]) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    keys, labels = _labels(metric, [level.attributes for level in series])
    family = GaugeMetricFamily(
        prometheus_name(metric), metric.description, labels=labels, unit=_UNITS.get(metric.unit, "")
    )
    for level in series:
        family.add_metric(_values(keys, level.attributes), number(metric, level.exact))
    return family


def _histogram(metric: Metric, series: Sequence[Distribution]) -> HistogramMetricFamily:
    from prometheus_client.core import HistogramMetricFamily

    keys, labels = _labels(metric, [one.attributes for one in series])
    family = HistogramMetricFamily(
        prometheus_name(metric), metric.description, labels=labels, unit=_UNITS.get(metric.unit, "")
    )
    for one in series:
        family.add_metric(_values(keys, one.attributes), list(_buckets(metric, one)), seconds(one.sum_ns))
    return family


def _buckets(metric: Metric, series: Distribution) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    from prometheus_client.samples import Exemplar, Timestamp

    bounds = (*map(repr, metric.buckets), "+Inf")
    for index, (bound, below) in enumerate(zip(bounds, accumulate(series.buckets), strict=True)):
        mark = series.marks.get(index)
        if mark is None:
            yield bound, below
        else:
            ids = {"trace_id": f"{mark.trace_id:032x}", "span_id": f"{mark.span_id:016x}"}
            yield bound, below, Exemplar(ids, seconds(mark.value_ns), Timestamp(*divmod(mark.unix_ns, NS_PER_S)))


def _labels(metric: Metric, attributes: Sequence[Labels]) -> tuple[list[str], list[str]]:
    """The attribute keys of a metric that its series have, and the labels for them."""
    keys = [key for key in metric.attributes if any(key in one for one in attributes)]
    return keys, [key.replace(".", "_") for key in keys]


def _values(keys: Sequence[str], attributes: Mapping[str, str]) -> list[str]:
    return [attributes.get(key, "") for key in keys]
