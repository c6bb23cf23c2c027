"""What a row is: descriptors, the bricks that statistics are kept for, and sites.

A descriptor is the interned, immutable "what" of a row. A site is a descriptor together with the counts that never
change there; its small integer is all that a scope writes at its entry. Everything here is bounded: names beyond the
bound share one entry called `__overflow__` and are counted.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from ..taxonomy import BrickCategory, BrickId, SpanLevel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .losses import Losses

MAX_COUNT: Final = (1 << 63) - 1
MAX_DESCRIPTORS: Final = 65_536
MAX_SITES: Final = 65_536
MAX_DYNAMIC_BRICKS: Final = 1_024
MAX_ERROR_TEXT: Final = 256
OVERFLOW_NAME: Final = "__overflow__"
NO_COUNT: Final = -1


def count_argument(name: str, value: object) -> int:
    """Turn an integer or integer scalar into a plain int of at most 63 bits.

    Raises:
        TypeError: for floats, strings, None and everything else that is not an integer.
        ValueError: for negative numbers and those above 2**63 - 1.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__} ({value!r})") from None
    if not 0 <= number <= MAX_COUNT:
        raise ValueError(f"{name} must be from 0 to 2**63 - 1; got {_shown(number)}")
    return number


def _shown(number: int) -> str:
    """A number as text; one too long to read by its length, which Python can tell without printing it."""
    return str(number) if number.bit_length() <= 128 else f"a number of {number.bit_length()} bits"


def printable(name: str) -> str:
    """A name as it can be sent: halves of surrogate pairs, which UTF-8 does not have, become their escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


class KernelIdentity:
    """What the driver knows of one kernel; asked once, after the first launch and before its row leaves.

    Two identities are never equal: what they are is known only later, and a descriptor must not change its hash.

    Attributes:
        name: demangled and cut, "" while not known.
        ptx_hash: of the module's PTX or cubin.
        registers: per thread.
        static_shared_mem: bytes that the kernel declares itself.
    """

    __slots__ = ("__weakref__", "name", "ptx_hash", "registers", "static_shared_mem")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.ptx_hash: int | None = None
        self.registers: int | None = None
        self.static_shared_mem: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch signature of a kernel, as given at the launch.

    Attributes:
        grid: blocks.
        block: threads of a block.
        shared_mem: dynamic shared memory in bytes.
        cluster: blocks of a cluster; None without clusters.
        stream: the ordinal that we gave the stream.
        device: CUDA's ordinal of the device.
        kernel: what the driver knows of the kernel; None for launches given by hand.
        replay: whether a graph was launched, which stands for all kernels in it.
    """

    ptx_hash: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_mem: int | None = None
    cluster: tuple[int, int, int] | None = None
    stream: int | None = None
    device: int | None = None
    kernel: KernelIdentity | None = None
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The immutable identity of rows.

    Attributes:
        name: a brick's or kernel's name, a layer's type ("" when it has none), or a transfer's direction.
        brick: the index of the brick's statistics, -1 for everything that is not a brick.
    """

    level: SpanLevel
    name: str
    brick: int = -1
    category: BrickCategory | None = None
    launch: Launch | None = None


class Column:
    """A growing int64 array that readers index while a writer, under the table's lock, appends."""

    __slots__ = ("data", "length")

    def __init__(self) -> None:
        self.data: NDArray[np.int64] = np.empty(64, np.int64)
        self.length = 0

    def append(self, value: int) -> None:
        if self.length == len(self.data):
            # A new array and no resize in place: a reader may hold the old one.
            self.data = np.concatenate((self.data, np.empty_like(self.data)))
        self.data[self.length] = value
        self.length += 1


