"""From device time to host time: anchors, and the line through them.

An anchor is one event whose host time is known to lie in a small interval. Device time is the sum of the differences
between consecutive anchors, so it never rests on one event far away: a difference is a float32 count of milliseconds,
good to 1 us over 10 s and to 250 us over an hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MAX_ANCHORS: Final = 128
DRIFT: Final = 1e-4
"""How much faster or slower than the host's clock a device's may run."""
WIDE_NS: Final = 100_000
"""Half the width of an interval that says little: such an anchor only stands until there is a better one."""
RESOLUTION_NS: Final = 500.0
"""Resolution of an event's time, by the driver's documentation of `cuEventElapsedTime`."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """One event on both axes.

    Attributes:
        device_ns: on the device's axis, which begins at the first anchor.
        host_ns: the middle of the interval in which the device passed it, on the host's monotonic clock.
        half_ns: half the width of that interval.
    """

    event: Any
    device_ns: float
    host_ns: float
    half_ns: float


class Axis:
    """The anchors of one device, in order of time."""

    def __init__(self) -> None:
        self._anchors: list[Anchor] = []

    @property
    def last(self) -> Anchor | None:
        """The newest anchor."""
        return self._anchors[-1] if self._anchors else None

    def add(self, event: Any, elapsed_ns: float, host_ns: float, half_ns: float) -> list[Any]:
        """Append an anchor; returns the events of those that are forgotten for it, for use again.

        Args:
            elapsed_ns: device time since the last anchor; anything for the first.
        """
        last = self.last
        anchor = Anchor(event, last.device_ns + elapsed_ns if last else 0.0, host_ns, half_ns)
        known = self._anchors if half_ns > WIDE_NS else [one for one in self._anchors if one.half_ns <= WIDE_NS]
        kept = [*known, anchor][-MAX_ANCHORS:]
        forgotten = [one.event for one in self._anchors if one not in kept]
        self._anchors = kept
        return forgotten

    def host(self, device_ns: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Host times of device times: between two anchors on the line through them, outside along the nearest one."""
        device = np.array([anchor.device_ns for anchor in self._anchors])
        host = np.array([anchor.host_ns for anchor in self._anchors])
        base = host[-1]
        if len(device) < 2:
            return base + (device_ns - device[0])
        # Relative to the newest anchor, so that doubles hold nanoseconds however long the machine has been up.
        segment = np.clip(np.searchsorted(device, device_ns) - 1, 0, len(device) - 2)
        rate = np.clip(np.diff(host) / np.diff(device), 1 - DRIFT, 1 + DRIFT)
        return base + ((host[segment] - base) + (device_ns - device[segment]) * rate[segment])

    def error_ns(self, first_ns: float, last_ns: float) -> float:
        """How far host times between two device times may be off."""
        near = [
            anchor.half_ns
            for anchor, after in zip(self._anchors, [*self._anchors[1:], None], strict=True)
            if after is None or after.device_ns >= first_ns
        ]
        oldest, newest = self._anchors[0], self._anchors[-1]
        outside = max(0.0, last_ns - newest.device_ns, oldest.device_ns - first_ns)
        rate = DRIFT
        if len(self._anchors) > 1:
            before = self._anchors[-2]
            rate = (newest.half_ns + before.half_ns + RESOLUTION_NS) / (newest.device_ns - before.device_ns)
        return max(near) + outside * min(rate, DRIFT) + RESOLUTION_NS
