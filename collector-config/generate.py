"""Writes what can be derived beside this file: the Grafana dashboard, and the collector files with the older names.

The dashboard takes every name from `otel_brick.semconv`, so a renamed metric can not leave it stale. The files in
`before-2026` are `agent.yaml` and `gateway.yaml` for collectors that know components by their names before 2026.

Run plainly it writes the files; with `--check` it writes nothing, and its exit status is 1 if a file is not what it
would have written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from otel_brick import semconv
from otel_brick.export.prometheus import prometheus_name
from otel_brick.semconv import Metric

FOLDER: Final = Path(__file__).parent
DASHBOARD: Final = Path("grafana/otel_brick.json")
BEFORE_2026: Final = Path("before-2026")
COLLECTOR_FILES: Final = ("agent.yaml", "gateway.yaml")

OLDER_NAMES: Final[Mapping[str, str]] = {
    "otlp_grpc": "otlp",
    "otlp_http": "otlphttp",
    "span_metrics": "spanmetrics",
    "prometheus_remote_write": "prometheusremotewrite",
    "load_balancing": "loadbalancing",
}
"""What the components were called before 2026."""
NEWER_KEYS: Final = ("without_scope_info", "disable_scope_info")
"""Settings that collectors did not have before 2026; without them series have labels `otel_scope_...`."""

SPAN_METRICS: Final = "traces_span_metrics_duration_seconds"
"""The histogram that `span_metrics` makes in `gateway.yaml`, as Prometheus names it."""
SLOWER_THAN_USUAL: Final = "brick:duration_seconds:p99_30m / brick:duration_seconds:p99_30m_median1d"
"""Of two recording rules in `rules/otel_brick.yml`."""
COLLECTORS_FAILED: Final = "collector:exporter_failed_items:total"
"""Another one: what the exporters of collectors did not queue or send."""

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_RATE: Final = "[$__rate_interval]"


def series(metric: Metric) -> str:
    """Name of a metric's samples in Prometheus; of a histogram, without `_bucket`, `_sum` and `_count`."""
    name = prometheus_name(metric)
    return f"{name}_total" if metric.instrument == "counter" else name


def label(attribute: str) -> str:
    """Name of an attribute as a label in Prometheus."""
    return attribute.replace(".", "_")


STEP: Final = series(semconv.METRIC_BRICK_STEP_DURATION)
BRICK: Final = series(semconv.METRIC_BRICK_DURATION)
TIME: Final = series(semconv.METRIC_BRICK_TIME)
CALLS: Final = series(semconv.METRIC_BRICK_CALLS)
IO: Final = series(semconv.METRIC_BRICK_IO)
TOKENS: Final = series(semconv.METRIC_BRICK_TOKENS)
LIMIT: Final = series(semconv.METRIC_BRICK_BUDGET_LIMIT)
VIOLATIONS: Final = series(semconv.METRIC_BRICK_BUDGET_VIOLATIONS)
DROPPED: Final = series(semconv.METRIC_BRICK_RECORDS_DROPPED)
FINALIZE: Final = series(semconv.METRIC_BRICK_FINALIZE_DURATION)

NAME: Final = label(semconv.BRICK_NAME)
PHASE: Final = label(semconv.BRICK_PHASE)
LEVEL: Final = label(semconv.BRICK_SPAN_LEVEL)
LAYER: Final = label(semconv.BRICK_LAYER_INDEX)
REASON: Final = label(semconv.BRICK_DROP_REASON)

OF_JOB: Final = 'job=~"$job"'
OF_STEP: Final = f'{OF_JOB},{PHASE}=~"$phase"'
OF_BRICK: Final = f'{OF_STEP},{NAME}=~"$brick"'
OF_SPAN: Final = f'{OF_JOB},{LEVEL}="brick",{NAME}=~"$brick"'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel, the name of its lines, and whether exemplars are asked for."""

    expression: str
    legend: str
    exemplar: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart over time: lines, or filled and stacked areas."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


def rate(metric: str, labels: str, by: str, range_: str = _RATE) -> str:
    """Sum of the rates of a counter's series."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}{range_}))"


def quantile(share: float, metric: str, labels: str, by: str) -> Query:
    """A percentile out of the buckets of a histogram, with exemplars."""
    buckets = rate(f"{metric}_bucket", labels, f"{by}, le")
    return Query(f"histogram_quantile({share}, {buckets})", f"{of(by)} p{share * 100:g}", exemplar=True)


