"""The ways out of one profiler: rows, steps and metrics, opened together and closed together in bounded time."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .metric_observe import Observed, observe
from .metric_push import MetricPusher
from .metrics import metrics_data

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

    from ..pipeline import Pipeline
    from ..record.recorder import Recorder
    from ..stats.reader import Tables
    from .metric_series import MetricSource
    from .spans import RowExporter

CLOSE_S = 0.3
"""What closing may take beyond a timeout that is used up."""


class MetricReadings:
    """Readings of a profiler's statistics for the metric routes.

    Args:
        tables: gives the tables while `pipeline.lock` is held.
    """

    def __init__(self, recorder: Recorder, pipeline: Pipeline, tables: Callable[[], Tables]) -> None:
        self._recorder = recorder
        self._pipeline = pipeline
        self._tables = tables
        self._last: MetricSource | None = None

    def now(self) -> MetricSource:
        """A reading in tables of its own. Callers may hold locks of the SDK, so it does not wait for ours."""
        if self._pipeline.lock.acquire(blocking=self._last is None):
            try:
                self._pipeline.collect()
                self._last = self._source(self._tables().copy())
            finally:
                self._pipeline.lock.release()
        assert self._last is not None
        return self._last

    def data(self, resource: Resource, histograms: str) -> MetricsData:
        """The same as `MetricsData`, made while the tables stand still."""
        with self._pipeline.lock:
            self._pipeline.collect()
            return metrics_data(
                self._source(self._tables()),
                resource=resource,
                start_unix_ns=self._pipeline.start_unix_ns,
                now_unix_ns=self._recorder.clock.unix(),
                histograms=histograms,  # type: ignore[arg-type]
            )

    def _source(self, tables: Tables) -> MetricSource:
        from .metric_series import MetricSource

        return MetricSource(
            tables,
            self._recorder.losses.snapshot(),
            copy.deepcopy(self._pipeline.exemplars),
            self._pipeline.generation,
        )


class Outputs:
    """What a profiler sends to, beside the provider that steps go through."""

    def __init__(
        self,
        recorder: Recorder,
        readings: MetricReadings,
        *,
        exporter: RowExporter | None,
        close_exporter: bool,
        metric_exporter: MetricExporter | None,
        meter_provider: MeterProvider | None,
        histograms: str,
    ) -> None:
        self._recorder = recorder
        self._exporter = exporter if close_exporter else None
        self._pusher: MetricPusher | None = None
        self._own_resource: Resource | None = None
        self._observed: Observed | None = None
        disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if metric_exporter is not None and not disabled:
            self._pusher = MetricPusher(lambda: readings.data(self._resource(), histograms), metric_exporter)
        if meter_provider is not None:
            self._observed = observe(meter_provider, readings.now)

    def start(self) -> None:
        """Begin to push metrics; called when the first step begins."""
        if self._pusher is not None:
            # Now, because resource detectors need a thread pool, which a program that ends has no more.
            self._resource()
            self._pusher.start()

    def flush(self, timeout_s: float) -> bool:
        """Push metrics now."""
        return self._pusher is None or self._pusher.flush(timeout_s)

    def shutdown(self, timeout_s: float) -> bool:
        """Close everything that the profiler was given for itself; the user's providers stay open."""
        deadline = time.monotonic() + timeout_s
        flushed = self._pusher is None or self._pusher.shutdown(timeout_s)
        if self._observed is not None:
            self._observed.close()
        if self._exporter is not None:
            self._exporter.shutdown(max(0.0, deadline - time.monotonic()) * 1000)
        private: Any = self._recorder.tracing.private
        if private is not None:
            closing = threading.Thread(target=private.shutdown, name="otel-brick-close", daemon=True)
            try:
                closing.start()
            except RuntimeError:  # the interpreter is shutting down; the provider has a handler of its own
                return flushed
            closing.join(max(CLOSE_S, deadline - time.monotonic()))
        return flushed

    def _resource(self) -> Resource:
        from opentelemetry.sdk.resources import Resource

        resource = getattr(self._recorder.tracing.tracer, "resource", None)
        if resource is not None:
            return resource
        if self._own_resource is None:
            self._own_resource = Resource.create()
        return self._own_resource
