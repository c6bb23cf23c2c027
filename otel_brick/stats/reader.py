"""Reading the statistics: the questions that a profiler and a merged set of statistics both answer."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..record.descriptors import printable
from ..taxonomy import BrickBottleneck, BrickId, Phase, TimingSource
from .snapshot import BrickStats, CategoryStats, brick_stats, category_stats
from .steps import MAX_LANES, StepTable
from .table import PHASES, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables behind one set of statistics, and what was said of bricks by hand."""

    bricks: Table = field(default_factory=Table)
    steps: StepTable = field(default_factory=StepTable)
    bottlenecks: Mapping[str, BrickBottleneck] = field(default_factory=dict[str, BrickBottleneck])
    budgets_ns: Mapping[str, int] = field(default_factory=dict[str, int])

    def copy(self) -> Tables:
        """The same statistics in tables of their own."""
        copied = Tables(bottlenecks=dict(self.bottlenecks), budgets_ns=dict(self.budgets_ns))
        copied.bricks.merge(self.bricks)
        copied.steps.merge(self.steps)
        return copied


@dataclass(frozen=True, slots=True)
class LayerMatrix:
    """Calls and time by layer and brick.

    Attributes:
        bricks: names of the columns.
        count: shape (layers, bricks), calls.
        total_ns: shape (layers, bricks), inclusive nanoseconds.
    """

    bricks: tuple[str, ...]
    count: NDArray[np.int64]
    total_ns: NDArray[np.int64]


