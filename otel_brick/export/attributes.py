"""Span names and attributes of rows, built from descriptors and counts; the same for every encoder."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from opentelemetry.trace import Status, StatusCode

from .. import semconv
from ..record.batch import CAPTURED
from ..record.budgets import EXCEEDED, UNFINISHED
from ..record.descriptors import OVERFLOW_NAME
from ..taxonomy import SpanLevel, TimingSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..record.batch import Batch
    from ..record.descriptors import Descriptor, Launch, Registry

Attributes = dict[str, Any]

_GRID: Final = (semconv.BRICK_CUDA_GRID_X, semconv.BRICK_CUDA_GRID_Y, semconv.BRICK_CUDA_GRID_Z)
_BLOCK: Final = (semconv.BRICK_CUDA_BLOCK_X, semconv.BRICK_CUDA_BLOCK_Y, semconv.BRICK_CUDA_BLOCK_Z)
_CLUSTER: Final = (semconv.BRICK_CUDA_CLUSTER_X, semconv.BRICK_CUDA_CLUSTER_Y, semconv.BRICK_CUDA_CLUSTER_Z)
_NOT_GIVEN: Final = (None, None, None)


def span_name(descriptor: Descriptor) -> str:
    """A name of low cardinality: no index, shape or hash."""
    if descriptor.level is SpanLevel.Layer:
        return f"layer {descriptor.name}" if descriptor.name else "layer"
    if descriptor.level is SpanLevel.Transfer and descriptor.name != OVERFLOW_NAME:
        return f"transfer {descriptor.name}"
    return _name(descriptor) or "cuda kernel"


def _name(descriptor: Descriptor) -> str:
    """The name of a descriptor; that of a kernel whose launch was seen is known only now."""
    kernel = None if descriptor.launch is None else descriptor.launch.kernel
    return descriptor.name if kernel is None else kernel.name


def fixed_attributes(descriptor: Descriptor, brick: Descriptor | None) -> Attributes:
    """What a descriptor says by itself.

    Args:
        brick: the brick that a kernel belongs to, whose name the kernel repeats.
    """
    attributes: Attributes = {semconv.BRICK_SPAN_LEVEL: descriptor.level.attribute_value}
    if descriptor.level is SpanLevel.Layer and descriptor.name:
        attributes[semconv.BRICK_LAYER_TYPE] = descriptor.name
    if descriptor.level is SpanLevel.Brick:
        attributes[semconv.BRICK_NAME] = descriptor.name
    if descriptor.category is not None:
        attributes[semconv.BRICK_CATEGORY] = descriptor.category.attribute_value
    if descriptor.level is SpanLevel.Kernel:
        if brick is not None:
            attributes[semconv.BRICK_NAME] = brick.name
        name = _name(descriptor)
        if name:
            attributes[semconv.BRICK_CUDA_KERNEL_NAME] = name
    if descriptor.level is SpanLevel.Transfer and descriptor.name != OVERFLOW_NAME:
        attributes[semconv.BRICK_TRANSFER_DIRECTION] = descriptor.name
    if descriptor.launch is not None:
        attributes |= _launch_attributes(descriptor.launch)
    return attributes


def _launch_attributes(launch: Launch) -> Attributes:
    kernel = launch.kernel
    known = (
        (semconv.BRICK_CUDA_PTX_HASH, launch.ptx_hash if kernel is None else kernel.ptx_hash),
        *zip(_GRID, launch.grid or _NOT_GIVEN, strict=True),
        *zip(_BLOCK, launch.block or _NOT_GIVEN, strict=True),
        *zip(_CLUSTER, launch.cluster or _NOT_GIVEN, strict=True),
        (semconv.BRICK_CUDA_SHARED_MEMORY_DYNAMIC_SIZE, launch.shared_mem),
        (semconv.BRICK_CUDA_SHARED_MEMORY_STATIC_SIZE, None if kernel is None else kernel.static_shared_mem),
        (semconv.BRICK_CUDA_REGISTER_COUNT, None if kernel is None else kernel.registers),
        (semconv.BRICK_CUDA_STREAM_ID, launch.stream),
        (semconv.BRICK_CUDA_DEVICE_INDEX, launch.device),
        (semconv.BRICK_CUDA_GRAPH_REPLAY, launch.replay or None),
    )
    attributes: Attributes = {key: value for key, value in known if value is not None}
    if semconv.BRICK_CUDA_PTX_HASH in attributes:
        attributes[semconv.BRICK_CUDA_PTX_HASH] = f"{attributes[semconv.BRICK_CUDA_PTX_HASH]:016x}"
    return attributes


def count_attributes(level: SpanLevel, elements: int, read: int, written: int, layer: int) -> Attributes:
    """What varies from row to row; -1 stands for a count that was not given and sends nothing."""
    attributes: Attributes = {}
    if layer >= 0 and level in (SpanLevel.Layer, SpanLevel.Brick):
        attributes[semconv.BRICK_LAYER_INDEX] = layer
    if elements >= 0:
        attributes[semconv.BRICK_ELEMENT_COUNT] = elements
    if read >= 0 or written >= 0:
        # The sum of two 63-bit counts may need 64 bits, which OTLP's signed integers do not have.
        attributes[semconv.BRICK_IO_SIZE] = min(max(read, 0) + max(written, 0), (1 << 63) - 1)
    if read >= 0 and level is not SpanLevel.Transfer:
        attributes[semconv.BRICK_IO_READ_SIZE] = read
    if written >= 0 and level is not SpanLevel.Transfer:
        attributes[semconv.BRICK_IO_WRITE_SIZE] = written
    return attributes


def budget_attributes(budget_s: float, verdict: int) -> Attributes:
    """What a brick's budget, in seconds, and the verdict on the row say; a verdict of 0 sends nothing."""
    attributes: Attributes = {}
    if verdict:
        attributes[semconv.BRICK_BUDGET_DURATION] = budget_s
        if verdict != UNFINISHED:
            attributes[semconv.BRICK_BUDGET_EXCEEDED] = verdict == EXCEEDED
    return attributes


