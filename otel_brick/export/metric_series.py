"""What the statistics say as metrics: the series of every counter, gauge and histogram, the same for every way out.

A `MetricSource` flows in, whose tables nobody changes meanwhile; exact integers flow out, times in nanoseconds. The
modules that send them only translate, so a name, an attribute or a value can not differ between two ways out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from .. import semconv
from ..record.descriptors import printable
from ..stats.table import PHASES
from ..taxonomy import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..semconv import Metric
    from ..stats.reader import Tables
    from ..stats.table import Table

Labels = dict[str, str]
"""Attributes of one series, in the order of its `Metric`."""

NS_PER_S: Final = 1_000_000_000
MAX_INTEGER: Final = (1 << 63) - 1
"""The largest integer that an OTLP data point holds."""
COUNTERS: Final = (
    semconv.METRIC_BRICK_TIME,
    semconv.METRIC_BRICK_CALLS,
    semconv.METRIC_BRICK_ELEMENTS,
    semconv.METRIC_BRICK_IO,
    semconv.METRIC_BRICK_TOKENS,
    semconv.METRIC_BRICK_BUDGET_VIOLATIONS,
    semconv.METRIC_BRICK_RECORDS_DROPPED,
)
GAUGES: Final = (semconv.METRIC_BRICK_BUDGET_LIMIT,)
HISTOGRAMS: Final = (
    semconv.METRIC_BRICK_STEP_DURATION,
    semconv.METRIC_BRICK_DURATION,
    semconv.METRIC_BRICK_FINALIZE_DURATION,
)
DROP_REASONS: Final = next(
    attribute.values for attribute in semconv.ATTRIBUTES if attribute.name == semconv.BRICK_DROP_REASON
)
_IO_COLUMNS: Final = (("read", "bytes_read"), ("write", "bytes_written"))


class ExemplarCells(Protocol):
    """One sample with a span for each series and bucket; all arrays have the shape (series, buckets)."""

    @property
    def span_id(self) -> NDArray[np.uint64]:
        """The span that was measured; 0 where there is none."""
        ...

    @property
    def trace_high(self) -> NDArray[np.uint64]:
        """The upper half of its trace id."""
        ...

    @property
    def trace_low(self) -> NDArray[np.uint64]:
        """The lower half of its trace id."""
        ...

    @property
    def value_ns(self) -> NDArray[np.int64]:
        """The measured duration."""
        ...

    @property
    def unix_ns(self) -> NDArray[np.int64]:
        """When it was measured."""
        ...


class Exemplars(Protocol):
    """The samples that metrics point at."""

    @property
    def bricks(self) -> ExemplarCells:
        """By key of the brick table and explicit bucket; keys beyond the arrays have none."""
        ...

    @property
    def steps(self) -> ExemplarCells:
        """By phase and explicit bucket."""
        ...


@dataclass(frozen=True, slots=True)
class MetricSource:
    """One reading of everything that becomes metrics; nothing in it changes while it is read.

    Attributes:
        tables: the statistics.
        losses: counts by reason; only the reasons of `brick.drop.reason` become metrics.
        exemplars: samples that have spans, None without any.
        generation: how often the statistics were forgotten and started again; `losses` are not part of it.
    """

    tables: Tables
    losses: Mapping[str, int]
    exemplars: Exemplars | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Total:
    """A series of a counter.

    Attributes:
        exact: the sum in the metric's unit; in nanoseconds where that is seconds.
    """

    attributes: Labels
    exact: int


@dataclass(frozen=True, slots=True)
class Level:
    """A series of a gauge.

    Attributes:
        exact: the value in the metric's unit; in nanoseconds where that is seconds.
    """

    attributes: Labels
    exact: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A sample with a span, for use as an exemplar."""

    value_ns: int
    unix_ns: int
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """A series of a histogram.

    Attributes:
        buckets: counts in the explicit buckets, one more than the metric has boundaries.
        min_ns, max_ns: the extremes; None where they are not kept.
        grid: counts on the exponential grid, shape (histogram.BUCKETS,); None where that is not kept.
        marks: by explicit bucket.
    """

    attributes: Labels
    count: int
    sum_ns: int
    buckets: list[int]
    min_ns: int | None = None
    max_ns: int | None = None
    grid: NDArray[np.int64] | None = None
    marks: Mapping[int, Mark] = field(default_factory=dict[int, Mark])


def seconds(ns: int) -> float:
    """Nanoseconds as seconds, rounded once."""
    return ns / NS_PER_S


def number(metric: Metric, exact: int) -> int | float:
    """A total or level in the metric's unit; one of 2**63 and more, which OTLP's integers can not hold, as a float."""
    if metric.unit == "s":
        return seconds(exact)
    return exact if exact <= MAX_INTEGER else float(exact)


