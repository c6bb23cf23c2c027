"""The OTLP exporter: spans of any kind through the SDK's interface, encoded rows through `submit`.

Both ways share one connection, its retries and its limits. Rows are put between a frame that the official classes
encode once for each resource; only lengths are computed here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from .. import semconv
from ..version import __version__
from .columnar import varint
from .otlp_settings import OTLPSettings
from .sender import Sender
from .transport import transport_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    from ..record.losses import Losses

logger = logging.getLogger("otel_brick")

MAX_FRAMES: Final = 16
_LENGTHS_BYTES: Final = 12
"""The most that the tags and lengths around a request's spans need."""


class BrickOTLPExporter(SpanExporter):
    """Sends spans to an OTLP collector.

    For processors of the SDK it is an ordinary exporter. A profiler hands it rows that are encoded already, which a
    thread of the exporter's own sends, so that nobody waits for the network. What is not given is taken from the
    variables `OTEL_EXPORTER_OTLP_TRACES_*` and `OTEL_EXPORTER_OTLP_*`, which mean what they mean to the official
    exporters; a malformed one is warned about and has no effect.

    Args:
        endpoint: over HTTP the complete URL with its path, over gRPC a URL or a target such as `collector:4317`.
        protocol: `http/protobuf`, the default, or `grpc`.
        headers: sent with every request. Over HTTP they are added to those of the variables, over gRPC they replace
            them.
        timeout_s: seconds that one request may take, retries included; 10 by default.
        compression: `none`, the default, `gzip` or `deflate`.
        insecure: whether gRPC goes without TLS where the endpoint does not begin with `https`; by default where it
            begins with `http`.
        certificate_file: certificates to trust, PEM; those that the official exporters trust by default.
        client_key_file: the client's private key, PEM, if `client_certificate_file` does not hold it.
        client_certificate_file: the client's certificate, PEM.

    Raises:
        ValueError: an argument is malformed; the message names it.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        protocol: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        compression: str | None = None,
        insecure: bool | None = None,
        certificate_file: str | Path | None = None,
        client_key_file: str | Path | None = None,
        client_certificate_file: str | Path | None = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "endpoint": endpoint,
            "protocol": protocol,
            "headers": headers,
            "timeout_s": timeout_s,
            "compression": compression,
            "insecure": insecure,
            "certificate_file": certificate_file,
            "client_key_file": client_key_file,
            "client_certificate_file": client_certificate_file,
        }
        settings = OTLPSettings.build(arguments)
        self._sender = Sender(transport_for(settings), settings.destination)
        self._frames: dict[int, tuple[Resource, Frame]] = {}
        self._warned = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans and wait for the answer, `timeout_s` for each request; too large a request is divided.

        Returns:
            FAILURE where spans were not delivered, also after shutdown; SUCCESS where the collector took the request,
            even if it rejected some of its spans, which is logged.
        """
        if not spans:
            return SpanExportResult.SUCCESS
        try:
            receipt = self._sender.deliver(SpansPayload(spans))
        except Exception:
            logger.exception("spans could not be encoded")
            return SpanExportResult.FAILURE
        if receipt is None and not self._warned:
            self._warned = True
            logger.warning("the exporter is shut down; spans are ignored")
        return SpanExportResult.FAILURE if receipt is None or receipt.failed else SpanExportResult.SUCCESS

    def submit(self, blocks: Sequence[NDArray[np.uint8]], resource: Resource, losses: Losses) -> None:
        """Queue encoded rows and return at once.

        Args:
            blocks: shape (spans, bytes) each, dtype uint8; every row an entry of `ScopeSpans.spans` with its tag and
                length. They are kept until they are sent and must not change.
            resource: what the spans belong to; encoded when it is first seen.
            losses: counts `export_failed`, `queue_full` and `already_shutdown`.

        Raises:
            ValueError: a block has another shape or dtype.
        """
        for block in blocks:
            if block.ndim != 2 or block.dtype != np.uint8 or (len(block) and not block.shape[1]):
                raise ValueError(f"blocks must be of shape (spans, bytes) and uint8; got {block.shape}, {block.dtype}")
        self._sender.submit(packed(self._frame(resource), blocks, self._sender.request_bytes), losses)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every row submitted so far is delivered or counted as lost; False if that takes longer."""
        return self._sender.flush(timeout_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Like `flush`, in milliseconds; `export` leaves nothing to flush."""
        return self.flush(timeout_millis / 1000)

    def shutdown(self, timeout_millis: float = 30_000) -> None:
        """Send what is queued, without waiting for anything to become better; the rest is counted after the timeout."""
        self._sender.shutdown(timeout_millis / 1000)

    def _frame(self, resource: Resource) -> Frame:
        known = self._frames.get(id(resource))
        if known is None:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            known = self._frames[id(resource)] = resource, Frame.of(resource)
        return known[1]


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the spans of one resource.

    Attributes:
        outer: the encoded `ResourceSpans` without `scope_spans`.
        inner: the encoded `ScopeSpans` without `spans`.
    """

    outer: bytes
    inner: bytes

    @classmethod
    def of(cls, resource: Resource) -> Frame:
        """Have the official encoder write the frame of our scope."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext

        scope = InstrumentationScope(semconv.SCOPE_NAME, __version__)
        context = SpanContext(1, 1, is_remote=False)
        span = ReadableSpan("", context, resource=resource, instrumentation_scope=scope)
        outer = encode_spans([span]).resource_spans[0]
        inner = outer.scope_spans[0]
        del inner.spans[:]
        inner_bytes = inner.SerializeToString()
        del outer.scope_spans[:]
        return cls(outer.SerializeToString(), inner_bytes)

    @property
    def size_bytes(self) -> int:
        """How much it adds to a request at most."""
        return len(self.outer) + len(self.inner) + _LENGTHS_BYTES

    def around(self, blocks: Sequence[NDArray[np.uint8]]) -> bytes:
        """An encoded `ExportTraceServiceRequest` of the spans in blocks."""
        inner = len(self.inner) + sum(block.size for block in blocks)
        scope_spans = b"\x12" + varint(inner) + self.inner
        outer = len(self.outer) + len(scope_spans) - len(self.inner) + inner
        return b"".join([b"\x0a", varint(outer), self.outer, scope_spans, *(block.data for block in blocks)])


