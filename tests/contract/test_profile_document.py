"""The profile document: one JSON text for those who read the reference's keys and for `pmat brick-score`."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from otel_brick import BrickBottleneck, BrickCategory, BrickId, BrickProfiler
from otel_brick.testing import ManualClock

Vectors = Callable[[str], Any]

REFERENCE_KEYS = [
    *("name", "count", "total_ns", "avg_us", "min_us", "max_us"),
    *("throughput", "pct", "total_bytes", "compression_ratio", "throughput_gbps", "bottleneck"),
]
SCORE_KEYS = ["min_ns", "max_ns", "total_elements"]
HARD_NAMES = (
    'quote " quote',
    "back\\slash",
    "line\nbreak\r\n",
    "tab\t and bell\x07",
    "nul\x00",
    "Größe 层 \N{FIRE} e\u0301",
    "line separator \u2028 paragraph \u2029",
    "</script>",
    "{}",
    " ",
    "n" * 5_000,
)


def document(profiler: BrickProfiler) -> dict[str, Any]:
    """The document with numbers as exact decimals."""
    return json.loads(profiler.to_json(), parse_float=Decimal)


def without_time(text: str) -> dict[str, Any]:
    content = json.loads(text)
    del content["generated_at"]
    return content


def record(profiler: BrickProfiler, samples: list[dict[str, Any]], name: str = "") -> None:
    for sample in samples:
        brick = sample.get("name", name)
        if "input_bytes" in sample:
            profiler.record_elapsed_with_bytes(
                brick,
                sample["elapsed_ns"],
                sample["elements"],
                sample["input_bytes"],
                sample["output_bytes"],
            )
        else:
            profiler.record_elapsed(brick, sample["elapsed_ns"], sample["elements"])


def empty(profiler: BrickProfiler, time: ManualClock) -> None:
    pass


def with_steps(profiler: BrickProfiler, time: ManualClock) -> None:
    for phase, tokens in (("prefill", 12), ("decode", 1), ("decode", 1)):
        with profiler.step(phase=phase, tokens=tokens):
            for index in range(2):
                with profiler.layer(index), profiler.brick(BrickId.AttentionScore, elements=64):
                    time.advance(700)
                    with profiler.brick(BrickId.AttentionSoftmax, bytes_read=256, bytes_written=128):
                        time.advance(300)
            time.advance(10)
    profiler.set_l2_cache_hit_rate(0.25)
    profiler.set_zero_copy(True)
    profiler.set_brick_bottleneck(BrickId.AttentionScore, BrickBottleneck.Memory)


def with_hard_names(profiler: BrickProfiler, time: ManualClock) -> None:
    for name in HARD_NAMES:
        profiler.record_elapsed(name, 10, 1)


def with_huge_counts(profiler: BrickProfiler, time: ManualClock) -> None:
    most = (1 << 63) - 1
    for _ in range(3):
        profiler.record_elapsed("Huge", (1 << 53) - 1, most, bytes_read=most, bytes_written=most)
    profiler.record_elapsed_with_bytes("Packed", (1 << 53) - 1, most, most, most)
    profiler.record_elapsed("Instant", 0, most, bytes_read=most)


def with_failures_and_losses(profiler: BrickProfiler, time: ManualClock) -> None:
    with pytest.raises(ZeroDivisionError), profiler.step(), profiler.brick("Bad"):
        raise ZeroDivisionError
    timer = profiler.start("Twice")
    profiler.stop(timer)
    profiler.stop(timer)


def with_nothing_but_a_step(profiler: BrickProfiler, time: ManualClock) -> None:
    with profiler.step():
        pass


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        empty,
        with_steps,
        with_hard_names,
        with_huge_counts,
        with_failures_and_losses,
        with_nothing_but_a_step,
    ],
)
Shape = Callable[[BrickProfiler, ManualClock], None]


def test_the_worked_example_has_every_figure_of_the_reference_to_the_digit(
    vectors: Vectors, profiler: BrickProfiler
) -> None:
    example = vectors("worked_example.json")

    record(profiler, example["samples"])

    content = document(profiler)
    bricks = [{key: brick[key] for key in (*REFERENCE_KEYS, *SCORE_KEYS)} for brick in content["bricks"]]
    assert {key: content[key] for key in example["document"]} | {"bricks": bricks} == example["document"]


def test_keys_stand_in_the_reference_s_order_followed_by_those_of_brick_score(
    vectors: Vectors, profiler: BrickProfiler
) -> None:
    record(profiler, vectors("worked_example.json")["samples"])

    content = document(profiler)

    assert list(content)[:4] == ["total_tokens", "total_ns", "total_throughput", "bricks"]
    assert [brick["name"] for brick in content["bricks"]] == ["Residual1", "RmsNorm"]
    for brick in content["bricks"]:
        assert list(brick)[:15] == REFERENCE_KEYS + SCORE_KEYS


@pytest.mark.parametrize("number", range(9))
def test_every_figure_follows_the_reference_s_formula_and_rounding(
    number: int, vectors: Vectors, profiler: BrickProfiler
) -> None:
    figure = vectors("figures.json")["figures"][number]

    record(profiler, figure["samples"], "RmsNorm")

    (brick,) = document(profiler)["bricks"]
    assert {key: brick[key] for key in figure["brick"]} == figure["brick"], figure["why"]


def test_bricks_are_ordered_by_falling_time_and_then_by_name(profiler: BrickProfiler) -> None:
    for name in ("zeta", "alpha", "RmsNorm", "LayerNorm", "Zeta"):
        profiler.record_elapsed(name, 500, 1)
    profiler.record_elapsed("slow", 501, 1)
    profiler.record_elapsed("quick", 1, 1)

    assert [brick["name"] for brick in document(profiler)["bricks"]] == [
        *("slow", "LayerNorm", "RmsNorm", "Zeta", "alpha", "zeta", "quick"),
    ]


def test_known_bricks_without_samples_are_left_out(profiler: BrickProfiler) -> None:
    profiler.define(BrickId.LmHead, elements=1)

    assert document(profiler)["bricks"] == []


def test_shares_of_nested_bricks_are_exclusive_and_add_up_while_their_times_are_inclusive(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    with profiler.step(), profiler.brick("Outer"):
        time.advance(600)
        with profiler.brick("Inner"):
            time.advance(400)

    content = document(profiler)

    assert content["total_ns"] == 1000
    assert [(brick["name"], brick["total_ns"], brick["pct"]) for brick in content["bricks"]] == [
        ("Outer", 1000, Decimal("60.0")),
        ("Inner", 400, Decimal("40.0")),
    ]


def test_a_stated_bottleneck_appears_in_the_document(profiler: BrickProfiler) -> None:
    for name in ("A", "B", "C"):
        profiler.record_elapsed(name, 1_000, 1)

    profiler.set_brick_bottleneck("A", BrickBottleneck.Memory)
    profiler.set_brick_bottleneck("B", BrickBottleneck.Compute)

    assert [(brick["name"], brick["bottleneck"]) for brick in document(profiler)["bricks"]] == [
        ("A", "memory"),
        ("B", "compute"),
        ("C", "unknown"),
    ]


def test_tokens_given_to_steps_replace_the_sum_of_elements_and_the_document_says_which_it_is(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    profiler.record_elapsed("B", 500, 77)
    assert [document(profiler)[key] for key in ("total_tokens", "tokens_source", "total_throughput")] == [
        77,
        "elements",
        Decimal(154_000_000),
    ]

    with profiler.step(tokens=4), profiler.brick("B", elements=100):
        time.advance(1_500)

    content = document(profiler)
    assert [content[key] for key in ("total_tokens", "tokens_source", "total_throughput")] == [
        4,
        "tokens",
        Decimal(2_000_000),
    ]
    assert content["tokens_per_sec"] == Decimal("2666666.7")


def test_a_category_given_to_a_dynamic_brick_appears_at_the_brick_and_in_the_categories(
    profiler: BrickProfiler,
) -> None:
    profiler.record_elapsed("FusedGateUp", 750, 1, category=BrickCategory.Ffn)
    profiler.record_elapsed("RmsNorm", 250, 1)

    content = document(profiler)

    assert [(brick["name"], brick["category"]) for brick in content["bricks"]] == [
        ("FusedGateUp", "ffn"),
        ("RmsNorm", "norm"),
    ]
    assert content["categories"] == [
        {"name": "norm", "count": 1, "total_ns": 250, "pct": Decimal("25.0")},
        {"name": "ffn", "count": 1, "total_ns": 750, "pct": Decimal("75.0")},
    ]


@SHAPES
def test_a_document_is_one_line_of_compact_json_with_unique_keys(
    shape: Shape, profiler: BrickProfiler, time: ManualClock
) -> None:
    shape(profiler, time)

    text = profiler.to_json()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    content = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    assert "\n" not in text
    assert "\r" not in text
    assert json.dumps(content, ensure_ascii=False, separators=(",", ":")) == text


@SHAPES
def test_pmat_brick_score_can_read_a_document(
    shape: Shape, vectors: Vectors, profiler: BrickProfiler, time: ManualClock
) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the JSON schema is checked with jsonschema")
    validator = jsonschema.Draft202012Validator(vectors("brick_score.schema.json"))
    shape(profiler, time)

    content = document(profiler)

    assert [error.message for error in validator.iter_errors(content)] == []


def test_the_schema_of_brick_score_refuses_what_it_could_not_read(vectors: Vectors, profiler: BrickProfiler) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the JSON schema is checked with jsonschema")
    validator = jsonschema.Draft202012Validator(vectors("brick_score.schema.json"))
    profiler.record_elapsed("B", 1_000, 1)
    content = document(profiler)
    assert validator.is_valid(content)

    for key in ("name", "count", "total_ns", *SCORE_KEYS):
        (brick,) = content["bricks"]
        assert not validator.is_valid(content | {"bricks": [{k: v for k, v in brick.items() if k != key}]})
        assert not validator.is_valid(content | {"bricks": [brick | {key: None}]})
        if key != "name":
            assert not validator.is_valid(content | {"bricks": [brick | {key: -1}]})
            assert not validator.is_valid(content | {"bricks": [brick | {key: Decimal("1.0")}]})
    assert not validator.is_valid({key: value for key, value in content.items() if key != "bricks"})


def test_names_come_back_from_the_document_as_they_were_given(profiler: BrickProfiler) -> None:
    for name in HARD_NAMES:
        profiler.record_elapsed(name, 10, 1)

    assert {brick["name"] for brick in document(profiler)["bricks"]} == set(HARD_NAMES)


def test_sums_beyond_64_bits_are_exact_in_the_document(profiler: BrickProfiler) -> None:
    most = (1 << 63) - 1
    for _ in range(5):
        profiler.record_elapsed("B", (1 << 53) - 1, most, bytes_read=most, bytes_written=most)

    content = document(profiler)

    (brick,) = content["bricks"]
    assert [brick[key] for key in ("total_ns", "total_elements", "total_bytes", "min_ns", "max_ns")] == [
        *(5 * ((1 << 53) - 1), 5 * most, 10 * most),
        *((1 << 53) - 1, (1 << 53) - 1),
    ]
    assert (content["total_tokens"], content["total_ns"]) == (5 * most, 5 * ((1 << 53) - 1))


@SHAPES
def test_the_file_holds_the_document_and_a_line_end_in_utf_8(
    shape: Shape, profiler: BrickProfiler, time: ManualClock, tmp_path: Path
) -> None:
    shape(profiler, time)

    profiler.write_json(tmp_path / "brick_profile.json")

    text = (tmp_path / "brick_profile.json").read_bytes().decode("utf-8")
    assert text.endswith("}\n")
    assert without_time(text) == without_time(profiler.to_json())


def test_a_name_that_utf_8_cannot_hold_does_not_spoil_the_file(profiler: BrickProfiler, tmp_path: Path) -> None:
    profiler.record_elapsed("lone surrogate \udcff", 10, 1)

    profiler.write_json(tmp_path / "brick_profile.json")

    content = json.loads((tmp_path / "brick_profile.json").read_text(encoding="utf-8"))
    assert [brick["count"] for brick in content["bricks"]] == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["brick_profile.json"]


def test_percentages_take_any_total_that_is_a_number_and_not_negative(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("RmsNorm", 250, 1)
    norm = profiler.category_stats()[BrickCategory.Norm]

    assert [norm.percentage(total) for total in (1_000, 250.0, 0, 0.0)] == [25.0, 100.0, 0.0, 0.0]
    for total in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"\btotal_ns\b"):
            norm.percentage(total)


def test_category_figures_follow_the_reference_s_formulas(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("RmsNorm", 1_500, 4)
    profiler.record_elapsed("LayerNorm", 2_500, 6)

    norm, empty_category = (profiler.category_stats()[i] for i in (BrickCategory.Norm, BrickCategory.Fft))

    assert (norm.count, norm.total_ns, norm.total_elements) == (2, 4_000, 10)
    assert (norm.avg_us, norm.throughput) == (2.0, 2_500_000.0)
    assert (empty_category.count, empty_category.avg_us, empty_category.throughput) == (0, None, None)
    assert empty_category.percentage(4_000) == 0.0


def test_brick_figures_are_none_in_python_where_the_document_has_the_reference_s_zero_values(
    profiler: BrickProfiler,
) -> None:
    profiler.record_elapsed("B", 0)

    stats = profiler.stats("B")
    (brick,) = document(profiler)["bricks"]

    assert (stats.throughput, stats.throughput_gbps, stats.compression_ratio) == (None, None, None)
    assert [brick[key] for key in ("throughput", "throughput_gbps", "compression_ratio")] == [0, 0, 1]
