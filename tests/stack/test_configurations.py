"""The files of `collector-config`: the programs that they are for accept each of them as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stack.conftest import Stack
from tests.stack.engine import Engine
from tests.stack.history import run_promtool
from tests.stack.processes import Binaries, wait_for
from tests.stack.stack import CONFIGS, Collector

COLLECTOR_FILES = ("agent.yaml", "gateway.yaml", "before-2026/agent.yaml", "before-2026/gateway.yaml")


def validate(program: str, path: Path) -> str:
    finished = subprocess.run(
        [program, "validate", f"--config={path}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def content(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


def test_no_file_is_left_out_here() -> None:
    pipelines = {
        path.relative_to(CONFIGS).as_posix()
        for path in CONFIGS.rglob("*.yaml")
        if "receivers" in yaml.safe_load(path.read_text(encoding="utf-8"))
    }
    assert pipelines == {*COLLECTOR_FILES, "jaeger.yaml"}


@pytest.mark.parametrize("name", COLLECTOR_FILES)
def test_the_collector_accepts_its_file(name: str, binaries: Binaries) -> None:
    validate(binaries["collector"], CONFIGS / name)


def test_jaeger_accepts_its_file(binaries: Binaries) -> None:
    validate(binaries["jaeger"], CONFIGS / "jaeger.yaml")


def test_prometheus_accepts_its_file_and_its_rules(binaries: Binaries) -> None:
    run_promtool(binaries, "check", "config", "--lint-fatal", "prometheus.yml", folder=CONFIGS)
    run_promtool(binaries, "check", "rules", "--lint-fatal", "rules/otel_brick.yml", folder=CONFIGS)


def test_the_rules_pass_their_tests(binaries: Binaries) -> None:
    names = [path.name for path in (CONFIGS / "rules").glob("*_test.yml")]
    assert names
    run_promtool(binaries, "test", "rules", *names, folder=CONFIGS / "rules")


@pytest.mark.parametrize("names", ["", "before-2026"])
def test_steps_go_through_agent_and_gateway(names: str, binaries: Binaries, stack: Stack, tmp_path: Path) -> None:
    """Older names of components are accepted with a warning, newer ones without."""
    folder = CONFIGS / names
    otlp = "otlp" if names else "otlp_grpc"
    gateway = Collector(
        binaries,
        "gateway",
        tmp_path,
        [folder / "gateway.yaml"],
        {
            "JAEGER_OTLP_ENDPOINT": stack.jaeger.grpc_address,
            "TEMPO_OTLP_ENDPOINT": stack.sink.grpc_address,
            "PROMETHEUS_REMOTE_WRITE_URL": stack.prometheus.remote_write,
            "QUEUE_DIRECTORY": str(tmp_path / "queue"),
            "DECISION_WAIT": "1s",
            "SAMPLING_PERCENTAGE": "100",
        },
    )
    agent = Collector(
        binaries,
        "agent",
        tmp_path,
        [folder / "agent.yaml"],
        {
            "GATEWAY_OTLP_ENDPOINT": gateway.grpc_address,
            "TRACES_EXPORTERS": f"[{otlp}/gateway]",
            "METRICS_EXPORTERS": f"[{otlp}/gateway, prometheus]",
        },
    )
    service = f"names-{names or 'now'}"
    try:
        gateway.start()
        agent.start()
        with Engine(service, agent.http, detail="all") as engine:
            sent = set(engine.steps(3))
            assert engine.flush()
        wait_for("Jaeger", lambda: stack.jaeger.query.trace_ids(service) == sent)
        selected = f'brick_step_duration_seconds_count{{job="{service}"}}'
        wait_for("Prometheus", lambda: [value for _, value in stack.prometheus.query.query(selected)] == [len(sent)])
        warned = "deprecated" in agent.log.lower()
        assert warned == bool(names), agent.log
        assert "\terror\t" not in agent.log + gateway.log
    finally:
        agent.stop()
        gateway.stop()


def test_the_file_for_tempo_has_what_tempo_needs() -> None:
    """Tempo itself is not among the servers of these tests."""
    tempo = content("tempo.yaml")
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert tempo["storage"]["trace"]["backend"] == "local"
    assert tempo["storage"]["trace"]["local"]["path"]
    assert tempo["storage"]["trace"]["wal"]["path"]
    assert tempo["metrics_generator"]["storage"]["remote_write"][0]["send_exemplars"] is True


def test_compose_mounts_files_that_are_there() -> None:
    services = content("compose.yaml")["services"]
    mounted = {
        volume.partition(":")[0]
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    }
    assert {"./agent.yaml", "./jaeger.yaml", "./prometheus.yml"} <= mounted
    assert [path for path in mounted if not (CONFIGS / path).exists()] == []


def test_compose_sets_only_variables_that_the_files_read() -> None:
    texts = {
        name: (CONFIGS / name).read_text(encoding="utf-8") for name in ("agent.yaml", "gateway.yaml", "jaeger.yaml")
    }
    services = content("compose.yaml")["services"]
    for name, text in texts.items():
        for variable in services[name.removesuffix(".yaml")]["environment"]:
            assert variable == "GOMEMLIMIT" or f"${{env:{variable}" in text, f"{variable} of {name}"
