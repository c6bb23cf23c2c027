"""Writes what the code knows into the pages beside this file: `attributes.md`, and a table of `configuration.md`.

Run plainly it writes the pages; with `--check` it writes nothing, and its exit status is 1 if a page is not what it
would have written.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from otel_brick import semconv
from otel_brick.config import SETTINGS, Setting
from otel_brick.export.metric_series import COUNTERS, GAUGES, HISTOGRAMS
from otel_brick.semconv import Attribute, Metric

FOLDER = Path(__file__).parent
ATTRIBUTES_PAGE = "attributes.md"
SETTINGS_PAGE = "configuration.md"
SETTINGS_BEGIN = "<!-- Written by docs/generate.py from otel_brick/config.py: change that file, then `make docs`. -->"
SETTINGS_END = "<!-- End of what docs/generate.py writes. -->"

_UNIT_WORDS = {
    "s": "seconds",
    "ms": "milliseconds",
    "By": "bytes",
    "J": "joules",
    "W": "watts",
    "Cel": "celsius",
    "Hz": "hertz",
    "%": "percent",
    "By/s": "bytes_per_second",
}

_HEAD = """\
<!-- Written by docs/generate.py from otel_brick/semconv.py: change that file, then run `make docs`. -->

# Attributes and metrics

Names that otel_brick sends, all under the instrumentation scope `{scope}`. The column *On* tells where an
attribute may appear: on a span of the level *step*, *layer*, *brick*, *kernel* or *transfer*; on an ordinary
*span* that somebody else makes; on the data points of a *metric*; on the *resource*. An attribute whose value
is not known is left out.
"""

_METRICS_HEAD = """\
Counters and histograms are cumulative. The Prometheus name is the one that the collector's exporters and the
OTLP receiver of Prometheus make by default; a histogram has `_bucket`, `_sum` and `_count` after it. A label
is the attribute's name with underscores for dots.
"""


def prometheus_name(metric: Metric) -> str:
    """Name of the metric in Prometheus, by the rules of the OpenTelemetry to Prometheus translation.

    The unit's word follows the name unless it is part of it already, a gauge without a dimension is marked
    as a ratio, and `_total` ends every counter.
    """
    tokens = [token for token in re.split(r"[^A-Za-z0-9:]+", metric.name) if token]
    unit = re.sub(r"\{[^}]*\}", "", metric.unit)
    word = _UNIT_WORDS.get(unit, "" if unit == "1" else unit)
    if word and word not in tokens:
        tokens.append(word)
    marker = {"counter": "total", "gauge": "ratio" if unit == "1" else ""}.get(metric.instrument, "")
    if marker:
        tokens = [token for token in tokens if token != marker] + [marker]
    name = "_".join(tokens)
    return f"_{name}" if name[0].isdigit() else name


def attributes_page() -> str:
    """All of `attributes.md`."""
    unsent = [metric.name for metric in semconv.METRICS if metric not in (*COUNTERS, *GAUGES, *HISTOGRAMS)]
    blocks = [
        _HEAD.format(scope=semconv.SCOPE_NAME),
        "## Attributes\n",
        *_attribute_section("Step, layer, brick and transfer", _own),
        *_attribute_section("CUDA", _cuda),
        *_attribute_section("From the OpenTelemetry conventions", _standard),
        "## Metrics\n",
        _METRICS_HEAD,
        textwrap.fill(f"Names only, which this version does not send: {_codes(unsent)}.", 120) + "\n",
        _metric_table(semconv.METRICS),
        "### Buckets\n",
        "Upper boundaries of the explicit buckets, in seconds.\n",
        _bucket_table(semconv.METRICS),
    ]
    return "\n".join(blocks)


def settings_table() -> str:
    """The settings that are arguments and variables alike."""
    return _table(("Argument", "Variable", "Values", "Default", "Meaning"), map(_setting_row, SETTINGS))


def configuration_page(page: str) -> str:
    """`configuration.md` with its table of settings as it should be.

    Raises:
        ValueError: the page does not have the comments that the table stands between.
    """
    before, begin, rest = page.partition(SETTINGS_BEGIN)
    _, end, after = rest.partition(SETTINGS_END)
    if not begin or not end:
        raise ValueError(f"{SETTINGS_PAGE} must have the line {SETTINGS_END if begin else SETTINGS_BEGIN!r}")
    return f"{before}{begin}\n\n{settings_table()}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write what the code knows into the pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pages are")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    settings = folder / SETTINGS_PAGE
    try:
        pages = {
            folder / ATTRIBUTES_PAGE: attributes_page(),
            settings: configuration_page(settings.read_text(encoding="utf-8")),
        }
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        for page, text in pages.items():
            page.write_text(text, encoding="utf-8")
        return 0
    stale = [page for page, text in pages.items() if not page.is_file() or page.read_text(encoding="utf-8") != text]
    for page in stale:
        print(f"{page} is not what the code says; run: make docs", file=sys.stderr)
    return 1 if stale else 0


def _own(attribute: Attribute) -> bool:
    return attribute.name.startswith("brick.") and not _cuda(attribute)


def _cuda(attribute: Attribute) -> bool:
    return attribute.name.startswith("brick.cuda.")


def _standard(attribute: Attribute) -> bool:
    return not attribute.name.startswith("brick.")


def _attribute_section(title: str, belongs: Callable[[Attribute], bool]) -> list[str]:
    rows = (_attribute_row(attribute) for attribute in semconv.ATTRIBUTES if belongs(attribute))
    return [f"### {title}\n", _table(("Attribute", "Type", "Unit", "On", "Meaning"), rows)]


def _attribute_row(attribute: Attribute) -> tuple[str, ...]:
    values = f" One of {_codes(attribute.values)}." if attribute.values else ""
    return (
        _code(attribute.name),
        attribute.type,
        _code(attribute.unit),
        ", ".join(attribute.levels),
        attribute.brief + values,
    )


def _setting_row(setting: Setting) -> tuple[str, ...]:
    values = setting.check(None) or ""
    choices = values.removeprefix("one of ").split(", ")
    return (
        _code(setting.name),
        _code(setting.variable),
        _codes(choices) if values.startswith("one of ") else values,
        _code(str(setting.default).lower()),
        setting.brief,
    )


def _metric_table(metrics: Iterable[Metric]) -> str:
    rows = (
        (
            _code(metric.name),
            metric.instrument,
            _code(metric.unit),
            _labels(metric),
            _code(prometheus_name(metric)),
            metric.description,
        )
        for metric in metrics
    )
    return _table(("Metric", "Instrument", "Unit", "Attributes", "Prometheus name", "Meaning"), rows)


def _labels(metric: Metric) -> str:
    labels = [_code(name) for name in metric.attributes]
    labels += [f"{_code(name)} (opt-in)" for name in metric.opt_in_attributes]
    return ", ".join(labels)


def _bucket_table(metrics: Iterable[Metric]) -> str:
    users: dict[tuple[float, ...], list[str]] = {}
    for metric in metrics:
        if metric.buckets:
            users.setdefault(metric.buckets, []).append(metric.name)
    rows = ((_codes(names), ", ".join(f"{bound:g}" for bound in bounds)) for bounds, names in users.items())
    return _table(("Metrics", "Boundaries"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(_code(text) for text in texts)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    sys.exit(main())