class Registry:
    """Interns bricks, descriptors and sites of one profiler; any thread may call it."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        # Reentrant: counting a loss logs, and the handler of a log record may be instrumented with us.
        self._lock = threading.RLock()
        self.brick_names: list[str] = [brick.name for brick in BrickId]
        self.brick_categories: list[BrickCategory] = [brick.category for brick in BrickId]
        self._brick_index: dict[str, int] = {}
        self.descriptors: list[Descriptor] = []
        self._descriptor_index: dict[Descriptor, int] = {}
        self._site_index: dict[tuple[int, int, int, int, int], int] = {}
        self._counted_sites = 0
        self.descriptor_level = Column()
        self.descriptor_brick = Column()
        self.site_descriptor = Column()
        self.site_elements = Column()
        self.site_bytes_read = Column()
        self.site_bytes_written = Column()
        self.site_layer = Column()

    def resolve_brick(self, brick: object, *, exact: bool = False, argument: str = "brick") -> BrickId | str:
        """Turn a `BrickId`, a name or an alias into the known brick or, for other strings, the name itself."""
        if isinstance(brick, BrickId):
            return brick
        if not isinstance(brick, str):
            raise TypeError(f"{argument} must be a BrickId or a string, not {type(brick).__name__} ({brick!r})")
        if not brick:
            raise ValueError(f"{argument} must not be an empty string")
        known = BrickId.lookup(brick, exact=exact)
        return printable(brick) if known is None else known

    def brick_index(self, brick: BrickId | str) -> int | None:
        """The statistics index of a known or already seen dynamic brick, else None."""
        return brick.value if isinstance(brick, BrickId) else self._brick_index.get(brick)

    def brick(
        self, brick: object, category: object = None, *, exact: bool = False, argument: str = "brick"
    ) -> Descriptor:
        """The descriptor of a brick, made on first use.

        Raises:
            TypeError, ValueError: not a brick or category, or a category that contradicts the brick's own.
        """
        if category is not None and not isinstance(category, BrickCategory):
            raise TypeError(f"category must be a BrickCategory, not {type(category).__name__} ({category!r})")
        resolved = self.resolve_brick(brick, exact=exact, argument=argument)
        with self._lock:
            index = resolved.value if isinstance(resolved, BrickId) else self._dynamic(resolved, category)
            name, own = self.brick_names[index], self.brick_categories[index]
        if category is not None and category is not own and name != OVERFLOW_NAME:
            raise ValueError(f"brick {name!r} has category {own.name}; got category {category.name}")
        return Descriptor(SpanLevel.Brick, name, index, own)

    def _dynamic(self, name: str, category: BrickCategory | None) -> int:
        index = self._brick_index.get(name)
        if index is None:
            if len(self.brick_names) >= len(BrickId) + MAX_DYNAMIC_BRICKS:
                self._losses.add("name_overflow")
                name, category = OVERFLOW_NAME, None
                if name in self._brick_index:
                    return self._brick_index[name]
            index = self._brick_index[name] = len(self.brick_names)
            self.brick_names.append(name)
            self.brick_categories.append(BrickCategory.Other if category is None else category)
        return index

    def descriptor(self, descriptor: Descriptor) -> int:
        """The small integer of a descriptor; beyond the bound, that of its level's overflow."""
        with self._lock:
            index = self._descriptor_index.get(descriptor)
            if index is not None:
                return index
            if len(self.descriptors) >= MAX_DESCRIPTORS:
                self._losses.add("name_overflow")
                # A brick keeps its own descriptor: bricks are bounded by themselves.
                if descriptor.level is not SpanLevel.Brick:
                    descriptor = Descriptor(descriptor.level, OVERFLOW_NAME)
                if descriptor in self._descriptor_index:
                    return self._descriptor_index[descriptor]
            index = self._descriptor_index[descriptor] = len(self.descriptors)
            self.descriptors.append(descriptor)
            self.descriptor_level.append(descriptor.level)
            self.descriptor_brick.append(descriptor.brick)
            return index

    def site(
        self,
        descriptor: int,
        elements: int = NO_COUNT,
        bytes_read: int = NO_COUNT,
        bytes_written: int = NO_COUNT,
        layer: int = NO_COUNT,
    ) -> int | None:
        """The small integer of a descriptor with fixed counts; None when there is no room for another."""
        key = (descriptor, elements, bytes_read, bytes_written, layer)
        counted = key[1:] != (NO_COUNT,) * 4
        with self._lock:
            index = self._site_index.get(key)
            if index is not None:
                return index
            if counted:
                if self._counted_sites >= MAX_SITES:
                    return None
                self._counted_sites += 1
            index = self._site_index[key] = self.site_descriptor.length
            self.site_elements.append(elements)
            self.site_bytes_read.append(bytes_read)
            self.site_bytes_written.append(bytes_written)
            self.site_layer.append(layer)
            self.site_descriptor.append(descriptor)
            return index

    def bare_site(self, descriptor: int) -> int:
        """The site of a descriptor without counts; there is always room, as they are no more than descriptors."""
        site = self.site(descriptor)
        assert site is not None
        return site

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        self._lock = threading.RLock()


def launch_argument(ptx_hash: object, grid: object, block: object, shared_mem: object) -> Launch:
    """Check a launch signature given by hand.

    Args:
        ptx_hash: an unsigned 64-bit integer, or its 16 hexadecimal digits.
        grid: blocks in x, y and z; one integer or up to three, missing ones are 1.
        block: threads in x, y and z, likewise.
        shared_mem: dynamic shared memory in bytes.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is expected.
    """
    return Launch(
        None if ptx_hash is None else _hash_argument(ptx_hash),
        None if grid is None else _dimensions("grid", grid),
        None if block is None else _dimensions("block", block),
        None if shared_mem is None else count_argument("shared_mem", shared_mem),
    )


def _hash_argument(value: object) -> int:
    if isinstance(value, str):
        if len(value) != 16 or set(value) - set("0123456789abcdefABCDEF"):
            raise ValueError(f"ptx_hash must have 16 hexadecimal digits; got {value!r}")
        return int(value, 16)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"ptx_hash must be an integer or 16 hexadecimal digits, not {value!r}") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"ptx_hash must be an unsigned 64-bit integer; got {_shown(number)}")
    return number


def _dimensions(name: str, value: Any) -> tuple[int, int, int]:
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)):
        kind = type(cast("object", value)).__name__
        raise TypeError(f"{name} must be one to three integers, not {kind} ({value!r})")
    try:
        given = tuple(value)
    except TypeError:
        given = (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{name} must be one to three integers; got {value!r}")
    numbers = [count_argument(f"{name}.{axis}", item) for axis, item in zip("xyz", given, strict=False)]
    if 0 in numbers:
        raise ValueError(f"{name} must be positive in every direction; got {value!r}")
    x, y, z = (*numbers, 1, 1)[:3]
    return (x, y, z)
