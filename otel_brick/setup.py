"""`configure`: one call that sets up everything for programs without an OpenTelemetry set-up of their own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from .config import Config
from .gpu.driver import stream_handle
from .profiler import BrickProfiler
from .record.tracing import Tracing
from .taxonomy import SyncMode

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import TracerProvider

    from .export.otlp import BrickOTLPExporter

logger = logging.getLogger("otel_brick")

_PROTOCOLS = ("http/protobuf", "grpc")
_lock = threading.Lock()
_configured = False


def configure(
    profiler: BrickProfiler,
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
    """Enable a profiler and send its traces and metrics to an OTLP endpoint; `otel_brick.configure` documents it."""
    global _configured
    if endpoint is not None and not isinstance(endpoint, str):
        raise TypeError(f"endpoint must be a string, not {type(endpoint).__name__}")
    if protocol is not None and protocol not in _PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(_PROTOCOLS)}; got {protocol!r}")
    unknown = set(settings) - set(Config.__annotations__)
    if unknown:
        raise TypeError(f"configure() got unexpected arguments: {', '.join(sorted(unknown))}")
    mode = settings.get("sync_mode")
    if isinstance(mode, SyncMode):
        settings["sync_mode"] = mode.value
    config = Config.build(settings)
    if stream is not None:
        stream_handle(stream)  # raises here, before anything is changed
    with _lock:
        if _configured:
            profiler.enable()
            if not profiler.is_enabled():
                logger.warning("the profiler is shut down for good; configure() cannot start it again")
            else:
                logger.warning("already configured: the profiler is enabled and everything else stays as it is")
            return profiler
        if stream is not None:
            profiler._use_stream(stream)  # pyright: ignore[reportPrivateUsage]
        exporter = _span_exporter(endpoint, protocol, headers)
        provider, ours = _tracer_provider(profiler, exporter, service_name, resource_attributes)
        profiler._connect(  # pyright: ignore[reportPrivateUsage]
            config,
            Tracing(provider, ours=provider if ours else None),
            exporter,
            _metric_exporter(endpoint, protocol, headers) if metrics else None,
            # The exporter of a provider that is global now closes with that.
            close_exporter=not ours,
        )
        _exit_on_sigterm()
        _configured = True
    return profiler


def _protocol(given: str | None, signal_name: str) -> str:
    """The protocol of a signal: the argument, then the signal's variable, then the general one, then HTTP."""
    for value in (
        given,
        os.environ.get(f"OTEL_EXPORTER_OTLP_{signal_name.upper()}_PROTOCOL"),
        os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL"),
    ):
        if value and value.strip() in _PROTOCOLS:
            return value.strip()
    return _PROTOCOLS[0]


def _endpoint(base: str | None, protocol: str, signal_name: str) -> str | None:
    """The endpoint of a signal: HTTP has a path for each, gRPC does not."""
    if base is None or protocol == "grpc":
        return base
    return f"{base.rstrip('/')}/v1/{signal_name}"


def _span_exporter(endpoint: str | None, given: str | None, headers: Mapping[str, str] | None) -> BrickOTLPExporter:
    from .export.otlp import BrickOTLPExporter

    protocol = _protocol(given, "traces")
    return BrickOTLPExporter(endpoint=_endpoint(endpoint, protocol, "traces"), protocol=protocol, headers=headers)


def _metric_exporter(endpoint: str | None, given: str | None, headers: Mapping[str, str] | None) -> MetricExporter:
    protocol = _protocol(given, "metrics")
    sent = dict(headers) if headers else None
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, headers=sent)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter(endpoint=_endpoint(endpoint, protocol, "metrics"), headers=sent)


def _tracer_provider(
    profiler: BrickProfiler,
    exporter: BrickOTLPExporter,
    service_name: str | None,
    attributes: Mapping[str, Any] | None,
) -> tuple[TracerProvider, bool]:
    """The global provider, or a new one that becomes global; and whether it is new."""
    from .export import providers

    present = trace.get_tracer_provider()
    if not isinstance(present, trace.ProxyTracerProvider):
        if service_name is not None or attributes:
            logger.info("a tracer provider exists, so its resource is used as it is")
        return present, False
    losses = profiler._recorder.losses  # pyright: ignore[reportPrivateUsage]
    provider = providers.tracer_provider(exporter, losses, _resource(service_name, attributes))
    trace.set_tracer_provider(provider)
    return provider, True


def _resource(service_name: str | None, attributes: Mapping[str, Any] | None) -> Resource:
    from opentelemetry.sdk.resources import Resource

    given = dict(attributes or {})
    if service_name is not None:
        given["service.name"] = service_name
    return Resource.create(given)


def _exit_on_sigterm() -> None:
    """Let SIGTERM end the program in an orderly way, so that exit handlers flush; a handler of the user's stays."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