def of(name: str) -> str:
    """The value of a label, in the name of a line."""
    return f"{{{{{name}}}}}"


STEPS: Final = (
    Panel(
        "Step duration",
        "Percentiles of whole steps by phase. A dot is one step; its link leads to the trace.",
        "s",
        (quantile(0.5, STEP, OF_STEP, PHASE), quantile(0.99, STEP, OF_STEP, PHASE)),
    ),
    Panel(
        "Tokens per second",
        "Tokens that the engine said it computed, by phase.",
        "short",
        (Query(rate(TOKENS, OF_STEP, PHASE), of(PHASE)),),
    ),
    Panel(
        "Steps per second",
        "By phase.",
        "short",
        (Query(rate(f"{STEP}_count", OF_STEP, PHASE), of(PHASE)),),
    ),
)
BRICKS: Final = (
    Panel(
        "99th percentile by brick",
        "Nested bricks included. A dot is one brick; its link leads to the trace.",
        "s",
        (quantile(0.99, BRICK, OF_BRICK, NAME),),
    ),
    Panel(
        "Share of step time by brick",
        "Time in the brick by time of steps. A brick's time includes the bricks inside it, so shares may pass 100 %.",
        "percentunit",
        (
            Query(
                f"{rate(TIME, OF_BRICK, NAME)} / ignoring ({NAME}) group_left () "
                f"sum (rate({STEP}_sum{{{OF_STEP}}}{_RATE}))",
                of(NAME),
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Bytes per second by brick",
        "Bytes read and written by the time in the brick, of bricks that say how many they move.",
        "Bps",
        (Query(f"{rate(IO, OF_BRICK, NAME)} / {rate(TIME, OF_BRICK, NAME)}", of(NAME)),),
    ),
    Panel(
        "Calls per second by brick",
        "",
        "short",
        (Query(rate(CALLS, OF_BRICK, NAME), of(NAME)),),
    ),
    Panel(
        "Slower than usual",
        "99th percentile of half an hour by what was usual over the day before; from recording rules.",
        "percentunit",
        (Query(SLOWER_THAN_USUAL, f"{of(NAME)} {of(PHASE)}"),),
    ),
)
BUDGETS_AND_LOSSES: Final = (
    Panel(
        "Calls over budget",
        "Share of calls that took longer than their brick's budget.",
        "percentunit",
        (Query(f"{rate(VIOLATIONS, OF_BRICK, NAME)} / {rate(CALLS, OF_BRICK, NAME)}", of(NAME)),),
    ),
    Panel(
        "Budget used",
        "99th percentile by the budget: above 100 %, one call in a hundred or more is over it.",
        "percentunit",
        (
            Query(
                f"{quantile(0.99, BRICK, OF_BRICK, NAME).expression}"
                f" / on ({NAME}) min by ({NAME}) ({LIMIT}{{{OF_JOB}}})",
                of(NAME),
            ),
        ),
    ),
    Panel(
        "Records lost",
        "Records that did not leave their process, by reason. Statistics and metrics have them.",
        "short",
        (Query(f"sum by ({REASON}) (increase({DROPPED}{{{OF_JOB}}}{_RATE}))", of(REASON)),),
    ),
    Panel(
        "Lost by collectors",
        "Spans and points that a collector did not queue (enqueue_failed) or send (send_failed), since it started, of "
        "all services; from a recording rule. What an agent does not queue it refuses, and engines try again.",
        "short",
        (
            Query(
                f"sum by (instance, exporter, counter) ({COLLECTORS_FAILED})",
                f"{of('instance')} {of('exporter')} {of('counter')}",
            ),
        ),
    ),
    Panel(
        "Delay of the worker",
        "Mean time from the end of a step until its rows were counted; mostly the 0.2 s for which the worker collects.",
        "s",
        (Query(f"{rate(f'{FINALIZE}_sum', OF_JOB, 'job')} / {rate(f'{FINALIZE}_count', OF_JOB, 'job')}", of("job")),),
    ),
)
LAYER_MATRIX: Final = (
    f"{rate(f'{SPAN_METRICS}_sum', OF_SPAN, f'{LAYER}, {NAME}', '[$__range]')}"
    f" / ({rate(f'{SPAN_METRICS}_count', OF_SPAN, f'{LAYER}, {NAME}', '[$__range]')} > 0)"
)


def dashboard() -> dict[str, object]:
    """The dashboard, in Grafana's JSON model."""
    return {
        "uid": "otel-brick",
        "title": "otel_brick",
        "description": "Steps, bricks and layers of a machine learning engine.",
        "tags": ["otel_brick"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_placed()),
    }


def dashboard_text() -> str:
    """All of the dashboard's file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def before_2026(name: str, text: str) -> str:
    """A collector file with the names of components from before 2026, and without the keys of later versions."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip().partition(":")[0] in NEWER_KEYS:
            while lines and lines[-1].startswith(_indent(line) + "#"):
                lines.pop()
        else:
            lines.append(re.sub(rf"\b({'|'.join(OLDER_NAMES)})\b", lambda match: OLDER_NAMES[match[1]], line))
    return "\n".join((f"# Written by generate.py from ../{name}: change that file, then run `make docs`.", *lines, ""))


def files(folder: Path = FOLDER) -> dict[Path, str]:
    """What is to be written, by path below `folder`, where the collector files are read from."""
    older = {
        folder / BEFORE_2026 / name: before_2026(name, (folder / name).read_text(encoding="utf-8"))
        for name in COLLECTOR_FILES
    }
    return {folder / DASHBOARD: dashboard_text(), **older}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the dashboard and the collector files with older names.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    wanted = files()
    if not options.check:
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} is not what the code says; run: make docs", file=sys.stderr)
    return 1 if stale else 0


def _variables() -> Iterator[dict[str, object]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    labels = (
        ("job", "Service", f"{CALLS}, job"),
        ("phase", "Phase", f"{CALLS}{{{OF_JOB}}}, {PHASE}"),
        ("brick", "Brick", f"{CALLS}{{{OF_JOB}}}, {NAME}"),
    )
    for name, title, values in labels:
        yield {
            "name": name,
            "label": title,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": f"label_values({values})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _placed() -> Iterator[dict[str, object]]:
    """Rows and panels with their ids and places; three panels stand side by side."""
    sections: tuple[tuple[str, tuple[dict[str, object], ...], int], ...] = (
        ("Steps", tuple(map(_chart, STEPS)), 8),
        ("Bricks", tuple(map(_chart, BRICKS)), 8),
        ("Layers", (_layer_matrix(),), 24),
        ("Budgets and losses", tuple(map(_chart, BUDGETS_AND_LOSSES)), 8),
    )
    number, top = 1, 0
    for title, panels, width in sections:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        across, height = 24 // width, 8 if width < 24 else 12
        for index, panel in enumerate(panels):
            place = {"x": index % across * width, "y": top + index // across * height, "w": width, "h": height}
            yield {"id": number, **panel, "gridPos": place}
            number += 1
        top += -(-len(panels) // across) * height


def _chart(panel: Panel) -> dict[str, object]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}} if panel.stacked else {"fillOpacity": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "exemplar": query.exemplar,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _layer_matrix() -> dict[str, object]:
    """Layers down, bricks across, coloured within each brick, so that a layer unlike the others stands out."""
    return {
        "type": "table",
        "title": "Mean time by layer and brick",
        "description": (
            "From spans, by the span_metrics connector of the gateway: steps with detail only, which are the first, "
            "failed and slow ones and one in so many. Slow ones are frequent among them, so these times are too long. "
            "Compare layers with each other; how long a brick takes, the panels above know."
        ),
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": "s",
                "fieldMinMax": True,
                "color": {"mode": "continuous-GrYlRd"},
                "custom": {"cellOptions": {"type": "color-background", "mode": "gradient"}, "align": "right"},
            },
            "overrides": [
                {
                    "matcher": {"id": "byRegexp", "options": f"{LAYER}.*"},
                    "properties": [
                        {"id": "unit", "value": "none"},
                        {"id": "displayName", "value": "layer"},
                        {"id": "custom.cellOptions", "value": {"type": "auto"}},
                    ],
                }
            ],
        },
        "options": {"showHeader": True, "cellHeight": "sm"},
        "targets": [
            {
                "refId": "A",
                "datasource": _DATASOURCE,
                "expr": LAYER_MATRIX,
                "format": "table",
                "instant": True,
                "exemplar": False,
            }
        ],
        "transformations": [
            {
                "id": "convertFieldType",
                "options": {"conversions": [{"targetField": LAYER, "destinationType": "number"}]},
            },
            {"id": "sortBy", "options": {"sort": [{"field": LAYER}]}},
            {"id": "groupingToMatrix", "options": {"rowField": LAYER, "columnField": NAME, "valueField": "Value"}},
        ],
    }


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


if __name__ == "__main__":
    sys.exit(main())
