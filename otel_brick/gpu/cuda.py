"""`CudaTimeline`: timed events of cuda-python on the streams that run the work, placed on the host's time axis.

Scopes ask for marks and get tokens; whoever resolves a step asks where the tokens lie and releases them. Recording
never synchronises, never makes a context, and never touches a stream that is capturing a graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import semconv
from ..record.marks import CAPTURED_MARK, NO_MARK, DeviceTimes, Mark
from .clocks import DeviceClock
from .driver import LEGACY_STREAM, PER_THREAD_STREAM, Driver, default_stream, framework_stream, stream_handle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.losses import Losses

MAX_EVENTS: Final = 1 << 16
"""Events that may exist at a time; beyond it rows keep their host times."""
CROWDED_EVENTS: Final = 1 << 11
"""After so many new events the worker is asked to resolve what has ended."""
STREAM_BITS: Final = 12
MAX_STREAMS: Final = 1 << STREAM_BITS
OVERDUE_ASKED: Final = 8
"""Events set aside that are asked at a time whether the device has passed them by now."""


class _Stream:
    """One stream: what marks it, and its newest token."""

    def __init__(self, ordinal: int, device: Any, core: Any) -> None:
        self.ordinal = ordinal
        self.device = device
        self.core = core
        self.last = NO_MARK
        self.mark: Mark = lambda: NO_MARK


_NOWHERE: Final = _Stream(0, None, None)
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
        self._overdue: dict[int, Any] = {}
        self._made = 0
        self._streams: list[_Stream] = []
        self._by_handle: dict[int, _Stream] = {}
        self._by_thread: dict[int, _Stream] = {}
        self._devices: dict[int, DeviceClock] = {}
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

    def _device(self, stream: Any) -> DeviceClock:
        index: int = stream.device.device_id
        device = self._devices.get(index)
        if device is None:
            device = self._devices[index] = DeviceClock(self._driver, stream, self._now, self._remember)
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
        self._remember(error)
        self._losses.add("device_error")
        return NO_MARK

    def _remember(self, error: Exception) -> None:
        self._losses.remember("a CUDA event could not be recorded or read; times are those of the host", error)

    def _new(self, stream: _Stream) -> Any:
        """Record a further event; None beyond the bound."""
        for token in itertools.islice(list(self._overdue), OVERDUE_ASKED):
            if self._device_of(token) is stream.device and self._done(self._overdue[token]):
                return stream.core.record(self._overdue.pop(token))
        if self._made >= MAX_EVENTS:
            self._losses.add("device_error")
            self._crowded()
            return None
        self._made += 1
        if self._made % CROWDED_EVENTS == 0:
            self._crowded()
        return stream.device.new_event(stream.core)

    def _device_of(self, token: int) -> DeviceClock:
        return self._streams[token & MAX_STREAMS - 1].device

    def _event(self, token: int) -> Any:
        """The event behind a token, None when the device is known to have passed it."""
        return self._live.get(token) or self._overdue.get(token)

    def frontier(self) -> tuple[int, ...]:
        """The newest token of every stream that the device may not have passed."""
        return tuple(stream.last for stream in self._streams if self._event(stream.last) is not None)

    def passed(self, tokens: Sequence[int]) -> bool:
        """Whether the device has passed all of these marks; a mark that can not be asked counts as passed."""
        events = [event for event in map(self._event, tokens) if event is not None]
        if not events:
            return True
        with self._driver.relaxed():
            return all(map(self._done, events))

    def _done(self, event: Any) -> bool:
        try:
            return event.is_done
        except Exception as error:
            self._remember(error)
            return True

    def wait(self, tokens: Sequence[int]) -> bool:
        """Wait without the interpreter lock until the device has passed these marks."""
        events = [event for event in map(self._event, tokens) if event is not None]
        waited = True
        with self._driver.relaxed():
            for event in events:
                try:
                    event.sync()
                except Exception as error:
                    self._remember(error)
                    waited = False
        return waited

    def place(self, tokens: NDArray[np.int64], host_ns: NDArray[np.int64]) -> DeviceTimes:
        """Where marks lie on the host's axis; see `DeviceTimeline`."""
        ns = np.full(len(tokens), np.nan)
        error_ns = 0.0
        order = np.lexsort((tokens, host_ns))
        marked = order[tokens[order] >= 0]
        if len(marked):
            device_of = np.array([stream.device.index for stream in self._streams], np.int64)
            device_of = device_of[tokens[marked] & (MAX_STREAMS - 1)]
            with self._driver.relaxed():
                for device in list(self._devices.values()):
                    own = marked[device_of == device.index]
                    if len(own):
                        ns[own], error = device.place([self._event(token) for token in tokens[own].tolist()])
                        error_ns = max(error_ns, error)
        known = ~np.isnan(ns)
        if not known[marked].all():
            self._losses.add("device_error", int(np.count_nonzero(~known[marked])))
        return DeviceTimes(np.rint(np.where(known, ns, 0)).astype(np.int64), known, error_ns)

    def anchor(self) -> None:
        """Tie the device's clock to the host's, if that was long ago; the worker calls it while work goes on."""
        if self._live:
            with self._driver.relaxed():
                for device in list(self._devices.values()):
                    device.anchor()

    def release(self, tokens: Sequence[int], *, passed: bool) -> None:
        """Use the events of these marks again; those the device may not have passed are set aside until it has."""
        for token in tokens:
            event = self._live.pop(token, None) if token >= 0 else None
            if event is not None:
                if passed:
                    self._device_of(token).free.append(event)
                else:
                    self._overdue[token] = event

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
            device.close()