def origins(batch: Batch, registry: Registry) -> NDArray[np.int64] | None:
    """What each row says of its times beside its step: shape (n,), below 8; None where no row says anything.

    The two lower bits hold a `TimingSource` plus 1 where it differs from the step's; layers say none. The third says
    that the row was captured into a graph.
    """
    of_step = np.array([record.source for record in batch.steps], np.uint8)
    differs = batch.source != of_step[batch.step]
    captured = batch.flags & CAPTURED != 0
    if not (differs.any() or captured.any()):
        return None
    differs &= registry.descriptor_level.data[batch.descriptor] >= SpanLevel.Brick
    return differs * (batch.source.astype(np.int64) + 1) + 4 * captured.astype(np.int64)


def origin_attributes(origin: int) -> Attributes:
    """The attributes behind a number of `origins`."""
    attributes: Attributes = {}
    if origin & 3:
        attributes[semconv.BRICK_TIMING_SOURCE] = TimingSource((origin & 3) - 1).attribute_value
    if origin & 4:
        attributes[semconv.BRICK_CUDA_GRAPH_CAPTURED] = True
    return attributes


def failure(error: tuple[str, str]) -> Status:
    """The status of a failed row: the message adds to `error.type`, the qualified class name."""
    return Status(StatusCode.ERROR, error[1] or None)


def limited(attributes: Attributes) -> Attributes:
    """Apply the environment's span limits, which the SDK applies only to spans that it made itself."""
    from opentelemetry.sdk.trace import SpanLimits

    limits = SpanLimits()
    count, length = limits.max_span_attributes, limits.max_span_attribute_length
    if count is not None and len(attributes) > count:
        attributes = dict(islice(attributes.items(), count))
    if length is not None:
        attributes = {key: value[:length] if isinstance(value, str) else value for key, value in attributes.items()}
    return attributes
