"""Every query that `docs/prometheus.md` shows, asked of a Prometheus that real programs feed."""

from __future__ import annotations

import math
import re

import pytest

from tests.stack.conftest import Stack
from tests.stack.processes import wait_for
from tests.stack.stack import ROOT

PAGE = (ROOT / "docs" / "prometheus.md").read_text(encoding="utf-8")
METRIC = re.compile(r"\b(?:(?:brick|traces)_\w+_(?:total|bucket|sum|count|seconds)|(?:brick|collector):\w+:\w+)\b")
ANSWER_S = 200.0


def in_tables() -> list[tuple[str, str]]:
    """Question and query of each row whose second cell is a query."""
    rows = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|$", PAGE, re.MULTILINE)
    return [(question, query) for question, query in rows if METRIC.search(query)]


def elsewhere() -> list[str]:
    """Queries in calls of the API, in paragraphs of their own, and within sentences."""
    prose = re.sub(r"^```[^`]*^```$|^\|.*$", "", PAGE, flags=re.MULTILINE)
    of_the_api = re.findall(r"'query=([^']+)'", prose)
    prose = re.sub(r"^ +curl (?:.+\n)+", "", prose, flags=re.MULTILINE)
    alone = [line.strip() for line in prose.splitlines() if re.match(r" {4,}\w+ *\(", line)]
    inline = [code for code in re.findall(r"`([^`\n]+)`", prose) if re.match(r"\w+\(", code)]
    found = [query for query in (*of_the_api, *alone, *inline) if METRIC.search(query)]
    return [re.sub(r"\{\.\.\.\}", "", query) for query in found]


def test_the_page_is_read_as_it_is_written() -> None:
    """A page that is written otherwise must not leave the tests below without anything to ask."""
    assert len(in_tables()) >= 17
    assert len(elsewhere()) >= 4


@pytest.mark.parametrize("query", [pytest.param(query, id=question) for question, query in in_tables()])
def test_a_question_of_the_page_has_an_answer(query: str, stack: Stack) -> None:
    def answered() -> bool:
        answer = stack.prometheus.query.query(query)
        assert answer, f"no series for {query}"
        return any(math.isfinite(value) for _, value in answer)

    wait_for(f"an answer to {query}", answered, ANSWER_S, interval_s=1)


@pytest.mark.parametrize("query", elsewhere())
def test_other_queries_of_the_page_are_accepted(query: str, stack: Stack) -> None:
    """They are about services or histograms that are not there, so no answer is one."""
    stack.prometheus.query.query(query)
