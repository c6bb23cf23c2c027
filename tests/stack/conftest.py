"""The stack of the session: Jaeger, Prometheus, an agent that sends to both, and a gateway, started once and ended.

`.ci/run` and `make stack` run these tests; `make test` does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stack.demos import DemoRun
from tests.stack.engine import Engine
from tests.stack.history import LONG_RUNNING, evaluate_history, write_history
from tests.stack.processes import Binaries, Server, free_address, wait_for
from tests.stack.queries import Span
from tests.stack.stack import CONFIGS, Collector, JaegerServer, PrometheusServer, Sink

SAMPLING_PERCENTAGE = 20
EXTRA = Path(__file__).with_name("agent-files.yaml")


@dataclass(frozen=True)
class Stack:
    """The servers that run for the whole session.

    Attributes:
        agent: sends traces to Jaeger, shows metrics to Prometheus, and writes both into `agent_traces` and
            `agent_metrics` besides.
        edge: another agent, which sends all to the gateway.
        stuck: an agent with a small queue, whose backend is not there.
        gateway: sends to Jaeger, to Prometheus, and to the sink where there would be Tempo.
        folder: where logs and files are.
    """

    jaeger: JaegerServer
    prometheus: PrometheusServer
    agent: Collector
    edge: Collector
    stuck: Collector
    gateway: Collector
    sink: Sink
    agent_traces: Path
    agent_metrics: Path
    folder: Path


def complete(stack: Stack, trace_id: str, count: int) -> list[Span]:
    """The spans of a trace, by start, once Jaeger has so many."""

    def enough() -> list[Span]:
        spans = stack.jaeger.query.trace(trace_id)
        assert len(spans) >= count, f"{len(spans)} of {count} spans"
        return spans

    return wait_for(f"{count} spans of trace {trace_id}", enough)


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """The servers' programs, built if they are not there."""
    return Binaries()


@pytest.fixture(scope="session")
def stack(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The servers that run for the whole session, and engines that use them all the time."""
    folder = tmp_path_factory.mktemp("stack")
    traces, metrics = folder / "agent-traces.jsonl", folder / "agent-metrics.jsonl"
    with ExitStack() as running:

        def started(server: Server) -> None:
            running.callback(server.kill)  # nothing of theirs is kept, and Jaeger takes ten seconds to end by itself
            server.start()

        jaeger = JaegerServer(binaries, "jaeger", folder, [CONFIGS / "jaeger.yaml"])
        started(jaeger)
        prometheus = PrometheusServer(binaries, "prometheus", folder)
        write_history(binaries, prometheus)
        started(prometheus)
        evaluate_history(binaries, prometheus)
        agent = Collector(
            binaries,
            "agent",
            folder,
            [CONFIGS / "agent.yaml", EXTRA],
            {
                "JAEGER_OTLP_ENDPOINT": jaeger.grpc_address,
                "TRACES_EXPORTERS": "[otlp_grpc/jaeger, file/traces]",
                "METRICS_EXPORTERS": "[prometheus, file/metrics]",
                "TRACES_FILE": str(traces),
                "METRICS_FILE": str(metrics),
            },
        )
        started(agent)
        sink = Sink(binaries, "sink", folder)
        started(sink)
        gateway = Collector(
            binaries,
            "gateway",
            folder,
            [CONFIGS / "gateway.yaml"],
            {
                "JAEGER_OTLP_ENDPOINT": jaeger.grpc_address,
                "TEMPO_OTLP_ENDPOINT": sink.grpc_address,
                "PROMETHEUS_REMOTE_WRITE_URL": prometheus.remote_write,
                "QUEUE_DIRECTORY": str(folder / "queue"),
                "DECISION_WAIT": "2s",
                "SLOW_STEP": "200ms",
                "SAMPLING_PERCENTAGE": str(SAMPLING_PERCENTAGE),
                "SPAN_METRICS_INTERVAL": "2s",
            },
        )
        started(gateway)
        edge = Collector(
            binaries,
            "edge",
            folder,
            [CONFIGS / "agent.yaml"],
            {
                "TRACES_EXPORTERS": "[otlp_grpc/gateway]",
                "METRICS_EXPORTERS": "[otlp_grpc/gateway]",
                "GATEWAY_OTLP_ENDPOINT": gateway.grpc_address,
            },
        )
        started(edge)
        stuck = Collector(
            binaries,
            "stuck",
            folder,
            [CONFIGS / "agent.yaml"],
            {
                "JAEGER_OTLP_ENDPOINT": free_address(),
                "QUEUE_SIZE_BYTES": "20000",
                "RETRY_MAX_ELAPSED_TIME": "30s",
            },
        )
        started(stuck)
        telemetry = [server.telemetry_address for server in (agent, edge, stuck, gateway, jaeger)]
        agents = [agent.prometheus_page, free_address()]
        prometheus.scrape({"otel-brick-agent": agents, "telemetry-pipeline": telemetry})
        for engine in engines(agent, edge, stuck):
            running.enter_context(engine)
            running.callback(engine.kill)
            engine.ask("budget", name="RmsNorm", budget_ns=1)
            engine.ask("run", pause_s=0.03, brick_ms=0.2)
        yield Stack(jaeger, prometheus, agent, edge, stuck, gateway, sink, traces, metrics, folder)


def engines(agent: Collector, edge: Collector, stuck: Collector) -> list[Engine]:
    """Programs that go on while the tests run, for rules and dashboards: one as it should be, one behind the gateway,
    one whose traces are cut, and one that loses them."""
    often = {"OTEL_METRIC_EXPORT_INTERVAL": "1000"}
    refused = {
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{agent.http}/v1/metrics",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{stuck.http}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1",
    }
    return [
        Engine(LONG_RUNNING, agent.http, environ=often),
        Engine("engine-behind-gateway", edge.grpc, "grpc", environ=often, detail="all"),
        Engine("engine-that-is-cut", agent.http, environ=often, detail="all", max_rows_per_trace=5),
        Engine("engine-that-loses", None, environ=often | refused),
    ]


@pytest.fixture(scope="session")
def demos(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DemoRun]:
    """The demo by both protocols through the agent, and with its metrics straight to Prometheus."""
    folder = tmp_path_factory.mktemp("demos")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    ways = {
        "http/protobuf": ["--endpoint", stack.agent.http],
        "grpc": ["--endpoint", stack.agent.grpc, "--protocol", "grpc"],
        "prometheus": ["--metrics-endpoint", stack.prometheus.otlp_metrics],
    }
    return {
        name: DemoRun.of(folder / name.replace("/", "-"), *arguments, environ=environ)
        for name, arguments in ways.items()
    }
