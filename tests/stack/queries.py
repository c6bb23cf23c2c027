"""Questions to a running Jaeger and Prometheus, and their answers in plain Python values.

It needs only the standard library, so that scripts outside the tests can use it too.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 20.0
Labels = dict[str, str]


@dataclass(frozen=True)
class Span:
    """A span as a backend or a file tells it.

    Attributes:
        attributes: by name, with the type in the value: bool, int, float or str.
        status: `"unset"`, `"ok"` or `"error"`.
        resource: the attributes of its resource.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: str
    scope: tuple[str, str]
    resource: dict[str, Any] = field(compare=False)

    @property
    def level(self) -> str:
        """What the span stands for: step, layer, brick or kernel."""
        return self.attributes.get("brick.span.level", "")


def spans_of(request: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of one trace request in the JSON form of OTLP."""
    for resource_spans in request.get("resourceSpans", []):
        resource = attributes_of(resource_spans.get("resource", {}))
        for scope_spans in resource_spans.get("scopeSpans", []):
            scope = scope_spans.get("scope", {})
            for span in scope_spans.get("spans", []):
                yield Span(
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    name=span["name"],
                    kind=_enum(span.get("kind", 0), _KINDS),
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    attributes=attributes_of(span),
                    status=_enum(span.get("status", {}).get("code", 0), _STATUSES),
                    scope=(scope.get("name", ""), scope.get("version", "")),
                    resource=resource,
                )


_KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
_STATUSES = ("unset", "ok", "error")


def _enum(value: int | str, names: tuple[str, ...]) -> str:
    """A member of an enum, which JSON writers give as a number or as a name such as SPAN_KIND_INTERNAL."""
    return names[value] if isinstance(value, int) else value.rpartition("_")[2].lower()


def attributes_of(owner: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a span, data point or resource in the JSON form of OTLP."""
    return {entry["key"]: any_value(entry["value"]) for entry in owner.get("attributes", [])}


def any_value(value: Mapping[str, Any]) -> Any:
    """A value in the JSON form of OTLP, where integers are strings, as one of its type."""
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "doubleValue":
        return float(content)
    if kind == "arrayValue":
        return [any_value(one) for one in content.get("values", [])]
    return content


class Jaeger:
    """The query API of Jaeger 2.

    Args:
        url: of its user interface, such as `http://localhost:16686`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of a trace, by start; empty where Jaeger does not know it."""
        try:
            answer = _get(f"{self.url}/api/v3/traces/{trace_id}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise
        return sorted(spans_of(answer["result"]), key=lambda span: (span.start_ns, -span.end_ns, span.span_id))

    def trace_ids(self, service: str, *, limit: int = 20_000, **tags: str) -> set[str]:
        """The traces of a service, of which a span has all these tags (`brick__phase="decode"`: dots as `__`)."""
        wanted = {name.replace("__", "."): value for name, value in tags.items()}
        now = time.time()
        answer = _get(
            f"{self.url}/api/traces",
            service=service,
            limit=str(limit),
            start=str(int((now - 86_400) * 1e6)),
            end=str(int((now + 3600) * 1e6)),
            **({"tags": json.dumps(wanted)} if wanted else {}),
        )
        return {trace["traceID"] for trace in answer["data"]}

    def traces(self, service: str, **tags: str) -> dict[str, list[Span]]:
        """All spans of those traces, by trace."""
        return {trace_id: self.trace(trace_id) for trace_id in self.trace_ids(service, **tags)}

    def services(self) -> set[str]:
        """The services that Jaeger has spans of."""
        return set(_get(f"{self.url}/api/services")["data"] or [])


class PrometheusError(AssertionError):
    """Prometheus does not accept a question."""


class Prometheus:
    """The query API of Prometheus.

    Args:
        url: such as `http://localhost:9090`.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str, at_s: float | None = None) -> list[tuple[Labels, float]]:
        """The labels and values of an expression, an instant vector or a scalar.

        Raises:
            PrometheusError: the expression is wrong.
        """
        data = self._ask("query", query=expression, **({} if at_s is None else {"time": str(at_s)}))
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def values(self, expression: str, *by: str) -> dict[tuple[str, ...], float]:
        """The values of an expression by some of its labels, which must tell its series apart."""
        found: dict[tuple[str, ...], float] = {}
        for labels, value in self.query(expression):
            key = tuple(labels.get(label, "") for label in by)
            assert key not in found, f"{by} does not tell the series of {expression} apart"
            found[key] = value
        return found

    def range(
        self, expression: str, *, minutes: float = 5, step_s: float = 15
    ) -> list[tuple[Labels, list[tuple[float, float]]]]:
        """The series of an expression over the last minutes: labels and (time, value), without values that are none."""
        now = time.time()
        data = self._ask("query_range", query=expression, start=str(now - 60 * minutes), end=str(now), step=str(step_s))
        return [
            (one["metric"], [(at, value) for at, text in one["values"] if not math.isnan(value := float(text))])
            for one in data["result"]
        ]

    def exemplars(self, expression: str, *, minutes: float = 30) -> list[tuple[Labels, Labels, float]]:
        """The exemplars of an expression's series: labels of the series, labels of the exemplar, its value."""
        now = time.time()
        data = self._ask("query_exemplars", query=expression, start=str(now - 60 * minutes), end=str(now + 60))
        return [
            (series["seriesLabels"], exemplar["labels"], float(exemplar["value"]))
            for series in data
            for exemplar in series["exemplars"]
        ]

    def metadata(self, metric: str) -> list[dict[str, str]]:
        """Type, help and unit of a metric."""
        return self._ask("metadata", metric=metric).get(metric, [])

    def rules(self) -> list[dict[str, Any]]:
        """The rules that it evaluates, each with its `query`, `name`, `type` and `health`."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        """Whom it scrapes, each with `scrapeUrl`, `health` and `lastError`."""
        return self._ask("targets")["activeTargets"]

    def _ask(self, what: str, **parameters: str) -> Any:
        try:
            return _get(f"{self.url}/api/v1/{what}", **parameters)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{parameters}: {error.read().decode(errors='replace')}") from error


def _get(url: str, **parameters: str) -> Any:
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=TIMEOUT_S) as answer:
        return json.load(answer)
