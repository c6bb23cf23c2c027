"""When a profiler begins to take device time: a stream given, a launch seen, or a framework that uses CUDA already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .driver import framework_stream, open_driver, stream_handle

if TYPE_CHECKING:
    from ..record.device import Finder
    from ..record.marks import DeviceTimeline
    from ..record.recorder import Recorder

CROWDED_ROWS = 8_192
"""What the worker is told waits when many events do: as many rows as it does not wait any longer for."""


def finder(recorder: Recorder, given: object) -> Finder:
    """The function that looks for a recorder's timeline.

    Args:
        given: the stream that the profiler was given, None for none.

    Raises:
        TypeError: `given` is no stream.
    """
    if given is not None:
        stream_handle(given)

    def find(stream: object) -> DeviceTimeline | None:
        if stream is not None:
            stream_handle(stream)
        elif given is None and not _framework_uses_cuda():
            return None
        driver = open_driver()
        if driver is None:
            return None
        from .cuda import CudaTimeline

        return CudaTimeline(
            driver,
            recorder.clock.now,
            recorder.losses,
            stream=given,
            crowded=lambda: recorder.notify(CROWDED_ROWS),
        )

    return find


def _framework_uses_cuda() -> bool:
    """Whether torch or CuPy are imported and have a CUDA context; cheap, since every step asks until it is so."""
    if "torch" not in sys.modules and "cupy" not in sys.modules:
        return False
    if framework_stream() is None:
        return False
    driver = open_driver()
    return driver is not None and driver.has_context()
