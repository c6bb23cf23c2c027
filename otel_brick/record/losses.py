"""Counters of everything that was lost, cut or found wrong, by the reason that users see in `losses()`."""

from __future__ import annotations

import logging
import threading
from typing import Final

logger = logging.getLogger("otel_brick")

REASONS: Final = {
    "log_full": "span detail dropped: the step's log reached its limit",
    "queue_full": "span detail dropped: the export queue was full",
    "trace_cap": "span detail dropped: the step or its trace has its maximum of rows",
    "encode_error": "spans dropped: they could not be built or encoded",
    "export_failed": "spans dropped: the exporter refused them",
    "already_shutdown": "rows dropped: the profiler is shut down",
    "fork": "rows dropped: they were open when the process forked",
    "out_of_order": "scopes closed while another one was innermost; they hang below the step",
    "left_open": "scopes still open when their step ended; they are not in the statistics",
    "closed_twice": "scopes closed that were not open",
    "clock_anomaly": "rows whose end lies before their start; they count 0 ns",
    "name_overflow": "names or launch signatures beyond the bound, counted as __overflow__",
    "device_error": "device times that could not be read",
}


class Losses:
    """Thread-safe counters by reason; each reason is logged once, when it first occurs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REASONS, 0)

    def add(self, reason: str, count: int = 1) -> None:
        """Count `count` losses for one of `REASONS`."""
        if count <= 0:
            return
        with self._lock:
            first = self._counts[reason] == 0
            self._counts[reason] += count
        if first:
            logger.warning("first loss of this kind (%s): %s", reason, REASONS[reason])

    def snapshot(self) -> dict[str, int]:
        """All reasons with their counts, in a fixed order."""
        with self._lock:
            return dict(self._counts)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child and start at zero there."""
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(REASONS, 0)
