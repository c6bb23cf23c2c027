"""The examples run as they are, need nothing but the library, and print what they are there to show."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_A_DEVICE = {"cuda_decoder"}
"""Those that tests/cuda runs."""
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in ON_A_DEVICE)


def run(example: Path, directory: Path, *arguments: str) -> str:
    """Run an example as a user would; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, str(example), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def calls(summary: str) -> dict[str, int]:
    """The last column of a summary's bricks and categories."""
    rows = (line.split() for line in summary.splitlines())
    return {row[0]: int(row[-1]) for row in rows if len(row) >= 4 and row[-2].endswith("%")}


def check_minimal(output: str, directory: Path) -> None:
    assert "100 steps, bricks cover" in output
    assert calls(output) == {"RmsNorm": 400, "UpProjection": 400, "Activation": 400, "Norm": 400, "FFN": 800}
    profile = json.loads((directory / "brick_profile.json").read_text(encoding="utf-8"))
    assert profile["total_tokens"] == profile["steps"]["count"] == 100
    elements = {brick["name"]: brick["total_elements"] for brick in profile["bricks"]}
    assert elements == dict.fromkeys(("RmsNorm", "UpProjection", "Activation"), 400 * 512)
    assert set(profile["losses"].values()) == {0}


def check_existing_tracer(output: str, directory: Path) -> None:
    lines = [re.fullmatch(r"( *)(.+?) +[\d.]+ us(?:  (.+))?", line) for line in output.splitlines()]
    tree = [(len(line[1]) // 2, line[2], line[3] or "") for line in lines if line]
    assert len(tree) == len(output.splitlines())

    def step(name: str, tokens: int) -> list[tuple[int, str, str]]:
        spans = [(1, name, f"brick.token.count={tokens}")]
        for layer in range(2):
            index = f"brick.layer.index={layer}"
            counts = f"{index}  brick.element.count={512 * tokens}"
            spans += [(2, "layer decoder", index), (3, "RmsNorm", counts), (3, "FusedMlp", counts)]
        return spans

    decode = step("step decode", 1)
    assert tree == [(0, "POST /generate", ""), *step("step prefill", 32), *decode, *decode]


def check_async_server(output: str, directory: Path) -> None:
    expected = {"Expert": 96, "MixtureOfExperts": 24, "AttentionOutput": 24, "Attention": 24, "Other": 120}
    assert calls(output) == expected
    edges = {edge: int(count) for count, edge in re.findall(r"^ +(\d+) x (.+)$", output, re.MULTILINE)}
    assert edges == {
        "request > step decode": 24,
        "step decode > AttentionOutput": 24,
        "step decode > MixtureOfExperts": 24,
        "MixtureOfExperts > Expert": 96,
    }
    assert output.endswith("every expert is below the mixture of its own step, and nothing was lost\n")


def check_otlp(output: str, directory: Path) -> None:
    assert output.startswith("lost: nothing\n")
    spans = {name: int(count) for count, name in re.findall(r"^ +(\d+) x (.+)$", output, re.MULTILINE)}
    # Every step leaves; four have detail: the first two and, one in 16, those with index 16 and 32.
    assert spans.pop("step decode") == 40
    assert set(spans) == {"layer decoder", "RmsNorm", "UpProjection"}
    assert set(spans.values()) == {4 * 4}
    metrics = dict(re.findall(r"^(brick\.\S+) +(.+)$", output, re.MULTILINE))
    assert metrics == {
        "brick.calls": "sum in {call}",
        "brick.duration": "histogram in s",
        "brick.elements": "sum in {element}",
        "brick.finalize.duration": "histogram in s",
        "brick.io": "sum in By",
        "brick.records.dropped": "sum in {record}",
        "brick.step.duration": "histogram in s",
        "brick.time": "sum in s",
        "brick.tokens": "sum in {token}",
    }


CHECKS: dict[str, Callable[[str, Path], None]] = {
    "async_server": check_async_server,
    "existing_tracer": check_existing_tracer,
    "minimal": check_minimal,
    "otlp": check_otlp,
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_prints_what_it_is_there_to_show(example: Path, tmp_path: Path) -> None:
    CHECKS[example.stem](run(example, tmp_path), tmp_path)


def test_no_example_is_missing() -> None:
    assert [example.stem for example in EXAMPLES] == sorted(CHECKS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_imports_only_what_comes_with_the_library(example: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(example.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    foreign = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    allowed = re.compile(r"(numpy|otel_brick|opentelemetry\.(trace|sdk|proto))(\..+)?")
    assert not {name for name in foreign if not allowed.fullmatch(name)}


def test_minimal_writes_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    run(ROOT / "examples" / "minimal.py", tmp_path, str(path))
    assert json.loads(path.read_text(encoding="utf-8"))["steps"]["count"] == 100
