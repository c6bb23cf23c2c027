"""`otel-brick demo --endpoint` through a collector: what Jaeger and the collector say is what the demo's files say."""

from __future__ import annotations

import pytest

from tests.stack.conftest import Stack, complete
from tests.stack.demos import TOKENS, DemoRun, assert_nested, by_id, read_spans
from tests.stack.processes import wait_for
from tests.stack.queries import Span

PROTOCOLS = ("http/protobuf", "grpc")


@pytest.fixture(scope="module", params=PROTOCOLS)
def run(request: pytest.FixtureRequest, demos: dict[str, DemoRun]) -> DemoRun:
    return demos[request.param]


def test_it_says_where_everything_went(run: DemoRun, stack: Stack) -> None:
    sent = [line for line in run.output.splitlines() if line.startswith("Sent")]
    assert len(sent) == 1
    accepted = f"{len(run.spans):,} spans and metrics accepted by {stack.agent.http[:17]}"
    assert sent[0].startswith(f"Sent      as service otel-brick-demo: {accepted}")
    assert "not accepted" not in sent[0]
    assert set(run.profile["losses"].values()) == {0}


def test_jaeger_has_the_same_trees_span_for_span(run: DemoRun, stack: Stack) -> None:
    assert len(run.traces) == TOKENS
    for trace_id, local in run.traces.items():
        told = complete(stack, trace_id, len(local))
        assert by_id(told) == by_id(local)
        assert_nested(told)


def test_jaeger_finds_the_steps_by_service_and_phase(run: DemoRun, stack: Stack) -> None:
    for phase in ("prefill", "decode"):
        local = {span.trace_id for span in run.spans if span.attributes.get("brick.phase") == phase}
        found = stack.jaeger.query.trace_ids("otel-brick-demo", **{"brick.phase": phase})
        assert local and local <= found


def test_the_file_of_the_collector_has_the_same_spans(run: DemoRun, stack: Stack) -> None:
    def written() -> list[Span]:
        spans = [span for span in read_spans(stack.agent_traces) if span.trace_id in run.traces]
        assert len(spans) >= len(run.spans), f"{len(spans)} of {len(run.spans)} spans"
        return spans

    assert by_id(wait_for("the collector's file", written)) == by_id(run.spans)


def test_a_demo_that_sends_only_metrics_keeps_its_spans_here(demos: dict[str, DemoRun], stack: Stack) -> None:
    run = demos["prometheus"]
    assert f": metrics accepted by {stack.prometheus.otlp_metrics} (http/protobuf)\n" in run.output
    assert not any(stack.jaeger.query.trace(trace_id) for trace_id in run.traces)
