"""OTLP over gRPC: bytes on one channel, one call for each attempt.

Imported only where an exporter for gRPC is made. gRPC itself repeats only calls that never left; all others follow the
protocol's rules for clients, where a call that got no answer in time is not repeated: it may have been processed.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.instrumentation.utils import suppress_instrumentation

from ..version import __version__
from .transport import SHUT_DOWN, Outcome, Patience, Verdict, accepted

if TYPE_CHECKING:
    from .otlp_settings import OTLPSettings

METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RETRYABLE: Final = ("UNAVAILABLE", "CANCELLED", "ABORTED", "OUT_OF_RANGE", "DATA_LOSS")
"""What may be repeated; RESOURCE_EXHAUSTED may if the collector names a delay."""
_OPTIONS: Final = (
    ("grpc.primary_user_agent", f"otel-brick/{__version__}"),
    # A channel that gave up for long would fail attempts after the collector has come back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_TOO_LARGE: Final = re.compile(r"larger than|too large|(message|size)\b.*\bexceed|exceed.*\b(message|size)\b", re.I)
_parents_channels: list[Any] = []
"""Kept for ever in a forked child, where letting go of one would wait for threads that are not there."""


class GrpcTransport:
    """Sends requests as calls of one method; the channel is made at the first one."""

    def __init__(self, settings: OTLPSettings) -> None:
        self._settings = settings
        self._patience = Patience(settings.timeout_s)
        # gRPC wants bytes for names with this ending.
        self._metadata = tuple(
            (name, value.encode() if name.endswith("-bin") else value) for name, value in settings.headers
        )
        self._lock = threading.Lock()
        self._channel: Any = None
        self._export: Any = None
        self._closed = False

    def send(self, body: bytes) -> Outcome:
        """Deliver one request."""
        try:
            with suppress_instrumentation():
                return self._patience.repeat(lambda timeout_s: self._attempt(body, timeout_s))
        except Exception as error:  # such as a channel that was closed meanwhile
            return Outcome(Verdict.Failed, message=f"{type(error).__name__}: {error}")

    def interrupt(self, deadline: float) -> None:
        """Cut waits short and let no request last beyond `deadline`."""
        self._patience.interrupt(deadline)

    def close(self) -> None:
        """Close the channel, which ends the requests on it; further ones fail."""
        with self._lock:
            self._closed = True
            channel, self._channel, self._export = self._channel, None, None
        if channel is not None:
            channel.close()

    def renew(self) -> None:
        """Leave the parent's channel alone."""
        self._lock = threading.Lock()
        self._patience = Patience(self._settings.timeout_s)
        if self._channel is not None:
            _parents_channels.append(self._channel)
        self._channel = self._export = None

    def _attempt(self, body: bytes, timeout_s: float) -> Outcome:
        export = self._method()
        if export is None:
            return SHUT_DOWN
        try:
            answer: bytes = export(body, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            return _failure(error)
        return accepted(answer)

    def _method(self) -> Any:
        with self._lock:
            if self._export is None and not self._closed:
                self._channel = _channel(self._settings)
                self._export = self._channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
            return self._export


def _channel(settings: OTLPSettings) -> Any:
    compression = {
        "gzip": grpc.Compression.Gzip,
        "deflate": grpc.Compression.Deflate,
    }.get(settings.compression, grpc.Compression.NoCompression)
    if settings.insecure:
        return grpc.insecure_channel(settings.endpoint, options=_OPTIONS, compression=compression)
    chain = settings.client_certificate_file
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_bytes(settings.certificate_file),
        # As over HTTP, the certificate's file may hold the key too.
        private_key=_bytes(settings.client_key_file or chain),
        certificate_chain=_bytes(chain),
    )
    return grpc.secure_channel(settings.endpoint, credentials, options=_OPTIONS, compression=compression)


def _bytes(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _failure(error: Any) -> Outcome:
    code, details = error.code(), error.details() or ""
    message = f"gRPC {code.name}: {details}"
    asked_s = _retry_delay_s(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if _TOO_LARGE.search(details):
            return Outcome(Verdict.TooLarge, message=message)
        return Outcome(Verdict.Failed, message=message, again_after_s=asked_s)
    return Outcome(Verdict.Failed, message=message, again_after_s=(asked_s or 0.0) if code.name in RETRYABLE else None)


def _retry_delay_s(error: Any) -> float | None:
    """The delay of a `google.rpc.RetryInfo` in an error's details."""
    from google.rpc.error_details_pb2 import RetryInfo
    from google.rpc.status_pb2 import Status

    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    info = RetryInfo()
    try:
        if "google.rpc.retryinfo-bin" in trailers:
            info.ParseFromString(trailers["google.rpc.retryinfo-bin"])
        else:
            status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
            if not any(detail.Unpack(info) for detail in status.details):
                return None
    except DecodeError:
        return None
    return max(0.0, info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
