"""Timers: bricks that are started and stopped by two calls, and rows whose duration somebody else measured."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ..taxonomy import SpanLevel
from .descriptors import count_argument
from .lane import SPILL_LENGTH, TAG_ABANDONED, TAG_MARK, TAG_SYNCED, TAG_TIMER
from .marks import NO_MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lane import Lane
    from .recorder import Recorder

MAX_ELAPSED_NS: Final = (1 << 53) - 1


class BrickTimer:
    """A brick that has been started; give it to `stop_brick` or `stop` exactly once.

    It belongs to the lane it was started on, whichever thread stops it. Started on a disabled profiler it is dead, and
    stopping it does nothing. Thrown away without being stopped it counts as left open.
    """

    __slots__ = ("_lane", "_leave", "_number", "_recorder")

    def __init__(self, recorder: Recorder, site: int | None) -> None:
        self._recorder = recorder
        self._lane: Lane | None = None
        self._leave = self._number = 0
        if site is not None:
            self._leave = ~site
            self._number = next(recorder.timer_numbers) & 0x7FFFFFFF
            lane = recorder.current.get().opened()
            now = recorder.clock.now()
            lane.extend((site, now, TAG_TIMER, self._number, *_mark_tag(recorder.device.mark())))
            self._lane = lane

    @property
    def running(self) -> bool:
        """Whether stopping it would record something."""
        return self._lane is not None

    def stop(self, tags: Sequence[int]) -> None:
        """Write the exit; a second call is counted."""
        now = self._recorder.clock.now()
        lane, self._lane = self._lane, None
        if lane is not None:
            token = self._recorder.device.mark()
            device, synced = self._recorder.device, ()
            if token >= 0 and device.synchronizes(SpanLevel.Brick) and device.synchronize(lane.record, token):
                now, synced = self._recorder.clock.now(), (TAG_SYNCED, 1)
            lane.extend((self._leave, now, TAG_TIMER, self._number, *tags, *_mark_tag(token), *synced))
            if len(lane) > SPILL_LENGTH:
                lane.spill()
        elif self._leave:
            self._recorder.losses.add("closed_twice")

    def __del__(self) -> None:
        # Runs wherever Python collects garbage, inside a lock of ours too, so it only leaves a note.
        if self._lane is not None:
            now = self._recorder.clock.now()
            exit_ = (self._leave, now, TAG_TIMER, self._number, TAG_ABANDONED, 0)
            self._recorder.abandoned.append((self._lane, exit_))


def _mark_tag(token: int) -> tuple[int, ...]:
    return () if token == NO_MARK else (TAG_MARK, token)


def elapsed_argument(elapsed: int | timedelta, *, argument: str = "elapsed") -> int:
    """Turn integer nanoseconds or a `timedelta` into nanoseconds.

    Raises:
        TypeError: for floats and everything else.
        ValueError: for negative durations and those of 2**53 ns (104 days) and more.
    """
    if isinstance(elapsed, timedelta):
        number = (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000_000 + elapsed.microseconds * 1_000
        if number < 0:
            raise ValueError(f"{argument} must not be negative; got {elapsed!r}")
    else:
        number = count_argument(argument, elapsed)
    if number > MAX_ELAPSED_NS:
        raise ValueError(f"{argument} must be below 2**53 ns (104 days); got {number}")
    return number
