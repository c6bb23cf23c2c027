"""The stand-in driver as tests see it: `Driver` sets clocks, kernels and faults, and reads what was called.

`Driver.load()` builds the library of `driver/` and loads it under the name `libcuda.so.1`, so that cuda.bindings and
cuda.core, unmodified, take it for the driver. A process can have one such library, and keeps it to its end.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from otel_brick.record.clock import Clock

from .driver.build import SONAME, build

NEVER_NS = 1 << 61
"""A duration that never ends."""

FIRST_NS = 1_000_000_000
"""Where the virtual clock begins."""

UNIX_NS = 1_700_000_000_000_000_000
"""Unix time at that moment, as `Driver.clock` tells it."""

_KINDS = {
    "contexts": 1,
    "streams": 2,
    "events": 3,
    "modules": 4,
    "libraries": 5,
    "kernels": 6,
    "functions": 7,
    "graphs": 8,
    "nodes": 9,
    "executables": 10,
    "user_objects": 11,
}
# cuda.core never unloads a library (https://github.com/NVIDIA/cuda-python/issues/1670), nor what belongs to it.
_KEPT_BY_CUDA_CORE = {"modules", "libraries", "kernels", "functions"}
_ALLOCATIONS = {"device_allocations": 0, "host_allocations": 1}
_Three = ctypes.c_uint32 * 3


class _Entry(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("time_ns", ctypes.c_int64),
        ("thread", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("grid", _Three),
        ("block", _Three),
        ("cluster", _Three),
        ("shared_bytes", ctypes.c_uint32),
        ("result", ctypes.c_int32),
        ("arguments_size", ctypes.c_uint32),
        ("arguments", ctypes.c_void_p),
    )


# Whatever is not listed takes no arguments and returns nothing.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "advance": (ctypes.c_int64, (ctypes.c_int64,)),
    "allocations": (ctypes.c_uint64, (ctypes.c_int,)),
    "calls": (ctypes.c_uint64, (ctypes.c_char_p,)),
    "fail": (None, (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_int)),
    "has_function": (ctypes.c_int, (ctypes.c_char_p,)),
    "live": (ctypes.c_uint64, (ctypes.c_int,)),
    "now": (ctypes.c_int64, ()),
    "pending_destroyed": (ctypes.c_uint64, ()),
    "pending_recorded": (ctypes.c_uint64, ()),
    "reset": (None, ()),
    "set_copies": (ctypes.c_int, (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)),
    "set_cost": (None, (ctypes.c_char_p, ctypes.c_int64)),
    "set_device_attribute": (ctypes.c_int, (ctypes.c_int, ctypes.c_int)),
    "set_device_clock": (None, (ctypes.c_double, ctypes.c_int64)),
    "set_devices": (ctypes.c_int, (ctypes.c_int,)),
    "set_kernel": (None, (ctypes.c_char_p, ctypes.c_int64, *(ctypes.c_int,) * 5)),
    "set_latency": (None, (ctypes.c_int64, ctypes.c_int64)),
    "set_resolution": (None, (ctypes.c_int64,)),
    "set_tracing": (None, (ctypes.c_int,)),
    "set_unsafe": (None, (ctypes.c_char_p, ctypes.c_int)),
    "set_version": (None, (ctypes.c_int,)),
    "set_wait_limit": (None, (ctypes.c_int64,)),
    "set_waits_move_clock": (None, (ctypes.c_int,)),
    "succeed": (None, (ctypes.c_char_p,)),
    "trace_clear": (None, ()),
    "trace_count": (ctypes.c_long, ()),
    "trace_dropped": (ctypes.c_uint64, ()),
    "trace_read": (ctypes.c_long, (ctypes.c_long, ctypes.c_long, ctypes.POINTER(_Entry))),
    "use_virtual_clock": (None, (ctypes.c_int64,)),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a driver function.

    Attributes:
        function: its name, without the suffix of a version.
        result: what it returned.
        time_ns: when, by the host's clock.
        thread: the caller, as `threading.get_native_id` has it.
        stream: handle of the stream as the caller gave it; 0 where there is none, or for the default stream.
        handle: what else the call was about: an event, a function, a library, a graph.
        kernel: name of the kernel that was launched, as the driver has it.
        grid: its blocks.
        block: its threads.
        cluster: its cluster, if one was asked for.
        shared_bytes: its dynamic shared memory.
        arguments: its arguments as they lie in memory, with zeros between them.
    """

    function: str
    result: int
    time_ns: int
    thread: int
    stream: int
    handle: int
    kernel: str | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    arguments: bytes


def _call(entry: _Entry) -> Call:
    cluster = tuple(entry.cluster)
    return Call(
        function=entry.function.decode(),
        result=entry.result,
        time_ns=entry.time_ns,
        thread=entry.thread,
        stream=entry.stream,
        handle=entry.handle,
        kernel=entry.kernel.decode() if entry.kernel else None,
        grid=tuple(entry.grid),
        block=tuple(entry.block),
        cluster=cluster if any(cluster) else None,
        shared_bytes=entry.shared_bytes,
        arguments=ctypes.string_at(entry.arguments, entry.arguments_size) if entry.arguments else b"",
    )


