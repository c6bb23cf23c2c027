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
RECLAIMED: Final = 8
"""Events set aside that are asked at a time whether the device has passed them by now, before another is made."""
TENDED: Final = 1 << 12
"""The same for the worker."""


class _Stream:
    """One stream.

    Attributes:
        last: its newest token; `passed` is the newest that the device is known to have passed.
        local: whether it is one thread's default stream, which no other thread can mark.
        mark: marks it.
    """

    def __init__(self, ordinal: int, device: Any, core: Any) -> None:
        self.ordinal = ordinal
        self.device = device
        self.core = core
        self.last = NO_MARK
        self.passed = NO_MARK
        self.local = False
        self.mark: Mark = lambda: NO_MARK


class _Holder:
    """Held by a thread for its default stream, which others may have when the thread has ended."""

    __slots__ = ("_idle", "stream")

    def __init__(self, stream: _Stream, idle: deque[_Stream]) -> None:
        self.stream = stream
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.stream)


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
        self._local = threading.local()
        self._idle: deque[_Stream] = deque()
        self._devices: dict[int, DeviceClock] = {}
        self._given = stream  # held, so that its handle stays what it is
        self._default: Mark | None = None
        self._follows = False
        self._attributes: dict[int, dict[str, str | int]] = {}
        self._closed: list[bool] = []

    @property
    def default(self) -> Mark:
        """Marks the profiler's stream, else the framework's current one, else the default stream."""
        if self._default is None and not self.follow():
            self._default = self.mark_of(default_stream() if self._given is None else self._given)
        assert self._default is not None
        return self._default

    def follow(self) -> bool:
        """Let the default stream be that of a framework as soon as one uses CUDA; True if that is new."""
        if self._follows or self._given is not None:
            return False
        current = framework_stream()
        if current is None:
            return False
        self._follows, self._default = True, self._following(current)
        return True

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

    def stream(self, token: int) -> int:
        """The ordinal of the stream of one mark."""
        return token & MAX_STREAMS - 1

    def streams(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ordinals of the streams of marks, -1 for none."""
        return np.where(tokens >= 0, tokens & (MAX_STREAMS - 1), -1)

    def devices(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ordinals of the devices of marks, -1 for none."""
        known = np.array([*(stream.device.index for stream in self._streams), -1], np.int64)
        return known[self.streams(tokens)]

    def mark_stream(self, stream: int) -> int:
        """Mark a stream by its ordinal; a per-thread default stream only on its own thread."""
        found = self._streams[stream]
        holder: _Holder | None = getattr(self._local, "holder", None)
        return found.mark() if not found.local or (holder and holder.stream is found) else NO_MARK

    def _of_thread(self) -> int:
        """Marks the calling thread's own default stream."""
        # Not by the thread's number, which another thread may have later.
        holder: _Holder | None = getattr(self._local, "holder", None)
        if holder is None:
            found = self._left() or self._made_stream(PER_THREAD_STREAM)
            if found is None:
                return NO_MARK
            found.local = True
            holder = self._local.holder = _Holder(found, self._idle)
        return holder.stream.mark()

    def _left(self) -> _Stream | None:
        """What stood for the default stream of a thread that has ended, if nothing waits on that any more."""
        for _ in range(len(self._idle)):
            try:
                found = self._idle.popleft()
            except IndexError:  # another thread was quicker
                return None
            if self._event(found.last) is None:
                return found
            self._idle.append(found)
        return None

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
            return None
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
        with self._lock:
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
        record, free, closed = stream.core.record, stream.device.free, self._closed

        def mark() -> int:
            if closed:
                return NO_MARK
            try:
                status = capturing(handle)
                if status[1] is not idle:
                    return self._unmarked(status)
                try:
                    event = free.pop()
                except IndexError:
                    event = None
                if event is None:
                    event = self._new(stream)
                    if event is None:
                        return NO_MARK
                else:
                    try:
                        record(event)
                    except Exception:
                        free.append(event)
                        raise
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
        with self._driver.relaxed():
            self._reclaim(RECLAIMED)
            if stream.device.free:
                event = stream.device.free.pop()
                stream.core.record(event)
                return event
            if self._made >= MAX_EVENTS:
                self._losses.add("device_error")
                self._crowded()
                return None
            event = stream.device.new_event(stream.core)
        self._made += 1
        if self._made % CROWDED_EVENTS == 0:
            self._crowded()
        return event

    def _reclaim(self, count: int) -> None:
        """Ask some of the events that were set aside whether the device has passed them by now."""
        for token in list(itertools.islice(self._overdue, count)):
            event = self._overdue.pop(token, None)
            if event is None:
                continue
            if self._done(event):
                self._device_of(token).free.append(event)
            else:
                self._overdue[token] = event  # behind the others, which may be of another stream

    def _device_of(self, token: int) -> DeviceClock:
        return self._stream_of(token).device

    def _event(self, token: int) -> Any:
        """The event behind a token, None when the device is known to have passed it."""
        return self._live.get(token) or self._overdue.get(token)

    def frontier(self) -> tuple[int, ...]:
        """The newest token of every stream that the device may not have passed."""
        return tuple(stream.last for stream in self._streams if self._event(stream.last) is not None)

    def passed(self, token: int) -> bool | None:
        """Whether the device has passed a mark; None where the driver does not tell."""
        event = self._event(token)
        if event is None or token <= self._stream_of(token).passed:
            return True
        with self._driver.relaxed():
            done = self._done(event)
        if done:
            self._note_passed(token)
        return done

    def _done(self, event: Any) -> bool | None:
        try:
            return event.is_done
        except Exception as error:
            self._remember(error)
            return None

    def _note_passed(self, token: int) -> None:
        stream = self._stream_of(token)
        stream.passed = max(stream.passed, token)

    def _stream_of(self, token: int) -> _Stream:
        return self._streams[self.stream(token)]

    def wait(self, tokens: Sequence[int]) -> bool:
        """Wait without the interpreter lock until the device has passed these marks."""
        waited = True
        with self._driver.relaxed():
            for token in tokens:
                event = self._event(token)
                try:
                    if event is not None:
                        event.sync()
                        self._note_passed(token)
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
            device_of = self.devices(tokens[marked])
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

    def tend(self) -> None:
        """Tie the device's clock to the host's, if that was long ago, and use events again that were late."""
        if self._closed or not (self._live or self._overdue):
            return
        with self._driver.relaxed():
            self._reclaim(TENDED)
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

    def attributes(self, device: int) -> dict[str, str | int]:
        """A device's ordinal, its name and, as DCGM labels it, its UUID."""
        if device not in self._attributes:
            self._attributes[device] = {semconv.BRICK_CUDA_DEVICE_INDEX: device, semconv.HW_VENDOR: "nvidia"}
            try:
                known = self._driver.core.Device(device)
                self._attributes[device] |= {semconv.HW_ID: f"GPU-{known.uuid}", semconv.HW_NAME: known.name}
            except Exception as error:
                self._losses.remember("what the device is called can not be had", error)
        return self._attributes[device]

    def close(self, *, forked: bool = False) -> None:
        """Make no more marks, and let go of all events while CUDA is still there to take them.

        In a forked child it is not: there they are kept, so that nothing destroys them.
        """
        self._closed.append(True)
        if forked:
            _kept.append(self)
            return
        self._live.clear()
        self._overdue.clear()
        for known in self._devices.values():
            known.close()


_kept: list[CudaTimeline] = []
"""The timelines of this process's parent."""
