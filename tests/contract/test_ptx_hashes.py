"""Hashes of PTX are those of the vectors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from otel_brick.gpu.ptx import CHUNK, PtxRegistry, fnv1a

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "ptx_hashes.json").read_text("utf-8"))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_text_has_the_hash_of_its_vector(vector: dict[str, Any]) -> None:
    assert len(vector["text"].encode()) == vector["size"]
    assert f"{PtxRegistry.hash_ptx(vector['text']):016x}" == vector["hash"]
    assert PtxRegistry.hash_ptx(vector["text"].encode() + b"\0") == PtxRegistry.hash_ptx(vector["text"])


@pytest.mark.parametrize("size", [1, 2, 3, 255, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7])
def test_long_data_has_the_hash_that_the_definition_gives(size: int) -> None:
    data = random.Random(size).randbytes(size)
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & (1 << 64) - 1
    assert fnv1a(data) == state
