"""Span names and attributes of rows, built from descriptors and counts; the same for every encoder."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Status, StatusCode

from .. import semconv
from ..record.budgets import EXCEEDED, UNFINISHED
from ..taxonomy import SpanLevel

if TYPE_CHECKING:
    from ..record.descriptors import Descriptor, Launch

Attributes = dict[str, Any]


def span_name(descriptor: Descriptor) -> str:
    """A name of low cardinality: no index, shape or hash."""
    if descriptor.level is SpanLevel.Layer:
        return f"layer {descriptor.name}" if descriptor.name else "layer"
    return descriptor.name or "cuda kernel"


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
        if descriptor.name:
            attributes[semconv.BRICK_CUDA_KERNEL_NAME] = descriptor.name
    if descriptor.launch is not None:
        attributes |= _launch_attributes(descriptor.launch)
    return attributes


def _launch_attributes(launch: Launch) -> Attributes:
    attributes: Attributes = {}
    if launch.ptx_hash is not None:
        attributes[semconv.BRICK_CUDA_PTX_HASH] = f"{launch.ptx_hash:016x}"
    if launch.grid is not None:
        (
            attributes[semconv.BRICK_CUDA_GRID_X],
            attributes[semconv.BRICK_CUDA_GRID_Y],
            attributes[semconv.BRICK_CUDA_GRID_Z],
        ) = launch.grid
    if launch.block is not None:
        (
            attributes[semconv.BRICK_CUDA_BLOCK_X],
            attributes[semconv.BRICK_CUDA_BLOCK_Y],
            attributes[semconv.BRICK_CUDA_BLOCK_Z],
        ) = launch.block
    if launch.shared_mem is not None:
        attributes[semconv.BRICK_CUDA_SHARED_MEMORY_DYNAMIC_SIZE] = launch.shared_mem
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
    if read >= 0:
        attributes[semconv.BRICK_IO_READ_SIZE] = read
    if written >= 0:
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
