"""The files under `collector-config` fit together and the code, as far as that shows without any server."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_brick import semconv

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "collector-config"
YAML_FILES = sorted(path.relative_to(FOLDER) for path in [*FOLDER.rglob("*.yaml"), *FOLDER.rglob("*.yml")])
COLLECTOR_FILES = ["agent.yaml", "gateway.yaml", "jaeger.yaml", "before-2026/agent.yaml", "before-2026/gateway.yaml"]
VARIABLE = re.compile(r"\$\{env:(\w+)(?::-([^}]*))?\}")


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # where dataclasses look for their module
    spec.loader.exec_module(loaded)
    return loaded


generate = module(FOLDER / "generate.py")
docs = module(ROOT / "docs" / "generate.py")


def read(name: str | Path) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def with_defaults(name: str) -> Any:
    """A collector's file as it is read where no variable is set."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return yaml.safe_load(VARIABLE.sub(lambda match: match[2], text))


def expressions() -> Iterator[str]:
    """Every PromQL expression of the rules, their tests and the dashboard, and every series of those tests."""
    for group in read("rules/otel_brick.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for test in read("rules/otel_brick_test.yml")["tests"]:
        yield from (series["series"] for series in test["input_series"])
        yield from (case["expr"] for case in test.get("promql_expr_test", ()))
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def dashboard() -> Any:
    return json.loads((FOLDER / "grafana" / "otel_brick.json").read_text(encoding="utf-8"))


def prometheus_series() -> set[str]:
    """Names of all our samples, by the translation that `docs/attributes.md` shows."""
    names: set[str] = set()
    for metric in semconv.METRICS:
        name = docs.prometheus_name(metric)
        names |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if metric.instrument == "histogram" else {name}
    return names


@pytest.mark.parametrize("name", YAML_FILES, ids=str)
def test_each_file_is_yaml(name: Path) -> None:
    assert read(name)


def test_what_is_generated_is_up_to_date() -> None:
    command = [sys.executable, str(FOLDER / "generate.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestNames:
    def test_every_metric_in_rules_and_dashboard_is_one_that_we_send(self) -> None:
        words = {word for text in expressions() for word in re.findall(r"(?<![\w:])brick_\w+(?=[{\[\s,)]|$)", text)}
        labels = {attribute.name.replace(".", "_") for attribute in semconv.ATTRIBUTES}
        used = {word for word in words if word not in labels}
        assert used <= prometheus_series()
        assert {"brick_duration_seconds_bucket", "brick_calls_total", "brick_budget_limit_seconds"} <= used

    def test_every_label_in_rules_and_dashboard_is_on_the_metrics_that_it_selects(self) -> None:
        keys = {docs.prometheus_name(metric): metric.attributes for metric in semconv.METRICS}
        selected = 0
        for text in expressions():
            for name, labels in re.findall(r"(?<![\w:])(brick_\w+)\{([^}]*)\}", text):
                family = name if name in keys else re.sub(r"_(bucket|sum|count)$", "", name)
                known = {key.replace(".", "_") for key in keys[family]} | {"job", "instance", "le"}
                assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) <= known, text
                selected += 1
        assert selected > 50

    def test_every_recording_rule_that_is_read_is_written(self) -> None:
        rules = [rule for group in read("rules/otel_brick.yml")["groups"] for rule in group["rules"]]
        written = {rule["record"] for rule in rules if "record" in rule}
        used = {word for text in expressions() for word in re.findall(r"\b(?:brick|collector):\w+:\w+", text)}
        assert used <= written
        assert generate.COLLECTORS_FAILED in used

    @pytest.mark.parametrize("name", ["gateway.yaml", "tempo.yaml"])
    def test_attributes_in_collectors_and_tempo_are_ours(self, name: str) -> None:
        found = set(re.findall(r"\bbrick\.[a-z.]+\b", (FOLDER / name).read_text(encoding="utf-8")))
        assert found
        assert found <= {attribute.name for attribute in semconv.ATTRIBUTES}

    def test_values_that_the_gateway_compares_with_exist(self) -> None:
        values = {attribute.name: attribute.values for attribute in semconv.ATTRIBUTES}
        text = (FOLDER / "gateway.yaml").read_text(encoding="utf-8")
        compared = re.findall(r'attributes\["([a-z.]+)"\] == "(\w+)"', text)
        assert {value for _, value in compared} == {"kernel", "step"}
        policies = with_defaults("gateway.yaml")["processors"]["tail_sampling/complete"]["policies"]
        strings = [policy["string_attribute"] for policy in policies if policy["type"] == "string_attribute"]
        compared += [(string["key"], value) for string in strings for value in string["values"]]
        assert all(value in values[name] for name, value in compared)

    def test_the_layer_matrix_reads_what_the_gateway_makes(self) -> None:
        connector = with_defaults("gateway.yaml")["connectors"]["span_metrics"]
        dimensions = {dimension["name"].replace(".", "_") for dimension in connector["dimensions"]}
        assert {generate.LEVEL, generate.NAME, generate.LAYER} <= dimensions
        assert (connector["histogram"]["unit"], connector.get("namespace")) == ("s", None)

    def test_alerts_and_tests_cover_each_other(self) -> None:
        rules = [rule for group in read("rules/otel_brick.yml")["groups"] for rule in group["rules"]]
        cases = [
            case for test in read("rules/otel_brick_test.yml")["tests"] for case in test.get("alert_rule_test", ())
        ]
        alerts = {rule["alert"] for rule in rules if "alert" in rule}
        assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
        assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


class TestCollectorFiles:
    @pytest.mark.parametrize("name", COLLECTOR_FILES)
    def test_every_variable_has_a_default(self, name: str) -> None:
        variables = VARIABLE.findall((FOLDER / name).read_text(encoding="utf-8"))
        assert variables
        assert [variable for variable, default in variables if not default] == []

    @pytest.mark.parametrize("name", COLLECTOR_FILES)
    def test_pipelines_name_components_that_are_defined(self, name: str) -> None:
        config = with_defaults(name)
        connectors = config.get("connectors", {})
        for pipeline in config["service"]["pipelines"].values():
            assert set(pipeline["receivers"]) <= {*config["receivers"], *connectors}
            assert set(pipeline["processors"]) <= {*config["processors"]}
            assert set(pipeline["exporters"]) <= {*config["exporters"], *connectors}
        assert set(config["service"]["extensions"]) == set(config["extensions"])

    def test_defaults_let_all_run_on_one_machine(self) -> None:
        listening = [
            match[2]
            for name in ("agent.yaml", "gateway.yaml", "jaeger.yaml")
            for match in VARIABLE.finditer((FOLDER / name).read_text(encoding="utf-8"))
            if match[1].endswith("_LISTEN") or match[1] == "TELEMETRY_PORT"
        ]
        ports = [listen.rpartition(":")[2] for listen in listening]
        assert len(ports) == len(set(ports)) == 15

    @pytest.mark.parametrize("name", generate.COLLECTOR_FILES)
    def test_files_from_before_2026_differ_in_names_only(self, name: str) -> None:
        def renamed(value: Any) -> Any:
            if isinstance(value, dict):
                return {renamed(key): renamed(item) for key, item in value.items() if key not in generate.NEWER_KEYS}
            if isinstance(value, list):
                return [renamed(item) for item in value]
            if isinstance(value, str):
                return "/".join(generate.OLDER_NAMES.get(part, part) for part in value.split("/"))
            return value

        assert with_defaults(f"before-2026/{name}") == renamed(with_defaults(name))
        assert not set(generate.OLDER_NAMES) & set(
            re.findall(r"\w+", (FOLDER / "before-2026" / name).read_text("utf-8"))
        )

    def test_nothing_in_the_agent_says_yes_before_a_queue_does(self) -> None:
        """Else engines are told that spans arrived which then find the queue full, and nobody sends them again."""
        config = with_defaults("agent.yaml")
        assert {name for pipeline in config["service"]["pipelines"].values() for name in pipeline["processors"]} == {
            "memory_limiter"
        }
        queues = [exporter["sending_queue"] for name, exporter in config["exporters"].items() if "otlp" in name]
        assert len(queues) == 3
        for queue in queues:
            assert (queue["sizer"], queue["batch"]["sizer"]) == ("bytes", "items")
            assert queue["batch"]["min_size"] <= queue["batch"]["max_size"] <= 4096

    def test_prometheus_scrapes_the_telemetry_of_every_collector(self) -> None:
        names = ("agent.yaml", "gateway.yaml", "jaeger.yaml")
        ports = {
            reader["pull"]["exporter"]["prometheus"]["port"]
            for name in names
            for reader in with_defaults(name)["service"]["telemetry"]["metrics"]["readers"]
        }
        by_job = {group["labels"]["job"]: group["targets"] for group in read("targets.yml")}
        assert {f"localhost:{port}" for port in ports} == set(by_job["telemetry-pipeline"])
        by_job = {group["labels"]["job"]: group["targets"] for group in read("targets.compose.yml")}
        hosts = {target.partition(":")[0] for target in by_job["telemetry-pipeline"]}
        assert hosts == {name.removesuffix(".yaml") for name in names}

    @pytest.mark.parametrize("name", ["agent.yaml", "gateway.yaml", "jaeger.yaml", "tempo.yaml"])
    def test_only_this_machine_reaches_them_unless_a_variable_says_otherwise(self, name: str) -> None:
        text = re.sub(r"\$\{(?:env:)?\w+:-([^}]*)\}", r"\1", (FOLDER / name).read_text(encoding="utf-8"))
        found = re.findall(r"^[\s-]*(\w*(?:endpoint|address|host|url)): (\S+)$", text, re.MULTILINE)
        expected = {"http_listen_address", "grpc_listen_address"} if name == "tempo.yaml" else {"endpoint", "host"}
        assert expected <= {key for key, _ in found}
        assert all(re.match(r"(http://)?localhost\b", address) for _, address in found)

    def test_readme_has_every_variable_with_its_defaults(self) -> None:
        page = (FOLDER / "README.md").read_text(encoding="utf-8")
        for name in ("agent.yaml", "gateway.yaml", "jaeger.yaml", "tempo.yaml"):
            text = (FOLDER / name).read_text(encoding="utf-8")
            for variable, default in re.findall(r"\$\{(?:env:)?(\w+):-([^}]*)\}", text):
                rows = [line for line in page.splitlines() if line.startswith("|") and f"`{variable}`" in line]
                assert any(f"`{default}`" in row for row in rows), (name, variable)


class TestCompose:
    def test_every_variable_that_it_sets_is_read(self) -> None:
        text = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")}
        for service in ("agent", "gateway", "jaeger", "tempo"):
            given = read("compose.yaml")["services"][service]["environment"]
            read_there = set(re.findall(r"\$\{(?:env:)?(\w+)", text[f"{service}.yaml"]))
            assert set(given) - {"GOMEMLIMIT"} <= read_there

    def test_ports_are_published_on_this_machine_only(self) -> None:
        ports = [port for service in read("compose.yaml")["services"].values() for port in service.get("ports", ())]
        assert ports
        assert all(port.startswith("127.0.0.1:") for port in ports)

    def test_what_it_mounts_and_needs_exists(self) -> None:
        compose = read("compose.yaml")
        for service in compose["services"].values():
            for mount in service["volumes"]:
                source = mount.partition(":")[0]
                assert (FOLDER / source).exists() if source.startswith("./") else source in compose["volumes"]
            assert set(service.get("depends_on", ())) <= set(compose["services"])
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])

    def test_prometheus_scrapes_services_that_exist(self) -> None:
        hosts = {target.partition(":")[0] for group in read("targets.compose.yml") for target in group["targets"]}
        assert hosts <= set(read("compose.yaml")["services"])
        jobs = {group["labels"]["job"] for name in ("targets.yml", "targets.compose.yml") for group in read(name)}
        assert jobs == {"otel-brick-agent", "telemetry-pipeline"}


class TestDashboard:
    def test_panels_do_not_lie_on_each_other(self) -> None:
        cells = [
            (x, y)
            for panel in dashboard()["panels"]
            for place in [panel["gridPos"]]
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) == 23

    def test_ids_are_unique_and_charts_have_data(self) -> None:
        panels = dashboard()["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert all(panel["targets"] for panel in panels if panel["type"] != "row")

    def test_exemplars_lead_to_data_sources_that_exist(self) -> None:
        sources = read("grafana/provisioning/datasources/otel_brick.yaml")["datasources"]
        links = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
        assert {link["datasourceUid"] for link in links} <= {source["uid"] for source in sources}
        asked = [target for panel in dashboard()["panels"] for target in panel.get("targets", ()) if target["exemplar"]]
        assert asked
        assert all("_bucket{" in target["expr"] for target in asked)
