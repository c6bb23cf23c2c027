"""Unions of time intervals, many groups at once, in exact integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def union_ns(
    group: NDArray[np.integer], start: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Length of the union of each group's intervals.

    Args:
        group: shape (n,), any integers.
        start, end: shape (n,), nanoseconds; an interval whose end lies before its start is empty.

    Returns:
        The distinct groups, ascending, and for each the nanoseconds covered by at least one of its intervals.
    """
    if not len(group):
        return group, np.empty(0, np.int64)
    if np.any(group[1:] < group[:-1]):
        order = np.argsort(group, kind="stable")
        group, start, end = group[order], start[order], end[order]
    heads = heads_of(group)
    number = np.repeat(np.arange(len(heads)), np.diff(heads, append=len(group)))
    if np.any((start[1:] < start[:-1]) & (number[1:] == number[:-1])):
        order = np.lexsort((start, group))
        start, end = start[order], end[order]
    # Put the groups one after another on a common axis, so that one running maximum serves all of them.
    base = start[heads]
    length = np.maximum(np.maximum.reduceat(end, heads) - base, 0)
    if len(heads) > 1 and np.sum(length, dtype=np.float64) > 1 << 62:
        return _in_halves(group, start, end, int(heads[len(heads) // 2]))
    shift = (np.cumsum(length) - length - base)[number]
    start, end = start + shift, end + shift
    reached = np.maximum.accumulate(end)
    begin = np.empty_like(start)
    begin[0] = start[0]
    np.maximum(start[1:], reached[:-1], out=begin[1:])
    covered = np.maximum(end - begin, 0)
    return group[heads], np.add.reduceat(covered, heads)


def _in_halves(
    group: NDArray[np.integer], start: NDArray[np.int64], end: NDArray[np.int64], middle: int
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """The unions of groups that are too long for one axis."""
    first, second = slice(None, middle), slice(middle, None)
    groups, lengths = union_ns(group[first], start[first], end[first])
    more_groups, more_lengths = union_ns(group[second], start[second], end[second])
    return np.concatenate((groups, more_groups)), np.concatenate((lengths, more_lengths))


def exact_sum(values: NDArray[np.int64]) -> int:
    """The sum of values that are not negative, however large."""
    if len(values) * int(values.max(initial=0)) < 1 << 63:
        return int(values.sum())
    return sum(values.tolist())


def heads_of(key: NDArray[np.integer]) -> NDArray[np.intp]:
    """Where runs of equal keys begin."""
    first = np.ones(len(key), np.bool_)
    np.not_equal(key[1:], key[:-1], out=first[1:])
    return np.flatnonzero(first)
