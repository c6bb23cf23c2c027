"""`CudaTimeline`: timed events of cuda-python on the streams that run the work, placed on the host's time axis.

Scopes ask for marks and get tokens; whoever resolves a step asks where the tokens lie and releases them. Recording
never synchronises, never makes a context, and never touches a stream that is capturing a graph.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import semconv
from ..record.marks import CAPTURED_MARK, NO_MARK, DeviceTimes, Mark
from .anchors import RESOLUTION_NS, Axis
from .driver import LEGACY_STREAM, PER_THREAD_STREAM, Driver, default_stream, framework_stream, stream_handle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.losses import Losses

MAX_EVENTS: Final = 1 << 16
"""Events that may exist at a time; beyond it rows keep their host times."""
CROWDED_EVENTS: Final = 1 << 12
"""After so many new events the worker is asked to resolve what has ended."""
STREAM_BITS: Final = 12
MAX_STREAMS: Final = 1 << STREAM_BITS
ANCHOR_NS: Final = 1_000_000_000
ANCHOR_TRIES: Final = 3
ANCHOR_PATIENCE_NS: Final = 50_000_000


class _Stream:
    """One stream: what marks it, and its newest token."""

    def __init__(self, ordinal: int, device: _Device, core: Any) -> None:
        self.ordinal = ordinal
        self.device = device
        self.core = core
        self.last = NO_MARK
        self.mark: Mark = lambda: NO_MARK


class _Device:
    """The events and the time axis of one device."""

    def __init__(self, index: int, context: Any = None) -> None:
        self.index = index
        self.context = context
        self.free: list[Any] = []
        self.axis = Axis()
        self.anchor_stream: Any = None
        self.anchor_events: list[Any] = []


_NOWHERE: Final = _Stream(0, _Device(-1), None)
"""Stands for a stream that can not be had now: its marks are `NO_MARK`."""


class CudaTimeline:
    """Device time of every stream of this process, for one profiler.

    Args:
        now: the host's monotonic clock.
        stream: the stream of scopes without one of their own; None for that of torch or CuPy where they use CUDA, else
            the default stream.
        crowded: called when many events wait to be resolved.
    """

    def __init__(
        self,
        driver: Driver,
        now: Callable[[], int],
        losses: Losses,
        *,
        stream: object = None,
        crowded: Callable[[], object] = lambda: None,
    ) -> None:
        self._driver = driver
        self._now = now
        self._losses = losses
        self._crowded = crowded
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._live: dict[int, Any] = {}
        self._overdue: deque[tuple[_Device, Any]] = deque()
        self._made = 0
        self._streams: list[_Stream] = []
        self._by_handle: dict[int, _Stream] = {}
        self._by_thread: dict[int, _Stream] = {}
        self._devices: dict[int, _Device] = {}
        self._given = stream  # held, so that its handle stays what it is
        self._default: Mark | None = None
        self._attributes: dict[str, str | int] | None = None

    @property
    def default(self) -> Mark:
        """Marks the profiler's stream, else the framework's current one, else the default stream."""
        if self._default is None:
            current = framework_stream() if self._given is None else None
            if current is not None:
                self._default = self._following(current)
            elif self._given is not None:
                self._default = self.mark_of(self._given)
            else:
                self._default = self.mark_of(default_stream())
        return self._default

    def _following(self, current: Callable[[], int]) -> Mark:
        known = self._by_handle

        def mark() -> int:
            try:
                handle = current() or LEGACY_STREAM
                stream = known.get(handle)
                return (stream.mark if stream is not None else self.mark_of(handle))()
            except Exception as error:
                return self._failed(error)

        return mark

    def mark_of(self, stream: object) -> Mark:
        """The mark of one stream; the stream must live as long as the mark is used.

        Raises:
            TypeError: `stream` is no stream.
        """
        handle = stream_handle(stream)
        if handle == PER_THREAD_STREAM:
            return self._of_thread
        if handle == LEGACY_STREAM:
            return self._of_legacy
        found = self._by_handle.get(handle)
        return found.mark if found is not None else self._known(handle, self._by_handle, handle).mark

    def stream_ordinal(self, token: int) -> int:
        """The small number of the stream that a token was made on."""
        return token & MAX_STREAMS - 1

    def _of_thread(self) -> int:
        """Marks the calling thread's own default stream."""
        number = threading.get_ident()
        found = self._by_thread.get(number)
        return (found or self._known(PER_THREAD_STREAM, self._by_thread, number)).mark()

    def _of_legacy(self) -> int:
        """Marks the legacy default stream of the context that is current."""
        found = self._by_handle.get(LEGACY_STREAM)
        return (found or self._known(LEGACY_STREAM, self._by_handle, LEGACY_STREAM)).mark()

    def _known(self, handle: int, known: dict[int, _Stream], key: int) -> _Stream:
        with self._lock:
            found = known.get(key)
            if found is None:
                found = self._made_stream(handle)
                if found is None:
                    return _NOWHERE
                known[key] = found
        return found

    def _made_stream(self, handle: int) -> _Stream | None:
        core: Any = self._driver.core
        if handle in (LEGACY_STREAM, PER_THREAD_STREAM) and not self._driver.has_context():
            return None
        if len(self._streams) >= MAX_STREAMS:
            self._losses.add("device_error")
            return self._streams[-1]
        try:
            with self._driver.relaxed():
                wrapped = {
                    LEGACY_STREAM: core.LEGACY_DEFAULT_STREAM,
                    PER_THREAD_STREAM: core.PER_THREAD_DEFAULT_STREAM,
                }.get(handle)
                if wrapped is None:
                    wrapped = core.Stream.from_handle(handle)
                device = self._device(wrapped)
        except Exception as error:
            self._failed(error)
            return None
        stream = _Stream(len(self._streams), device, wrapped)
        stream.mark = self._marking(stream)
        self._streams.append(stream)
        return stream

    def _device(self, stream: Any) -> _Device:
        index = stream.device.device_id
        device = self._devices.get(index)
        if device is None:
            device = self._devices[index] = _Device(index, self._driver.context_of(stream))
            bindings = self._driver.bindings
            # A stream of our own that waits for nobody's work, so that an anchor costs microseconds.
            error, handle = bindings.cuStreamCreate(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
            if error == self._driver.success:
                device.anchor_stream = self._driver.core.Stream.from_handle(int(handle))
        return device

    def _marking(self, stream: _Stream) -> Mark:
        """The mark of a stream as a closure, which is what a scope pays for."""
        driver, live, numbers, ordinal = self._driver, self._live, self._numbers, stream.ordinal
        capturing, handle, idle = driver.bindings.cuStreamIsCapturing, stream.core.handle, driver.not_capturing
        record, free = stream.core.record, stream.device.free

        def mark() -> int:
            try:
                status = capturing(handle)
                if status[1] is not idle:
                    return self._unmarked(status)
                try:
                    event = free.pop()
                except IndexError:
                    event = self._new(stream)
                    if event is None:
                        return NO_MARK
                else:
                    record(event)
            except Exception as error:
                return self._failed(error)
            token = next(numbers) << STREAM_BITS | ordinal
            live[token] = event
            stream.last = token
            return token

        return mark

    def _unmarked(self, status: tuple[Any, Any]) -> int:
        """What stands for a mark that a capture forbids."""
        if status[0] == self._driver.success or status[0] == self._driver.capture_implicit:
            return CAPTURED_MARK
        return self._failed(RuntimeError(f"cuStreamIsCapturing: {status[0]}"))

    def _failed(self, error: Exception) -> int:
        self._losses.remember("a CUDA event could not be recorded or read; times are those of the host", error)
        self._losses.add("device_error")
        return NO_MARK

    def _new(self, stream: _Stream) -> Any:
        """Record a further event; None beyond the bound."""
        for _ in range(len(self._overdue)):
            device, event = self._overdue.popleft()
            if device is stream.device and self._done(event):
                return stream.core.record(event)
            self._overdue.append((device, event))
        if self._made >= MAX_EVENTS:
            self._losses.add("device_error")
            self._crowded()
            return None
        self._made += 1
        if self._made % CROWDED_EVENTS == 0:
            self._crowded()
        with self._driver.within(stream.device.context):
            return stream.core.record(None, self._driver.timed)

    def frontier(self) -> tuple[int, ...]:
        """The newest token of every stream that the device may not have passed."""
        return tuple(stream.last for stream in self._streams if stream.last in self._live)

    def passed(self, tokens: Sequence[int]) -> bool:
        """Whether the device has passed all of these marks; a mark that can not be asked counts as passed."""
        events = [event for event in map(self._live.get, tokens) if event is not None]
        if not events:
            return True
        with self._driver.relaxed():
            return all(map(self._done, events))

    def _done(self, event: Any) -> bool:
        try:
            return event.is_done
        except Exception as error:
            self._failed(error)
            return True

    def wait(self, tokens: Sequence[int]) -> bool:
        """Wait without the interpreter lock until the device has passed these marks."""
        events = [event for event in map(self._live.get, tokens) if event is not None]
        waited = True
        with self._driver.relaxed():
            for event in events:
                try:
                    event.sync()
                except Exception as error:
                    self._failed(error)
                    waited = False
        return waited

    def place(self, tokens: NDArray[np.int64], host_ns: NDArray[np.int64]) -> DeviceTimes:
        """Where marks lie on the host's axis; see `DeviceTimeline`."""
        ns = np.zeros(len(tokens), np.int64)
        known = np.zeros(len(tokens), np.bool_)
        error_ns = 0.0
        order = np.lexsort((tokens, host_ns))
        marked = order[tokens[order] >= 0]
        ordinals = tokens[marked] & (MAX_STREAMS - 1)
        device_of = np.array([stream.device.index for stream in self._streams], np.int64)
        with self._driver.relaxed():
            for device in list(self._devices.values()):
                own = marked[device_of[ordinals] == device.index] if len(device_of) else marked[:0]
                if len(own):
                    error_ns = max(error_ns, self._place(device, tokens, own, ns, known))
        return DeviceTimes(ns, known, error_ns)

    def _place(
        self,
        device: _Device,
        tokens: NDArray[np.int64],
        own: NDArray[np.int64],
        ns: NDArray[np.int64],
        known: NDArray[np.bool_],
    ) -> float:
        """Place the marks of one device, given in order of time; each difference is one call to the driver."""
        if not self._anchor(device):
            self._losses.add("device_error", len(own))
            return 0.0
        anchor = device.axis.last
        assert anchor is not None
        chain = np.full(len(own), np.nan)
        before, position = None, 0.0
        for number, token in enumerate(tokens[own].tolist()):
            event = self._live.get(token)
            if event is None:
                continue
            try:
                if before is not None and before is not event:
                    position += (event - before) * 1e6
                elif before is None:
                    _ = event - event  # raises where the event has not been passed
            except Exception as error:
                self._failed(error)
                continue
            before, chain[number] = event, position
        if before is None:
            return 0.0
        try:
            gap = (anchor.event - before) * 1e6
        except Exception as error:
            self._failed(error)
            return 0.0
        good = ~np.isnan(chain)
        at = anchor.device_ns - gap + (chain[good] - position)
        ns[own[good]] = np.rint(device.axis.host(at)).astype(np.int64)
        known[own[good]] = True
        rounding = float(np.spacing(np.float32(abs(gap) / 1e6))) * 1e6
        return device.axis.error_ns(float(at.min()), float(at.max())) + rounding

    def anchor(self) -> None:
        """Tie the device's clock to the host's, if that was long ago; the worker calls it while work goes on."""
        if self._live:
            with self._driver.relaxed():
                for device in list(self._devices.values()):
                    self._anchor(device)

    def _anchor(self, device: _Device) -> bool:
        """Make an anchor if the last one is old; False where there is none at all."""
        last, now = device.axis.last, self._now()
        if last is not None and 0 <= now - last.host_ns < ANCHOR_NS:
            return True
        with self._lock:
            best: tuple[int, float, Any] | None = None
            for _ in range(ANCHOR_TRIES):
                best = self._better_anchor(device, best)
            if best is None:
                return last is not None
            width, middle, event = best
            try:
                elapsed = 0.0 if last is None else (event - last.event) * 1e6
                # The first anchor proves that the event can be read at all.
                _ = event - event
            except Exception as error:
                self._failed(error)
                return last is not None
            forgotten = device.axis.add(event, elapsed, middle, width / 2)
            if forgotten is not None:
                device.anchor_events.append(forgotten)
        return True

    def _better_anchor(self, device: _Device, best: tuple[int, float, Any] | None) -> tuple[int, float, Any] | None:
        try:
            if device.anchor_stream is None:
                return best
            event = device.anchor_events.pop() if device.anchor_events else None
            before = self._now()
            if event is None:
                with self._driver.within(device.context):
                    event = device.anchor_stream.record(None, self._driver.timed)
            else:
                device.anchor_stream.record(event)
            while not event.is_done:
                if self._now() - before > ANCHOR_PATIENCE_NS:
                    self._overdue.append((device, event))
                    return best
            after = self._now()
        except Exception as error:
            self._failed(error)
            return best
        if best is None or after - before < best[0]:
            if best is not None:
                device.anchor_events.append(best[2])
            return after - before, (before + after) / 2, event
        device.anchor_events.append(event)
        return best

    def release(self, tokens: Sequence[int], *, passed: bool) -> None:
        """Use the events of these marks again; those the device may not have passed are set aside until it has."""
        for token in tokens:
            event = self._live.pop(token, None) if token >= 0 else None
            if event is not None:
                device = self._streams[token & MAX_STREAMS - 1].device
                if passed:
                    device.free.append(event)
                else:
                    self._overdue.append((device, event))

    def attributes(self) -> dict[str, str | int]:
        """The device of the default stream: its ordinal and, as DCGM labels it, its UUID."""
        if self._attributes is None:
            self._attributes = {}
            for device in list(self._devices.values()):
                try:
                    known = self._driver.core.Device(device.index)
                    self._attributes = {
                        semconv.BRICK_CUDA_DEVICE_INDEX: device.index,
                        semconv.HW_ID: f"GPU-{known.uuid}",
                        semconv.HW_NAME: known.name,
                        semconv.HW_VENDOR: "nvidia",
                    }
                except Exception as error:
                    self._losses.remember("what the device is called can not be had", error)
                break
        return self._attributes

    def close(self) -> None:
        """Let go of all events while CUDA is still there to take them."""
        self._live.clear()
        self._overdue.clear()
        for device in self._devices.values():
            device.free.clear()
            device.anchor_events.clear()
            device.axis = Axis()


__all__ = ["RESOLUTION_NS", "CudaTimeline"]
