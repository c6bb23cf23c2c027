"""The clock of one device: its events, and where they lie on the host's time axis.

Anchors tie the two axes together (`anchors.py`). Each is an event on a stream of our own, which waits for nobody's
work, so that the host sees within microseconds when the device passed it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .anchors import WIDE_NS, Axis

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .driver import Driver

ANCHOR_NS: Final = 1_000_000_000
ANCHOR_TRIES: Final = 3
NARROW_NS: Final = 20_000
"""An interval that needs no second try."""
PATIENCE_NS: Final = 2_000_000
FIRST_PATIENCE_NS: Final = 50_000_000
"""How long the first anchor may take, without which there are no device times at all."""
BACKOFF_NS: Final = 1_000_000_000
SPIN_NS: Final = 200_000
NAP_S: Final = 50e-6


class DeviceClock:
    """Places the events of one device on the host's axis.

    Args:
        stream: a stream of `cuda.core` on the device, for which a context is current.
        now: the host's monotonic clock.
        failed: called with what went wrong in a call to the driver.

    Attributes:
        index: the device's ordinal.
        context: its context.
        free: events that may be recorded.
    """

    def __init__(
        self, driver: Driver, stream: Any, now: Callable[[], int], failed: Callable[[Exception], object]
    ) -> None:
        self.index: int = stream.device.device_id
        self.context: Any = driver.context_of(stream)
        self.free: list[Any] = []
        self._driver = driver
        self._now = now
        self._failed = failed
        self._axis = Axis()
        self._lock = threading.RLock()
        self._events: list[Any] = []
        self._late: list[Any] = []
        self._stream: Any = None
        self._not_before_ns = 0
        self._open()

    def _open(self) -> None:
        """Make the stream of the anchors, if it is not there yet."""
        if self._stream is None:
            bindings = self._driver.bindings
            with self._driver.within(self.context):
                error, handle = bindings.cuStreamCreate(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
            if error == self._driver.success:
                self._stream = self._driver.core.Stream.from_handle(int(handle))

    def new_event(self, stream: Any) -> Any:
        """A new timed event, recorded on a stream of the device."""
        with self._driver.within(self.context):
            return stream.record(None, self._driver.timed)

    def place(self, events: Sequence[Any]) -> tuple[NDArray[np.float64], float]:
        """Where events lie on the host's axis.

        Args:
            events: about in the order in which they were recorded; None for what is not known. Each difference between
                neighbours is one call to the driver.

        Returns:
            Monotonic nanoseconds, shape (n,), NaN for what is not known, and how far all of them together may be off.
        """
        chain = np.full(len(events), np.nan)
        anchor = self._axis.last if self.anchor() else None
        if anchor is None:
            return chain, 0.0
        before, position = None, 0.0
        for number, event in enumerate(events):
            if event is None:
                continue
            try:
                # The first difference, to itself, raises where the event can not be read.
                position += (event - (event if before is None else before)) * 1e6
            except Exception as error:
                self._failed(error)
                continue
            before, chain[number] = event, position
        if before is None:
            return chain, 0.0
        try:
            gap = (anchor.event - before) * 1e6
        except Exception as error:
            self._failed(error)
            return np.full(len(events), np.nan), 0.0
        at = anchor.device_ns - gap + (chain - position)
        rounding = float(np.spacing(np.float32(abs(gap) / 1e6))) * 1e6
        return self._axis.host(at), self._axis.error_ns(float(np.nanmin(at)), float(np.nanmax(at))) + rounding

    def anchor(self) -> bool:
        """Make an anchor if the last one is old; False where there is none at all."""
        last, now = self._axis.last, self._now()
        if last is not None and (0 <= now - last.host_ns < ANCHOR_NS or 0 <= self._not_before_ns - now < BACKOFF_NS):
            return True
        with self._lock:
            best: tuple[int, float, Any] | None = None
            for _ in range(ANCHOR_TRIES):
                tried = self._tried(PATIENCE_NS if last is not None else FIRST_PATIENCE_NS)
                if tried is None:
                    break
                if best is not None:
                    best, worse = (tried, best) if tried[0] < best[0] else (best, tried)
                    self._events.append(worse[2])
                else:
                    best = tried
                if best[0] <= NARROW_NS or tried[0] > PATIENCE_NS:
                    break
            self._not_before_ns = self._now() + BACKOFF_NS
            if best is None:
                return last is not None
            width, middle, event = best
            if last is not None and width / 2 > WIDE_NS:
                self._events.append(event)
                return True
            try:
                # The difference of the first anchor to itself proves that the event can be read at all.
                elapsed = (event - (event if last is None else last.event)) * 1e6
            except Exception as error:
                self._failed(error)
                return last is not None
            self._events += self._axis.add(event, elapsed, middle, width / 2)
        return True

    def _tried(self, patience_ns: int) -> tuple[int, float, Any] | None:
        """One try at an anchor: the width and the middle of its interval, and the event."""
        try:
            self._open()
            if self._stream is None:
                return None
            event = self._spare()
            before = self._now()
            if event is None:
                event = self.new_event(self._stream)
            else:
                self._stream.record(event)
            while not event.is_done:
                waited = self._now() - before
                if waited > patience_ns:
                    self._late.append(event)
                    return None
                if waited > SPIN_NS:
                    time.sleep(NAP_S)
            after = self._now()
        except Exception as error:
            self._failed(error)
            return None
        return after - before, (before + after) / 2, event

    def _spare(self) -> Any:
        if not self._events and self._late and self._late[0].is_done:
            return self._late.pop(0)
        return self._events.pop() if self._events else None

    def close(self) -> None:
        """Let go of all events."""
        self.free.clear()
        self._events.clear()
        self._late.clear()
        self._axis = Axis()