class StatsReader(ABC):
    """Statistics as frozen snapshots; every call reads a consistent state."""

    @abstractmethod
    def _tables(self) -> AbstractContextManager[Tables]:
        """The tables, unchanged while the context is open."""

    def stats(self, name: BrickId | str, *, phase: Phase | str | None = None, exact: bool = False) -> BrickStats | None:
        """A brick's statistics by name or alias, over all phases or in one; None without samples."""
        wanted = tuple(Phase) if phase is None else (Phase.of(phase),)
        known = name if isinstance(name, BrickId) else BrickId.lookup(name, exact=exact) or printable(name)
        with self._tables() as tables:
            try:
                index = tables.bricks.names.index(known.name if isinstance(known, BrickId) else known)
            except ValueError:
                return None
            found = self._brick(tables, index, wanted)
            return found if found.count else None

    def brick_stats(self, brick: BrickId) -> BrickStats:
        """A known brick's statistics, with or without samples.

        Raises:
            TypeError: not a `BrickId`; `stats` takes names.
        """
        if not isinstance(brick, BrickId):
            raise TypeError(f"brick must be a BrickId, not {type(brick).__name__}; stats() takes names")
        with self._tables() as tables:
            return self._brick(tables, brick.value)

    def all_brick_stats(self) -> list[BrickStats]:
        """All bricks with samples: the known ones by index, then the dynamic ones by first use."""
        with self._tables() as tables:
            count = tables.bricks.columns["count"].reshape(-1, PHASES).sum(axis=1)
            used = np.flatnonzero(count[: len(tables.bricks.names)]).tolist()
            return [self._brick(tables, index) for index in used]

    def all_stats(self) -> dict[str, BrickStats]:
        """Dynamic bricks only, as the reference's deprecated call of this name gives them."""
        warnings.warn("all_stats() leaves known bricks out; use all_brick_stats()", DeprecationWarning, 2)
        known = BrickId.__members__
        return {brick.name: brick for brick in self.all_brick_stats() if brick.name not in known}

    def brick_names(self) -> list[str]:
        """Names of the bricks with samples, in the order of `all_brick_stats`."""
        return [brick.name for brick in self.all_brick_stats()]

    def category_stats(self) -> list[CategoryStats]:
        """One entry for each category, indexed by `BrickCategory`."""
        return category_stats(self.all_brick_stats())

    def layer_matrix(self) -> LayerMatrix:
        """Calls and time of each brick in each layer; rows are layer indexes."""
        with self._tables() as tables:
            table = tables.bricks
            used = np.flatnonzero(table.layer_count.sum(axis=0))
            return LayerMatrix(
                tuple(table.names[int(index)] for index in used),
                table.layer_count[:, used],
                table.layer_ns[:, used],
            )

    def total_ns(self) -> int:
        """Brick time: the sum of all exclusive times, nested bricks counted once."""
        with self._tables() as tables:
            return int(tables.bricks.columns["exclusive_ns"].sum())

    def union_ns(self) -> int:
        """Time of all steps in which at least one brick was open, lanes counted once."""
        with self._tables() as tables:
            return tables.steps.total("union_ns")

    def wall_ns(self) -> int:
        """Time of all steps, from their start to their end."""
        with self._tables() as tables:
            return tables.steps.total("wall_ns")

    def sync_ns(self) -> int:
        """Time that steps waited for the device because of their sync mode; no sample contains it."""
        with self._tables() as tables:
            return tables.steps.total("sync_ns")

    def sample_sources(self) -> dict[TimingSource, int]:
        """How many samples of bricks have their times from where; all sources are present."""
        with self._tables() as tables:
            counts = tables.bricks.columns["sources"].sum(axis=0).tolist()
            return dict(zip(TimingSource, counts, strict=True))

    def step_count(self) -> int:
        """How many steps have ended."""
        with self._tables() as tables:
            return tables.steps.total("count")

    def coverage(self, lane: int | None = None) -> float | None:
        """Share of step time that bricks cover; None without steps.

        Above 1 means that bricks claim time outside their steps, which only measured durations can.

        Args:
            lane: by its number within its step, 0 being the step's own; None for all lanes together.

        Raises:
            ValueError: `lane` is not from 0 to 63.
        """
        with self._tables() as tables:
            if lane is None:
                covered, wall = tables.steps.total("union_ns"), tables.steps.total("wall_ns")
            elif 0 <= lane < MAX_LANES:
                covered = int(tables.steps.lane_union_ns[lane])
                wall = int(tables.steps.lane_wall_ns[lane])
            else:
                raise ValueError(f"lane must be from 0 to {MAX_LANES - 1}; got {lane!r}")
            return covered / wall if wall else None

    def tokens(self) -> int:
        """Tokens given to steps, 0 when none were."""
        with self._tables() as tables:
            return tables.steps.total("tokens")

    def total_tokens(self) -> int:
        """Tokens given to steps; when none were, the sum of all elements, as the reference counts."""
        with self._tables() as tables:
            return tables.steps.total("tokens") or int(tables.bricks.columns["elements"].sum())

    def total_throughput(self) -> float | None:
        """`total_tokens()` per second of brick time; None without brick time."""
        with self._tables():
            total = self.total_ns()
            return self.total_tokens() / (total / 1e9) if total else None

    def tokens_per_sec(self) -> float | None:
        """Tokens given to steps per second of step time; None without tokens.

        The times of steps add up even where steps run beside each other: it is the speed of one step, not the
        throughput of a program that runs many at once.
        """
        with self._tables():
            tokens, wall = self.tokens(), self.wall_ns()
            return tokens * 1e9 / wall if tokens and wall else None

    def phase_tokens_per_sec(self, phase: Phase | str) -> float | None:
        """The same for the steps of one phase."""
        with self._tables() as tables:
            columns = tables.steps.columns
            tokens, wall = int(columns["tokens"][Phase.of(phase)]), int(columns["wall_ns"][Phase.of(phase)])
            return tokens * 1e9 / wall if tokens and wall else None

    def snapshot(self) -> Statistics:
        """A copy that no longer changes and can be merged."""
        with self._tables() as tables:
            return Statistics(tables.copy())

    @staticmethod
    def _brick(tables: Tables, index: int, phases: tuple[Phase, ...] = tuple(Phase)) -> BrickStats:
        name = tables.bricks.names[index]
        bottleneck = tables.bottlenecks.get(name, BrickBottleneck.Unknown)
        return brick_stats(tables.bricks, index, bottleneck, tables.budgets_ns.get(name), phases)


class Statistics(StatsReader):
    """Statistics apart from any profiler; `merge` adds those of threads, processes or ranks exactly."""

    def __init__(self, tables: Tables | None = None) -> None:
        self._own = Tables() if tables is None else tables

    def _tables(self) -> AbstractContextManager[Tables]:
        return nullcontext(self._own)

    def merge(self, *others: Statistics) -> Statistics:
        """The sum of these statistics, in any order and grouping the same; none of them changes.

        Where two of them state a bottleneck or a budget for one brick, the first one's is kept.

        Raises:
            TypeError: something else than `Statistics` was given.
        """
        for other in others:
            if not isinstance(other, Statistics):
                raise TypeError(f"only Statistics can be merged, not {type(other).__name__}; take a snapshot()")
        own = self._own.copy()
        bottlenecks, budgets_ns = own.bottlenecks, own.budgets_ns
        for other in others:
            own.bricks.merge(other._own.bricks)
            own.steps.merge(other._own.steps)
            bottlenecks = {**other._own.bottlenecks, **bottlenecks}
            budgets_ns = {**other._own.budgets_ns, **budgets_ns}
        return Statistics(Tables(own.bricks, own.steps, bottlenecks, budgets_ns))


def rate_argument(name: str, value: float) -> float:
    """Check a share from 0 to 1.

    Raises:
        TypeError, ValueError: not a number, not finite, or outside.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not math.isfinite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1; got {value!r}")
    return float(value)