def totals(source: MetricSource) -> dict[Metric, list[Total]]:
    """The series of all `COUNTERS`, empty lists where nothing was counted.

    Elements, bytes and tokens appear once some were given. Losses appear, zeros too, as soon as anything was counted,
    violations as soon as a brick with a budget was: a rate can not see the first one if that is what brings the series
    into being.
    """
    found: dict[Metric, list[Total]] = {metric: [] for metric in COUNTERS}

    def add(metric: Metric, about: Labels, exact: int) -> None:
        found[metric].append(Total(_chosen(metric, about), exact))

    table = source.tables.bricks
    columns = table.columns
    for key, about in _bricks(table):
        add(semconv.METRIC_BRICK_TIME, about, int(columns["total_ns"][key]))
        add(semconv.METRIC_BRICK_CALLS, about, int(columns["count"][key]))
        if elements := int(columns["elements"][key]):
            add(semconv.METRIC_BRICK_ELEMENTS, about, elements)
        for direction, column in _IO_COLUMNS:
            if moved := int(columns[column][key]):
                add(semconv.METRIC_BRICK_IO, about | {semconv.BRICK_IO_DIRECTION: direction}, moved)
        violations = int(columns["violations"][key])
        if violations or table.names[key // PHASES] in source.tables.budgets_ns:
            add(semconv.METRIC_BRICK_BUDGET_VIOLATIONS, about, violations)
    for phase, about in _phases():
        if tokens := int(source.tables.steps.columns["tokens"][phase]):
            add(semconv.METRIC_BRICK_TOKENS, about, tokens)
    lost = {reason: source.losses.get(reason, 0) for reason in DROP_REASONS}
    if any(lost.values()) or columns["count"].any() or source.tables.steps.columns["count"].any():
        for reason, count in lost.items():
            add(semconv.METRIC_BRICK_RECORDS_DROPPED, {semconv.BRICK_DROP_REASON: reason}, count)
    return found


def levels(source: MetricSource) -> dict[Metric, list[Level]]:
    """The series of all `GAUGES`, empty lists where there is nothing to tell.

    A budget appears when it is stated, whether or not its brick has samples.
    """
    limits = [
        Level({semconv.BRICK_NAME: printable(name)}, budget_ns) for name, budget_ns in source.tables.budgets_ns.items()
    ]
    return {semconv.METRIC_BRICK_BUDGET_LIMIT: limits}


def distributions(source: MetricSource) -> dict[Metric, list[Distribution]]:
    """The series of all `HISTOGRAMS`, empty lists where there are no samples."""
    return {
        semconv.METRIC_BRICK_STEP_DURATION: list(_step_durations(source)),
        semconv.METRIC_BRICK_DURATION: list(_brick_durations(source)),
        semconv.METRIC_BRICK_FINALIZE_DURATION: list(_finalize_durations(source)),
    }


def _step_durations(source: MetricSource) -> Iterator[Distribution]:
    columns = source.tables.steps.columns
    for phase, about in _phases():
        if count := int(columns["count"][phase]):
            yield Distribution(
                _chosen(semconv.METRIC_BRICK_STEP_DURATION, about),
                count,
                int(columns["wall_ns"][phase]),
                columns["explicit"][phase].tolist(),
                grid=columns["grid"][phase],
                marks={} if source.exemplars is None else _marks(source.exemplars.steps, phase),
            )


def _brick_durations(source: MetricSource) -> Iterator[Distribution]:
    table = source.tables.bricks
    columns = table.columns
    for key, about in _bricks(table):
        yield Distribution(
            _chosen(semconv.METRIC_BRICK_DURATION, about),
            int(columns["count"][key]),
            int(columns["total_ns"][key]),
            columns["explicit"][key].tolist(),
            int(columns["min_ns"][key]),
            int(columns["max_ns"][key]),
            table.grid(key),
            {} if source.exemplars is None else _marks(source.exemplars.bricks, key),
        )


def _finalize_durations(source: MetricSource) -> Iterator[Distribution]:
    columns = source.tables.steps.columns
    if count := int(columns["finalize_count"].sum()):
        yield Distribution({}, count, int(columns["finalize_ns"].sum()), columns["finalize_explicit"].tolist())


def _bricks(table: Table) -> Iterator[tuple[int, Labels]]:
    """The keys with samples and what is known of them."""
    keys: list[int] = np.flatnonzero(table.columns["count"]).tolist()
    for key in keys:
        brick, phase = divmod(key, PHASES)
        yield (
            key,
            {
                # A name may hold half a surrogate pair, which would keep all metrics from being encoded.
                semconv.BRICK_NAME: printable(table.names[brick]),
                semconv.BRICK_CATEGORY: table.categories[brick].attribute_value,
                semconv.BRICK_PHASE: Phase(phase).attribute_value,
            },
        )


def _phases() -> Iterator[tuple[Phase, Labels]]:
    for phase in Phase:
        yield phase, {semconv.BRICK_PHASE: phase.attribute_value}


def _chosen(metric: Metric, about: Labels) -> Labels:
    """The attributes that a metric has, as far as they are known."""
    return {key: about[key] for key in metric.attributes if key in about}


def _marks(cells: ExemplarCells, series: int) -> dict[int, Mark]:
    if series >= len(cells.span_id):
        return {}
    return {
        bucket: Mark(
            int(cells.value_ns[series, bucket]),
            int(cells.unix_ns[series, bucket]),
            int(cells.trace_high[series, bucket]) << 64 | int(cells.trace_low[series, bucket]),
            int(cells.span_id[series, bucket]),
        )
        for bucket in np.flatnonzero(cells.span_id[series]).tolist()
    }