def ptx(kernels: Mapping[str, Sequence[str]]) -> bytes:
    """The text of a PTX module of kernels that do nothing.

    Args:
        kernels: by name, the PTX types of their parameters: "u64", "f32", or "align 8 .b8[24]" for a structure.
    """
    lines = [".version 8.3", ".target sm_90", ".address_size 64", ""]
    for name, types in kernels.items():
        parameters = []
        for index, kind in enumerate(types):
            scalar, bracket, length = kind.partition("[")
            parameters.append(f"\t.param .{scalar} {name}_param_{index}{bracket}{length}")
        lines += [f".visible .entry {name}(", ",\n".join(parameters), ")", "{", "\tret;", "}", ""]
    return "\n".join(lines).encode()


class Driver:
    """The stand-in driver of this process; get it with `Driver.load()`.

    Functions are named as in CUDA's documentation, without the suffix of a version ("cuEventRecord"); "*" means each.
    Results are CUresult members or their integers. Times are integer nanoseconds.
    """

    _loaded: Driver | None = None

    @classmethod
    def load(cls) -> Driver:
        """Build and load the library, the first time.

        Raises:
            RuntimeError: another driver is in the process already.
            BuildError: it can not be built.
        """
        if cls._loaded is None:
            cls._loaded = cls()
        return cls._loaded

    def __init__(self) -> None:
        try:
            ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
        except OSError:
            pass
        else:
            raise RuntimeError(
                f"another {SONAME} is loaded in this process, and it can not be replaced; run tests/cuda by themselves"
            )
        library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
        if ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)._handle != library._handle:
            raise RuntimeError(f"the stand-in driver was loaded, but {SONAME} is another library")
        self._library = library
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"standin_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, f"_{name}", function)

    def _named(self, function: str) -> bytes:
        if not self._has_function(function.encode()):
            raise ValueError(f"the stand-in driver has no function {function!r}")
        return function.encode()

    def reset(self) -> None:
        """Go back to the first settings: real clock, one device, no faults, empty trace, no capture, counts at zero.

        Objects stay, with all their work done. The calling thread's capture mode is the first one again; other threads
        keep theirs.
        """
        self._reset()

    # Time

    def use_virtual_clock(self, now_ns: int = FIRST_NS) -> None:
        """Let time stand still, but for `advance`, costs of calls, and waits, which jump to what they wait for."""
        self._use_virtual_clock(now_ns)

    @property
    def now_ns(self) -> int:
        """The host's monotonic time: the virtual clock, else CLOCK_MONOTONIC as `time.perf_counter_ns` reads it."""
        return self._now()

    def advance(self, ns: int) -> int:
        """Let time pass (with the real clock: sleep); the time then."""
        return self._advance(ns)

    @property
    def clock(self) -> Clock:
        """This clock for a profiler: `BrickProfiler.enabled(clock=driver.clock)`."""
        now = self._now
        return Clock(now=now, unix=lambda: now() - FIRST_NS + UNIX_NS)

    def set_waits_move_clock(self, enabled: bool) -> None:
        """Whether waits move the virtual clock (they do at first), or really wait until another thread advances it."""
        self._set_waits_move_clock(enabled)

    def set_wait_limit(self, seconds: float) -> None:
        """How long, in real time, a wait may take before it fails with CUDA_ERROR_LAUNCH_TIMEOUT (10 s at first)."""
        self._set_wait_limit(round(seconds * 1e9))

    def set_latency(self, *, submit_ns: int = 0, completion_ns: int = 0) -> None:
        """Delays between host and device.

        Args:
            submit_ns: from a call until the device begins the work, if it is idle.
            completion_ns: from the end of work on the device until the host can see it.
        """
        self._set_latency(submit_ns, completion_ns)

    def set_device_clock(self, *, ppm: float = 0.0, jump_ns: int = 0) -> None:
        """From now on let the device's clock run fast by `ppm` millionths, after a jump. It stamps events."""
        self._set_device_clock(ppm, jump_ns)

    def set_resolution(self, step_ns: int) -> None:
        """The step of the device's clock (1 at first; 500 is what the documentation of CUDA warns of)."""
        self._set_resolution(step_ns)

    # Kernels and copies

    def set_kernel(
        self,
        name: str,
        *,
        duration_ns: int | None = None,
        registers: int | None = None,
        static_shared_bytes: int | None = None,
        constant_bytes: int | None = None,
        local_bytes: int | None = None,
        max_threads: int | None = None,
    ) -> None:
        """Set what is known of all kernels of this name, loaded or not: at first 5 us, 32 registers, 1024 threads.

        Launches that are captured keep the duration of that moment.
        """
        values = (duration_ns, registers, static_shared_bytes, constant_bytes, local_bytes, max_threads)
        self._set_kernel(name.encode(), *(-1 if value is None else value for value in values))

    def kernel(
        self,
        name: str,
        *,
        parameters: Sequence[str] = (),
        duration_ns: int | None = None,
        registers: int | None = None,
        static_shared_bytes: int | None = None,
    ) -> Any:
        """A `cuda.core.Kernel` in a library of its own, made from PTX text.

        Args:
            name: as the driver shall have it; mangled, for a C++ function.
            parameters: their PTX types, see `ptx`.
            duration_ns: how long each launch takes.
            registers: per thread.
            static_shared_bytes: shared memory per block besides the dynamic one.
        """
        from cuda.core import ObjectCode

        self.set_kernel(name, duration_ns=duration_ns, registers=registers, static_shared_bytes=static_shared_bytes)
        return ObjectCode.from_ptx(ptx({name: parameters})).get_kernel(name)

    def set_copies(
        self, *, least_ns: int = 2000, host_bytes_per_us: int = 25_000, device_bytes_per_us: int = 10**6
    ) -> None:
        """How long copies take: the least, and the rates between host and device and within the device."""
        if self._set_copies(least_ns, host_bytes_per_us, device_bytes_per_us):
            raise ValueError("times must not be negative and rates must be positive")

    # Devices

    def set_devices(self, count: int) -> None:
        """How many devices there are, up to 8. cuda.core asks once per process."""
        if self._set_devices(count):
            raise ValueError("the stand-in driver has up to 8 devices")

    def set_version(self, version: int) -> None:
        """The driver's version, 13050 at first.

        Before the first driver call of a process it also decides which functions there are: cuda.bindings asks once.
        """
        self._set_version(version)

    def set_device_attribute(self, attribute: int, value: int) -> None:
        """A value for cuDeviceGetAttribute, of all devices. cuda.core keeps what it was once told."""
        if self._set_device_attribute(int(attribute), value):
            raise ValueError(f"no attribute {attribute}")

    # Faults

    def fail(self, function: str, result: int, *, call: int = 1, always: bool = False) -> None:
        """Let a call fail without doing anything.

        Args:
            function: its name; "*" for whatever is called.
            result: what it returns.
            call: which one, counted from now: 1 is the next.
            always: that call and all after it, until `succeed`.
        """
        self._fail(self._named(function), int(result), call, always)

    def succeed(self, function: str) -> None:
        """Take back what `fail` set for this function."""
        self._succeed(self._named(function))

    def set_cost(self, function: str, ns: int) -> None:
        """How long each call of this function keeps its caller, 0 at first."""
        self._set_cost(self._named(function), ns)

    def set_unsafe(self, function: str, unsafe: bool) -> None:
        """Whether a capture prohibits this function, as potentially unsafe, to the threads that its mode is about."""
        self._set_unsafe(self._named(function), unsafe)

    # What happened

    def calls(self, function: str) -> int:
        """How often this function was called since the reset; "*" for all together."""
        return self._calls(self._named(function))

    @property
    def pending_destroyed(self) -> int:
        """Events destroyed, since the reset, while their record was still to be reached."""
        return self._pending_destroyed()

    @property
    def pending_recorded(self) -> int:
        """Events recorded anew, since the reset, while their record was still to be reached."""
        return self._pending_recorded()

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist: streams, events, libraries, graphs, device_allocations and so on.

        Python's own garbage is collected first. Default streams and memory pools are not counted.
        """
        gc.collect()
        objects = {name: self._live(kind) for name, kind in _KINDS.items()}
        return objects | {name: self._allocations(on_host) for name, on_host in _ALLOCATIONS.items()}

    @contextmanager
    def no_leaks(self, *kinds: str) -> Iterator[None]:
        """Assert that after the body there are as many objects as before it.

        Args:
            kinds: of these kinds; if none is named, of all but modules, libraries and what is in them, since cuda.core
                keeps those for good.
        """
        before = self.live()
        yield
        after = self.live()
        compared = set(kinds) or before.keys() - _KEPT_BY_CUDA_CORE
        changed = {kind: (before[kind], after[kind]) for kind in sorted(compared) if before[kind] != after[kind]}
        assert not changed, f"numbers of objects before and after: {changed}"

    def trace(self, *functions: str) -> list[Call]:
        """The calls since the reset or `clear_trace`, oldest first: those of these functions, or all."""
        wanted = {self._named(function) for function in functions}
        count = self._trace_count()
        entries = (_Entry * count)()
        copied = self._trace_read(0, count, entries)
        return [_call(entry) for entry in entries[:copied] if not wanted or entry.function in wanted]

    def launches(self) -> list[Call]:
        """The kernel launches among them, failed ones too if they got as far as the kernel."""
        return [call for call in self.trace() if call.kernel is not None]

    def clear_trace(self) -> None:
        """Forget the calls; counts stay."""
        self._trace_clear()

    def set_tracing(self, enabled: bool) -> None:
        """Whether calls are traced (they are at first)."""
        self._set_tracing(enabled)

    @property
    def trace_dropped(self) -> int:
        """Calls that the trace, of 200,000 entries, had no room for."""
        return self._trace_dropped()
