"""Where the demo sends its spans and metrics besides its files: OTLP endpoints that the user names.

A `Destination` comes in and makes an `Outbox`, which keeps what the run hands it until `send` is called; at the end a
`Sent` says what was accepted. After a failure, which an exporter reports when its time for repeating is over, nothing
more is tried.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from ..export import BrickOTLPExporter
from ..export.otlp_settings import OTLPSettings
from .words import counted

HTTP = "http/protobuf"
GRPC = "grpc"
SERVICE_NAME = "otel-brick-demo"
BATCH_SPANS = 2_048
DEFAULT_INTERVAL_S = 3.0
"""From one export to the next while texts are generated; short, so that a query of a minute has several."""

_LOGGERS = ("otel_brick", "opentelemetry")
_LAST_PORT = 65_535


def check_endpoint(endpoint: str, protocol: str) -> None:
    """Find out before a run whether spans or metrics can be sent there at all.

    Raises:
        ValueError: the endpoint is malformed; the message says what is expected.
    """
    port = re.search(r":(\d+)$", re.split(r"[/?#]", endpoint.partition("://")[2] or endpoint, maxsplit=1)[0])
    if port is not None and not 1 <= int(port[1]) <= _LAST_PORT:
        raise ValueError(f"the port must be from 1 to {_LAST_PORT}; got {port[1]}")
    OTLPSettings.build({"endpoint": endpoint, "protocol": protocol}, {})


def interval_s() -> float:
    """Seconds from one export to the next: `OTEL_METRIC_EXPORT_INTERVAL` in milliseconds, or the demo's own."""
    try:
        seconds = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")) / 1000
    except ValueError:
        return DEFAULT_INTERVAL_S
    return seconds if 0 < seconds <= threading.TIMEOUT_MAX and math.isfinite(seconds) else DEFAULT_INTERVAL_S


@dataclass(frozen=True)
class Destination:
    """What the user chose, already checked.

    Attributes:
        endpoint: over HTTP a base URL, over gRPC a URL or a target; None sends no spans.
        protocol: `http/protobuf` or `grpc`.
        metrics_endpoint: the complete HTTP URL for metrics that do not go to `endpoint`.
    """

    endpoint: str | None
    protocol: str
    metrics_endpoint: str | None = None

    def span_exporter(self) -> SpanExporter | None:
        """An exporter for spans, None where only metrics are sent."""
        if self.endpoint is None:
            return None
        return BrickOTLPExporter(endpoint=self._url("traces"), protocol=self.protocol)

    def metric_exporter(self) -> MetricExporter:
        """An exporter for metrics: the official one, as `otel_brick.configure` has it."""
        if self.metrics_endpoint is None and self.protocol == GRPC:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

            return GrpcExporter(endpoint=self.endpoint)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        return HttpExporter(endpoint=self.metrics_endpoint or self._url("metrics"))

    def _url(self, signal: str) -> str | None:
        if self.endpoint is None or self.protocol == GRPC:
            return self.endpoint
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"

    def __str__(self) -> str:
        """Where everything goes, for a person; without a password."""
        names = [] if self.endpoint is None else [self.spans_name()]
        if self.metrics_endpoint is not None:
            names.append(f"{self.metrics_name()} for metrics")
        return " and ".join(names)

    def spans_name(self) -> str:
        """Where spans go, for a person; without a password."""
        return f"{_without_user(self.endpoint or '')} ({self.protocol})"

    def metrics_name(self) -> str:
        """Where metrics go, for a person; without a password."""
        if self.metrics_endpoint is None:
            return self.spans_name()
        return f"{_without_user(self.metrics_endpoint)} ({HTTP})"

    def hint(self, reason: str) -> str:
        """What a user might do about a failure; empty where nothing is known."""
        if self.protocol == GRPC:
            settings = OTLPSettings.build({"endpoint": self.endpoint, "protocol": GRPC})
            if not settings.insecure and re.search(r"ssl|tls|handshake|UNAVAILABLE|DEADLINE", reason, re.I):
                target = _without_user(self.endpoint or "").rpartition("://")[2]
                return (
                    f"this was gRPC with TLS; for a receiver without TLS say http://{target},"
                    " or set OTEL_EXPORTER_OTLP_INSECURE=true and leave out the scheme"
                )
            if re.search(r"http[/ ]?1|parse HTTP2|http2|settings frame|protocol error", reason, re.I):
                return "this may be a port for HTTP, often 4318: leave out --protocol grpc"
        elif re.search(r"BadStatusLine|InvalidChunk|illegal|HTTP/2|ProtocolError|Connection aborted", reason):
            return "what answers does not speak HTTP, perhaps gRPC, often 4317: try --protocol grpc"
        return ""


