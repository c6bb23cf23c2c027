"""Runs of `otel-brick demo` against the stack, and what they left on this side: spans and a profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tests.stack.queries import Span, spans_of
from tests.stack.stack import ROOT

TOKENS = 12


@dataclass(frozen=True)
class DemoRun:
    """A finished run.

    Attributes:
        folder: with its two files.
        output: what it printed.
    """

    folder: Path
    output: str

    @classmethod
    def of(cls, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> DemoRun:
        """Run the command, which has to succeed."""
        command = [sys.executable, "-m", "otel_brick", "demo", "--tokens", str(TOKENS), "--output", str(folder)]
        finished = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
            check=False,
            cwd=ROOT,
            env=None if environ is None else dict(environ),
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert finished.stderr == ""
        return cls(folder, finished.stdout)

    @cached_property
    def spans(self) -> list[Span]:
        """The spans of trace.jsonl."""
        return read_spans(self.folder / "trace.jsonl")

    @cached_property
    def profile(self) -> dict[str, Any]:
        """The content of brick_profile.json."""
        return json.loads((self.folder / "brick_profile.json").read_text(encoding="utf-8"))

    @cached_property
    def traces(self) -> dict[str, list[Span]]:
        """The spans by trace."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id, []).append(span)
        return found

    @property
    def instance(self) -> str:
        """Its `service.instance.id`, the label `instance` in Prometheus."""
        return self.spans[0].resource["service.instance.id"]

    def durations_s(self, level: str) -> dict[tuple[str, str], list[float]]:
        """The durations of all spans of a level by name and phase; the name of a step is empty."""
        phases = {span.trace_id: span.attributes["brick.phase"] for span in self.spans if span.level == "step"}
        found: dict[tuple[str, str], list[float]] = {}
        for span in self.spans:
            if span.level == level:
                key = span.attributes.get("brick.name", ""), phases[span.trace_id]
                found.setdefault(key, []).append((span.end_ns - span.start_ns) / 1e9)
        return found


def read_spans(path: Path) -> list[Span]:
    """The spans of a file of OTLP JSON lines. The last line may be half written."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return list(chain.from_iterable(spans_of(json.loads(line)) for line in lines))


def exact(attributes: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Values with their types: for Python True equals 1, and 1 equals 1.0."""
    return {name: (type(value).__name__, value) for name, value in attributes.items()}


def typed(span: Span) -> tuple[Any, ...]:
    """Everything about a span, values with their types."""
    return span, exact(span.attributes), exact(span.resource)


def by_id(spans: Iterable[Span]) -> dict[str, tuple[Any, ...]]:
    """Spans by their id, which none shares with another, as `typed` has them."""
    listed = list(spans)
    assert max(Counter(span.span_id for span in listed).values(), default=1) == 1, "a span is there twice"
    return {span.span_id: typed(span) for span in listed}


def assert_nested(spans: Iterable[Span]) -> None:
    """One root, every other span below one of these and within its time."""
    listed = {span.span_id: span for span in spans}
    roots = [span for span in listed.values() if not span.parent_id]
    assert [span.level for span in roots] == ["step"]
    for span in listed.values():
        if span.parent_id:
            parent = listed[span.parent_id]
            assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns
            assert (
                parent.level
                in {"layer": ["step"], "brick": ["step", "layer", "brick"], "kernel": ["brick"]}[span.level]
            )
