"""Metrics in a real Prometheus, by scrape of the collector's page and by its own OTLP endpoint, against the profile."""

from __future__ import annotations

import re
from bisect import bisect_left

import pytest

from otel_brick import semconv
from tests.stack.conftest import Stack
from tests.stack.demos import TOKENS, DemoRun
from tests.stack.processes import wait_for
from tests.stack.queries import Prometheus
from tests.stack.stack import ROOT

WAYS = ("http/protobuf", "grpc", "prometheus")
SCRAPES_S = 60.0


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, demos: dict[str, DemoRun], stack: Stack) -> DemoRun:
    """A run whose last metrics Prometheus has."""
    run: DemoRun = demos[request.param]
    calls = sum(brick["count"] for brick in run.profile["bricks"])
    selected = f'sum(brick_calls_total{{job="otel-brick-demo", instance="{run.instance}"}})'
    wait_for("the metrics of a run", lambda: stack.prometheus.query.query(selected) == [({}, calls)], SCRAPES_S)
    return run


@pytest.fixture
def prometheus(stack: Stack) -> Prometheus:
    return stack.prometheus.query


def total(
    prometheus: Prometheus, run: DemoRun, metric: str, *by: str, matching: str = ""
) -> dict[tuple[str, ...], float]:
    """The sum of a metric of a run by labels."""
    selector = f'{{job="otel-brick-demo", instance="{run.instance}"{matching}}}'
    return prometheus.values(f"sum by ({', '.join(by)}) ({metric}{selector})", *by)


def of_bricks(run: DemoRun, key: str) -> dict[tuple[str, ...], float]:
    """A figure of the profile by brick; where it is 0 there is no series."""
    return {(brick["name"],): brick[key] for brick in run.profile["bricks"] if brick[key]}


def test_calls_times_and_elements_are_those_of_the_profile(run: DemoRun, prometheus: Prometheus) -> None:
    assert total(prometheus, run, "brick_calls_total", "brick_name") == of_bricks(run, "count")
    assert total(prometheus, run, "brick_elements_total", "brick_name") == of_bricks(run, "total_elements")
    seconds = {name: ns / 1e9 for name, ns in of_bricks(run, "total_ns").items()}
    assert total(prometheus, run, "brick_time_seconds_total", "brick_name") == pytest.approx(seconds, rel=1e-12)


def test_bytes_are_those_of_the_profile(run: DemoRun, prometheus: Prometheus) -> None:
    for direction, key in (("read", "bytes_read"), ("write", "bytes_written")):
        matching = f', brick_io_direction="{direction}"'
        bytes_by_name = total(prometheus, run, "brick_io_bytes_total", "brick_name", matching=matching)
        assert bytes_by_name == of_bricks(run, key)
        assert bytes_by_name


def test_steps_and_tokens_are_those_of_the_profile(run: DemoRun, prometheus: Prometheus) -> None:
    steps = run.profile["steps"]
    assert total(prometheus, run, "brick_step_duration_seconds_count") == {(): steps["count"]}
    assert total(prometheus, run, "brick_step_duration_seconds_sum")[()] == pytest.approx(steps["wall_ns"] / 1e9)
    assert total(prometheus, run, "brick_tokens_total") == {(): run.profile["total_tokens"]}
    by_phase = total(prometheus, run, "brick_step_duration_seconds_count", "brick_phase")
    assert by_phase == {("prefill",): 1, ("decode",): TOKENS - 1}


@pytest.mark.parametrize(("metric", "level"), [("brick.duration", "brick"), ("brick.step.duration", "step")])
def test_each_bucket_has_the_spans_of_that_duration(
    run: DemoRun, prometheus: Prometheus, metric: str, level: str
) -> None:
    bounds = next(one.buckets for one in semconv.METRICS if one.name == metric)
    expected: dict[tuple[str, ...], float] = {}
    for (name, phase), durations in run.durations_s(level).items():
        ordered = [bisect_left(bounds, duration) for duration in durations]
        for bucket, bound in enumerate([*bounds, float("inf")]):
            expected[name, phase, str(float(bound))] = sum(place <= bucket for place in ordered)
    series = f"{metric.replace('.', '_')}_seconds_bucket"
    told = total(prometheus, run, series, "brick_name", "brick_phase", "le")
    assert {(name, phase, str(float(le))): count for (name, phase, le), count in told.items()} == expected


