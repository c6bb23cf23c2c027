"""Every question that the dashboard and the rules ask, asked of a Prometheus that real programs feed, has an answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.stack.conftest import Stack
from tests.stack.history import GONE, LONG_RUNNING
from tests.stack.processes import wait_for
from tests.stack.stack import CONFIGS

DASHBOARD = json.loads((CONFIGS / "grafana" / "otel_brick.json").read_text(encoding="utf-8"))
ANSWER_S = 200.0
GRAFANA = {"__rate_interval": "1m", "__range": "15m", "__interval": "15s"}
"""Grafana's own variables, as it sets them for a quarter of an hour of data with a sample each 15 s."""


def panels(owner: dict[str, Any] = DASHBOARD) -> Iterator[dict[str, Any]]:
    """The panels of the dashboard and of its rows."""
    for panel in owner.get("panels", []):
        yield panel
        yield from panels(panel)


def queries() -> list[Any]:
    return [
        pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
        for panel in panels()
        for target in panel.get("targets", [])
    ]


def substituted(expression: str) -> str:
    """The expression with Grafana's variables, and every other variable as the choice `All` has it."""
    everything = {variable["name"]: variable.get("allValue") or ".*" for variable in DASHBOARD["templating"]["list"]}
    values = GRAFANA | everything
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda match: values[match[1]], expression)


@pytest.mark.parametrize("expression", queries())
def test_a_panel_shows_data(expression: str, stack: Stack) -> None:
    asked = substituted(expression)

    def answered() -> bool:
        series = stack.prometheus.query.range(asked, minutes=15)
        assert series, f"no series for {asked}"
        return any(math.isfinite(value) for _, points in series for _, value in points)

    wait_for(f"an answer to {asked}", answered, ANSWER_S, interval_s=1)


def test_the_variables_of_the_dashboard_offer_choices(stack: Stack) -> None:
    asked = 0
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            text = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", text)
            assert found, text
            selector = substituted(found[1])
            choices = stack.prometheus.query.values(f"count by ({found[2]}) ({selector})", found[2])
            assert choices and ("",) not in choices
            asked += 1
    assert asked


EXPECTED = {
    "BrickSlowerThanLastDay": LONG_RUNNING,
    "BrickOverBudget": LONG_RUNNING,
    "BrickRecordsLost": "engine-that-loses",
    "BrickTracesCut": "engine-that-is-cut",
    "BrickCollectorLosesData": "telemetry-pipeline",
    "BrickMetricsMissing": GONE,
    "BrickAgentDown": "otel-brick-agent",
}
"""Of each alert, a job for which it has to fire."""


def rules(stack: Stack, kind: str) -> list[dict[str, Any]]:
    found = [rule for rule in stack.prometheus.query.rules() if rule["type"] == kind]
    assert found
    return found


def jobs_of(stack: Stack, expression: str) -> set[str]:
    return {labels["job"] for labels, _ in stack.prometheus.query.query(expression)}


def test_every_recording_rule_records_something(stack: Stack) -> None:
    for name in sorted({rule["name"] for rule in rules(stack, "recording")}):
        wait_for(name, partial(stack.prometheus.query.query, name), ANSWER_S, interval_s=1)


def test_every_alert_has_something_to_fire_at(stack: Stack) -> None:
    """Of an alert, its condition; how long it has to hold is the matter of the rules' own tests."""
    conditions = {rule["name"]: rule["query"] for rule in rules(stack, "alerting")}
    assert set(conditions) == set(EXPECTED)
    for name, condition in conditions.items():

        def fires(condition: str = condition, job: str = EXPECTED[name]) -> bool:
            jobs = jobs_of(stack, condition)
            assert job in jobs, f"fires for {jobs}"
            return True

        wait_for(f"{name}: {condition}", fires, ANSWER_S, interval_s=1)


def test_a_collector_that_loses_is_named_with_its_exporter_and_the_kind_of_loss(stack: Stack) -> None:
    """Its queue is full at once; what is in it is given up after half a minute. Collectors without losses are not."""
    (condition,) = [rule["query"] for rule in rules(stack, "alerting") if rule["name"] == "BrickCollectorLosesData"]
    place = stack.stuck.telemetry_address, "otlp_grpc/jaeger"
    expected = {(*place, f"{kind}_failed_spans") for kind in ("enqueue", "send")}

    def told() -> set[tuple[str, ...]]:
        losses = stack.prometheus.query.values(condition, "instance", "exporter", "counter")
        assert expected <= set(losses), losses
        assert all(lost > 0 for lost in losses.values())
        return set(losses)

    instances = {instance for instance, _, _ in wait_for(condition, told, ANSWER_S, interval_s=1)}
    assert not instances & {server.telemetry_address for server in (stack.agent, stack.edge, stack.jaeger)}


def test_alerts_leave_engines_alone_that_are_as_they_should_be(stack: Stack) -> None:
    quiet = {"BrickRecordsLost": LONG_RUNNING, "BrickTracesCut": LONG_RUNNING, "BrickMetricsMissing": LONG_RUNNING}
    for rule in rules(stack, "alerting"):
        if rule["name"] in quiet:
            assert quiet[rule["name"]] not in jobs_of(stack, rule["query"])


def test_prometheus_evaluates_every_rule_without_an_error(stack: Stack) -> None:
    def evaluated() -> bool:
        health = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in stack.prometheus.query.rules()}
        assert {state for state, _ in health.values()} == {"ok"}, health
        return True

    wait_for("all rules", evaluated, ANSWER_S, interval_s=1)
