"""README and docs are true: their code runs, their links lead somewhere, and nothing public is left out."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import otel_brick
from otel_brick import BrickProfiler, BrickStats, CategoryStats, Config, Statistics, pipeline, semconv
from otel_brick.export import BrickOTLPExporter, columnar, detail, sender
from otel_brick.export.otlp_settings import OTLPSettings
from otel_brick.record import descriptors, recorder, step, verbs
from otel_brick.record.losses import REASONS
from otel_brick.stats import steps, table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COLLECTOR = "http://localhost:4318"
"""What the pages send to."""
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
JAEGER = ROOT / "docs" / "jaeger.md"
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")

sys.path.insert(0, str(ROOT / "docs"))  # its scripts import each other
draw_step = importlib.import_module("draw_step")
draw_servers = importlib.import_module("draw_servers")


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(code: str, directory: Path) -> str:
    """Run pasted code in a fresh interpreter; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@contextmanager
def collector() -> Iterator[tuple[str, list[str]]]:
    """A collector that takes everything: its address, and the paths of the requests so far."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


def shape(report: str) -> list[str]:
    """The lines of a report without its measurements, in any order; counts stay."""
    return sorted(re.sub(r" *\d+\.\d+", " #", line) for line in report.strip().splitlines())


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    printed = run(blocks(README, "python")[0], tmp_path)
    assert shape(printed) == shape(blocks(README, "text")[0])
    assert json.loads((tmp_path / "brick_profile.json").read_text(encoding="utf-8"))["total_tokens"] == 100


def test_the_readme_sends_traces_and_metrics_with_one_call(tmp_path: Path) -> None:
    with collector() as (address, paths):
        run(blocks(README, "python")[1].replace(COLLECTOR, address), tmp_path)
    assert set(paths) == {"/v1/traces", "/v1/metrics"}


def test_the_readme_puts_a_step_below_the_request_without_more_set_up(tmp_path: Path) -> None:
    printed = run(blocks(README, "python")[2], tmp_path)
    decoder, position = json.JSONDecoder(), 0
    spans: dict[str, dict[str, Any]] = {}
    while position < len(printed):
        span, position = decoder.raw_decode(printed, position)
        spans[span["context"]["span_id"]] = span
        position += len(printed[position:]) - len(printed[position:].lstrip())
    parent = {span["name"]: spans[span["parent_id"]]["name"] if span["parent_id"] else None for span in spans.values()}
    assert parent == {
        "POST /generate": None,
        "step prefill": "POST /generate",
        "layer decoder": "step prefill",
        "RmsNorm": "layer decoder",
    }


@pytest.mark.parametrize("name", ["concepts.md", "configuration.md", "performance.md", "reference.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    with collector() as (address, paths):
        run("\n".join(blocks(ROOT / "docs" / name, "python")).replace(COLLECTOR, address), tmp_path)
    assert set(paths) == ({"/v1/traces", "/v1/metrics"} if name == "configuration.md" else set())


def test_the_jaeger_page_sends_a_step_to_be_found(tmp_path: Path) -> None:
    with collector() as (address, paths):
        run(blocks(JAEGER, "python")[0].replace(COLLECTOR, address), tmp_path)
    assert set(paths) == {"/v1/traces", "/v1/metrics"}


def test_the_jaeger_page_compares_two_traces_as_it_shows(tmp_path: Path) -> None:
    shown = blocks(JAEGER, "text")[0]
    rows = re.findall(r"^ *(\d+) +(\d+)  (\w+) (.+?)(?: (\d))?$", shown, re.MULTILINE)
    for column, trace_id in enumerate(("usual", "slow")):
        spans: list[dict[str, Any]] = []
        for *durations, level, name, layer in rows:
            tags = [{"key": "brick.span.level", "value": level}, {"key": "brick.layer.index", "value": layer}]
            spans.append({"operationName": name, "duration": int(durations[column]), "tags": tags})
        (tmp_path / trace_id).write_text(json.dumps({"data": [{"spans": spans}]}), encoding="utf-8")
    code = blocks(JAEGER, "python")[1].replace("http://localhost:16686/api/traces", tmp_path.as_uri())
    assert run(f"import sys; sys.argv[1:] = 'usual', 'slow'\n{code}", tmp_path) == shown


def test_the_prometheus_page_opens_a_port_for_pull(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (code,) = blocks(ROOT / "docs" / "prometheus.md", "python")
    show = "from prometheus_client import generate_latest\nprint(generate_latest(REGISTRY).decode())"
    printed = run(f"{code.replace('9464', '0')}\n{show}", tmp_path)
    assert 'brick_elements_total{brick_name="RmsNorm",brick_phase="decode"} 4096.0' in printed


SERVER_PAGES = [ROOT / "docs" / f"{name}.md" for name in ("jaeger", "tempo", "prometheus", "production")]


@pytest.mark.parametrize("page", SERVER_PAGES, ids=lambda page: page.name)
def test_what_the_pages_on_servers_name_is_what_we_send(page: Path) -> None:
    attributes = {attribute.name for attribute in semconv.ATTRIBUTES}
    metrics = {metric.name for metric in semconv.METRICS}
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\bbrick(?:\.[a-z_]+)+", text)) <= attributes | metrics
    labels = {name.replace(".", "_") for name in attributes}
    series = set(re.findall(r"`(brick_\w+)`", (ROOT / "docs" / "attributes.md").read_text(encoding="utf-8")))
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bbrick_[a-z_]+", text)}
    assert named <= labels | series


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), target


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_set_up_is_two_commands_that_make_knows() -> None:
    text = README.read_text(encoding="utf-8")
    section = text.partition("## Try it")[2].partition("\n## ")[0]
    commands = re.findall(r"^    (.+)$", section, re.MULTILINE)
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)


def test_both_pages_have_every_argument_of_a_profiler() -> None:
    arguments = list(inspect.signature(BrickProfiler).parameters)
    settings = CONFIGURATION.partition("## Settings")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE)) == sorted(arguments)
    sending = REFERENCE.partition("## Sending")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`.+?) \|", sending, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(arguments)


def test_the_configuration_page_has_every_argument_of_configure() -> None:
    section = CONFIGURATION.partition("### One call")[2].partition("\n### ")[0]
    arguments = set(inspect.signature(otel_brick.configure).parameters) - {"settings"}
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == arguments


def test_the_configuration_page_has_every_argument_and_variable_of_the_exporter() -> None:
    section = CONFIGURATION.partition("## The OTLP exporter")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE))
    assert set(rows) == set(inspect.signature(BrickOTLPExporter).parameters)
    values = {
        "protocol": "grpc",
        "endpoint": "https://collector:1",
        "headers": "a=b",
        "timeout_s": "7",
        "compression": "gzip",
        "insecure": "true",
        "certificate_file": __file__,
        "client_key_file": __file__,
        "client_certificate_file": __file__,
    }
    given = {f"OTEL_EXPORTER_OTLP_{rows[argument]}": value for argument, value in values.items()}
    read = OTLPSettings.build({}, given)
    assert (read.protocol, read.endpoint, read.headers) == ("grpc", "collector:1", (("a", "b"),))
    assert (read.timeout_s, read.compression, read.insecure) == (7.0, "gzip", False)
    assert {read.certificate_file, read.client_key_file, read.client_certificate_file} == {__file__}


BOUNDS = {
    "MIN_ROW_LIMIT": recorder.MIN_ROW_LIMIT,
    "MAX_PENDING_ROWS": pipeline.MAX_PENDING_ROWS,
    "MAX_QUEUED_ROWS": pipeline.MAX_QUEUED_ROWS,
    "max_rows_per_step": Config.build({}, {}).max_rows_per_step,
    "max_rows_per_trace": Config.build({}, {}).max_rows_per_trace,
    "MAX_QUEUE_BYTES": sender.MAX_QUEUE_BYTES,
    "MAX_REQUEST_BYTES": sender.MAX_REQUEST_BYTES,
    "MAX_TRACES": detail.MAX_TRACES,
    "MAX_DYNAMIC_BRICKS": descriptors.MAX_DYNAMIC_BRICKS,
    "MAX_DESCRIPTORS": descriptors.MAX_DESCRIPTORS,
    "MAX_SITES": descriptors.MAX_SITES,
    "MAX_HANDLES": verbs.MAX_HANDLES,
    "MAX_TEMPLATES": columnar.MAX_TEMPLATES,
    "MAX_LAYERS": table.MAX_LAYERS,
    "MAX_LANES": steps.MAX_LANES,
    "MAX_ERRORS": step.MAX_ERRORS,
    "MAX_ERROR_TEXT": descriptors.MAX_ERROR_TEXT,
    "MAX_KERNEL_NAME": verbs.MAX_KERNEL_NAME,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_performance_page_has_the_bounds_of_the_code(name: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.partition("## Memory")[2].splitlines() if f"`{name}`" in line]
    (bound,) = (row[1] for row in rows if f"`{name}`" in row[2])
    value = BOUNDS[name]
    assert (f"{value >> 20} MiB" if name.endswith("_BYTES") else f"{value:,}") in bound


def test_the_reference_has_every_reason_of_losses() -> None:
    section = REFERENCE.partition("### Losses")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(REASONS)


@pytest.mark.parametrize("owner", [BrickProfiler, Statistics, BrickStats, CategoryStats])
def test_the_reference_has_every_public_member(owner: type) -> None:
    fields = getattr(owner, "__dataclass_fields__", {})
    members = {name for name in {*dir(owner), *fields} if not name.startswith("_") and name != "config"}
    code = " ".join(re.findall(r"`([^`\n]+)`", REFERENCE)) + " ".join(blocks(ROOT / "docs" / "reference.md", "python"))
    assert not {name for name in members if not re.search(rf"\b{name}\b", code)}


def test_the_reference_has_every_key_of_the_profile() -> None:
    profiler = BrickProfiler.enabled()
    with profiler.step(tokens=1), profiler.brick("B"):
        pass
    document = json.loads(profiler.to_json())
    profiler.shutdown()
    section = REFERENCE.partition("### The profile")[2].partition("\n### ")[0]
    for keys in (document, document["bricks"][0], document["steps"], document["categories"][0]):
        assert not {key for key in keys if f"`{key}`" not in section}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda picture: picture.name)
def test_a_picture_is_well_formed_and_says_what_it_shows(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.findtext("{http://www.w3.org/2000/svg}title")


def test_the_picture_of_a_step_has_a_bar_for_each_span_as_wide_as_it_is_long(tmp_path: Path) -> None:
    def span(number: int, parent: int, name: str, start: int, end: int, **attributes: str) -> dict[str, object]:
        keys = ({"key": f"brick.{key.replace('_', '.')}", "value": {"x": value}} for key, value in attributes.items())
        return {
            "spanId": str(number),
            "parentSpanId": str(parent or ""),
            "name": name,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(end),
            "attributes": list(keys),
        }

    spans = [
        span(1, 0, "step decode", 1_000, 11_000, span_level="step", phase="decode"),
        span(2, 1, "layer", 2_000, 10_000, span_level="layer", layer_index="0"),
        span(3, 2, "RmsNorm", 2_000, 4_000, span_level="brick", category="norm"),
        span(4, 2, "A<B", 4_000, 10_000, span_level="brick", category="ffn"),
    ]
    scopes: list[dict[str, Any]] = [
        {"scope": {"name": "otel_brick"}, "spans": spans},
        {"scope": {"name": "other"}, "spans": [{}]},
    ]
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "step.svg"
    trace.write_text(json.dumps({"resourceSpans": [{"scopeSpans": scopes}]}) + "\n", encoding="utf-8")
    assert draw_step.main([str(trace), "--output", str(picture)]) == 0
    bars = [
        (title.text, float(rect.get("width", "")))
        for rect in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}rect")
        if (title := rect.find("{http://www.w3.org/2000/svg}title")) is not None
    ]
    axis = draw_step.RIGHT - draw_step.LEFT
    expected = [
        ("step decode  10.0 µs", 1.0),
        ("layer 0  8.0 µs", 0.8),
        ("RmsNorm  2.0 µs", 0.2),
        ("A<B  6.0 µs", 0.6),
        ("RmsNorm  2.0 µs", 0.25),
        ("A<B  6.0 µs", 0.75),
    ]
    assert [name for name, _ in bars] == [name for name, _ in expected]
    assert [width / axis for _, width in bars] == pytest.approx([share for _, share in expected], abs=1e-3)


def test_the_picture_of_a_trace_is_of_the_slow_step_of_median_duration(tmp_path: Path) -> None:
    def found(trace_id: str, *durations_us: int) -> dict[str, object]:
        return {"traceID": trace_id, "spans": [{"duration": duration_us} for duration_us in durations_us]}

    def span(number: int, parent: str, name: str, end: int, **attributes: str) -> dict[str, object]:
        keys = [{"key": f"brick.{key.replace('_', '.')}", "value": {"x": value}} for key, value in attributes.items()]
        times = {"startTimeUnixNano": "0", "endTimeUnixNano": str(end)}
        return {"spanId": str(number), "parentSpanId": parent, "name": name, "attributes": keys, **times}

    spans = [
        span(1, "", "step decode", 10_000, span_level="step"),
        span(2, "1", "layer", 9_000, span_level="layer", layer_index="0"),
        span(3, "2", "RmsNorm", 8_000, span_level="brick", category="norm"),
    ]
    scopes = [{"scope": {"name": "otel_brick"}, "spans": spans}]
    search = {"data": [found("short", 9, 10), found("long", 90), found("median", 8, 11)]}
    (tmp_path / "search.json").write_text(json.dumps(search), encoding="utf-8")
    (tmp_path / "trace.json").write_text(json.dumps({"result": {"resourceSpans": [{"scopeSpans": scopes}]}}), "utf-8")
    asked: list[str] = []

    class Answers(draw_servers.Answers):
        def of_jaeger(self, name: str, path: str, **parameters: str) -> Any:
            asked.append(path)
            return super().of_jaeger(name, path, **parameters)

    picture = draw_servers.draw_trace(Answers(tmp_path, "", ""), "engine", 5)
    assert asked == ["/api/traces", "/api/v3/traces/median"]
    titles = [title.text for title in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == ["step decode  10.0 µs", "layer 0  9.0 µs", "RmsNorm  8.0 µs", "RmsNorm  8.0 µs"]


def test_the_picture_of_the_dashboard_has_what_prometheus_answered(tmp_path: Path) -> None:
    def series(label: str, *names: str) -> list[dict[str, object]]:
        return [{"metric": {label: name}, "values": [[0, "NaN"], [60, "0.001"], [120, "0.002"]]} for name in names]

    cells = [
        {"metric": {"brick_name": "RmsNorm", "brick_layer_index": layer}, "value": [0, seconds]}
        for layer, seconds in (("0", "0.00001"), ("10", "0.00001"), ("2", "0.00004"))
    ]
    answers = {
        "tokens": series("brick_phase", "decode"),
        "p99": series("brick_name", "RmsNorm", "LmHead"),
        "layers": cells,
    }
    for name, result in answers.items():
        content = {"status": "success", "data": {"result": result}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    root = ElementTree.fromstring(draw_servers.draw_dashboard(draw_servers.Answers(tmp_path, "", ""), "engine", 5))
    svg = "{http://www.w3.org/2000/svg}"
    lines = [title.text for path in root.iter(f"{svg}path") if (title := path.find(f"{svg}title")) is not None]
    assert sorted(filter(None, lines)) == ["LmHead", "RmsNorm", "decode"]
    shades = {title.text: float(rect.get("fill-opacity", "")) for rect in root.iter(f"{svg}rect") for title in rect}
    assert list(shades) == ["RmsNorm, layer 0", "RmsNorm, layer 2", "RmsNorm, layer 10"]
    assert shades["RmsNorm, layer 2"] > shades["RmsNorm, layer 0"] == shades["RmsNorm, layer 10"]
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert {"layer 2", "40.0", "10.0", "1 ms", "2 ms"} <= set(texts)
