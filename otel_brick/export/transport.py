"""What carries requests to a collector, whatever the protocol: bytes in, an outcome as a value out.

Transports retry what may be retried within the request's time and never raise. What happens to a request that is too
large, or whose time is over, is decided by those who send it.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from .otlp_settings import GRPC

if TYPE_CHECKING:
    from collections.abc import Callable

    from .otlp_settings import OTLPSettings

FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 5.0
LEAST_S: Final = 0.001
"""Libraries take no timeout of zero."""


class Verdict(enum.Enum):
    """What became of a request."""

    Delivered = "delivered"
    TooLarge = "too large"
    Failed = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request, or of one attempt at it.

    Attributes:
        verdict: what became of it.
        rejected: spans that the collector left out of a request which it took.
        message: the collector's words, or what went wrong.
        again_after_s: the least time after which another attempt makes sense, None where none does.
    """

    verdict: Verdict
    rejected: int = 0
    message: str = ""
    again_after_s: float | None = None


SHUT_DOWN: Final = Outcome(Verdict.Failed, message="the exporter is shut down")


class Transport(Protocol):
    """Sends requests to one endpoint; used by several threads at a time."""

    def send(self, body: bytes) -> Outcome:
        """Deliver one encoded `ExportTraceServiceRequest`."""
        ...

    def interrupt(self, deadline: float) -> None:
        """End waits for another attempt and let no request last beyond `deadline`, a time of `time.monotonic`."""
        ...

    def close(self) -> None:
        """Let go of connections; requests fail from now on."""
        ...

    def renew(self) -> None:
        """In a forked child: leave the parent's connections alone and open others when needed."""
        ...


class Patience:
    """How long a request may take: `timeout_s` with all its attempts, less once somebody waits for the end.

    The retries of HTTP and gRPC libraries are not used: they log each attempt or can not be interrupted.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interrupted = threading.Event()
        self._end = float("inf")

    def repeat(self, attempt: Callable[[float], Outcome]) -> Outcome:
        """Make attempts, each with the seconds that it may take, until one is final or time is over."""
        deadline = time.monotonic() + self._timeout_s
        attempts = 0
        while True:
            outcome = attempt(max(LEAST_S, min(deadline, self._end) - time.monotonic()))
            attempts += 1
            if outcome.again_after_s is None:
                return outcome
            wait_s = max(outcome.again_after_s, backoff_s(attempts))
            if self._interrupted.is_set() or time.monotonic() + wait_s >= deadline:
                return outcome
            # When interrupted, one more attempt follows at once.
            self._interrupted.wait(wait_s)

    def interrupt(self, deadline: float) -> None:
        """Cut waits short and let no attempt last beyond `deadline`."""
        self._end = min(self._end, deadline)
        self._interrupted.set()


def backoff_s(attempts: int) -> float:
    """Seconds to wait after so many failed attempts: doubled each time up to a maximum, and scattered by half."""
    return random.uniform(0.5, 1.5) * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(attempts - 1, 16))


def transport_for(settings: OTLPSettings) -> Transport:
    """The transport for a protocol; its library is loaded here."""
    if settings.protocol == GRPC:
        from .transport_grpc import GrpcTransport

        return GrpcTransport(settings)
    from .transport_http import HttpTransport

    return HttpTransport(settings)


def accepted(content: bytes) -> Outcome:
    """The outcome of a request that the collector took, from its `ExportTraceServiceResponse`."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except DecodeError:
        return Outcome(Verdict.Delivered)
    return Outcome(Verdict.Delivered, max(0, partial.rejected_spans), partial.error_message)
