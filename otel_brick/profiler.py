"""`BrickProfiler`, the front door: it composes the rooms and adds nothing of its own to what they do."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .config import Config
from .export import pmat, text
from .export.detail import DetailPolicy
from .export.outputs import MetricReadings, Outputs
from .export.readable import Pace, ReadableRoute
from .export.spans import ColumnarRoute, SpanSink
from .gpu.driver import forget_driver, stream_handle
from .gpu.find import finder
from .gpu.kernels import identities
from .pipeline import Pipeline
from .record.budgets import budget_argument
from .record.clock import Clock
from .record.deferring import DeviceVerbs
from .record.device import LIMIT_S
from .record.losses import Losses
from .record.recorder import Recorder
from .record.tracing import Tracing
from .stats.reader import Statistics, StatsReader, Tables, rate_argument
from .taxonomy import BrickBottleneck, BrickId, SyncMode

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.trace import TracerProvider

    from .export.otlp import BrickOTLPExporter
    from .export.prometheus import BrickCollector
    from .export.spans import RowExporter


class BrickProfiler(DeviceVerbs, StatsReader):
    """Records steps, layers, bricks and kernels; keeps their statistics; sends them as OpenTelemetry spans.

    A new profiler is disabled and costs almost nothing; `BrickProfiler.enabled()` makes one that records. All methods
    may be called from any thread and from asyncio tasks. Statistics count every step; spans leave for those that the
    tracer provider samples.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        exporter: RowExporter | None = None,
        metric_exporter: MetricExporter | None = None,
        meter_provider: MeterProvider | None = None,
        detail: str | None = None,
        detail_interval: int | None = None,
        max_rows_per_step: int | None = None,
        max_rows_per_trace: int | None = None,
        attach_context: bool | None = None,
        histograms: str | None = None,
        stream: object = None,
        sync_mode: SyncMode | str | None = None,
        kernel_events: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Make a disabled profiler. Arguments that are None come from `OTEL_BRICK_*`, then from defaults.

        Args:
            tracer_provider: makes the spans; None for whatever provider is global when a step begins.
            exporter: a `BrickOTLPExporter`, which takes the rows below steps as encoded columns. Steps leave through
                their provider, or through this exporter too where no provider is global.
            metric_exporter: gets all metrics of the statistics at an interval.
            meter_provider: gets their counters and gauges as observable instruments.
            detail: which recorded steps have spans below them: `"auto"`, `"all"` or `"none"`.
            detail_interval: under `"auto"`, one step in this many has detail.
            max_rows_per_step, max_rows_per_trace: bounds for the spans below one step and one trace.
            attach_context: layers and bricks too become the current OpenTelemetry span.
            histograms: for `metric_exporter`, `"explicit"` buckets, `"exponential"` ones or `"none"`.
            stream: the CUDA stream of scopes without one of their own, any object with `__cuda_stream__` or an integer
                handle; None for the current stream of torch or CuPy where they use CUDA, else the default stream.
            sync_mode: when device time is taken, a `SyncMode` or its value.
            kernel_events: which kernels have device times of their own: `"all"`, `"sampled"` or `"off"`.
            clock: the source of time, for tests.

        Raises:
            ValueError: an argument is out of its range.
            TypeError: a provider or exporter is none. `exporter` takes encoded rows; an ordinary exporter belongs to a
                tracer provider.
        """
        self.config = Config.build(
            {
                "detail": detail,
                "detail_interval": detail_interval,
                "max_rows_per_step": max_rows_per_step,
                "max_rows_per_trace": max_rows_per_trace,
                "attach_context": attach_context,
                "histograms": histograms,
                "sync_mode": _mode_value(sync_mode),
                "kernel_events": kernel_events,
            }
        )
        for name, given, method in (
            ("tracer_provider", tracer_provider, "get_tracer"),
            ("metric_exporter", metric_exporter, "export"),
            ("meter_provider", meter_provider, "get_meter"),
        ):
            if given is not None and not hasattr(given, method):
                raise TypeError(f"{name} must have a method {method}; got {given!r}")
        losses = Losses()
        tracing = _tracing(tracer_provider, exporter, losses)
        super().__init__(Recorder(self.config, clock or Clock(), tracing, losses))
        self._use_stream(stream)
        self._pipeline = Pipeline(
            self._recorder, DetailPolicy(self.config, self._recorder.losses), self._sink(exporter)
        )
        self._outputs = self._open(exporter, metric_exporter, meter_provider)
        self._bottlenecks: dict[str, BrickBottleneck] = {}
        self._l2_cache_hit_rate: float | None = None
        self._zero_copy = False
        self._recorder.on_fork = _restart_in_child
        _profilers.add(self)

    @classmethod
    def enabled(cls, **arguments: Any) -> BrickProfiler:
        """Make a profiler that records; takes the arguments of the constructor."""
        profiler = cls(**arguments)
        profiler.enable()
        return profiler

    def __repr__(self) -> str:
        state = "shut down" if self._shut else "enabled" if self._enabled else "disabled"
        pipeline = self._pipeline
        with pipeline.lock:
            pipeline.collect()  # without waiting for a device, which nobody expects of a repr
            known = Statistics(Tables(pipeline.table, pipeline.steps))
            return f"<BrickProfiler {state}, {known.step_count()} steps, {len(known.brick_names())} bricks>"

    def _use_stream(self, stream: object) -> None:
        """Take device time from this stream where a scope names no other; None for whatever the program uses."""
        self._recorder.device.handle_of = stream_handle
        self._recorder.device.find = finder(self._recorder, stream)
        if stream is not None:
            self._recorder.device.look(stream)

    @contextmanager
    def _tables(self) -> Generator[Tables]:
        if self._recorder.device.holds():
            self._pipeline.collect(LIMIT_S)
        with self._pipeline.lock:
            pipeline = self._pipeline
            pipeline.collect()
            yield Tables(pipeline.table, pipeline.steps, self._bottlenecks, pipeline.budgets.by_name)

    def _sink(self, exporter: RowExporter | None) -> SpanSink:
        recorder = self._recorder
        pace = Pace(recorder)
        route = ReadableRoute(recorder, pace) if exporter is None else ColumnarRoute(recorder, exporter)
        return SpanSink(recorder, route, pace)

    def _open(
        self,
        exporter: RowExporter | None,
        metric_exporter: MetricExporter | None,
        meter_provider: MeterProvider | None,
        *,
        close_exporter: bool = True,
    ) -> Outputs:
        pipeline = self._pipeline
        self._readings = MetricReadings(
            self._recorder,
            pipeline,
            lambda: Tables(pipeline.table, pipeline.steps, budgets_ns=pipeline.budgets.by_name),
        )
        outputs = Outputs(
            self._recorder,
            self._readings,
            exporter=exporter,
            close_exporter=close_exporter,
            metric_exporter=metric_exporter,
            meter_provider=meter_provider,
            histograms=self.config.histograms,
        )
        pipeline.on_start = outputs.start
        shutdown = weakref.WeakMethod(self.shutdown)

        def on_exit(timeout_s: float) -> None:
            # The pipeline must not hold the profiler, which holds the pipeline.
            (shutdown() or pipeline.stop)(timeout_s)

        pipeline.on_exit = on_exit
        return outputs

    def _connect(
        self,
        config: Config,
        tracing: Tracing,
        exporter: RowExporter,
        metric_exporter: MetricExporter | None,
        *,
        close_exporter: bool,
    ) -> None:
        """Give a profiler that has no outputs of its own yet a configuration and outputs, and enable it."""
        self.config = config
        self._recorder.configure(config, tracing)
        self._pipeline.replace(DetailPolicy(config, self._recorder.losses), self._sink(exporter))
        self._outputs = self._open(exporter, metric_exporter, None, close_exporter=close_exporter)
        self._switch(True)

    def prometheus_collector(self) -> BrickCollector:
        """A collector for a registry of `prometheus_client` (extra `prometheus`): `registry.register(...)` it.

        Raises:
            ModuleNotFoundError: `prometheus_client` is not installed.
        """
        from .export.prometheus import BrickCollector

        return BrickCollector(self._readings.now)

    # --- life ---

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Export everything that has ended, and flush the tracer provider and the metrics; False if that took too long.

        What a collector refuses is no reason to wait longer: `losses()` counts it.
        """
        deadline = time.monotonic() + timeout_s
        delivered = self._pipeline.flush(timeout_s)
        return self._outputs.flush(max(0.0, deadline - time.monotonic())) and delivered

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """Flush and stop for good, with the exporters that the profiler was given.

        Tracer and meter providers are their owner's to shut down. What is recorded afterwards is dropped and counted.
        May be called again.
        """
        if not self._shut_down():
            return True
        deadline = time.monotonic() + timeout_s
        delivered = self._pipeline.stop(timeout_s)
        closed = self._outputs.shutdown(max(0.0, deadline - time.monotonic()))
        self._recorder.device.close()
        return closed and delivered

    def losses(self) -> dict[str, int]:
        """Everything lost, cut or found wrong, by reason; all reasons are present."""
        self._pipeline.collect()
        self._recorder.losses.tell()
        return self._recorder.losses.snapshot()

    def reset(self) -> None:
        """Forget all statistics, bottlenecks, budgets and run facts; open steps go on and count when they end."""
        self._recorder.deferred.forget(self._recorder.device.timeline)
        self.reset_stats()
        self._pipeline.forget_budgets()
        self._bottlenecks = {}
        self._l2_cache_hit_rate = None
        self._zero_copy = False

    def reset_stats(self) -> None:
        """Forget all statistics; what was stated stays."""
        self._pipeline.reset()

    # --- what is known from elsewhere ---

    def set_brick_bottleneck(self, name: BrickId | str, bottleneck: BrickBottleneck) -> None:
        """State what limits a brick; it appears in its statistics and in the profile.

        Raises:
            KeyError: no brick of this name has been seen.
            TypeError: `bottleneck` is not a `BrickBottleneck`.
        """
        if not isinstance(bottleneck, BrickBottleneck):
            raise TypeError(f"bottleneck must be a BrickBottleneck, not {type(bottleneck).__name__}")
        registry = self._recorder.registry
        index = registry.brick_index(registry.resolve_brick(name, argument="name"))
        if index is None:
            raise KeyError(f"no brick {name!r} has been seen")
        self._bottlenecks[registry.brick_names[index]] = bottleneck

    def set_brick_budget(self, name: BrickId | str, budget: int | timedelta | None) -> None:
        """State the longest time that one call of a brick may take; longer ones are counted as violations.

        It holds for steps that end from now on, and for bricks outside steps likewise. The name may be that of a brick
        that has not been seen yet.

        Args:
            name: a known brick, its name or alias, or any other name. Budgets of more than 1,024 other names are not
                kept, but counted as `name_overflow`.
            budget: of the inclusive time, integer nanoseconds or a `timedelta`; None for no budget any more.

        Raises:
            TypeError, ValueError: an argument is not what it should be; nothing is changed then.
        """
        brick = self._recorder.registry.resolve_brick(name, argument="name")
        self._pipeline.set_budget(brick, budget_argument(budget))

    def set_l2_cache_hit_rate(self, rate: float) -> None:
        """State the run's L2 cache hit rate, from 0 to 1.

        Raises:
            TypeError, ValueError: not a number from 0 to 1.
        """
        self._l2_cache_hit_rate = rate_argument("rate", rate)

    def l2_cache_hit_rate(self) -> float | None:
        """The stated L2 cache hit rate."""
        return self._l2_cache_hit_rate

    def set_zero_copy(self, zero_copy: bool) -> None:
        """State whether the run used zero-copy memory."""
        self._zero_copy = bool(zero_copy)

    def is_zero_copy(self) -> bool:
        """Whether the run was said to use zero-copy memory."""
        return self._zero_copy

    # --- reports ---

    def summary(self) -> str:
        """Totals, bricks and categories as text for a person."""
        with self._tables():
            return text.summary(self, self._recorder.losses.snapshot())

    def print_category_stats(self) -> None:
        """Print the categories that have samples."""
        with self._tables():
            report = text.categories(self)
        print(report)

    def to_json(self) -> str:
        """The profile as one JSON document; `export.pmat` describes its keys."""
        with self._tables():
            return pmat.document(
                self,
                losses=self._recorder.losses.snapshot(),
                l2_cache_hit_rate=self._l2_cache_hit_rate,
                zero_copy=self._zero_copy,
            )

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file at once or not at all; missing folders are made.

        Raises:
            OSError: naming the path and the reason; a file that was there is unchanged.
        """
        pmat.write(Path(path), self.to_json())


def _mode_value(mode: SyncMode | str | None) -> str | None:
    """The value of a mode or of its name; what is neither stays, for the configuration to refuse."""
    if isinstance(mode, str):
        mode = SyncMode.__members__.get(mode, mode)
    return mode.value if isinstance(mode, SyncMode) else mode


def _tracing(tracer_provider: TracerProvider | None, exporter: RowExporter | None, losses: Losses) -> Tracing:
    if exporter is None:
        return Tracing(tracer_provider)
    if not hasattr(exporter, "submit"):
        raise TypeError(
            f"exporter must be a BrickOTLPExporter, not {type(exporter).__name__}; "
            "give an ordinary span exporter to a tracer provider"
        )

    def make_private() -> TracerProvider:
        from .export.providers import tracer_provider

        return tracer_provider(cast("BrickOTLPExporter", exporter), losses)

    return Tracing(tracer_provider, make_private)


_profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


def _restart_in_child() -> None:
    forget_driver()
    identities.renew_locks()
    for profiler in list(_profilers):
        profiler._recorder.restart_in_child()  # pyright: ignore[reportPrivateUsage]
        profiler._pipeline.restart_in_child()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)
