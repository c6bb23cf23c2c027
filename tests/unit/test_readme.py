"""README and docs are true: their code runs, their links lead somewhere, and nothing public is left out."""

from __future__ import annotations

import importlib.util
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
from otel_brick import BrickProfiler, BrickStats, CategoryStats, Config, Statistics, pipeline
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
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("docs_draw_step", ROOT / "docs" / "draw_step.py")
assert _spec is not None
assert _spec.loader is not None
draw_step = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = draw_step  # dataclasses look their module up
_spec.loader.exec_module(draw_step)


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
