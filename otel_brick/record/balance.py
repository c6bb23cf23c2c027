"""Matching of entries and exits by their balance, never by their times.

`match_lanes` is the way in: well-formed lanes are matched all at once, and only a lane whose scopes were left open,
closed twice or closed out of order is walked event by event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Matched:
    """Rows as positions of events, in the order of their entries.

    Attributes:
        entry, exit: int64, positions; an exit of -1 means that there was none.
        parent: int64, position of the parent's entry, -1 for none.
        out_of_order: bool, closed while another row was innermost.
        closed_twice: how many exits had no open entry.
    """

    entry: NDArray[np.int64]
    exit: NDArray[np.int64]
    parent: NDArray[np.int64]
    out_of_order: NDArray[np.bool_]
    closed_twice: int = 0


def _depth(code: NDArray[np.int64]) -> NDArray[np.int32]:
    """How many rows are open after each event."""
    # The sign bit, shifted, is -1 for exits; cheaper than a choice.
    return np.cumsum(((code >> 63) * 2 + 1).astype(np.int8), dtype=np.int32)


def _unbalanced(depth: NDArray[np.int32], heads: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which lanes have an exit without an entry, or entries left over; `heads` is where each lane begins."""
    ends = depth[np.append(heads[1:], len(depth)) - 1]
    before = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
    return (ends != before) | (np.minimum.reduceat(depth, heads) < before)


def match(code: NDArray[np.int64], depth: NDArray[np.int32] | None = None) -> Matched:
    """Match balanced lanes in sequence.

    At any depth entries and exits alternate, so a stable sort by depth puts each exit right behind its entry, and the
    children of one parent one behind the other; the first of them is the one whose entry follows its parent's. Whether
    an entry and its exit have the same label is for the caller to check.
    """
    if depth is None:
        depth = _depth(code)
    is_exit = code < 0
    level = depth + is_exit
    order = np.argsort(level.astype(np.int16) if len(level) and level.max() < 1 << 15 else level, kind="stable")
    entry, exit_ = order[0::2], order[1::2]
    count = len(entry)
    entries = np.flatnonzero(~is_exit)
    matched = Matched(entries, np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.bool_))
    roots = int(np.count_nonzero(level[entries] == 1))
    parent = np.full(count, -1, np.int64)
    if roots < count:
        nested = entry[roots:]
        first = np.maximum.accumulate(np.where(is_exit[nested - 1], 0, np.arange(count - roots)))
        parent[roots:] = nested[first] - 1
    rank = np.empty(len(code), np.int32)
    rank[entries] = np.arange(count, dtype=np.int32)
    row = rank[entry]
    matched.exit[row] = exit_
    matched.parent[row] = parent
    return matched


def match_lanes(code: NDArray[np.int64], label: NDArray[np.int64], heads: NDArray[np.int64]) -> Matched:
    """Match any lanes in sequence, the well-formed ones at once and the others one by one.

    Args:
        code: shape (n,), n > 0.
        label: shape (n,), not negative; an exit belongs to an entry of its own label.
        heads: where each lane begins; every lane has at least one event.
    """
    depth = _depth(code)
    bad = _unbalanced(depth, heads)
    if not bad.any():
        matched = match(code, depth)
        wrong = label[matched.entry] != label[matched.exit]
        if not wrong.any():
            return matched
        bad[np.searchsorted(heads, matched.entry[wrong], side="right") - 1] = True
    ends = np.append(heads, len(code))
    lane = np.repeat(np.arange(len(heads)), np.diff(ends))
    bounds: list[int] = ends.tolist()
    while True:
        good = np.flatnonzero(~bad[lane])
        matched = match(code[good])
        entry, exit_ = good[matched.entry], good[matched.exit]
        wrong = label[entry] != label[exit_]
        if not wrong.any():
            break
        bad[lane[entry[wrong]]] = True
    parts = [_moved(matched, good)]
    parts += [
        _moved(
            repair(code[bounds[i] : bounds[i + 1]], label[bounds[i] : bounds[i + 1]]),
            np.arange(bounds[i], bounds[i + 1]),
        )
        for i in cast("list[int]", np.flatnonzero(bad).tolist())
    ]
    order = np.argsort(np.concatenate([part.entry for part in parts]), kind="stable")
    return Matched(
        np.concatenate([part.entry for part in parts])[order],
        np.concatenate([part.exit for part in parts])[order],
        np.concatenate([part.parent for part in parts])[order],
        np.concatenate([part.out_of_order for part in parts])[order],
        sum(part.closed_twice for part in parts),
    )


def _moved(matched: Matched, positions: NDArray[np.int64]) -> Matched:
    """The same rows with positions of the whole event array; -1 stays -1."""
    positions = np.append(positions, -1)
    return Matched(
        positions[matched.entry],
        positions[matched.exit],
        positions[matched.parent],
        matched.out_of_order,
        matched.closed_twice,
    )


def repair(code: NDArray[np.int64], label: NDArray[np.int64]) -> Matched:
    """Match one malformed lane: an exit closes the latest open entry of its label.

    A row that was not innermost when it closed hangs below the step (no parent), and what was open inside it goes to
    its former parent; entries that no exit closes keep their place.
    """
    entries: list[int] = []
    exits: dict[int, int] = {}
    parents: dict[int, int] = {}
    out_of_order: set[int] = set()
    open_of_label: dict[int, list[int]] = {}
    inside: dict[int, list[int]] = {}
    stack: list[int] = []
    closed_twice = 0
    for position, (value, own) in enumerate(zip(code.tolist(), label.tolist(), strict=True)):
        while stack and stack[-1] in exits:
            stack.pop()
        if value >= 0:
            entries.append(position)
            above = parents[position] = stack[-1] if stack else -1
            inside.setdefault(above, []).append(position)
            stack.append(position)
            open_of_label.setdefault(own, []).append(position)
            continue
        candidates = open_of_label.get(own)
        if not candidates:
            closed_twice += 1
            continue
        entry = candidates.pop()
        exits[entry] = position
        if stack[-1] != entry:
            out_of_order.add(entry)
            for inner in inside.pop(entry, ()):
                if inner not in exits:
                    parents[inner] = parents[entry]
                    inside.setdefault(parents[entry], []).append(inner)
            parents[entry] = -1
    return Matched(
        np.array(entries, np.int64),
        np.array([exits.get(entry, -1) for entry in entries], np.int64),
        np.array([parents[entry] for entry in entries], np.int64),
        np.array([entry in out_of_order for entry in entries], np.bool_),
        closed_twice,
    )
