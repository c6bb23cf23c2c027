"""Copies between host and device as rows: the functions that stand in for `cuMemcpy*` of `cuda.bindings.driver`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from ..record.descriptors import Descriptor, count_argument
from ..record.lane import TAG_BYTES_READ
from ..taxonomy import SpanLevel
from .capture import Capture, driver_failure, driver_stream, streams
from .driver import open_driver

COPIES: Final = {
    "cuMemcpy": ("", ("dst", "src", "ByteCount")),
    "cuMemcpyAsync": ("", ("dst", "src", "ByteCount", "hStream")),
    "cuMemcpyHtoD": ("h2d", ("dstDevice", "srcHost", "ByteCount")),
    "cuMemcpyHtoDAsync": ("h2d", ("dstDevice", "srcHost", "ByteCount", "hStream")),
    "cuMemcpyDtoH": ("d2h", ("dstHost", "srcDevice", "ByteCount")),
    "cuMemcpyDtoHAsync": ("d2h", ("dstHost", "srcDevice", "ByteCount", "hStream")),
    "cuMemcpyDtoD": ("d2d", ("dstDevice", "srcDevice", "ByteCount")),
    "cuMemcpyDtoDAsync": ("d2d", ("dstDevice", "srcDevice", "ByteCount", "hStream")),
    "cuMemcpyPeer": ("d2d", ("dstDevice", "dstContext", "srcDevice", "srcContext", "ByteCount")),
    "cuMemcpyPeerAsync": ("d2d", ("dstDevice", "dstContext", "srcDevice", "srcContext", "ByteCount", "hStream")),
}
"""Functions with their direction, where the name has it, and their parameters."""


def copy_recorder(name: str, original: Callable[..., Any], capture: Capture) -> Callable[..., Any]:
    """The function that stands in for one of `COPIES`."""
    fixed, parameters = COPIES[name]

    @wraps(original)
    def copy(*arguments: Any, **keywords: Any) -> Any:
        if not capture.open:
            return original(*arguments, **keywords)

        def described() -> tuple[str, int, Any]:
            given = {**dict(zip(parameters, arguments, strict=False)), **keywords}
            direction = fixed or _direction(given["dst"], given["src"])
            return direction, int(given["ByteCount"]), driver_stream(given.get("hStream"))

        return record_copy(capture, described, original, arguments, keywords, driver_failure)

    return copy


def record_copy(
    capture: Capture,
    described: Callable[[], tuple[str, int, Any]],
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    failure: Callable[[Any], type[BaseException] | None] | None = None,
) -> Any:
    """Copy, with a row around it.

    Args:
        described: gives the direction ("" for what is no transfer), the bytes and the stream; it may raise.
    """
    lane = capture.lane()
    if lane is None:
        return call(*arguments, **keywords)
    try:
        direction, size, stream = described()
        info = streams.of(stream)
        tags = (TAG_BYTES_READ, count_argument("size", size))
    except Exception:  # wrong arguments are the original's to refuse
        return call(*arguments, **keywords)
    if not direction:
        return call(*arguments, **keywords)
    registry = lane.recorder.registry
    site = registry.bare_site(registry.descriptor(Descriptor(SpanLevel.Transfer, direction)))
    return capture.around(
        lane, site, info, call, arguments, keywords, tags=tags, failure=failure, level=SpanLevel.Transfer
    )


def _direction(target: Any, source: Any) -> str:
    """From where to where a copy between unified addresses goes; "" within the host."""
    ends = ("h" if _is_host(source) else "d", "h" if _is_host(target) else "d")
    return "" if ends == ("h", "h") else "2".join(ends)


def _is_host(address: Any) -> bool:
    driver = open_driver()
    if driver is None:
        return True
    bindings = driver.bindings
    with driver.relaxed():
        error, kind = bindings.cuPointerGetAttribute(
            bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, int(address)
        )
    # What the driver does not know is ordinary memory of the host.
    return error != driver.success or int(kind) == int(bindings.CUmemorytype.CU_MEMORYTYPE_HOST)
