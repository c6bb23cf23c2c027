"""The vocabulary: members index tables, equal nothing but themselves, and have the values that telemetry carries."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import pickle
from enum import Enum
from typing import Any

import pytest

from otel_brick import BrickBottleneck, BrickCategory, BrickId, Phase, SpanLevel, TimingSource, taxonomy
from otel_brick.taxonomy import BRICK_ALIASES

INDEXED: tuple[type[Any], ...] = (BrickId, BrickCategory, Phase, SpanLevel, TimingSource)
EACH_INDEXED = pytest.mark.parametrize("enumeration", INDEXED)
VALUES = {
    BrickCategory: ("norm", "attention", "ffn", "other", "sparse", "fft", "solver"),
    Phase: ("prefill", "decode", "mixed", "train_forward", "train_backward", "idle", "other"),
    SpanLevel: ("step", "layer", "brick", "kernel", "transfer"),
    TimingSource: ("host", "synced_host", "cuda_event"),
}


@EACH_INDEXED
def test_members_index_a_sequence_in_their_order(enumeration: type[Any]) -> None:
    members = list(enumeration)
    letters = [chr(ord("a") + number) for number in range(len(members))]

    assert [letters[member] for member in members] == letters
    assert [member.value for member in members] == list(range(len(members)))


def test_a_brick_or_category_equals_no_number_and_not_the_other_of_its_index() -> None:
    members: list[Any] = [*BrickId, *BrickCategory]

    for first, second in itertools.product(members, members):
        assert (first == second) is (first is second)
    for member in members:
        assert member not in {member.value, float(member.value), bool(member.value), member.name}
        assert {member: "found"}.get(member.value) is None
    assert len(set(members)) == 30


@pytest.mark.parametrize("enumeration", [*INDEXED, BrickBottleneck])
def test_members_stay_themselves_when_copied_and_when_sent_to_another_process(enumeration: type[Enum]) -> None:
    for member in enumeration:
        for again in (copy.copy(member), copy.deepcopy(member), pickle.loads(pickle.dumps(member))):
            assert again is member
            assert {member: 1}[again] == 1


@pytest.mark.parametrize("enumeration", VALUES)
def test_attribute_values_are_those_that_telemetry_carries(enumeration: type[Any]) -> None:
    assert tuple(member.attribute_value for member in enumeration) == VALUES[enumeration]


def test_bottlenecks_have_the_reference_s_values() -> None:
    assert {bottleneck.name: bottleneck.value for bottleneck in BrickBottleneck} == {
        **{"Unknown": "unknown", "Memory": "memory", "Compute": "compute"},
    }


def test_a_phase_is_found_by_its_value_and_by_nothing_else() -> None:
    assert [Phase.of(value) for value in VALUES[Phase]] == [Phase.of(phase) for phase in Phase] == list(Phase)
    assert Phase.of(None) is Phase.Other
    for bad in ("Decode", "DECODE", "", " decode", "train"):
        with pytest.raises(ValueError, match=r"\Aphase must be one of prefill, decode, mixed, ") as refused:
            Phase.of(bad)
        assert str(refused.value).endswith(f"; got {bad!r}")
    for wrong in (1, 1.0, b"decode", BrickId.LayerNorm, [], True):
        with pytest.raises(TypeError, match=r"\Aphase must be a string or Phase, not "):
            Phase.of(wrong)


def test_no_alias_is_the_name_of_a_brick_and_every_alias_leads_to_one() -> None:
    assert BRICK_ALIASES.keys().isdisjoint(BrickId.__members__)
    assert all(isinstance(brick, BrickId) for brick in BRICK_ALIASES.values())


def test_aliases_cannot_be_added() -> None:
    with pytest.raises(TypeError):
        BRICK_ALIASES["Norm"] = BrickId.RmsNorm  # type: ignore[index]


def test_lookup_finds_nothing_under_strings_that_only_look_alike() -> None:
    for name in ("", "rmsnorm", "RMSNorm", "RmsNorm ", "qkv", "SOFTMAX", "lu", "__members__", "lookup", "category"):
        assert BrickId.lookup(name) is None
        assert BrickId.lookup(name, exact=True) is None


def test_there_are_no_further_members_under_other_names() -> None:
    for enumeration in (*INDEXED, BrickBottleneck):
        assert [member.name for member in enumeration] == list(enumeration.__members__)


def test_the_ground_imports_nothing_of_the_package() -> None:
    tree = ast.parse(inspect.getsource(taxonomy))

    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {
        name
        for node in imported
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert all(not (isinstance(node, ast.ImportFrom) and node.level) for node in imported)
    assert {str(module).partition(".")[0] for module in modules} <= {
        *("__future__", "collections", "enum", "types", "typing"),
    }
