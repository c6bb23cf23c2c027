"""Kernels that keep the GPU busy for a time, and tell how long they really did.

They are PTX text, so that no compiler is needed. Each waits on the GPU's own nanosecond clock and then writes what that
clock has counted into memory of the host: a duration that our events have no part in.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.core import LaunchConfig, LegacyPinnedMemoryResource, ObjectCode, launch

if TYPE_CHECKING:
    from cuda.core import Device, Kernel

    from tests.cuda.standin import Driver

US, MS, S = 1_000, 1_000_000, 1_000_000_000
ONE = LaunchConfig(grid=1, block=1)
DURATIONS_US = (20, 100, 250, 1_000, 4_000, 20_000, 200_000)
SLOTS = 1 << 16
MANGLED = "_ZN6engine4spinILi4EEEvPy"
"""`engine::spin<4>(unsigned long long*)`, which takes 100 us."""

HEAD = """.version 6.3
.target sm_70
.address_size 64
"""
ENTRY = """
.visible .entry {name}(
    .param .u64 {name}_param_0
)
{{
    .reg .pred %p<2>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [{name}_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u64 %rd3, %globaltimer;
$wait_{name}:
    mov.u64 %rd4, %globaltimer;
    sub.s64 %rd5, %rd4, %rd3;
    setp.lt.u64 %p1, %rd5, {duration_ns};
    @%p1 bra $wait_{name};
    st.global.u64 [%rd2], %rd5;
    ret;
}}
"""


def source() -> bytes:
    """The PTX of all of them."""
    entries = {f"spin_{us}us": us for us in DURATIONS_US} | {MANGLED: 100}
    return (HEAD + "".join(ENTRY.format(name=name, duration_ns=us * US) for name, us in entries.items())).encode()


@dataclass(frozen=True)
class Spin:
    """One launch."""

    nominal_ns: int
    _slot: np.ndarray[Any, np.dtype[np.uint64]]

    @property
    def spent_ns(self) -> int:
        """How long it was busy, once it has ended. On the stand-in nothing runs, so it is what it should have been."""
        return int(self._slot[0]) or self.nominal_ns


class Spins:
    """Launches them: `spins(stream, 1_000)` keeps a stream busy for a millisecond.

    All are loaded and were run once, and nothing is allocated in a call, so that one may happen during a capture.
    """

    def __init__(self, device: Device, standin: Driver | None) -> None:
        self.source = source()
        self.code = ObjectCode.from_ptx(self.source)
        self.kernels = {us: self.kernel(f"spin_{us}us") for us in DURATIONS_US}
        if standin is not None:
            for us in DURATIONS_US:
                standin.set_kernel(f"spin_{us}us", duration_ns=us * US)
            standin.set_kernel(MANGLED, duration_ns=100 * US, registers=24, static_shared_bytes=256)
        self._memory = LegacyPinnedMemoryResource().allocate(8 * SLOTS)
        self._address = int(self._memory.handle)
        self._slots = np.ctypeslib.as_array((ctypes.c_uint64 * SLOTS).from_address(self._address))
        self._next = 0
        stream = device.create_stream()
        for us in DURATIONS_US:
            self(stream, us)
        stream.sync()

    def kernel(self, name: str) -> Kernel:
        """One of the kernels."""
        return self.code.get_kernel(name)

    def __call__(self, stream: Any, us: int, *, kernel: Kernel | None = None, config: LaunchConfig = ONE) -> Spin:
        """Launch the one that takes `us`, or a given one that does."""
        slot = self._next
        self._next = (slot + 1) % SLOTS
        self._slots[slot] = 0
        launch(stream, config, kernel or self.kernels[us], self._address + 8 * slot)
        return Spin(us * US, self._slots[slot : slot + 1])


def assert_near(measured_ns: float, spent_ns: float) -> None:
    """A pair of events around a kernel reads its time and up to a few microseconds of starting and ending it."""
    assert 0.99 * spent_ns - 2 * US <= measured_ns <= 1.03 * spent_ns + 8 * US
