"""Kernel launches and graph launches as rows: the functions that stand in for those of cuda-python.

`launch` is a plain closure, since it is in the way of every launch: for a kernel and stream that it has seen with the
same configuration it compares, writes four integers, and does nothing else. Everything that is not so goes through
`Capture.around`.
"""

# The function that is in the way of every launch has no assignment to spare.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

from ..record.descriptors import Launch
from ..record.lane import SPILL_LENGTH, innermost
from ..taxonomy import SpanLevel
from .capture import Capture, Launches, StreamInfo, driver_failure, driver_stream, streams
from .kernels import identities

if TYPE_CHECKING:
    from ..record.recorder import Recorder

GRAPH_BRICK: Final = "CudaGraph"
"""The brick that a graph launch is."""
_LAUNCH_PARAMETERS: Final = (
    *("f", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"),
    *("sharedMemBytes", "hStream", "kernelParams", "extra"),
)


def launch_recorder(original: Callable[..., Any], capture: Capture, core: Any) -> Callable[..., Any]:
    """The function that stands in for `cuda.core.launch`.

    Args:
        original: what it calls.
        core: the module `cuda.core`.
    """
    current: Callable[[], Any] = innermost.get
    around, outside, nowhere = capture.around, capture.outside, cast("object", None)

    def launch_otherwise(stream: Any, config: Any, kernel: Any, kernel_args: tuple[Any, ...]) -> Any:
        lane = capture.lane()
        if lane is not None:
            try:
                found = _prepared(lane.recorder, core, stream, config, kernel)
            except Exception as error:
                found = None
                capture.failed(lane.recorder, error)
            if found is not None:
                site, info, captured = found
                return around(lane, site, info, original, (stream, config, kernel, *kernel_args), {}, captured=captured)
        return original(stream, config, kernel, *kernel_args)

    @wraps(original)
    def launch(stream: Any, config: Any, kernel: Any, *kernel_args: Any) -> Any:
        lane = current()
        begin = None
        if lane is nowhere and (outside is None or not outside.on):
            return original(stream, config, kernel, *kernel_args)
        try:
            grid, block, cluster, shared_mem, stream_ref, enter, leave, now, _ = lane.launches[id(kernel)]
            if (
                # Comparing identities first: attributes of one configuration are the same objects each time.
                config.grid is grid
                and config.block is block
                and config.cluster is cluster
                and config.shmem_size == shared_mem
                and stream_ref() is stream
            ) or (
                stream_ref() is stream
                and config.shmem_size == shared_mem
                and (config.grid, config.block, config.cluster) == (grid, block, cluster)
            ):
                begin = now()
        except Exception:  # a kernel that is not known, an argument that the original will refuse, or no lane
            begin = None
        if begin is None:
            return launch_otherwise(stream, config, kernel, kernel_args)
        try:
            # Without arguments this is a cheaper call.
            result = original(stream, config, kernel, *kernel_args) if kernel_args else original(stream, config, kernel)
        except BaseException as error:
            capture.close_failed(lane, enter, begin, error)
            raise
        try:
            # As `extend` of the list itself: a step may have closed meanwhile.
            lane += (enter, begin, leave, now())
            if len(lane) > SPILL_LENGTH:
                lane.spill()
        except Exception as error:
            capture.failed(lane.recorder, error)
        return result

    def stop() -> None:
        nonlocal current
        current = _nowhere

    capture.when_closed(stop)
    return launch


def _nowhere() -> Any:
    """The lane of a function that records nothing any more."""


def _prepared(
    recorder: Recorder, core: Any, stream: Any, config: Any, kernel: Any
) -> tuple[int, StreamInfo, bool] | None:
    """The site and stream of a launch, and whether it is captured; None for arguments that cuda.core does not take."""
    known = recorder.launches.get(id(kernel))
    if known is not None and known[4]() is stream:
        signature = (config.grid, config.block, config.cluster, config.shmem_size)
        if signature == known[:4]:
            return known[5], known[8], False
    if not (isinstance(config, core.LaunchConfig) and isinstance(kernel, core.Kernel)):
        return None
    try:
        info = streams.of(stream)
    except TypeError:
        return None
    launches = Launches.of(recorder)
    seen = launches.seen(kernel)
    grid, block, cluster, shared_mem = signature = (config.grid, config.block, config.cluster, config.shmem_size)
    site = seen.sites.get((signature, info.ordinal))
    if site is None:
        if cluster is not None:
            x, y, z = (count * size for count, size in zip(grid, cluster, strict=True))
            grid = (x, y, z)
        identity = identities.of(kernel, info.device)
        launch = Launch(None, grid, block, shared_mem, cluster, info.ordinal, info.device, identity)
        site = launches.site(launch, seen.sites, (signature, info.ordinal))
    if isinstance(stream, core.Stream):
        if recorder.on:
            recorder.launches[id(kernel)] = (*signature, weakref.ref(stream), site, ~site, launches.now, info)
        return site, info, False
    return site, info, isinstance(stream, core.graph.GraphBuilder)


def driver_launch_recorder(original: Callable[..., Any], capture: Capture) -> Callable[..., Any]:
    """The function that stands in for `cuda.bindings.driver.cuLaunchKernel`."""

    def described(given: dict[str, Any]) -> tuple[Any, Launch, Any]:
        grid = (int(given["gridDimX"]), int(given["gridDimY"]), int(given["gridDimZ"]))
        block = (int(given["blockDimX"]), int(given["blockDimY"]), int(given["blockDimZ"]))
        return given["f"], Launch(None, grid, block, int(given["sharedMemBytes"])), given["hStream"]

    return _driver_recorder(original, capture, _LAUNCH_PARAMETERS, described)


def driver_launch_ex_recorder(original: Callable[..., Any], capture: Capture, driver: Any) -> Callable[..., Any]:
    """The function that stands in for `cuda.bindings.driver.cuLaunchKernelEx`.

    Args:
        driver: the module `cuda.bindings.driver`.
    """
    cluster_attribute = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION

    def described(given: dict[str, Any]) -> tuple[Any, Launch, Any]:
        config = given["config"]
        grid = (int(config.gridDimX), int(config.gridDimY), int(config.gridDimZ))
        block = (int(config.blockDimX), int(config.blockDimY), int(config.blockDimZ))
        cluster = None
        for attribute in config.attrs if config.numAttrs else ():
            if attribute.id == cluster_attribute:
                size = attribute.value.clusterDim
                cluster = (int(size.x), int(size.y), int(size.z))
        return given["f"], Launch(None, grid, block, int(config.sharedMemBytes), cluster), config.hStream

    return _driver_recorder(original, capture, ("config", "f", "kernelParams", "extra"), described)


def _driver_recorder(
    original: Callable[..., Any],
    capture: Capture,
    parameters: tuple[str, ...],
    described: Callable[[dict[str, Any]], tuple[Any, Launch, Any]],
) -> Callable[..., Any]:
    """A launch function of the bindings, which take bare handles and return errors."""

    @wraps(original)
    def launch(*arguments: Any, **keywords: Any) -> Any:
        lane = capture.lane()
        if lane is None:
            return original(*arguments, **keywords)
        try:
            # As the call has it, so that wrong arguments are the original's to refuse.
            function, signature, stream = described({**dict(zip(parameters, arguments, strict=False)), **keywords})
            info = streams.of(driver_stream(stream))
            identity = identities.of_function(function, info.device)
            launches = Launches.of(lane.recorder)
            key = (identity, signature, info.ordinal)
            site = launches.bare_sites.get(key)
            if site is None:
                whole = replace(signature, stream=info.ordinal, device=info.device, kernel=identity)
                site = launches.site(whole, launches.bare_sites, key)
        except Exception:
            return original(*arguments, **keywords)
        return capture.around(lane, site, info, original, arguments, keywords, failure=driver_failure)

    return launch


def graph_recorder(original: Callable[..., Any], capture: Capture) -> Callable[..., Any]:
    """The function that stands in for `cuda.bindings.driver.cuGraphLaunch`."""

    @wraps(original)
    def launch_graph(*arguments: Any, **keywords: Any) -> Any:
        stream = keywords["hStream"] if "hStream" in keywords else arguments[1] if len(arguments) > 1 else None
        return replay(capture, driver_stream, stream, original, arguments, keywords, driver_failure)

    return launch_graph


def replay(
    capture: Capture,
    as_stream: Callable[[Any], Any],
    stream: Any,
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    failure: Callable[[Any], type[BaseException] | None] | None = None,
) -> Any:
    """Launch a graph as a brick of its own, since none of the kernels in it has a launch that could be seen."""
    lane = capture.lane()
    if lane is None:
        return call(*arguments, **keywords)
    try:
        info = streams.of(as_stream(stream))
        registry = lane.recorder.registry
        brick = replace(registry.brick(GRAPH_BRICK), launch=Launch(replay=True))
        site = registry.bare_site(registry.descriptor(brick))
    except Exception:
        return call(*arguments, **keywords)
    return capture.around(lane, site, info, call, arguments, keywords, failure=failure, level=SpanLevel.Brick)


def unload_observer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that stands in for `cuModuleUnload` and `cuLibraryUnload`: handles may come again afterwards."""

    @wraps(original)
    def unload(*arguments: Any, **keywords: Any) -> Any:
        identities.forget_functions()
        return original(*arguments, **keywords)

    return unload
