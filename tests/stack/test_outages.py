"""A collector that is killed and comes back while the library sends: nothing is lost within its limits, and what is
lost beyond them is counted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.stack.conftest import Stack
from tests.stack.demos import read_spans
from tests.stack.engine import ROWS_OF_STEP, Engine
from tests.stack.processes import Binaries, wait_for
from tests.stack.stack import CONFIGS, Collector, Sink

SPANS_OF_STEP = 1 + ROWS_OF_STEP
PROTOCOLS = ("http/protobuf", "grpc")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_lost_while_a_collector_is_killed_again_and_again(
    protocol: str, binaries: Binaries, tmp_path: Path
) -> None:
    sink = Sink(binaries, "sink", tmp_path)
    try:
        sink.start()
        environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "60", "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with Engine("killed", sink.endpoint(protocol), protocol, environ=environ, detail="all") as engine:
            engine.ask("begin", count=600, pause_s=0.01)
            for _ in range(3):
                time.sleep(0.7)
                sink.kill()
                time.sleep(0.7)
                sink.start()
            trace_ids = set(engine.ask("finish"))
            assert engine.flush(60)
            assert engine.losses() == {}
        spans = read_spans(sink.traces_path)
        # A span that was written but not acknowledged is sent again, so some may be there twice.
        by_id = {span.span_id: span for span in spans}
        assert len(trace_ids) == 600
        assert {span.trace_id for span in by_id.values()} == trace_ids
        assert len(by_id) == 600 * SPANS_OF_STEP
    finally:
        sink.stop()


def test_steps_during_an_outage_of_the_agent_are_in_jaeger_afterwards(
    binaries: Binaries, stack: Stack, tmp_path: Path
) -> None:
    agent = Collector(
        binaries, "agent", tmp_path, [CONFIGS / "agent.yaml"], {"JAEGER_OTLP_ENDPOINT": stack.jaeger.grpc_address}
    )
    try:
        agent.start()
        with Engine("agent-down", agent.http, environ={"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}, detail="all") as engine:
            before = engine.steps(20)
            assert engine.flush()
            wait_for("Jaeger", lambda: stack.jaeger.query.trace_ids("agent-down") == set(before))
            agent.kill()
            during = engine.steps(20)
            agent.start()
            after = engine.steps(20)
            assert engine.flush(60)
            assert engine.losses() == {}
            sent = {*before, *during, *after}
            wait_for("Jaeger", lambda: stack.jaeger.query.trace_ids("agent-down") == sent)

        def complete() -> bool:
            return {len(spans) for spans in stack.jaeger.query.traces("agent-down").values()} == {SPANS_OF_STEP}

        wait_for("complete traces", complete)
    finally:
        agent.stop()


def test_what_the_queue_of_the_agent_does_not_hold_is_refused_and_sent_again(
    binaries: Binaries, tmp_path: Path
) -> None:
    """The smallest queue that holds every request, and more than it holds; the backend is away, and comes."""
    steps, rows = 60, 500
    sink = Sink(binaries, "sink", tmp_path)
    agent = Collector(
        binaries,
        "agent",
        tmp_path,
        [CONFIGS / "agent.yaml"],
        {"JAEGER_OTLP_ENDPOINT": sink.grpc_address, "QUEUE_SIZE_BYTES": str(4 << 20)},
    )
    environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
    try:
        agent.start()
        with Engine("queue-full", agent.grpc, "grpc", environ=environ, detail="all", metrics=False) as engine:
            engine.ask("wide", count=steps, rows=rows)
            wait_for("a full queue", lambda: "sending queue is full" in agent.log)
            sink.start()
            assert engine.flush(60)
            assert engine.losses() == {}
        expected = steps * (1 + rows)

        def arrived() -> bool:
            count = sink.traces_path.read_bytes().count(b'"spanId":')
            assert count >= expected, f"{count} of {expected} spans"
            return True

        wait_for("the spans", arrived)
        ids = {span.span_id for span in read_spans(sink.traces_path)}
        assert len(ids) == expected
    finally:
        agent.kill()
        sink.kill()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_waits_longer_than_a_request_may_take_is_counted(
    protocol: str, binaries: Binaries, tmp_path: Path
) -> None:
    sink = Sink(binaries, "sink", tmp_path)
    try:
        sink.start()
        environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
        with Engine("too-long", sink.endpoint(protocol), protocol, environ=environ, detail="all") as engine:
            arriving = engine.steps(10)
            assert engine.flush()
            sink.kill()
            lost = engine.steps(10)
            engine.flush(20)
            assert engine.losses() == {"export_failed": len(lost) * SPANS_OF_STEP}
            sink.start()
            wait_for("metrics to arrive again", lambda: engine.flush(10))
            arriving += engine.steps(10)
            assert engine.flush()
            assert engine.losses() == {"export_failed": len(lost) * SPANS_OF_STEP}
        spans = read_spans(sink.traces_path)
        assert {span.trace_id for span in spans} == set(arriving)
        assert len(spans) == len(arriving) * SPANS_OF_STEP
    finally:
        sink.stop()


def test_what_the_queue_does_not_hold_is_counted_and_the_rest_arrives(binaries: Binaries, tmp_path: Path) -> None:
    steps, rows = 150, 2000
    sink = Sink(binaries, "sink", tmp_path)
    try:
        environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
        with Engine("too-much", sink.http, environ=environ, detail="all", metrics=False) as engine:
            engine.ask("wide", count=steps, rows=rows)
            sink.start()
            assert engine.flush(60)
            losses = engine.losses()
        lost = losses.get("queue_full", 0)
        assert set(losses) == {"queue_full"}
        assert 0 < lost < steps * rows
        assert sink.traces_path.read_bytes().count(b'"spanId":') + lost == steps * (1 + rows)
    finally:
        sink.stop()
