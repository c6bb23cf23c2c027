"""The statistics table: one row for each brick and phase, fed with whole batches and merged exactly.

Sums that could pass 63 bits (time, squares, elements, bytes) are added in two halves and kept as Python integers, so no
total of a brick ever wraps or rounds, and merging tables in any order gives the same table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..record.batch import COMPRESSED, LAUNCH_SPACING, LEFT_OPEN, OPEN, Batch
from ..record.intervals import heads_of
from ..taxonomy import BrickCategory, BrickId, Phase, TimingSource
from . import histogram

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.descriptors import Registry

PHASES: Final = len(Phase)
MAX_LAYERS: Final = 4_096
NO_MINIMUM: Final = (1 << 63) - 1

SUMS: Final = ("count", "failures", "violations", "launch_spacing")
"""Columns of 64-bit sums."""
WIDE_SUMS: Final = (
    "total_ns",
    "exclusive_ns",
    "sum_of_squares",
    "elements",
    "bytes_read",
    "bytes_written",
    "uncompressed",
    "compressed",
)
"""Columns of unbounded integer sums; the last two cover samples with a compressed form only."""


class Table:
    """Statistics of one profiler, or of several after `merge`.

    A key is `brick * PHASES + phase`, where `brick` indexes `names`.

    Attributes:
        names, categories: the bricks; the known ones come first, in the order of `BrickId`.
        columns: the arrays of `SUMS` and `WIDE_SUMS`, and `min_ns`, `max_ns`, shape (keys,); `sources`, shape
            (keys, 3), counts by `TimingSource`; `explicit`, shape (keys, 20), counts in the explicit metric buckets.
        layer_count, layer_ns: int64, shape (layers, bricks), calls and inclusive nanoseconds by layer; they hold 292
            years of one brick in one layer.
    """

    def __init__(self) -> None:
        self.names: list[str] = [brick.name for brick in BrickId]
        self.categories: list[BrickCategory] = [brick.category for brick in BrickId]
        self.columns = _columns(len(self.names))
        self._grid_row: NDArray[np.int32] = np.full(len(self.names) * PHASES, -1, np.int32)
        self._grid: NDArray[np.int64] = np.zeros((0, histogram.BUCKETS), np.int64)
        self.layer_count: NDArray[np.int64] = np.zeros((0, len(self.names)), np.int64)
        self.layer_ns: NDArray[np.int64] = np.zeros((0, len(self.names)), np.int64)
        self.layers_beyond = 0

    def grid(self, key: int) -> NDArray[np.int64]:
        """The duration histogram of a key, shape (BUCKETS,); zeros when it has no samples."""
        row = int(self._grid_row[key])
        return self._grid[row] if row >= 0 else np.zeros(histogram.BUCKETS, np.int64)

    def add(self, batch: Batch, registry: Registry) -> None:
        """Count the finished brick rows of a batch."""
        brick = registry.descriptor_brick.data[batch.descriptor]
        rows = np.flatnonzero((brick >= 0) & (batch.flags & (LEFT_OPEN | OPEN) == 0))
        if not len(rows):
            return
        self._adopt(registry.brick_names, registry.brick_categories)
        phase_of_step = np.array([step.phase for step in batch.steps], np.int64)
        brick = brick[rows]
        key = brick * PHASES + phase_of_step[batch.step[rows]]
        order = np.argsort(key.astype(np.uint16), kind="stable")
        rows, key = rows[order], key[order]
        heads = heads_of(key)
        keys = key[heads]
        duration = batch.end[rows] - batch.start[rows]
        columns = self.columns
        columns["count"][keys] += np.diff(heads, append=len(rows))
        columns["total_ns"][keys] += _exact_sums(duration, heads)
        columns["exclusive_ns"][keys] += _exact_sums(batch.exclusive[rows], heads)
        failed = batch.error[rows] >= 0
        if failed.any():
            columns["failures"][keys] += np.add.reduceat(failed.astype(np.int64), heads)
        spaced = batch.flags[rows] & LAUNCH_SPACING != 0
        if spaced.any():
            columns["launch_spacing"][keys] += np.add.reduceat(spaced.astype(np.int64), heads)
        if batch.budgets is not None:
            exceeded = duration > batch.budgets[key // PHASES]
            columns["violations"][keys] += np.add.reduceat(exceeded.astype(np.int64), heads)
        columns["min_ns"][keys] = np.minimum(columns["min_ns"][keys], np.minimum.reduceat(duration, heads))
        columns["max_ns"][keys] = np.maximum(columns["max_ns"][keys], np.maximum.reduceat(duration, heads))
        columns["sum_of_squares"][keys] += _sums_of_squares(duration, heads)
        for name, column in (
            ("elements", batch.elements),
            ("bytes_read", batch.bytes_read),
            ("bytes_written", batch.bytes_written),
        ):
            values = column[rows]
            if values.max() > 0:
                columns[name][keys] += _exact_sums(np.maximum(values, 0), heads)
        compressed = batch.flags[rows] & COMPRESSED != 0
        if compressed.any():
            read, written = np.maximum(batch.bytes_read[rows], 0), np.maximum(batch.bytes_written[rows], 0)
            columns["uncompressed"][keys] += _exact_sums(np.where(compressed, read, 0), heads)
            columns["compressed"][keys] += _exact_sums(np.where(compressed, written, 0), heads)
        _count(columns["sources"], key, batch.source[rows])
        _count(columns["explicit"], key, histogram.explicit_bucket_of(duration))
        self._give_grids(keys)
        _count(self._grid, self._grid_row[key], histogram.bucket_of(duration))
        self._add_layers(batch.layer[rows], key // PHASES, duration)

    def merge(self, other: Table) -> None:
        """Add another table to this one; bricks are matched by name."""
        mine = self._adopt(other.names, other.categories)
        keys = (mine[:, np.newaxis] * PHASES + np.arange(PHASES)).ravel()
        for name, whole in other.columns.items():
            theirs = whole[: len(keys)]
            column = self.columns[name]
            if name == "min_ns":
                column[keys] = np.minimum(column[keys], theirs)
            elif name == "max_ns":
                column[keys] = np.maximum(column[keys], theirs)
            else:
                column[keys] += theirs
        used = np.flatnonzero(other._grid_row[: len(keys)] >= 0)
        self._give_grids(keys[used])
        self._grid[self._grid_row[keys[used]]] += other._grid[other._grid_row[used]]
        layers = len(other.layer_count)
        self._give_layers(layers)
        columns = slice(None, len(mine))
        self.layer_count[:layers, mine] += other.layer_count[:, columns]
        self.layer_ns[:layers, mine] += other.layer_ns[:, columns]
        self.layers_beyond += other.layers_beyond

    def _adopt(self, names: list[str], categories: list[BrickCategory]) -> NDArray[np.int64]:
        """Know these bricks too; returns their indexes here."""
        # Copies, since a registry goes on growing; it appends to the categories last.
        categories = list(categories)
        names = names[: len(categories)]
        if self.names != names or self.categories != categories:
            known = {name: index for index, name in enumerate(self.names)}
            for name, category in zip(names, categories, strict=True):
                if name not in known:
                    known[name] = len(self.names)
                    self.names.append(name)
                    self.categories.append(category)
                elif self.categories[known[name]] is not category:
                    self.categories[known[name]] = _settled(self.categories[known[name]], category)
            self._grow(len(self.names))
            return np.array([known[name] for name in names], np.int64)
        return np.arange(len(names))

    def _grow(self, bricks: int) -> None:
        have = len(self._grid_row) // PHASES
        if bricks <= have:
            return
        more = max(bricks - have, have)
        for name, extra in _columns(more).items():
            self.columns[name] = np.concatenate((self.columns[name], extra))
        self._grid_row = np.concatenate((self._grid_row, np.full(more * PHASES, -1, np.int32)))
        self.layer_count = np.pad(self.layer_count, ((0, 0), (0, more)))
        self.layer_ns = np.pad(self.layer_ns, ((0, 0), (0, more)))

    def _give_grids(self, keys: NDArray[np.int64]) -> None:
        new = keys[self._grid_row[keys] < 0]
        if len(new):
            first = len(self._grid)
            self._grid_row[new] = np.arange(first, first + len(new))
            self._grid = np.concatenate((self._grid, np.zeros((len(new), histogram.BUCKETS), np.int64)))

    def _give_layers(self, layers: int) -> None:
        missing = layers - len(self.layer_count)
        if missing > 0:
            self.layer_count = np.pad(self.layer_count, ((0, missing), (0, 0)))
            self.layer_ns = np.pad(self.layer_ns, ((0, missing), (0, 0)))

    def _add_layers(self, layer: NDArray[np.int32], brick: NDArray[np.int64], duration: NDArray[np.int64]) -> None:
        known = (layer >= 0) & (layer < MAX_LAYERS)
        self.layers_beyond += int(np.count_nonzero(layer >= MAX_LAYERS))
        if not known.any():
            return
        layer, brick = layer[known], brick[known]
        self._give_layers(int(layer.max()) + 1)
        _count(self.layer_count, layer, brick)
        np.add.at(
            np.reshape(self.layer_ns, -1), layer.astype(np.int64) * self.layer_ns.shape[1] + brick, duration[known]
        )


def _settled(one: BrickCategory, other: BrickCategory) -> BrickCategory:
    """The category of a brick that two programs put into different ones: `Other` gives way, then the smaller index."""
    given = [category for category in (one, other) if category is not BrickCategory.Other]
    return min(given, key=lambda category: category.value)


def _columns(bricks: int) -> dict[str, NDArray[Any]]:
    keys = bricks * PHASES
    columns: dict[str, NDArray[Any]] = {name: np.zeros(keys, np.int64) for name in SUMS}
    columns |= {name: np.full(keys, 0, object) for name in WIDE_SUMS}
    columns["min_ns"] = np.full(keys, NO_MINIMUM, np.int64)
    columns["max_ns"] = np.zeros(keys, np.int64)
    columns["sources"] = np.zeros((keys, len(TimingSource)), np.int64)
    columns["explicit"] = np.zeros((keys, len(histogram.EXPLICIT_UPPER_NS) + 1), np.int64)
    return columns


def _count(table: NDArray[np.int64], row: NDArray[np.integer], column: NDArray[np.integer]) -> None:
    """Add one at each (row, column); a flat index is three times as fast as a pair. The table must be C-contiguous."""
    np.add.at(np.reshape(table, -1), row.astype(np.int64) * table.shape[1] + column, 1)


def _exact_sums(values: NDArray[np.int64], heads: NDArray[np.int64]) -> NDArray[np.object_]:
    """Sums of 64-bit values that are not negative from each head to the next, as Python integers."""
    if len(values) * int(values.max()) < 1 << 63:
        return _as_integers(np.add.reduceat(values, heads))
    low = np.add.reduceat(values & 0xFFFFFFFF, heads)
    high = np.add.reduceat(values >> 32, heads)
    return (_as_integers(high) << 32) + _as_integers(low)


def _as_integers(values: NDArray[Any]) -> NDArray[np.object_]:
    """The same numbers as Python integers."""
    return values.astype(np.object_)


def _sums_of_squares(values: NDArray[np.int64], heads: NDArray[np.int64]) -> NDArray[np.object_]:
    """Exact sums of squares of values from 0 to 2**62 - 1, as Python integers."""
    if int(values.max()) < 1 << 31:
        return _exact_sums(values * values, heads)
    low, high = values & 0x7FFFFFFF, values >> 31
    sums = _exact_sums(low * low, heads)
    sums += _exact_sums(low * high, heads) << 32
    sums += _exact_sums(high * high, heads) << 62
    return sums
