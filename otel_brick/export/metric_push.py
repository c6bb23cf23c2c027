"""The push side of metrics: one thread that hands `MetricsData` to a `MetricExporter` at an interval.

Whatever the exporter does (raise, refuse, hang), flush and shutdown end in time and nobody else waits. A failure is
logged the first time and counted always; nothing is lost by it, because the next export says everything again.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData

logger = logging.getLogger("otel_brick")

DEFAULT_INTERVAL_S: Final = 60.0
DEFAULT_EXPORT_TIMEOUT_S: Final = 30.0


class _Request:
    """One request to the thread and its answer."""

    def __init__(self, timeout_s: float, *, final: bool = False) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.final = final
        self.done = threading.Event()
        self.delivered = False

    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class MetricPusher:
    """Exports metrics periodically, and once more on `flush` and `shutdown`.

    The thread is started by the first `start` or `flush`, and ends by `shutdown` or when the pusher is forgotten. A
    forked child has a pusher that was never started. While the interpreter is ending no thread can be started any
    more; flush and shutdown then export on the caller's thread, with the exporter's own time limit only.

    Attributes:
        failures: exports that raised or were refused in this process.
    """

    def __init__(
        self, collect: Callable[[], MetricsData], exporter: MetricExporter, interval_s: float | None = None
    ) -> None:
        """Make a pusher; nothing runs yet.

        Args:
            collect: gives what is to be exported, on the pusher's thread; an empty result is not exported.
            exporter: any metric exporter. `shutdown` shuts it down. It gets cumulative data, whatever temporality it
                prefers.
            interval_s: seconds from one export to the next; None for `OTEL_METRIC_EXPORT_INTERVAL` (milliseconds),
                else 60.

        Raises:
            ValueError: `interval_s` is not a positive number of seconds that a thread can wait.
        """
        if interval_s is None:
            interval_s = _seconds_from_environment("OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_S)
        elif not _can_wait(interval_s):
            raise ValueError(f"interval_s must be a positive number of seconds; got {interval_s!r}")
        self._collect = collect
        self._exporter = exporter
        self._interval_s = interval_s
        self._export_timeout_s = _seconds_from_environment("OTEL_METRIC_EXPORT_TIMEOUT", DEFAULT_EXPORT_TIMEOUT_S)
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._requests: deque[_Request] = deque()
        self._last: _Request | None = None
        self._thread: threading.Thread | None = None
        self.failures = 0

    def _after_fork(self) -> None:
        # Comparing process ids also notices forks that never run Python's hooks, such as uWSGI's.
        if self._process != os.getpid():
            self._renew()

    def start(self) -> bool:
        """Start the thread unless it runs; False after `shutdown` and while the interpreter is ending."""
        self._after_fork()
        with self._lock:
            if self._last is not None:
                return False
            return self._start()

    def _start(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        # The thread holds the pusher weakly while it waits, so that a forgotten one can go.
        wake = self._wake
        pusher = weakref.ref(self, lambda _: wake.set())
        thread = threading.Thread(
            target=_work, args=(pusher, wake, self._interval_s), name="otel-brick-metrics", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            return False
        self._thread = thread
        return True

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Export now.

        Returns:
            False if that took more than `timeout_s` seconds, failed, or comes after `shutdown`.
        """
        self._after_fork()
        request = _Request(timeout_s)
        with self._lock:
            if self._last is not None:
                return False
            self._requests.append(request)
            running = self._start()
        return self._answer(request, timeout_s, running)

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """Export for the last time, shut the exporter down and end the thread; may be called again.

        An exporter that hangs is left to its thread, which does not keep the process alive.

        Returns:
            False if that took more than `timeout_s` seconds or failed.
        """
        self._after_fork()
        with self._lock:
            first = self._last is None
            request = self._last = self._last or _Request(timeout_s, final=True)
            if first:
                self._requests.append(request)
            running = self._start() if first else True
        return self._answer(request, timeout_s, running)

    def _answer(self, request: _Request, timeout_s: float, running: bool) -> bool:
        if running:
            self._wake.set()
            request.done.wait(timeout_s)
        else:
            self._round(due=False)
        return request.delivered

    def _round(self, *, due: bool) -> bool:
        """Answer the requests that are there, or export because it is time; False when that was the last time."""
        self._wake.clear()
        requests: list[_Request] = []
        while self._requests:
            requests.append(self._requests.popleft())
        final = any(request.final for request in requests)
        # Whoever has given up waiting has had his answer.
        waiting = [request for request in requests if request.remaining_s()]
        delivered = bool(waiting)
        if waiting:
            delivered &= self._export(max(request.remaining_s() for request in waiting))
            delivered &= self._ask_exporter("force_flush", requests)
        elif due and not final:
            self._export(self._export_timeout_s)
        if final:
            delivered &= self._ask_exporter("shutdown", requests)
        for request in requests:
            request.delivered = delivered
            request.done.set()
        return not final

    def _export(self, timeout_s: float) -> bool:
        from opentelemetry.instrumentation.utils import suppress_instrumentation
        from opentelemetry.sdk.metrics.export import MetricExportResult

        try:
            data = self._collect()
            if not data.resource_metrics:
                return True
            with suppress_instrumentation():
                result = self._exporter.export(data, timeout_millis=timeout_s * 1000)
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}", error)
        return True if result is not MetricExportResult.FAILURE else self._failed("the exporter refused them")

    def _ask_exporter(self, verb: str, requests: list[_Request]) -> bool:
        from opentelemetry.instrumentation.utils import suppress_instrumentation

        timeout_s = max(request.remaining_s() for request in requests)
        try:
            with suppress_instrumentation():
                return getattr(self._exporter, verb)(timeout_millis=timeout_s * 1000) is not False
        except Exception as error:
            return self._failed(f"{verb}: {type(error).__name__}: {error}", error)

    def _failed(self, reason: str, error: Exception | None = None) -> bool:
        self.failures += 1
        if self.failures == 1:
            logger.warning("metrics could not be exported, which is said once: %s", reason, exc_info=error)
        return False


def _work(pusher: weakref.ref[MetricPusher], wake: threading.Event, interval_s: float) -> None:
    due = time.monotonic() + interval_s
    while True:
        wake.wait(max(0.0, due - time.monotonic()))
        alive = pusher()
        now = time.monotonic()
        if alive is None or not alive._round(due=now >= due):  # pyright: ignore[reportPrivateUsage]
            return
        del alive
        if now >= due:
            due = max(due + interval_s, time.monotonic())


def _can_wait(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 < seconds <= threading.TIMEOUT_MAX


def _seconds_from_environment(variable: str, default_s: float) -> float:
    """A duration in milliseconds from the environment; a bad one is reported and the default used."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default_s
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = math.nan
    if _can_wait(seconds):
        return seconds
    logger.warning("%s must be a positive number of milliseconds; got %r, using %g", variable, text, default_s * 1000)
    return default_s
