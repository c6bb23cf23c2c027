"""Counters of everything that was lost, cut or found wrong, by the reason that users see in `losses()`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import Final

logger = logging.getLogger("otel_brick")

REASONS: Final = {
    "log_full": "span detail dropped: the step's log reached its limit",
    "queue_full": "span detail dropped: the export queue was full",
    "trace_cap": "span detail dropped: the step or its trace has its maximum of rows",
    "encode_error": "spans dropped: they could not be built or encoded",
    "export_failed": "spans dropped: they could not be delivered",
    "already_shutdown": "rows dropped: the profiler is shut down",
    "fork": "rows dropped: they were open when the process forked",
    "out_of_order": "scopes closed while another one was innermost; they hang below the step",
    "left_open": "scopes still open when their step ended; they are not in the statistics",
    "closed_twice": "scopes closed that were not open",
    "clock_anomaly": "rows whose times contradict each other: an end before its start, which counts 0 ns, or deferred "
    "starts out of order",
    "name_overflow": "names or launch signatures beyond the bound, counted as __overflow__",
    "device_error": "device times that could not be read",
}


class Losses:
    """Thread-safe counters by reason.

    What first occurs is remembered and logged by `tell`, which nobody calls with a lock held: the handler of a log
    record may read our statistics.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(REASONS, 0)
        self._told: set[str] = set()
        self._untold: deque[tuple[str, BaseException | None]] = deque()
        self.renew_lock()

    def add(self, reason: str, count: int = 1) -> None:
        """Count `count` losses for one of `REASONS`."""
        if count <= 0:
            return
        with self._lock:
            self._counts[reason] += count
        self.remember(f"first loss of this kind ({reason}): {REASONS[reason]}")

    def remember(self, message: str, error: BaseException | None = None) -> None:
        """Keep a message for `tell`; one that was kept before is ignored."""
        if message not in self._told:
            self._told.add(message)
            self._untold.append((message, error))

    def tell(self) -> None:
        """Log what happened for the first time since the last call."""
        while self._untold:
            try:
                message, error = self._untold.popleft()
            except IndexError:  # another thread was quicker
                return
            # A handler of the user's may raise, and may not end our worker.
            with contextlib.suppress(Exception):
                logger.warning(message, exc_info=error)

    def snapshot(self) -> dict[str, int]:
        """All reasons with their counts, in a fixed order."""
        with self._lock:
            return dict(self._counts)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        # Reentrant like all our locks: a finalizer or signal handler may run one of our scopes while we hold it.
        self._lock = threading.RLock()

    def restart_in_child(self) -> None:
        """After a fork: count from zero."""
        self.renew_lock()
        self._counts = dict.fromkeys(REASONS, 0)
