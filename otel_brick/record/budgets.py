"""Budgets: the longest time that the user allows single bricks.

They are stated by name, also before a brick of that name has been seen. Each batch takes those along that are in force
when it is resolved, so that its statistics and its spans can not disagree. Recording knows nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np

from ..taxonomy import BrickId
from .batch import LEFT_OPEN
from .descriptors import MAX_DYNAMIC_BRICKS
from .timers import elapsed_argument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .batch import Batch
    from .descriptors import Registry
    from .losses import Losses

NO_BUDGET: Final = (1 << 63) - 1
"""Stands for a brick without a budget: no duration is greater."""

WITHIN: Final = 1
EXCEEDED: Final = 2
UNFINISHED: Final = 3
"""The row has a budget, but was left open and so has no duration of its own."""


class Budgets:
    """The budgets of one profiler; called by one thread at a time.

    Attributes:
        by_name: nanoseconds by the brick's name.
    """

    def __init__(self, registry: Registry, losses: Losses) -> None:
        self._registry = registry
        self._losses = losses
        self.by_name: dict[str, int] = {}
        self._by_brick: NDArray[np.int64] | None = None

    def set(self, brick: BrickId | str, budget_ns: int | None) -> None:
        """State or, with None, remove the budget of a brick; names beyond the bound of names are counted instead."""
        name = brick.name if isinstance(brick, BrickId) else brick
        self._by_brick = None
        if budget_ns is None:
            self.by_name.pop(name, None)
        elif isinstance(brick, BrickId) or name in self.by_name or self._has_room():
            self.by_name[name] = budget_ns
        else:
            self._losses.add("name_overflow")

    def _has_room(self) -> bool:
        # The name itself stays unknown to the registry: its first use as a brick may give it a category.
        return len(self.by_name.keys() - BrickId.__members__.keys()) < MAX_DYNAMIC_BRICKS

    def clear(self) -> None:
        """Remove all budgets."""
        self.by_name, self._by_brick = {}, None

    def by_brick(self) -> NDArray[np.int64] | None:
        """What a batch takes along as `Batch.budgets`; nobody changes it any more."""
        if not self.by_name:
            return None
        names = list(self._registry.brick_names)
        if self._by_brick is None or len(self._by_brick) != len(names) + 1:
            self._by_brick = np.array([*(self.by_name.get(name, NO_BUDGET) for name in names), NO_BUDGET], np.int64)
        return self._by_brick


def budget_argument(budget: int | timedelta | None) -> int | None:
    """Turn integer nanoseconds or a `timedelta` into nanoseconds; None stays None.

    Raises:
        TypeError, ValueError: as for `elapsed_argument`, and for a budget of 0.
    """
    if budget is None:
        return None
    number = elapsed_argument(budget, argument="budget")
    if not number:
        raise ValueError("budget must be longer than 0 ns; None removes it")
    return number


@dataclass(frozen=True, slots=True)
class Judged:
    """How the rows of a batch stand to their budgets; arrays of shape (n,).

    Attributes:
        budget: int64, nanoseconds, `NO_BUDGET` for rows without one.
        verdict: int64, `WITHIN`, `EXCEEDED` or `UNFINISHED`; 0 for rows without a budget.
    """

    budget: NDArray[np.int64]
    verdict: NDArray[np.int64]


def judged(batch: Batch, registry: Registry) -> Judged | None:
    """Compare rows with the budgets that the batch took along; None where no row has one."""
    if batch.budgets is None or not len(batch):
        return None
    budget = batch.budgets[registry.descriptor_brick.data[batch.descriptor]]
    if int(budget.min()) == NO_BUDGET:
        return None
    verdict = np.where(batch.end - batch.start > budget, EXCEEDED, WITHIN)
    verdict[batch.flags & LEFT_OPEN != 0] = UNFINISHED
    verdict[budget == NO_BUDGET] = 0
    return Judged(budget, verdict)
