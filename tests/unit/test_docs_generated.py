"""The generated page agrees with the code, and the check notices when it does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from otel_brick import semconv
from otel_brick.semconv import InstrumentKind, Metric

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "generate.py"
_spec = importlib.util.spec_from_file_location("docs_generate", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_page_in_the_repository_is_what_the_generator_writes() -> None:
    result = run("--check")
    assert (result.returncode, result.stderr) == (0, "")


def test_check_fails_and_changes_nothing_when_the_page_differs(tmp_path: Path) -> None:
    page = tmp_path / "attributes.md"
    assert run("--output", page).returncode == 0
    assert run("--check", "--output", page).returncode == 0
    stale = page.read_text(encoding="utf-8").replace("`brick.name`", "`brick.title`")
    page.write_text(stale, encoding="utf-8")

    result = run("--check", "--output", page)

    assert result.returncode == 1
    assert "make docs" in result.stderr
    assert page.read_text(encoding="utf-8") == stale


def test_check_fails_and_writes_nothing_when_the_page_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "attributes.md"
    assert run("--check", "--output", page).returncode == 1
    assert not page.exists()


def test_every_attribute_has_one_row_with_its_type_unit_levels_and_values() -> None:
    rows = table_rows(generate.render(), "### ", columns=5)
    assert set(rows) == {attribute.name for attribute in semconv.ATTRIBUTES}
    for attribute in semconv.ATTRIBUTES:
        kind, unit, levels, brief = rows[attribute.name]
        assert (kind, unit.strip("`")) == (attribute.type, attribute.unit)
        assert tuple(levels.split(", ")) == attribute.levels
        assert brief.startswith(attribute.brief)
        assert all(f"`{value}`" in brief for value in attribute.values)


def test_every_metric_has_one_row_with_its_instrument_unit_attributes_and_buckets() -> None:
    page = generate.render()
    rows = table_rows(page, "## Metrics", columns=6)
    assert set(rows) == {metric.name for metric in semconv.METRICS}
    for metric in semconv.METRICS:
        kind, unit, labels, prometheus, description = rows[metric.name]
        assert (kind, unit.strip("`"), description) == (metric.instrument, metric.unit, metric.description)
        assert all(f"`{name}`" in labels for name in metric.attributes + metric.opt_in_attributes)
        assert prometheus == f"`{generate.prometheus_name(metric)}`"
    bucket_lines = page.partition("### Buckets")[2].splitlines()
    for metric in semconv.METRICS:
        bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
        found = [line.rpartition("` | ")[2] for line in bucket_lines if f"`{metric.name}`" in line]
        assert found == ([f"{bounds} |"] if metric.buckets else [])


def table_rows(page: str, section: str, columns: int) -> dict[str, list[str]]:
    """Cells of all table rows with that many columns after the heading `section`, by their first cell."""
    lines = [line for line in page.partition(section)[2].splitlines() if line.startswith("| `")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    rows = [row for row in cells if len(row) == columns]
    names = [row[0].strip("`") for row in rows]
    assert len(names) == len(set(names))
    return {name: row[1:] for name, row in zip(names, rows, strict=True)}


PROMETHEUS_NAMES = {
    "brick.step.duration": "brick_step_duration_seconds",
    "brick.duration": "brick_duration_seconds",
    "brick.time": "brick_time_seconds_total",
    "brick.calls": "brick_calls_total",
    "brick.elements": "brick_elements_total",
    "brick.io": "brick_io_bytes_total",
    "brick.tokens": "brick_tokens_total",
    "brick.budget.limit": "brick_budget_limit_seconds",
    "brick.budget.violations": "brick_budget_violations_total",
    "brick.cuda.kernel.duration": "brick_cuda_kernel_duration_seconds",
    "brick.cuda.kernel.launches": "brick_cuda_kernel_launches_total",
    "brick.cuda.memory.bandwidth.utilization": "brick_cuda_memory_bandwidth_utilization_ratio",
    "brick.finalize.duration": "brick_finalize_duration_seconds",
    "brick.records.dropped": "brick_records_dropped_total",
}


def test_our_metrics_have_the_prometheus_names_that_dashboards_are_built_on() -> None:
    assert {metric.name: generate.prometheus_name(metric) for metric in semconv.METRICS} == PROMETHEUS_NAMES


@pytest.mark.parametrize(
    ("name", "instrument", "unit", "expected"),
    [
        pytest.param("io.bytes", "gauge", "By", "io_bytes", id="unit already in the name"),
        pytest.param("total.calls", "counter", "{call}", "calls_total", id="total moves to the end"),
        pytest.param("disk.rate", "gauge", "By/s", "disk_rate_bytes_per_second", id="rate"),
        pytest.param("load", "histogram", "1", "load", id="dimensionless histogram gets no suffix"),
        pytest.param("load", "counter", "1", "load_total", id="dimensionless counter"),
        pytest.param("a-b..c", "gauge", "", "a_b_c", id="other characters collapse"),
        pytest.param("3d.steps", "gauge", "{step}", "_3d_steps", id="leading digit"),
    ],
)
def test_prometheus_translation(name: str, instrument: InstrumentKind, unit: str, expected: str) -> None:
    assert generate.prometheus_name(Metric(name, instrument, unit, "", ())) == expected
