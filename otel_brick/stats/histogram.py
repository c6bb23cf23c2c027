"""The duration grid: OpenTelemetry's exponential buckets at scale 5, decided in integer nanoseconds.

A bucket's bounds grow by a factor of 2**(1/32), so it is 2.2 % wide: fine enough to see a 5 % change. Bucket `i` of the
grid holds the durations in (2**(i/32), 2**((i+1)/32)] seconds, as in the exponential histogram of the OpenTelemetry
data model. The grid reaches from 1 ns to 73 minutes; what lies outside is counted in the outermost bucket.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from .. import semconv

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCALE: Final = 5
_PER_DOUBLING: Final = 1 << SCALE
OFFSET: Final = math.ceil(math.log2(1e-9) * _PER_DOUBLING) - 1
"""OpenTelemetry's index of the first bucket, the one that holds 1 ns."""
BUCKETS: Final = math.ceil(math.log2((1 << 42) * 1e-9) * _PER_DOUBLING) - OFFSET
UPPER_NS: Final[NDArray[np.int64]] = np.array(
    [math.floor(2 ** ((OFFSET + i + 1) / _PER_DOUBLING) * 1e9) for i in range(BUCKETS)], np.int64
)
"""The largest whole nanosecond in each bucket, shape (BUCKETS,)."""
EXPLICIT_UPPER_NS: Final[NDArray[np.int64]] = np.array(
    [round(bound * 1e9) for bound in semconv.BRICK_DURATION_BUCKETS_S], np.int64
)
"""Upper bounds of the explicit metric buckets; one more bucket holds everything above."""


class Buckets:
    """Finds the bucket of a duration among ascending upper bounds, four times as fast as a binary search.

    The exponent and the first six bits behind the point of a double cut the axis into cells, 64 to a doubling. A cell
    that holds no more than one bound leaves one comparison; bounds must lie at least that far apart.
    """

    def __init__(self, upper: NDArray[np.int64]) -> None:
        last = int(upper[-1])
        count = int(_cells(np.array([last + 1]))[0]) + 1
        place = np.arange(count + 1)
        lowest = np.ceil(np.ldexp(1 + (place % 64) / 64, place // 64)).astype(np.int64)
        lowest[0] = 0
        self._below = np.searchsorted(upper, lowest[:-1])
        if np.any(np.searchsorted(upper, lowest[1:] - 1) - self._below > 1):
            raise ValueError("bounds lie too close together")
        self._upper = np.append(upper, _FOR_EVER)[self._below]
        self._last = last

    def of(self, values: NDArray[np.int64]) -> NDArray[np.intp]:
        """Position of the first bound that is not below each value, shape (n,); beyond the last, their number."""
        cells = _cells(np.minimum(values, self._last + 1))
        return self._below[cells] + (values > self._upper[cells])


_FOR_EVER: Final = (1 << 63) - 1


def _cells(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cell of each value, from 0 for 1 and anything below."""
    bits: NDArray[np.int64] = np.maximum(values, 1).astype(np.float64).view(np.int64)  # pyright: ignore[reportUnknownMemberType]
    return (bits >> (52 - 6)) - (1023 << 6)


_GRID: Final = Buckets(UPPER_NS)


def bucket_of(duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Position in the grid, shape (n,); 0 ns goes with 1 ns."""
    return np.minimum(_GRID.of(duration_ns), BUCKETS - 1)


def explicit_bucket_of(duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Position among the explicit metric buckets, shape (n,)."""
    return np.searchsorted(EXPLICIT_UPPER_NS, duration_ns)


def percentile(counts: NDArray[np.int64], percent: float, low_ns: int, high_ns: int) -> float | None:
    """The duration in nanoseconds at or below which `percent` of the samples lie.

    Within a bucket samples are taken as evenly spread; the smallest and largest duration seen bound the result, so a
    bucket's width of 2.2 %, or 1 ns where that is more, bounds the error.

    Args:
        counts: shape (BUCKETS,).
        percent: from 0 to 100.

    Returns:
        None without samples.
    """
    total = int(counts.sum())
    if not total:
        return None
    rank = percent * total / 100
    upto = np.cumsum(counts)
    bucket = int(np.searchsorted(upto, rank))
    while bucket < BUCKETS - 1 and not counts[bucket]:
        bucket += 1
    below = float(UPPER_NS[bucket - 1]) if bucket else 0.0
    share = (rank - float(upto[bucket] - counts[bucket])) / float(counts[bucket])
    above = float(UPPER_NS[bucket]) if bucket < BUCKETS - 1 else float(high_ns)
    value = below + (above - below) * share
    return min(max(value, float(low_ns)), float(high_ns))
