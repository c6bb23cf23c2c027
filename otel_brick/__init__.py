"""Bricks, layers and GPU kernels of ML engines as OpenTelemetry spans, statistics and profiles.

The verbs of this module belong to one process-wide default profiler, which is disabled until somebody enables it:
library authors use them freely, and `default_profiler().enable()` switches them on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import setup as _setup
from .config import Config
from .gpu.ptx import PtxRegistry
from .profiler import BrickProfiler
from .record.clock import Clock
from .stats.reader import LayerMatrix, Statistics
from .stats.snapshot import BrickStats, CategoryStats
from .taxonomy import BrickBottleneck, BrickCategory, BrickId, Phase, SpanLevel, SyncMode, TimingSource
from .version import __version__

_default = BrickProfiler()

step = _default.step
lane = _default.lane
layer = _default.layer
brick = _default.brick
kernel = _default.kernel
define = _default.define


def default_profiler() -> BrickProfiler:
    """The profiler behind the verbs of this module."""
    return _default


def configure(
    *,
    service_name: str | None = None,
    endpoint: str | None = None,
    protocol: str | None = None,
    headers: Mapping[str, str] | None = None,
    resource_attributes: Mapping[str, Any] | None = None,
    metrics: bool = True,
    stream: object = None,
    **settings: Any,
) -> BrickProfiler:
    """Set everything up in one call: the default profiler, enabled, sends traces and metrics to an OTLP endpoint.

    What exists is respected: a global tracer provider is used as it is, a SIGTERM handler stays. Where there is none,
    a provider is made global, and SIGTERM ends the program with exit handlers, which flush. A second call only enables
    the profiler. What is not given comes from the `OTEL_*` variables.

    Args:
        service_name: the resource's `service.name`.
        endpoint: base URL such as `http://collector:4318`, to which HTTP adds `/v1/traces` and `/v1/metrics`; a target
            such as `collector:4317` for gRPC.
        protocol: `"http/protobuf"`, the default, or `"grpc"`.
        headers: sent with every request.
        resource_attributes: further attributes of the resource.
        metrics: whether metrics are sent too.
        stream: the CUDA stream of scopes without one of their own, as for `BrickProfiler`.
        settings: `detail`, `detail_interval`, `max_rows_per_step`, `max_rows_per_trace`, `attach_context`,
            `histograms`, `sync_mode`, `kernel_events`, as for `BrickProfiler`.

    Returns:
        The default profiler, the one behind the verbs of this module.

    Raises:
        TypeError, ValueError: an argument is unknown or out of its range; nothing is changed then.
    """
    return _setup.configure(
        _default,
        service_name=service_name,
        endpoint=endpoint,
        protocol=protocol,
        headers=headers,
        resource_attributes=resource_attributes,
        metrics=metrics,
        stream=stream,
        **settings,
    )


__all__ = [
    "BrickBottleneck",
    "BrickCategory",
    "BrickId",
    "BrickProfiler",
    "BrickStats",
    "CategoryStats",
    "Clock",
    "Config",
    "LayerMatrix",
    "Phase",
    "PtxRegistry",
    "SpanLevel",
    "Statistics",
    "SyncMode",
    "TimingSource",
    "__version__",
    "brick",
    "configure",
    "default_profiler",
    "define",
    "kernel",
    "lane",
    "layer",
    "step",
]
