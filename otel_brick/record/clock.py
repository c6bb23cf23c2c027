"""Host time: a monotonic clock to measure with and a Unix clock to place the measurements on the calendar."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Two sources of integer nanoseconds.

    Attributes:
        now: monotonic, read twice per brick, so it should be a C function.
        unix: time since the epoch, read once per step to anchor `now` to the calendar.
    """

    now: Callable[[], int] = time.perf_counter_ns
    unix: Callable[[], int] = time.time_ns
