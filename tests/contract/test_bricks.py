"""The known bricks: indexes, names, categories and aliases that files, dashboards and engines rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from otel_brick import BrickCategory, BrickId, BrickProfiler

Vectors = Callable[[str], Any]


@pytest.fixture
def table(vectors: Vectors) -> list[dict[str, Any]]:
    return vectors("bricks.json")["bricks"]


def test_bricks_have_the_reference_s_indexes_names_and_categories(table: list[dict[str, Any]]) -> None:
    assert [(brick.value, brick.name, brick.category.label) for brick in BrickId] == [
        (row["index"], row["name"], row["category"]) for row in table
    ]
    assert len(table) == 23


def test_categories_have_the_reference_s_indexes_members_and_names(vectors: Vectors) -> None:
    rows = vectors("bricks.json")["categories"]

    assert [(category.value, category.name, category.label) for category in BrickCategory] == [
        (row["index"], row["member"], row["name"]) for row in rows
    ]
    assert len(rows) == 7


def test_a_brick_is_found_by_its_name_and_by_exactly_its_aliases(table: list[dict[str, Any]]) -> None:
    words = {word for row in table for word in (row["name"], *row["aliases"])}

    found = {word: BrickId.lookup(word) for word in words}

    assert found == {word: BrickId[row["name"]] for row in table for word in (row["name"], *row["aliases"])}
    assert len(words) == sum(1 + len(row["aliases"]) for row in table) == 45


def test_with_exact_no_alias_is_found(table: list[dict[str, Any]]) -> None:
    assert {alias: BrickId.lookup(alias, exact=True) for row in table for alias in row["aliases"]} == {
        alias: None for row in table for alias in row["aliases"]
    }
    assert [BrickId.lookup(row["name"], exact=True) for row in table] == list(BrickId)


def test_any_other_string_names_a_dynamic_brick(vectors: Vectors, profiler: BrickProfiler) -> None:
    names = vectors("bricks.json")["dynamic"]

    for name in names:
        profiler.record_elapsed(name, 1_000, 1)

    assert profiler.brick_names() == names
    assert {profiler.stats(name).category for name in names} == {BrickCategory.Other}
    assert all(profiler.brick_stats(brick).count == 0 for brick in BrickId)


def test_samples_under_an_alias_count_for_the_brick_and_are_read_under_any_of_its_names(
    table: list[dict[str, Any]], profiler: BrickProfiler
) -> None:
    for row in table:
        for word in (row["name"], *row["aliases"]):
            profiler.record_elapsed(word, 1_000 + row["index"], 1)

    assert profiler.brick_names() == [row["name"] for row in table]
    for row in table:
        words = (row["name"], *row["aliases"])
        for word in words:
            stats = profiler.stats(word)
            assert (stats.name, stats.count, stats.total_ns) == (
                row["name"],
                len(words),
                len(words) * (1_000 + row["index"]),
            )


def test_with_exact_an_alias_names_a_dynamic_brick(profiler: BrickProfiler) -> None:
    with profiler.brick("Softmax", exact=True):
        pass
    with profiler.brick("Softmax"):
        pass
    profiler.stop(profiler.start("Softmax", exact=True))

    assert [(stats.name, stats.count, stats.category) for stats in profiler.all_brick_stats()] == [
        ("AttentionSoftmax", 1, BrickCategory.Attention),
        ("Softmax", 2, BrickCategory.Other),
    ]
    assert profiler.stats("Softmax").name == "AttentionSoftmax"
    assert profiler.stats("Softmax", exact=True).count == 2


def test_category_stats_has_one_entry_for_each_category_in_order_and_each_brick_counts_in_its_own(
    table: list[dict[str, Any]], vectors: Vectors, profiler: BrickProfiler
) -> None:
    for row in table:
        profiler.record_elapsed(row["name"], 1 << row["index"], 1)
    profiler.record_elapsed("Residual1", 1 << 23, 1)
    profiler.record_elapsed("FusedGateUp", 1 << 24, 1, category=BrickCategory.Ffn)

    expected = {row["name"]: 0 for row in vectors("bricks.json")["categories"]}
    for row in table:
        expected[row["category"]] += 1 << row["index"]
    expected["Other"] += 1 << 23
    expected["FFN"] += 1 << 24
    stats = profiler.category_stats()
    assert [(category.name, category.total_ns) for category in stats] == list(expected.items())
    assert stats[BrickCategory.Solver].name == "Solver"
    assert profiler.total_ns() == (1 << 25) - 1
