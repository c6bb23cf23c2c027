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


def bucket_of(duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Position in the grid, shape (n,); 0 ns goes with 1 ns."""
    return np.minimum(np.searchsorted(UPPER_NS, duration_ns), BUCKETS - 1)


def explicit_bucket_of(duration_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Position among the explicit metric buckets, shape (n,)."""
    return np.searchsorted(EXPLICIT_UPPER_NS, duration_ns)


def percentile(counts: NDArray[np.int64], percent: float, low_ns: int, high_ns: int) -> float | None:
    """The duration in nanoseconds at or below which `percent` of the samples lie.

    Within a bucket samples are taken as evenly spread; the smallest and largest duration seen bound the result, so a
    bucket's width of 2.2 % bounds the error.

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
