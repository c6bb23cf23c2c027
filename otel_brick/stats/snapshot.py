"""Snapshots: frozen views of the statistics of one brick, category or layer, with their derived figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..taxonomy import BrickBottleneck, BrickCategory, Phase, TimingSource
from . import histogram
from .table import NO_MINIMUM, PHASES, SUMS, WIDE_SUMS, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True, slots=True)
class BrickStats:
    """One brick's samples; figures that have no data are None.

    Attributes:
        total_ns: inclusive time, nested bricks counted in.
        exclusive_ns: time not covered by bricks directly below on the same lane; sums up over bricks.
        sum_of_squares: of the durations, ns squared.
        total_elements, bytes_read, bytes_written: what callers gave, summed.
        failures: samples that ended with an exception.
        budget_ns: the longest time that the user allows a sample; None without a budget.
        budget_violations: samples whose inclusive time was greater than the budget in force when they ended.
        launch_spacing: samples that end at the launch of the next one, by `finalize` with an end; no device time.
        timing_source: where the durations came from; None when samples differ or there are none.
    """

    name: str
    category: BrickCategory
    count: int
    total_ns: int
    exclusive_ns: int
    min_ns: int | None
    max_ns: int | None
    sum_of_squares: int
    total_elements: int
    bytes_read: int
    bytes_written: int
    uncompressed_bytes: int
    compressed_bytes: int
    failures: int
    timing_source: TimingSource | None
    bottleneck: BrickBottleneck
    budget_ns: int | None
    budget_violations: int
    launch_spacing: int
    _grid: NDArray[np.int64] = field(repr=False, compare=False)

    @property
    def avg_us(self) -> float | None:
        """Mean inclusive duration, microseconds."""
        return self.total_ns / self.count / 1000 if self.count else None

    @property
    def min_us(self) -> float | None:
        """Shortest duration, microseconds."""
        return None if self.min_ns is None else self.min_ns / 1000

    @property
    def max_us(self) -> float | None:
        """Longest duration, microseconds."""
        return None if self.max_ns is None else self.max_ns / 1000

    @property
    def std_us(self) -> float | None:
        """Standard deviation of the durations over the population, microseconds."""
        if not self.count:
            return None
        return math.sqrt(self.count * self.sum_of_squares - self.total_ns**2) / self.count / 1000

    @property
    def cv(self) -> float | None:
        """Coefficient of variation, standard deviation over mean, as a fraction."""
        return None if self.std_us is None or not self.avg_us else self.std_us / self.avg_us

    def percentile_us(self, percent: float) -> float | None:
        """A percentile of the durations in microseconds, within the 2.2 % of a histogram bucket.

        Raises:
            ValueError: `percent` is not from 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be from 0 to 100; got {percent!r}")
        if self.min_ns is None or self.max_ns is None:
            return None
        value = histogram.percentile(self._grid, percent, self.min_ns, self.max_ns)
        return None if value is None else value / 1000

    @property
    def p50_us(self) -> float | None:
        """Median duration, microseconds."""
        return self.percentile_us(50)

    @property
    def p99_us(self) -> float | None:
        """99th percentile of the durations, microseconds."""
        return self.percentile_us(99)

    @property
    def throughput(self) -> float | None:
        """Elements per second of inclusive time; None without elements."""
        return _ratio(self.total_elements, self.total_ns / 1e9) if self.total_elements else None

    @property
    def total_bytes(self) -> int:
        """Bytes read and written; of samples with a compressed form, the uncompressed bytes only."""
        return self.bytes_read + self.bytes_written - self.compressed_bytes

    @property
    def throughput_gbps(self) -> float | None:
        """`total_bytes` per nanosecond of inclusive time, which is GB/s (1e9 bytes); None without bytes."""
        return _ratio(self.total_bytes, self.total_ns) if self.total_bytes else None

    @property
    def compression_ratio(self) -> float | None:
        """Uncompressed over compressed bytes; None where no sample had a compressed form."""
        return _ratio(self.uncompressed_bytes, self.compressed_bytes)


@dataclass(frozen=True, slots=True)
class CategoryStats:
    """The bricks of one category together.

    Attributes:
        total_ns: the sum of exclusive time, so that categories add up to the profiler's `total_ns()`.
    """

    category: BrickCategory
    total_ns: int
    total_elements: int
    count: int

    @property
    def name(self) -> str:
        """The category's display name."""
        return self.category.label

    @property
    def avg_us(self) -> float | None:
        """Mean exclusive duration, microseconds."""
        return self.total_ns / self.count / 1000 if self.count else None

    @property
    def throughput(self) -> float | None:
        """Elements per second of exclusive time; None without elements."""
        return _ratio(self.total_elements, self.total_ns / 1e9) if self.total_elements else None

    def percentage(self, total_ns: float) -> float:
        """Share of a total, in percent; 0.0 for a total of 0.

        Raises:
            ValueError: the total is negative or not finite.
        """
        if not (math.isfinite(total_ns) and total_ns >= 0):
            raise ValueError(f"total_ns must be a finite number that is not negative; got {total_ns!r}")
        return 100.0 * self.total_ns / total_ns if total_ns else 0.0


def brick_stats(
    table: Table,
    index: int,
    bottleneck: BrickBottleneck = BrickBottleneck.Unknown,
    budget_ns: int | None = None,
    phases: Iterable[Phase] = tuple(Phase),
) -> BrickStats:
    """Sum a brick's row of the table over phases."""
    if index >= len(table.names):
        raise IndexError(index)
    keys = [index * PHASES + phase for phase in phases]
    sums = {name: int(table.columns[name][keys].sum()) for name in (*SUMS, *WIDE_SUMS)}
    low, high = int(table.columns["min_ns"][keys].min()), int(table.columns["max_ns"][keys].max())
    sources = np.flatnonzero(table.columns["sources"][keys].sum(axis=0))
    grid = np.sum([table.grid(key) for key in keys], axis=0)
    return BrickStats(
        name=table.names[index],
        category=table.categories[index],
        count=sums["count"],
        total_ns=sums["total_ns"],
        exclusive_ns=sums["exclusive_ns"],
        min_ns=None if low == NO_MINIMUM else low,
        max_ns=high if sums["count"] else None,
        sum_of_squares=sums["sum_of_squares"],
        total_elements=sums["elements"],
        bytes_read=sums["bytes_read"],
        bytes_written=sums["bytes_written"],
        uncompressed_bytes=sums["uncompressed"],
        compressed_bytes=sums["compressed"],
        failures=sums["failures"],
        timing_source=TimingSource(int(sources[0])) if len(sources) == 1 else None,
        bottleneck=bottleneck,
        budget_ns=budget_ns,
        budget_violations=sums["violations"],
        launch_spacing=sums["launch_spacing"],
        _grid=grid,
    )


def category_stats(bricks: Iterable[BrickStats]) -> list[CategoryStats]:
    """Sum bricks into their categories; the list is indexed by `BrickCategory`."""
    groups: list[list[BrickStats]] = [[] for _ in BrickCategory]
    for brick in bricks:
        groups[brick.category.value].append(brick)
    return [
        CategoryStats(
            category,
            sum(brick.exclusive_ns for brick in group),
            sum(brick.total_elements for brick in group),
            sum(brick.count for brick in group),
        )
        for category, group in zip(BrickCategory, groups, strict=True)
    ]