@dataclass(frozen=True)
class Sent:
    """What became of a run's spans and metrics.

    Attributes:
        spans: that were accepted; None where none were to be sent.
        spans_lost: that were not.
        metrics: whether the last export of metrics, which says everything, was accepted.
        interrupted: whether the user ended it.
        reason: why something was not accepted, if that is known, and a hint below; or what else was in the log.
    """

    destination: Destination
    spans: int | None
    spans_lost: int
    metrics: bool
    interrupted: bool = False
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether everything was accepted."""
        return self.metrics and not self.spans_lost and not self.interrupted

    def __str__(self) -> str:
        """One line for a person."""
        parts: list[str] = []
        spans, metrics = self.destination.spans_name(), self.destination.metrics_name()
        if self.spans is not None:
            both = " and metrics" if self.metrics and spans == metrics else ""
            parts.append(f"{counted(self.spans, 'span')}{both} accepted by {spans}")
        if self.metrics and (self.spans is None or spans != metrics):
            parts.append(f"metrics accepted by {metrics}")
        missing = [counted(self.spans_lost, "span")] if self.spans_lost else []
        if not self.metrics:
            same = self.spans is not None and spans == metrics
            missing.append(f"the {'last ' if self.interrupted else ''}metrics{'' if same else f' for {metrics}'}")
        if missing:
            parts.append(f"{'interrupted, not sent' if self.interrupted else 'not accepted'}: {' and '.join(missing)}")
        return f"as service {SERVICE_NAME}: {', '.join(parts)}"


class Outbox:
    """Keeps the spans and the last metrics of a run, and sends them when asked; `send` is called by one thread.

    Attributes:
        spans: an exporter for the tracer provider, None where no spans are to be sent.
        metrics: an exporter for the profiler.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._span_exporter = destination.span_exporter()
        self._metric_exporter = destination.metric_exporter()
        self.spans = None if self._span_exporter is None else _Queue()
        self.metrics = _Latest()
        self._accepted = 0
        self._spans_failed = False
        self._metrics_failed = False
        self._delivered: MetricsData | None = None
        self._reasons = list[str]()

    @property
    def hopeless(self) -> bool:
        """Whether nothing more will be sent."""
        return self._metrics_failed and (self._span_exporter is None or self._spans_failed)

    def send(self) -> None:
        """Send everything that is here and was not sent yet."""
        while self.spans is not None and self._span_exporter is not None:
            batch = self.spans.take(BATCH_SPANS)
            if not batch:
                break
            if not self._spans_failed:
                self._spans_failed = self._failed(partial(self._span_exporter.export, batch), SpanExportResult.SUCCESS)
                self._accepted += 0 if self._spans_failed else len(batch)
        data = self.metrics.data
        if data is not None and data is not self._delivered and not self._metrics_failed:
            self._metrics_failed = self._failed(lambda: self._metric_exporter.export(data), MetricExportResult.SUCCESS)
            self._delivered = self._delivered if self._metrics_failed else data

    def _failed(self, export: Callable[[], object], success: object) -> bool:
        """Export, and tell whether that failed: older releases of the exporters raise instead of answering."""
        try:
            return export() is not success
        except Exception as error:
            self._reasons.append(f"{type(error).__name__}: {error}")
            return True

    def close(self) -> None:
        """Shut the exporters down, after the last `send`."""
        if self._span_exporter is not None:
            self._span_exporter.shutdown()
        self._metric_exporter.shutdown()

    def sent(self, *, interrupted: bool = False) -> Sent:
        """What became of everything so far."""
        accepted = None if self.spans is None else self._accepted
        lost = 0 if self.spans is None else self.spans.added - self._accepted
        delivered = self._delivered is not None and not self._metrics_failed and not interrupted
        reason = self._reasons[0] if self._reasons else ""
        if lost or not delivered:
            hints = [hint for hint in map(self._destination.hint, self._reasons) if hint]
            hint = hints[0] if hints else ""
            reason = f"{reason}\n{hint}" if hint else reason
        return Sent(self._destination, accepted, lost, delivered, interrupted, "" if interrupted else reason)

    @contextmanager
    def heard(self) -> Generator[None]:
        """Meanwhile, what the exporters say in the log is the reason in `Sent` and not printed beside it."""
        listener = _Listener(self._reasons)
        before = [(logger, logger.propagate) for logger in map(logging.getLogger, _LOGGERS)]
        for logger, _ in before:
            logger.addHandler(listener)
            logger.propagate = False
        try:
            yield
        finally:
            for logger, propagate in before:
                logger.removeHandler(listener)
                logger.propagate = propagate


class Postman:
    """A thread that sends an outbox at an interval, and a last time when it is told to finish."""

    def __init__(self, outbox: Outbox, gather: Callable[[], object], interval: float) -> None:
        """Make it; `gather` puts into the outbox what the profiler still has."""
        self._outbox = outbox
        self._gather = gather
        self._interval_s = interval
        self._finish = threading.Event()
        self._done = threading.Event()
        # A daemon: an interrupted program does not wait for a request.
        threading.Thread(target=self._work, name="otel-brick-demo-sender", daemon=True).start()

    def finish(self) -> None:
        """Have everything sent and wait for it; an interrupt ends only the waiting."""
        self._finish.set()
        self._done.wait()

    def _work(self) -> None:
        try:
            while not self._finish.wait(self._interval_s):
                self._gather()
                self._outbox.send()
            self._outbox.send()
            self._outbox.close()
        finally:
            self._done.set()


class _Queue(SpanExporter):
    """Keeps spans until they are taken."""

    def __init__(self) -> None:
        self._waiting = deque[ReadableSpan]()
        self.added = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep them."""
        self._waiting.extend(spans)
        self.added += len(spans)
        return SpanExportResult.SUCCESS

    def take(self, count: int) -> list[ReadableSpan]:
        """The oldest ones, `count` at most."""
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]


class _Latest(MetricExporter):
    """Keeps the latest metrics, which say everything that earlier ones did."""

    def __init__(self) -> None:
        super().__init__()
        self.data: MetricsData | None = None

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: object) -> MetricExportResult:
        """Keep them in the place of those before."""
        self.data = metrics_data
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing to do."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: object) -> None:
        """Nothing to do."""


class _Listener(logging.Handler):
    """Notes warnings."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._notes) < 100:
            self._notes.append(_without_user(" ".join(record.getMessage().split())))


def _without_user(url: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", url)