@dataclass(frozen=True, slots=True)
class RowsPayload:
    """A request of encoded rows, put together only to be sent."""

    frame: Frame
    blocks: tuple[NDArray[np.uint8], ...]

    @property
    def rows(self) -> int:
        """The number of spans."""
        return sum(len(block) for block in self.blocks)

    @property
    def size_bytes(self) -> int:
        """The size of the request, rounded up."""
        return self.frame.size_bytes + sum(block.size for block in self.blocks)

    def body(self) -> bytes:
        """The encoded request."""
        return self.frame.around(self.blocks)

    def halves(self) -> tuple[RowsPayload, RowsPayload]:
        """Two requests of half of the rows each; they share the memory of this one."""
        left: list[NDArray[np.uint8]] = []
        right: list[NDArray[np.uint8]] = []
        room = self.rows // 2
        for block in self.blocks:
            left.append(block[:room])
            right.append(block[room:])
            room -= min(room, len(block))
        return _rows_payload(self.frame, left), _rows_payload(self.frame, right)


class SpansPayload:
    """A request of span objects, encoded by the official encoder."""

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        self._spans = spans
        self._body = encode_spans(spans).SerializeToString()

    @property
    def rows(self) -> int:
        """The number of spans."""
        return len(self._spans)

    @property
    def size_bytes(self) -> int:
        """The size of the request."""
        return len(self._body)

    def body(self) -> bytes:
        """The encoded request."""
        return self._body

    def halves(self) -> tuple[SpansPayload, SpansPayload]:
        """Two requests of half of the spans each."""
        middle = self.rows // 2
        return SpansPayload(self._spans[:middle]), SpansPayload(self._spans[middle:])


def packed(frame: Frame, blocks: Sequence[NDArray[np.uint8]], max_bytes: int) -> list[RowsPayload]:
    """Divide rows into requests of at most `max_bytes` each, but never less than a row."""
    payloads: list[RowsPayload] = []
    chosen: list[NDArray[np.uint8]] = []
    room = space = max_bytes - frame.size_bytes
    for block in map(np.ascontiguousarray, blocks):
        start = 0
        while start < len(block):
            rows = room // block.shape[1]
            if rows <= 0 and chosen:
                payloads.append(_rows_payload(frame, chosen))
                chosen, room = [], space
                continue
            part = block[start : start + max(1, rows)]
            chosen.append(part)
            room -= part.size
            start += len(part)
    if chosen:
        payloads.append(_rows_payload(frame, chosen))
    return payloads


def _rows_payload(frame: Frame, blocks: Sequence[NDArray[np.uint8]]) -> RowsPayload:
    return RowsPayload(frame, tuple(block for block in blocks if len(block)))