def test_losses_are_there_and_none(run: DemoRun, prometheus: Prometheus) -> None:
    lost = total(prometheus, run, "brick_records_dropped_total", "brick_drop_reason")
    reasons = next(one.values for one in semconv.ATTRIBUTES if one.name == semconv.BRICK_DROP_REASON)
    assert lost == {(reason,): 0 for reason in reasons}


def documented_labels() -> dict[str, set[str]]:
    """Labels by Prometheus name, from the table of metrics in docs/attributes.md."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "attributes.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 6 and cells[1] in ("counter", "gauge", "histogram"):
            labels = re.findall("`([^`]+)`(?! \\(opt-in)", cells[3])
            found[cells[4].strip("`")] = {label.replace(".", "_") for label in labels}
    return found


def test_labels_are_those_of_the_documentation_and_no_others(run: DemoRun, prometheus: Prometheus) -> None:
    documented = documented_labels()
    seen: set[str] = set()
    for labels, _ in prometheus.query(f'{{__name__=~"brick_.*", instance="{run.instance}"}}'):
        name = labels["__name__"]
        if name not in documented:
            name = name.rpartition("_")[0]
        assert set(labels) - {"le"} == documented[name] | {"__name__", "job", "instance"}
        seen.add(name)
    assert seen == {
        "brick_step_duration_seconds",
        "brick_duration_seconds",
        "brick_time_seconds_total",
        "brick_calls_total",
        "brick_elements_total",
        "brick_io_bytes_total",
        "brick_tokens_total",
        "brick_finalize_duration_seconds",
        "brick_records_dropped_total",
    }


def test_the_resource_is_joined_by_target_info(run: DemoRun, prometheus: Prometheus) -> None:
    (labels, value), *others = prometheus.query(f'target_info{{instance="{run.instance}"}}')
    assert not others
    assert value == 1
    assert labels["job"] == "otel-brick-demo"
    assert labels["telemetry_sdk_language"] == "python"


def test_exemplars_name_spans_that_jaeger_has(demos: dict[str, DemoRun], stack: Stack) -> None:
    run = demos["http/protobuf"]
    selected = f'brick_duration_seconds_bucket{{instance="{run.instance}"}}'
    exemplars = wait_for("exemplars", lambda: stack.prometheus.query.exemplars(selected), SCRAPES_S)
    assert {labels["brick_name"] for labels, _, _ in exemplars} == {brick["name"] for brick in run.profile["bricks"]}
    for labels, exemplar, value in exemplars:
        spans = {span.span_id: span for span in stack.jaeger.query.trace(exemplar["trace_id"])}
        span = spans[exemplar["span_id"]]
        assert span.attributes["brick.name"] == labels["brick_name"]
        assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(value)


def test_exemplars_of_steps_open_the_step(demos: dict[str, DemoRun], stack: Stack) -> None:
    run = demos["grpc"]
    selected = f'brick_step_duration_seconds_bucket{{instance="{run.instance}"}}'
    exemplars = wait_for("exemplars", lambda: stack.prometheus.query.exemplars(selected), SCRAPES_S)
    for labels, exemplar, value in exemplars:
        (root,) = [span for span in stack.jaeger.query.trace(exemplar["trace_id"]) if not span.parent_id]
        assert root.span_id == exemplar["span_id"]
        assert root.attributes["brick.phase"] == labels["brick_phase"]
        assert (root.end_ns - root.start_ns) / 1e9 == pytest.approx(value)
