"""OTLP over HTTP: urllib3's kept connections, one attempt at a time.

Imported only where an exporter for HTTP is made. A request is repeated where the collector can not have processed it,
or said that it did not; the one exception is a connection that breaks before any answer, which is tried again once,
because a kept connection that the other side has closed looks the same.
"""

from __future__ import annotations

import gzip
import os
import time
import zlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from opentelemetry.instrumentation.utils import suppress_instrumentation
from urllib3.exceptions import ConnectTimeoutError, HTTPError, InvalidHeader, ProtocolError, ProxyError
from urllib3.util import Retry, Timeout, make_headers

from ..version import __version__
from .transport import LEAST_S, SHUT_DOWN, Outcome, Patience, Verdict, accepted

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse

    from .otlp_settings import OTLPSettings

RETRYABLE: Final = (429, 502, 503, 504)
MAX_CONNECTIONS: Final = 32
MAX_ANSWER_BYTES: Final = 65_536
MAX_MESSAGE: Final = 200


class HttpTransport:
    """Sends requests as `POST`; everything that it needs is made at the first one."""

    def __init__(self, settings: OTLPSettings) -> None:
        self._settings = settings
        self._patience = Patience(settings.timeout_s)
        self._headers = _headers(settings)
        self._pool: urllib3.PoolManager | None = None
        self._closed = False

    def send(self, body: bytes) -> Outcome:
        """Deliver one request."""
        try:
            compressed = _compressed(body, self._settings.compression)
            with suppress_instrumentation():
                return self._patience.repeat(lambda timeout_s: self._attempt(compressed, timeout_s))
        except Exception as error:  # such as a certificate file that holds none
            return Outcome(Verdict.Failed, message=_described(error))

    def interrupt(self, deadline: float) -> None:
        """Cut waits short and let no request last beyond `deadline`."""
        self._patience.interrupt(deadline)

    def close(self) -> None:
        """Close idle connections; requests fail from now on."""
        self._closed = True
        if self._pool is not None:
            self._pool.clear()

    def renew(self) -> None:
        """Leave the parent's connections alone."""
        self._patience = Patience(self._settings.timeout_s)
        self._pool = None

    def _attempt(self, body: bytes, timeout_s: float) -> Outcome:
        deadline = time.monotonic() + timeout_s
        try:
            try:
                return self._post(body, deadline)
            except ProtocolError:
                if time.monotonic() >= deadline:
                    raise
                return self._post(body, deadline)
        except (ConnectTimeoutError, ProxyError) as error:
            cause = error.original_error if isinstance(error, ProxyError) else error
            again_after_s = 0.0 if isinstance(cause, ConnectTimeoutError) else None
            return Outcome(Verdict.Failed, message=_described(error), again_after_s=again_after_s)

    def _post(self, body: bytes, deadline: float) -> Outcome:
        if self._closed:
            return SHUT_DOWN
        if self._pool is None:
            self._pool = _pool(self._settings)
        response = self._pool.urlopen(
            "POST",
            self._settings.endpoint,
            body=body,
            headers=self._headers,
            timeout=Timeout(total=max(LEAST_S, deadline - time.monotonic())),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        content = _content(response, deadline)
        if 200 <= response.status < 300:
            return accepted(content)
        message = f"HTTP {response.status} {_message(response, content)}".strip()
        if response.status == 413:
            return Outcome(Verdict.TooLarge, message=message)
        again_after_s = _retry_after_s(response) if response.status in RETRYABLE else None
        return Outcome(Verdict.Failed, message=message, again_after_s=again_after_s)


def _headers(settings: OTLPSettings) -> dict[str, str]:
    headers = {"content-type": "application/x-protobuf", "user-agent": f"otel-brick/{__version__}"}
    place = urlsplit(settings.endpoint)
    if place.username or place.password:
        user = f"{unquote(place.username or '')}:{unquote(place.password or '')}"
        headers |= make_headers(basic_auth=user)
    headers.update(settings.headers)
    if settings.compression != "none":
        headers.setdefault("content-encoding", settings.compression)
    return headers


def _compressed(body: bytes, compression: str) -> bytes:
    """Spans resemble each other so much that higher levels cost four times as much and save next to nothing."""
    if compression == "gzip":
        return gzip.compress(body, compresslevel=1)
    return zlib.compress(body, 1) if compression == "deflate" else body


def _pool(settings: OTLPSettings) -> urllib3.PoolManager:
    """Connections as the official exporter makes them: through proxies of the environment, trusting what it trusts."""
    options: dict[str, Any] = {
        "maxsize": MAX_CONNECTIONS,
        "cert_reqs": "CERT_REQUIRED",
        "ca_certs": settings.certificate_file or _trusted(),
        "cert_file": settings.client_certificate_file,
        "key_file": settings.client_key_file,
    }
    place = urlsplit(settings.endpoint)
    proxies = getproxies()
    proxy = proxies.get(place.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(place.netloc.rpartition("@")[2]):
        return urllib3.PoolManager(**options)
    user, found, _ = proxy.partition("://")[2].rpartition("@")
    headers = make_headers(proxy_basic_auth=unquote(user)) if found else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def _trusted() -> str | None:
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if bundle:
        return bundle
    try:
        import certifi
    except ImportError:
        return None
    return certifi.where()


def _retry_after_s(response: BaseHTTPResponse) -> float:
    try:
        return Retry().get_retry_after(response) or 0.0
    except InvalidHeader:
        return 0.0


def _content(response: BaseHTTPResponse, deadline: float) -> bytes:
    """The answer's body as far as it comes: the status alone decides what became of a request."""
    content = bytearray()
    try:
        for chunk in response.stream(MAX_ANSWER_BYTES, decode_content=False):
            content += chunk
            if len(content) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                response.close()
                break
    except (HTTPError, OSError):
        response.close()
    return bytes(content)


def _message(response: BaseHTTPResponse, content: bytes) -> str:
    """The collector's words about a refusal: an encoded `google.rpc.Status`, or text."""
    from google.protobuf.message import DecodeError
    from google.rpc.status_pb2 import Status

    kind = response.headers.get("Content-Type", "")
    try:
        said = Status.FromString(content).message if "protobuf" in kind else content.decode("utf-8", "replace")
    except DecodeError:
        said = ""
    return " ".join((said or response.reason or "").split())[:MAX_MESSAGE]


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
