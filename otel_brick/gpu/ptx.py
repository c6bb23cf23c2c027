"""PTX by its hash: `PtxRegistry` finds the source of a kernel from the `brick.cuda.ptx.hash` of its span.

The hash is FNV-1a with 64 bits over the UTF-8 bytes of the text, trailing NULs left out: NVRTC gives a text with one,
and other tools the same text without.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

OFFSET_BASIS: Final = 0xCBF29CE484222325
PRIME: Final = 0x100000001B3
MASK: Final = (1 << 64) - 1
CHUNK: Final = 1 << 14
"""Bytes hashed at a time."""
MAX_SOURCES: Final = 4_096


def fnv1a(data: bytes) -> int:
    """FNV-1a with 64 bits.

    A step xors a byte into the lowest eight bits and multiplies. Once it is known what each xor adds, the rest is one
    sum of products; and what it adds follows from the lowest eight bits alone, which do not depend on the others.
    """
    state = OFFSET_BASIS
    for begin in range(0, len(data), CHUNK):
        chunk = np.frombuffer(data, np.uint8, min(CHUNK, len(data) - begin), begin)
        before, mixed = _lowest_bytes(state & 0xFF, chunk)
        added = mixed.astype(np.int64) - before
        powers = _powers()[CHUNK - len(chunk) :]
        total = int(np.sum(added.astype(np.uint64) * powers, dtype=np.uint64))
        state = (state * pow(PRIME, len(chunk), 1 << 64) + total) & MASK
    return state


def _lowest_bytes(first: int, data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The state's lowest byte before each xor, and after it.

    Bit k of a product with the odd prime is bit k of the factor, flipped where the lower bits say so. So each bit is
    a running xor, once the bits below it are known.
    """
    mixed = np.zeros(len(data), np.uint8)
    before = np.zeros(len(data), np.uint8)
    for bit in range(8):
        flips = (mixed * np.uint8(PRIME & 0xFF)) >> bit & 1
        bits = data >> bit & 1
        change = np.empty(len(data), np.uint8)
        change[0] = first >> bit & 1
        change[1:] = bits[:-1] ^ flips[:-1]
        own = np.bitwise_xor.accumulate(change)
        before |= own << bit
        mixed |= (own ^ bits) << bit
    return before, mixed


@lru_cache(maxsize=1)
def _powers() -> NDArray[np.uint64]:
    """The prime's powers modulo 2**64, from that of `CHUNK` down to the first."""
    accumulate: Any = np.multiply.accumulate
    powers: NDArray[np.uint64] = accumulate(np.full(CHUNK, PRIME, np.uint64))
    return np.ascontiguousarray(powers[::-1])


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    text: str
    path: Path | None


class PtxRegistry:
    """Sources by hash. Any thread may use it; it belongs to no profiler.

    Args:
        max_sources: how many are kept; beyond it the one registered longest ago is forgotten.
    """

    def __init__(self, max_sources: int = MAX_SOURCES) -> None:
        if max_sources < 1:
            raise ValueError(f"max_sources must be positive; got {max_sources}")
        self._max = max_sources
        self._lock = threading.RLock()
        self._sources: dict[int, _Source] = {}

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        self._lock = threading.RLock()

    @staticmethod
    def hash_ptx(source: Any) -> int:
        """The hash of a source: text, its bytes, or an `ObjectCode` that was made of PTX.

        Raises:
            TypeError, ValueError, OSError: the source can not be read; the message says where.
        """
        return fnv1a(_encoded(_text(source)))

    def register(self, name: str, source: Any, path: str | os.PathLike[str] | None = None) -> int:
        """Keep a source under its hash; the same source again replaces name and path.

        Args:
            name: of the kernel or module.
            source: text, its bytes, or an `ObjectCode` that was made of PTX.
            path: the file that it comes from, for whoever looks it up; it is not read.

        Returns:
            The hash.

        Raises:
            ValueError: the name or source is empty, the source is no text, or another source has the same hash; the one
                registered first stays then.
            TypeError: an argument is not what it should be.
            OSError: the file behind an `ObjectCode` can not be read.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {type(name).__name__} ({name!r})")
        if not name:
            raise ValueError("name must not be an empty string")
        text = _text(source)
        if not text:
            raise ValueError(f"the source of {name!r} is empty")
        number = fnv1a(_encoded(text))
        with self._lock:
            known = self._sources.pop(number, None)
            if known is not None and known.text != text:
                self._sources[number] = known
                raise ValueError(f"{name!r} and {known.name!r} differ and both have the hash {number:016x}")
            self._sources[number] = _Source(name, text, None if path is None else Path(path))
            while len(self._sources) > self._max:
                del self._sources[next(iter(self._sources))]
        return number

    def register_file(self, path: str | os.PathLike[str], name: str | None = None) -> int:
        """Read a PTX file and register it; its name is the file's unless another is given.

        Raises:
            OSError: the file can not be read.
            ValueError: it is empty or no text.
        """
        file = Path(path)
        return self.register(name or file.stem, _read(file), file)

    def lookup(self, ptx_hash: int) -> str | None:
        """The source with this hash."""
        source = self._sources.get(ptx_hash)
        return None if source is None else source.text

    def lookup_name(self, ptx_hash: int) -> str | None:
        """The name that the source was registered under last."""
        source = self._sources.get(ptx_hash)
        return None if source is None else source.name

    def lookup_path(self, ptx_hash: int) -> Path | None:
        """The file that the source was said to come from."""
        source = self._sources.get(ptx_hash)
        return None if source is None else source.path

    def hashes(self) -> list[int]:
        """All hashes, the one registered longest ago first."""
        with self._lock:
            return list(self._sources)

    def __contains__(self, ptx_hash: object) -> bool:
        return ptx_hash in self._sources

    def __iter__(self) -> Iterator[int]:
        return iter(self.hashes())

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"<PtxRegistry of {len(self)} sources>"


def _text(source: Any) -> str:
    if isinstance(source, str):
        return source.rstrip("\0")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decoded(bytes(cast("bytes", source)), "the source")
    kind = getattr(source, "code_type", None)
    if kind is None:
        raise TypeError(f"source must be PTX as text or bytes, or an ObjectCode, not {type(source).__name__}")
    # Nothing else of an ObjectCode may be touched: its repr, hash and equality load it into the driver.
    if kind != "ptx":
        raise ValueError(f"the ObjectCode {source.name!r} holds {kind}, not ptx")
    code: Any = source.code
    return _read(Path(code)) if isinstance(code, str) else _decoded(bytes(code), source.name)


def _read(file: Path) -> str:
    text = _decoded(file.read_bytes(), str(file))
    if not text:
        raise ValueError(f"{file}: the file is empty")
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.rstrip(b"\0").decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text, at byte {error.start}") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the source can not be encoded as UTF-8, at character {error.start}") from None
