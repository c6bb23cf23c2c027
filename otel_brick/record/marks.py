"""Marks: places on a device's own time axis that the record refers to by a token.

The recorder knows no device. It asks whatever timeline it was given for a mark at a scope's entry and exit and writes
the token into the log; what the token stood for is asked when the step is resolved, after the device has passed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NO_MARK: Final = -1
"""Nothing was marked: the row keeps its host time."""
CAPTURED_MARK: Final = -2
"""The stream was capturing a graph, so that nothing was marked: what was recorded has not run."""

Mark = Callable[[], int]
"""Marks a stream where it stands now and returns the token, or one of the constants above; never raises."""


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Where marks lie on the host's axis.

    Attributes:
        ns: int64, shape (n,), monotonic nanoseconds; anything where a mark is not `known`.
        known: bool, shape (n,).
        error_ns: how far all of them together may be off against the host's clock; differences are much better.
    """

    ns: NDArray[np.int64]
    known: NDArray[np.bool_]
    error_ns: float


class DeviceTimeline(Protocol):
    """What gives device times; `CudaTimeline` is the real one."""

    @property
    def default(self) -> Mark:
        """Marks the stream that a scope without one of its own means, looked up at each call where it may change."""
        ...

    def mark_of(self, stream: object) -> Mark:
        """The mark of one stream.

        Raises:
            TypeError: `stream` is no stream.
        """
        ...

    def frontier(self) -> tuple[int, ...]:
        """The last token of every stream; when the device has passed them, it has passed all tokens before them."""
        ...

    def follow(self) -> bool:
        """Look again whether a framework chooses the default stream; True if `default` is another mark now."""
        ...

    def passed(self, token: int) -> bool | None:
        """Whether the device has passed a mark, without waiting; None where that can not be told."""
        ...

    def wait(self, tokens: Sequence[int]) -> bool:
        """Wait without the interpreter lock until the device has passed these marks; False where that failed."""
        ...

    def stream(self, token: int) -> int:
        """The number, as of `streams`, of the stream of one mark."""
        ...

    def streams(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Small numbers that tell the streams of marks apart, -1 for none; shape (n,)."""
        ...

    def devices(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ordinals of the devices of marks, -1 for none; shape (n,)."""
        ...

    def mark_stream(self, stream: int) -> int:
        """Mark a stream by its number of `streams`; `NO_MARK` where this thread can not."""
        ...

    def place(self, tokens: NDArray[np.int64], host_ns: NDArray[np.int64]) -> DeviceTimes:
        """Where marks lie on the host's axis.

        Args:
            tokens: shape (n,), negative ones are unknown.
            host_ns: shape (n,), about when each was made, by the host's clock: their order in time.
        """
        ...

    def release(self, tokens: Sequence[int], *, passed: bool) -> None:
        """Forget these marks; `passed` tells whether the device is past all of them."""
        ...

    def tend(self) -> None:
        """What a worker does now and then while work goes on: tie the clocks together, use late events again."""
        ...

    def attributes(self, device: int) -> Mapping[str, str | int]:
        """What a step says of its device."""
        ...

    def close(self, *, forked: bool = False) -> None:
        """Make no more marks and let go of everything; in a forked child without touching the device."""
        ...


def no_mark() -> int:
    """The mark of a scope whose device time nobody takes."""
    return NO_MARK
