"""What is generated agrees with the code, and the check notices when it does not."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from otel_brick import semconv
from otel_brick.config import SETTINGS
from otel_brick.export.metric_series import COUNTERS, GAUGES, HISTOGRAMS
from otel_brick.semconv import InstrumentKind, Metric

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "generate.py"
_spec = importlib.util.spec_from_file_location("docs_generate", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)
PAGES = ["attributes.md", "configuration.md"]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the pages that are written."""
    for name in PAGES:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    return tmp_path


def test_the_pages_in_the_repository_are_what_the_generator_writes() -> None:
    result = run("--check")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "old"), [("attributes.md", "`brick.name`"), ("configuration.md", "`OTEL_BRICK_DETAIL`")]
)
def test_check_fails_and_changes_nothing_when_a_page_differs(name: str, old: str, folder: Path) -> None:
    page = folder / name
    assert run("--check", "--folder", folder).returncode == 0
    true = page.read_text(encoding="utf-8")
    stale = true.replace(old, "`other`")
    assert stale != true
    page.write_text(stale, encoding="utf-8")

    result = run("--check", "--folder", folder)

    assert result.returncode == 1
    assert str(page) in result.stderr
    assert "make docs" in result.stderr
    assert page.read_text(encoding="utf-8") == stale
    assert run("--folder", folder).returncode == 0
    assert page.read_text(encoding="utf-8") == true


@pytest.mark.parametrize("name", PAGES)
def test_check_fails_and_writes_nothing_when_a_page_is_missing(name: str, folder: Path) -> None:
    (folder / name).unlink()
    assert run("--check", "--folder", folder).returncode == 1
    assert not (folder / name).exists()


def test_only_the_table_of_the_settings_is_written_in_a_page_that_people_write() -> None:
    page = f"# Mine\n\n{generate.SETTINGS_BEGIN}\n\nstale\n\n{generate.SETTINGS_END}\n\nand mine\n"
    written = generate.configuration_page(page)
    before, table, after = written.partition(generate.settings_table())
    assert table
    assert (before, after) == (f"# Mine\n\n{generate.SETTINGS_BEGIN}\n\n", f"\n{generate.SETTINGS_END}\n\nand mine\n")
    assert generate.configuration_page(written) == written


@pytest.mark.parametrize("mark", [generate.SETTINGS_BEGIN, generate.SETTINGS_END])
def test_a_page_without_a_place_for_the_table_is_left_alone(mark: str, folder: Path) -> None:
    page = folder / "configuration.md"
    text = page.read_text(encoding="utf-8").replace(mark, "")
    page.write_text(text, encoding="utf-8")
    result = run("--folder", folder)
    assert (result.returncode, page.read_text(encoding="utf-8")) == (1, text)
    assert mark in result.stderr


def test_every_setting_has_one_row_with_its_variable_values_default_and_meaning() -> None:
    rows = table_rows(generate.settings_table(), "", columns=5)
    assert list(rows) == [setting.name for setting in SETTINGS]
    for setting in SETTINGS:
        variable, values, default, meaning = rows[setting.name]
        assert (variable, meaning) == (f"`{setting.variable}`", setting.brief)
        assert f"one of {values}".replace("`", "").endswith(setting.check(None) or "")
        assert setting.parse(default.strip("`")) == setting.default


def test_every_attribute_has_one_row_with_its_type_unit_levels_and_values() -> None:
    rows = table_rows(generate.attributes_page(), "### ", columns=5)
    assert set(rows) == {attribute.name for attribute in semconv.ATTRIBUTES}
    for attribute in semconv.ATTRIBUTES:
        kind, unit, levels, brief = rows[attribute.name]
        assert (kind, unit.strip("`")) == (attribute.type, attribute.unit)
        assert tuple(levels.split(", ")) == attribute.levels
        assert brief.startswith(attribute.brief)
        assert all(f"`{value}`" in brief for value in attribute.values)


def test_every_metric_has_one_row_with_its_instrument_unit_attributes_and_buckets() -> None:
    page = generate.attributes_page()
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


def test_the_page_says_which_metrics_are_only_names() -> None:
    (sentence,) = (text for text in generate.attributes_page().split("\n\n") if text.startswith("Names only"))
    sent = {metric.name for metric in (*COUNTERS, *GAUGES, *HISTOGRAMS)}
    assert {metric.name for metric in semconv.METRICS if f"`{metric.name}`" in sentence} == {
        metric.name for metric in semconv.METRICS
    } - sent


def table_rows(page: str, section: str, columns: int) -> dict[str, list[str]]:
    """Cells of all table rows with that many columns after the heading `section`, by their first cell."""
    lines = [line for line in (page.partition(section)[2] if section else page).splitlines() if line.startswith("| `")]
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
