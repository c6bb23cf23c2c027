"""The border to cuda-python: the only module that imports it for the timeline, and what its calls mean to us.

`open_driver` gives a `Driver` or None, once a process; nothing here makes a context, and nothing raises when CUDA is
missing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

logger = logging.getLogger("otel_brick")

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2


class Driver:
    """The calls of `cuda.bindings.driver` and the classes of `cuda.core` that device time needs."""

    def __init__(self) -> None:
        # Neither package has types, which an import by name would be blamed for.
        self.bindings: Any = import_module("cuda.bindings.driver")
        self.core: Any = import_module("cuda.core")
        driver = self.bindings
        self.success: Any = driver.CUresult.CUDA_SUCCESS
        self.not_capturing: Any = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.capture_implicit: Any = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        self.timed: Any = self.core.EventOptions(timing_enabled=True)
        self._relaxed: Any = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def ready(self) -> bool:
        """Whether the driver answers; asked once, before anything that could hang without one."""
        return self.bindings.cuInit(0)[0] == self.success

    def has_context(self) -> bool:
        """Whether a context is current on this thread."""
        error, context = self.bindings.cuCtxGetCurrent()
        return error == self.success and int(context) != 0

    def context_of(self, stream: Any) -> Any:
        """The context that a stream of `cuda.core` belongs to; for the default streams, the current one."""
        error, *found = self.bindings.cuStreamGetCtx(stream.handle)
        return found[0] if error == self.success else self.bindings.cuCtxGetCurrent()[1]

    @contextmanager
    def within(self, context: Any) -> Generator[None]:
        """Make streams and events in a context, whichever is current, if any is."""
        error, current = self.bindings.cuCtxGetCurrent()
        there = error == self.success and int(current) == int(context)
        pushed = not there and self.bindings.cuCtxPushCurrent(context)[0] == self.success
        try:
            yield
        finally:
            if pushed:
                self.bindings.cuCtxPopCurrent()

    @contextmanager
    def relaxed(self) -> Generator[None]:
        """Query and wait without harm to a capture that this or another thread has under way.

        In the driver's default mode such a call is an error of the capture, which then is lost to its owner.
        """
        exchange = self.bindings.cuThreadExchangeStreamCaptureMode
        error, before = exchange(self._relaxed)
        try:
            yield
        finally:
            if error == self.success:
                exchange(before)


_driver: Driver | None = None
_tried = False


def open_driver() -> Driver | None:
    """The driver of this process; None where there is none, which one debug line says."""
    global _driver, _tried
    if not _tried:
        _tried = True
        try:
            found = Driver()
            if found.ready():
                _driver = found
            else:
                logger.debug("the CUDA driver does not start; times are those of the host")
        except ImportError as error:
            logger.debug("cuda-python is not installed (%s); times are those of the host", error)
        except Exception as error:  # no libcuda, or one too old
            logger.debug("no CUDA driver (%s: %s); times are those of the host", type(error).__name__, error)
    return _driver


def forget_driver() -> None:
    """In a forked child: CUDA does not work there, so it is not touched again."""
    global _driver, _tried
    _driver, _tried = None, True


def stream_handle(stream: object) -> int:
    """The handle of anything that stands for a CUDA stream; both spellings of the legacy default stream are 1.

    Args:
        stream: an integer handle, or an object with `__cuda_stream__`, `cuda_stream` (torch) or `ptr` (CuPy).

    Raises:
        TypeError: for everything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream or LEGACY_STREAM
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair: Any = protocol() if callable(protocol) else protocol
        return int(pair[1]) or LEGACY_STREAM
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int) and not isinstance(handle, bool):
            return handle or LEGACY_STREAM
    raise TypeError(
        f"stream must be a CUDA stream (an object with __cuda_stream__, or its integer handle), not "
        f"{type(stream).__name__} ({stream!r})"
    )


def default_stream() -> int:
    """The default stream that cuda-python means in this process: the legacy one unless the environment says other."""
    chosen = os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "").strip()
    return PER_THREAD_STREAM if chosen not in ("", "0") else LEGACY_STREAM


def framework_stream() -> Any:
    """A function that gives the handle of the stream that torch or CuPy use now; None where neither uses CUDA.

    It looks at what the program has imported already, and neither imports nor initialises anything.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return lambda: torch.cuda.current_stream().cuda_stream
        cupy: Any = sys.modules.get("cupy")
        if cupy is not None:
            return lambda: cupy.cuda.get_current_stream().ptr
    except Exception as error:
        logger.debug("the framework's current stream can not be had", exc_info=error)
    return None
