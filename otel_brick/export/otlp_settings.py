"""Where and how spans are sent: arguments over `OTEL_EXPORTER_OTLP_*` variables over defaults, as a frozen dataclass.

The variables mean what they mean to the official exporters. A malformed argument raises at once; a malformed variable
warns once and its default is used, because an environment must never stop a program.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from opentelemetry.util.re import parse_env_headers

logger = logging.getLogger("otel_brick")

HTTP: Final = "http/protobuf"
GRPC: Final = "grpc"
COMPRESSIONS: Final = ("none", "gzip", "deflate")
DEFAULT_ENDPOINTS: Final = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}
TRACES_PATH: Final = "/v1/traces"
DEFAULT_TIMEOUT_S: Final = 10.0
ARGUMENTS: Final = (
    *("endpoint", "protocol", "headers", "timeout_s", "compression"),
    *("insecure", "certificate_file", "client_key_file", "client_certificate_file"),
)

_GENERAL: Final = "OTEL_EXPORTER_OTLP_"
_OF_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_"
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUES: Final = {HTTP: re.compile(r"[\t\x20-\x7e\x80-\xff]*"), GRPC: re.compile(r"[\x20-\x7e]*")}
"""What the two protocols can carry."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OTLPSettings:
    """The settings of one exporter; make it with `OTLPSettings.build`.

    Attributes:
        protocol: `http/protobuf` or `grpc`.
        endpoint: over HTTP the complete URL, over gRPC the target of the channel.
        headers: sent with every request, names in lower case.
        timeout_s: seconds that one request may take, retries included.
        compression: `none`, `gzip` or `deflate`.
        insecure: whether gRPC goes without TLS.
        certificate_file: certificates to trust, PEM; None for the usual ones.
        client_key_file: the client's private key, PEM.
        client_certificate_file: the client's certificates, PEM.
    """

    protocol: str
    endpoint: str
    headers: tuple[tuple[str, str], ...]
    timeout_s: float
    compression: str
    insecure: bool
    certificate_file: str | None
    client_key_file: str | None
    client_certificate_file: str | None

    @property
    def destination(self) -> str:
        """The endpoint as logs may show it, without a password."""
        return _without_user(self.endpoint)

    @classmethod
    def build(cls, arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> OTLPSettings:
        """Combine arguments (None: not given) with the environment and the defaults.

        Args:
            arguments: values by the names in `ARGUMENTS`.

        Raises:
            ValueError: an argument is malformed; the message names it and what is expected.
        """
        if not isinstance(arguments.get("insecure"), bool | None):
            raise ValueError(f"insecure must be True or False; got {arguments['insecure']!r}")
        source = _Source(arguments, environ)
        protocol = source.value("protocol", "PROTOCOL", HTTP, _protocol)
        key = source.value("client_key_file", "CLIENT_KEY", None, _file)
        certificate = source.value("client_certificate_file", "CLIENT_CERTIFICATE", None, _file)
        if key is not None and certificate is None:
            if arguments.get("client_key_file") is not None:
                raise ValueError("client_key_file must be given together with client_certificate_file")
            _warn(_GENERAL + "CLIENT_KEY", "there is no client certificate; the key is not used")
            key = None
        if protocol == HTTP:
            endpoint, insecure = source.http_endpoint(), False
        else:
            endpoint, insecure = source.grpc_endpoint()
        return cls(
            protocol=protocol,
            endpoint=endpoint,
            headers=source.headers(protocol),
            timeout_s=source.value("timeout_s", "TIMEOUT", DEFAULT_TIMEOUT_S, _timeout),
            compression=source.value("compression", "COMPRESSION", "none", _compression),
            insecure=insecure,
            certificate_file=source.value("certificate_file", "CERTIFICATE", None, _file),
            client_key_file=key,
            client_certificate_file=certificate,
        )


class _Source:
    """Reads one setting after the other from arguments and variables."""

    def __init__(self, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._environ = environ

    def value(self, name: str, variable: str, default: T, parse: Callable[[Any], T]) -> T:
        """A setting; `parse` takes an argument or a variable's text and raises ValueError saying what is expected."""
        argument = self._arguments.get(name)
        if argument is not None:
            return _argument(name, argument, parse)
        spelled, text = self._variable(variable)
        return default if text is None else _parsed(spelled, text, default, parse)

    def http_endpoint(self) -> str:
        """The URL; that of all signals gets the path of this one, all others are used as given."""
        argument = self._arguments.get("endpoint")
        if argument is not None:
            return _argument("endpoint", argument, _http_url)
        variable, text = self._variable("ENDPOINT")
        endpoint = None if text is None else _parsed(variable, text, None, _http_url)
        if endpoint is not None and variable.startswith(_OF_TRACES):
            return endpoint
        return (endpoint or DEFAULT_ENDPOINTS[HTTP]).removesuffix("/") + TRACES_PATH

    def grpc_endpoint(self) -> tuple[str, bool]:
        """The channel's target and whether it goes without TLS: as told or as the scheme says, never with `https`."""
        endpoint = self.value("endpoint", "ENDPOINT", DEFAULT_ENDPOINTS[GRPC], _grpc_url)
        parts = urlsplit(endpoint)
        target = parts.netloc or endpoint
        told: bool | None = self._arguments.get("insecure")
        variable, text = self._variable("INSECURE")
        if told is None and text is not None:
            # A typing error must not take the encryption away.
            told = text.lower() == "true"
            if text.lower() not in ("true", "false"):
                _warn(variable, f"must be true or false; got {text!r}, using false")
        return target, parts.scheme != "https" and (parts.scheme == "http" if told is None else told)

    def headers(self, protocol: str) -> tuple[tuple[str, str], ...]:
        """Over HTTP an argument adds to the variable, over gRPC it takes its place, as in the official exporters."""
        given: Mapping[Any, Any] = self._arguments.get("headers") or {}
        if not isinstance(given, Mapping):
            raise ValueError("headers must be a mapping of names to values")
        spelled, text = self._variable("HEADERS")
        headers: dict[str, str] = {}
        if text is not None and not (given and protocol == GRPC):
            for name, value in parse_env_headers(text, liberal=True).items():
                if _carried(name, value, protocol):
                    headers[name] = value
                else:
                    _warn(spelled, f"the header {name!r} can not be sent and is left out")
        for name, value in given.items():
            if not isinstance(name, str) or not _carried(name.lower(), value, protocol):
                raise ValueError(f"headers must have values that {protocol} can carry; {name!r} has not")
            headers[name.lower()] = value
        return tuple(headers.items())

    def _variable(self, name: str) -> tuple[str, str | None]:
        """The variable that counts, and its text; an empty one counts as unset."""
        for spelled in (_OF_TRACES + name, _GENERAL + name):
            text = self._environ.get(spelled, "").strip()
            if text:
                return spelled, text
        return _GENERAL + name, None


def _argument(name: str, value: Any, parse: Callable[[Any], T]) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{name} must be {error}; got {value!r}") from None


def _parsed(variable: str, text: str, default: T, parse: Callable[[Any], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        _warn(variable, f"must be {error}; got {_without_user(text)!r}, using the default")
        return default


def _without_user(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


_warned: set[tuple[str, str]] = set()


def _warn(variable: str, message: str) -> None:
    if (variable, message) not in _warned:
        _warned.add((variable, message))
        logger.warning("%s: %s", variable, message)


def _protocol(value: Any) -> str:
    if value not in (HTTP, GRPC):
        raise ValueError(f"{HTTP} or {GRPC}")
    return value


def _compression(value: Any) -> str:
    name = value.strip().lower() if isinstance(value, str) else value
    if name not in COMPRESSIONS:
        raise ValueError(f"one of {', '.join(COMPRESSIONS)}")
    return name


def _timeout(value: Any) -> float:
    expected = "a positive number of seconds"
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    if not 0 < seconds < math.inf:
        raise ValueError(expected)
    return seconds


def _file(value: Any) -> str:
    path = str(value) if isinstance(value, Path) else value
    if not isinstance(path, str) or not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise ValueError("the path of a file that can be read")
    return path


def _http_url(value: Any) -> str:
    if _scheme(value) not in ("http", "https"):
        raise ValueError("a URL with http or https and a host")
    return value


def _grpc_url(value: Any) -> str:
    if _scheme(value) is None:
        raise ValueError("a URL, or a target such as localhost:4317")
    return value


def _scheme(value: Any) -> str | None:
    """What stands before the colon; None where the value can not be an endpoint."""
    if not isinstance(value, str) or not value or re.search(r"\s", value):
        return None
    try:
        parts = urlsplit(value)
        usable = parts.scheme not in ("http", "https") or (parts.hostname and parts.port != 0)
    except ValueError:  # brackets or a port that are none
        return None
    return parts.scheme if usable else None


def _carried(name: str, value: Any, protocol: str) -> bool:
    pattern = _HEADER_VALUES[protocol]
    return isinstance(value, str) and bool(_HEADER_NAME.fullmatch(name)) and bool(pattern.fullmatch(value))
