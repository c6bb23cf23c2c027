"""The registry of PTX sources keeps what it was given, within bounds, and says clearly what it can not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_brick.gpu import ptx
from otel_brick.gpu.ptx import PtxRegistry

SOURCE = ".visible .entry noop()\n{\n\tret;\n}\n"


class Code:
    """Looks like an `ObjectCode`; everything that would load a real one into the driver fails."""

    def __init__(self, code: bytes | str, code_type: str = "ptx") -> None:
        self.code, self.code_type, self.name = code, code_type, "module"

    def _touched(self, *_: object) -> str:
        raise AssertionError("this loads the module")

    __repr__ = __str__ = __eq__ = _touched  # type: ignore[assignment]
    __hash__ = _touched  # type: ignore[assignment]


def test_a_source_is_found_by_its_hash_with_name_and_path() -> None:
    registry = PtxRegistry()
    number = registry.register("noop", SOURCE, "kernels/noop.ptx")
    assert number == PtxRegistry.hash_ptx(SOURCE)
    assert (registry.lookup(number), registry.lookup_name(number)) == (SOURCE, "noop")
    assert registry.lookup_path(number) == Path("kernels/noop.ptx")
    assert number in registry
    assert (registry.hashes(), list(registry), len(registry)) == ([number], [number], 1)


def test_an_unknown_hash_gives_nothing() -> None:
    registry = PtxRegistry()
    assert (registry.lookup(1), registry.lookup_name(1), registry.lookup_path(1)) == (None, None, None)
    assert 1 not in registry
    assert "1" not in registry
    assert (registry.hashes(), len(registry)) == ([], 0)


def test_the_same_source_again_replaces_name_and_path() -> None:
    registry = PtxRegistry()
    number = registry.register("old", SOURCE, "old.ptx")
    assert registry.register("new", SOURCE.encode() + b"\0\0") == number
    assert (registry.lookup_name(number), registry.lookup_path(number), len(registry)) == ("new", None, 1)


def test_text_bytes_and_an_object_code_of_it_are_the_same_source() -> None:
    expected = PtxRegistry.hash_ptx(SOURCE)
    for source in (SOURCE, SOURCE.encode(), bytearray(SOURCE.encode()), Code(SOURCE.encode() + b"\0")):
        assert PtxRegistry.hash_ptx(source) == expected


def test_an_object_code_may_stand_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "noop.ptx").write_text(SOURCE)
    assert PtxRegistry.hash_ptx(Code(str(tmp_path / "noop.ptx"))) == PtxRegistry.hash_ptx(SOURCE)


def test_a_file_is_registered_under_its_own_name_or_another(tmp_path: Path) -> None:
    file = tmp_path / "noop.ptx"
    file.write_text(SOURCE)
    registry = PtxRegistry()
    number = registry.register_file(file)
    assert (registry.lookup(number), registry.lookup_name(number), registry.lookup_path(number)) == (
        SOURCE,
        "noop",
        file,
    )
    assert registry.register_file(str(file), "other") == number
    assert registry.lookup_name(number) == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "noop.ptx: the file is empty"), (b"\0", "noop.ptx: the file is empty"), (b"ab\xff", "noop.ptx: not UTF-8")],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "noop.ptx").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PtxRegistry().register_file(tmp_path / "noop.ptx")


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.ptx"):
        PtxRegistry().register_file(tmp_path / "missing.ptx")


def test_bad_arguments_are_refused_and_nothing_is_registered() -> None:
    registry = PtxRegistry()
    for name, source, error, message in (
        ("", SOURCE, ValueError, "name must not be an empty string"),
        (7, SOURCE, TypeError, "name must be a string, not int"),
        ("noop", "", ValueError, "the source of 'noop' is empty"),
        ("noop", b"\0", ValueError, "the source of 'noop' is empty"),
        ("noop", 7, TypeError, "source must be PTX as text or bytes, or an ObjectCode, not int"),
        ("noop", b"\xff", ValueError, "not UTF-8 text, at byte 0"),
        ("noop", "\ud800", ValueError, "can not be encoded as UTF-8, at character 0"),
        ("noop", Code(b"\x7fELF", "cubin"), ValueError, "the ObjectCode 'module' holds cubin, not ptx"),
    ):
        with pytest.raises(error, match=message):
            registry.register(name, source)  # type: ignore[arg-type]
    assert len(registry) == 0
    with pytest.raises(ValueError, match="max_sources must be positive"):
        PtxRegistry(0)


def test_of_two_sources_with_one_hash_the_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "fnv1a", lambda data: 7)
    registry = PtxRegistry()
    registry.register("first", SOURCE)
    with pytest.raises(ValueError, match="'second' and 'first' differ and both have the hash 0000000000000007"):
        registry.register("second", SOURCE + " ")
    assert (registry.lookup(7), registry.lookup_name(7)) == (SOURCE, "first")


def test_beyond_its_bound_the_one_registered_longest_ago_is_forgotten() -> None:
    registry = PtxRegistry(max_sources=2)
    first, second = registry.register("first", "1"), registry.register("second", "2")
    registry.register("first again", "1")
    third = registry.register("third", "3")
    assert registry.hashes() == [first, third]
    assert registry.lookup(second) is None
