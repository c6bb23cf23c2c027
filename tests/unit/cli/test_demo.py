"""`otel-brick demo` from the command line to its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import otel_brick
from otel_brick.cli.decoder import PRESETS
from otel_brick.cli.demo import DemoOptions, run_demo

try:
    import opentelemetry.exporter.otlp.json.file  # noqa: F401
except ImportError:
    HAS_FILE_EXPORTER = False
else:
    HAS_FILE_EXPORTER = True

needs_file_exporter = pytest.mark.skipif(
    not HAS_FILE_EXPORTER, reason="OpenTelemetry's file exporter, for SDK 1.45 and later, is not installed"
)

LAYERS = PRESETS["default"].layers
TOKENS = 5
RUN_MAIN = "from otel_brick.cli import main; main()"
WITHOUT = "import sys; sys.modules[{module!r}] = None; " + RUN_MAIN

Span = dict[str, Any]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(otel_brick.__file__).parents[1]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONIOENCODING": "utf-8",
            **environment,
        },
    )


def run_demo_command(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "otel_brick", "demo", "--tokens", str(TOKENS), "--output", str(output), *arguments)


def read_spans(path: Path) -> list[Span]:
    requests = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        span
        for request in requests
        for resource_spans in request["resourceSpans"]
        for scope_spans in resource_spans["scopeSpans"]
        for span in scope_spans["spans"]
    ]


def attributes(span: Span) -> dict[str, Any]:
    values = {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}
    return {key: int(value) if str(value).isdigit() else value for key, value in values.items()}


def duration_ns(span: Span) -> int:
    return int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])


def of_level(spans: list[Span], level: str) -> list[Span]:
    return [span for span in spans if attributes(span)["brick.span.level"] == level]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new" / "directory"


@pytest.fixture(scope="module")
def finished(output: Path) -> subprocess.CompletedProcess[str]:
    return run_demo_command(output)


@pytest.fixture(scope="module")
def spans(output: Path, finished: subprocess.CompletedProcess[str]) -> list[Span]:
    assert finished.returncode == 0, finished.stderr
    return read_spans(output / "trace.jsonl")


def test_it_succeeds_and_says_what_it_found_in_plain_text(
    finished: subprocess.CompletedProcess[str], output: Path
) -> None:
    assert finished.returncode == 0
    assert finished.stderr == ""
    assert "\x1b" not in finished.stdout
    for expected in (
        "random weights, so expect gibberish",
        "QkvProjection",
        "step decode",
        "layer decoder 0",
    ):
        assert expected in finished.stdout
    assert f"... {LAYERS - 2} more layers" in finished.stdout
    assert "…" not in finished.stdout
    assert "Losses" not in finished.stdout
    assert str(output / "brick_profile.json") in finished.stdout


def test_the_profile_counts_every_brick_of_every_step(finished: subprocess.CompletedProcess[str], output: Path) -> None:
    assert finished.returncode == 0
    profile = json.loads((output / "brick_profile.json").read_text(encoding="utf-8"))
    counts = {brick["name"]: brick["count"] for brick in profile["bricks"]}
    assert counts["LmHead"] == counts["Sampling"] == counts["Embedding"] == TOKENS
    assert counts["RmsNorm"] == TOKENS * (2 * LAYERS + 1)
    assert counts["QkvProjection"] == counts["Residual1"] == counts["Residual2"] == TOKENS * LAYERS
    assert sum(brick["pct"] for brick in profile["bricks"]) == pytest.approx(100, abs=1)


@needs_file_exporter
def test_every_step_is_one_trace_with_its_phase_and_tokens(spans: list[Span]) -> None:
    steps = of_level(spans, "step")
    assert Counter(span["name"] for span in steps) == {"step prefill": 1, "step decode": TOKENS - 1}
    assert len({span["traceId"] for span in steps}) == TOKENS
    assert not any(span.get("parentSpanId") for span in steps)
    assert {span["traceId"] for span in spans} == {span["traceId"] for span in steps}
    assert all(attributes(span)["brick.token.count"] == 1 for span in steps if span["name"] == "step decode")


@needs_file_exporter
def test_layers_lie_in_steps_and_bricks_in_layers_or_steps(spans: list[Span]) -> None:
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans)
    allowed = {"layer": {"step"}, "brick": {"layer", "step"}}
    for span in spans:
        level = attributes(span)["brick.span.level"]
        if level == "step":
            continue
        parent = by_id[span["parentSpanId"]]
        assert parent["traceId"] == span["traceId"]
        assert attributes(parent)["brick.span.level"] in allowed[level]
        assert int(parent["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(parent["endTimeUnixNano"])
    layers = of_level(spans, "layer")
    assert Counter(attributes(span)["brick.layer.index"] for span in layers) == dict.fromkeys(range(LAYERS), TOKENS)
    outside = {span["name"] for span in of_level(spans, "brick") if by_id[span["parentSpanId"]] not in layers}
    assert outside == {"Embedding", "RmsNorm", "LmHead", "Sampling"}


@needs_file_exporter
def test_bricks_cover_the_steps(spans: list[Span]) -> None:
    bricks, steps = (sum(map(duration_ns, of_level(spans, level))) for level in ("brick", "step"))
    assert 0.85 <= bricks / steps <= 1


@needs_file_exporter
def test_bricks_carry_their_counts(spans: list[Span]) -> None:
    head = next(span for span in spans if span["name"] == "LmHead")
    config = PRESETS["default"]
    assert attributes(head)["brick.element.count"] == config.vocabulary
    read = 4 * (config.vocabulary + 1) * config.hidden
    assert attributes(head)["brick.io.size"] == read + 4 * config.vocabulary


@needs_file_exporter
def test_a_second_run_replaces_both_files(tmp_path: Path) -> None:
    for tokens in ("4", "2"):
        assert run_demo_command(tmp_path, "--tokens", tokens).returncode == 0
        assert len(of_level(read_spans(tmp_path / "trace.jsonl"), "step")) == int(tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["brick_profile.json", "trace.jsonl"]


def test_without_detail_only_steps_leave_and_statistics_stay_complete(tmp_path: Path) -> None:
    finished = run_demo_command(tmp_path, "--detail", "none")
    assert finished.returncode == 0, finished.stderr
    assert "layer decoder" not in finished.stdout
    assert "QkvProjection" in finished.stdout
    if HAS_FILE_EXPORTER:
        assert len(read_spans(tmp_path / "trace.jsonl")) == TOKENS


def test_with_detail_auto_the_tree_is_of_a_step_that_has_one(tmp_path: Path) -> None:
    finished = run_demo_command(tmp_path, "--detail", "auto", "--tokens", "20")
    assert finished.returncode == 0, finished.stderr
    assert "layer decoder" in finished.stdout
    if HAS_FILE_EXPORTER:
        reasons = Counter(
            attributes(span)["brick.detail.reason"] for span in of_level(read_spans(tmp_path / "trace.jsonl"), "step")
        )
        assert reasons == {"first": 3, "interval": 1, "none": 16}


def test_one_token_is_one_prefill_step(tmp_path: Path) -> None:
    finished = run_demo_command(tmp_path, "--tokens", "1", "--prompt", "x")
    assert finished.returncode == 0, finished.stderr
    assert "step prefill" in finished.stdout
    assert "prefill of 1 token, then 0 decode steps of one token each" in finished.stdout
    assert "spans in 1 trace," in finished.stdout or not HAS_FILE_EXPORTER


def test_without_the_file_exporter_it_says_so_and_still_writes_the_profile(tmp_path: Path) -> None:
    code = WITHOUT.format(module="opentelemetry.exporter.otlp.json.file")
    finished = run_python("-c", code, "demo", "--tokens", "2", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert "opentelemetry-exporter-otlp-json-file" in finished.stdout
    assert 'pip install "otel-brick[cli]"' in finished.stdout
    assert "step decode" in finished.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["brick_profile.json"]


def test_the_environment_of_the_users_own_service_does_not_change_the_demo(tmp_path: Path) -> None:
    finished = run_python(
        "-m", "otel_brick", "demo", "--tokens", "2", "--output", str(tmp_path),
        OTEL_TRACES_SAMPLER="always_off", OTEL_SERVICE_NAME="mine", OTEL_BRICK_DETAIL="none",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "layer decoder 0" in finished.stdout
    if HAS_FILE_EXPORTER:
        text = (tmp_path / "trace.jsonl").read_text(encoding="utf-8")
        assert "otel-brick-demo" in text
        assert "mine" not in text


@pytest.mark.skipif(not HAS_FILE_EXPORTER, reason="no trace.jsonl without OpenTelemetry's file exporter")
def test_a_failed_run_leaves_the_files_of_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("earlier", encoding="utf-8")
    (tmp_path / "brick_profile.json").write_text("earlier", encoding="utf-8")

    def interrupt() -> None:
        raise KeyboardInterrupt

    options = DemoOptions("default", "x", 2, 0, tmp_path, "all")
    with pytest.raises(KeyboardInterrupt):
        run_demo(options, interrupt, lambda _: None)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        "trace.jsonl": "earlier",
        "brick_profile.json": "earlier",
    }


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--preset", "gpt5"], "--preset"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--tokens", "5000"], "--tokens"),
        (["--seed", "-1"], "--seed"),
        (["--prompt", ""], "--prompt"),
        (["--detail", "some"], "--detail"),
        (["--seconds", "5"], "--seconds"),
        (["--seconds", "0", "--endpoint", "http://localhost:4318"], "--seconds"),
        (["--protocol", "grpc"], "--protocol"),
    ],
)
def test_a_bad_argument_is_named(tmp_path: Path, arguments: list[str], option: str) -> None:
    finished = run_demo_command(tmp_path / "unused", *arguments)
    assert finished.returncode == 2
    assert option in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "unused").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        finished = run_demo_command(place)
        assert finished.returncode == 2
        assert "--output" in finished.stderr
        assert str(place) in finished.stderr
        assert "Traceback" not in finished.stderr
        assert finished.stdout == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    finished = run_demo_command(tmp_path)
    tmp_path.chmod(0o700)
    assert finished.returncode == 2
    assert "Permission denied" in finished.stderr


@pytest.mark.parametrize("module", ["click", "rich"])
def test_without_the_cli_extra_one_line_says_what_to_install(module: str) -> None:
    finished = run_python("-c", WITHOUT.format(module=module), "demo")
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == (
        f'otel-brick: {module} is not installed, the command needs it: pip install "otel-brick[cli]"\n'
    )


def test_version_is_the_packages() -> None:
    finished = run_python("-c", RUN_MAIN, "--version")
    assert (finished.returncode, finished.stdout) == (0, f"otel-brick {otel_brick.__version__}\n")
