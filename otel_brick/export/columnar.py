"""Rows as OTLP bytes without a Python object per row.

Each combination of descriptor and varint widths is encoded once by the official protobuf classes, with placeholders
where rows differ; rows are then written by copying such templates and patching ids, times and counts with numpy. The
bytes decode to what the official encoder makes of the same spans; they are never parsed back at run time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from opentelemetry.trace import SpanContext, Status, TraceFlags

from .. import semconv
from ..taxonomy import SpanLevel
from .attributes import count_attributes, failure, fixed_attributes, limited, span_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..record.batch import Batch
    from ..record.descriptors import Registry

MAX_TEMPLATES: Final = 16_384
MAX_VARINT: Final = 9
"""Bytes of the widest non-negative 63-bit varint."""
VARYING: Final = (
    semconv.BRICK_LAYER_INDEX,
    semconv.BRICK_ELEMENT_COUNT,
    semconv.BRICK_IO_SIZE,
    semconv.BRICK_IO_READ_SIZE,
    semconv.BRICK_IO_WRITE_SIZE,
)
"""The attributes that are patched, in the order in which `count_attributes` gives them."""
_HEAD_BYTES: Final = 38
"""Trace id, span id and parent id with their tags and lengths, which begin every span."""
_TIME_BYTES: Final = 18
"""Start and end with their tags."""


@dataclass(frozen=True, slots=True)
class _Template:
    """An encoded span with placeholders.

    Attributes:
        body: the span's fields, shape (bytes,).
        times: where the start's tag stands.
        varints: for each patched attribute its index in `VARYING`, offset and width.
    """

    body: NDArray[np.uint8]
    times: int
    varints: tuple[tuple[int, int, int], ...]


class ColumnarEncoder:
    """Encodes rows of batches; keeps a bounded number of templates between batches."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._templates: dict[tuple[int, ...], _Template] = {}

    def encode(
        self, batch: Batch, rows: NDArray[np.intp], ends: NDArray[np.int64], span_ids: NDArray[np.uint64]
    ) -> list[NDArray[np.uint8]]:
        """Encode rows of a batch.

        Args:
            rows: shape (n,), the rows to encode; the steps of all of them are recorded.
            ends: shape (len(batch),), monotonic nanoseconds at which spans end.
            span_ids: shape (len(batch),), never zero.

        Returns:
            Arrays of shape (spans, bytes), together n spans in no particular order: entries of `ScopeSpans.spans`,
            each with its tag and length.
        """
        if not len(rows):
            return []
        levels = self._registry.descriptor_level.data[batch.descriptor[rows]]
        heads, times = _heads(batch, rows, span_ids), _times(batch, rows, ends)
        values = _values(batch, rows, levels)
        widths = [_widths(column) for column in values]
        digits = [_digits(column, int(width.max())) for column, width in zip(values, widths, strict=True)]
        brick = np.where(levels == SpanLevel.Kernel, batch.brick_parent[rows], -1)
        brick = np.where(brick >= 0, batch.descriptor[brick], -1)
        order, bounds = _groups(batch, rows, brick, widths)
        tails = _tails(batch)
        blocks: list[NDArray[np.uint8]] = []
        for first, last in itertools.pairwise(bounds):
            group = order[first:last]
            lead = int(group[0])
            step = batch.steps[int(batch.step[rows[lead]])]
            template = self._template(
                int(batch.descriptor[rows[lead]]),
                int(brick[lead]),
                tuple(int(width[lead]) for width in widths),
                _error(batch, int(rows[lead])),
            )
            tail = tails.get(id(step), b"")
            prefix = b"\x12" + varint(len(template.body) + len(tail))
            at = len(prefix)
            block = np.empty((len(group), at + len(template.body) + len(tail)), np.uint8)
            block[:, :at] = np.frombuffer(prefix, np.uint8)
            block[:, at : at + len(template.body)] = template.body
            block[:, at + len(template.body) :] = np.frombuffer(tail, np.uint8)
            block[:, at : at + _HEAD_BYTES] = heads[group]
            block[:, at + template.times : at + template.times + _TIME_BYTES] = times[group]
            for column, offset, width in template.varints:
                block[:, at + offset : at + offset + width] = digits[column][group, :width]
            blocks.append(block)
        return blocks

    def _template(
        self, descriptor: int, brick: int, widths: tuple[int, ...], error: tuple[str, str] | None
    ) -> _Template:
        key = (descriptor, brick, *widths)
        template = self._templates.get(key) if error is None else None
        if template is None:
            first, present = self._encoded(descriptor, brick, widths, error, 0xAA)
            second, _ = self._encoded(descriptor, brick, widths, error, 0x55)
            template = _located(first, second, present, widths)
            if error is None and len(self._templates) < MAX_TEMPLATES:
                self._templates[key] = template
        return template

    def _encoded(
        self, descriptor: int, brick: int, widths: tuple[int, ...], error: tuple[str, str] | None, fill: int
    ) -> tuple[NDArray[np.uint8], list[int]]:
        """Encode one span with every byte that may vary set to `fill`; also which attributes it has."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan

        known = self._registry.descriptors
        identity = known[descriptor]
        layer, elements, _, read, written = (_filled(width, fill) for width in widths)
        attributes = fixed_attributes(identity, known[brick] if brick >= 0 else None)
        attributes |= count_attributes(identity.level, elements, read, written, layer)
        if widths[2]:
            attributes[semconv.BRICK_IO_SIZE] = _filled(widths[2], fill)
        if error is not None:
            attributes[semconv.ERROR_TYPE] = error[0]
        attributes = limited(attributes)
        identifier = int.from_bytes(bytes([fill]) * 16, "big")
        short = identifier & (1 << 64) - 1
        time = int.from_bytes(bytes([fill]) * 8, "little") & (1 << 64) - 1
        span = ReadableSpan(
            name=span_name(identity),
            context=SpanContext(identifier, short, False, TraceFlags(1)),
            parent=SpanContext(identifier, short, False, TraceFlags(1)),
            resource=Resource.get_empty(),
            attributes=attributes,
            status=Status() if error is None else failure(error),
            start_time=time,
            end_time=time,
        )
        message = encode_spans([span]).resource_spans[0].scope_spans[0].spans[0]
        present = [column for column, name in enumerate(VARYING) if name in attributes]
        return np.frombuffer(message.SerializeToString(deterministic=True), np.uint8), present


def _located(
    first: NDArray[np.uint8], second: NDArray[np.uint8], present: list[int], widths: tuple[int, ...]
) -> _Template:
    """Find the placeholders: the two encodings differ in exactly their bytes.

    Raises:
        RuntimeError: the protobuf library lays spans out in another way than by field number.
    """
    places = np.flatnonzero(first != second) if len(first) == len(second) else np.empty(0, np.intp)
    sizes = [16, 8, 8, 8, 8, *(widths[column] for column in present)]
    starts = np.cumsum([0, *sizes])
    if len(places) != starts[-1]:
        raise RuntimeError("spans are not encoded as expected: placeholders are missing")
    offsets = places[starts[:-1]].tolist()
    begin, end = offsets[3], offsets[4]
    if offsets[:3] != [2, 20, 30] or end != begin + 9:
        raise RuntimeError("spans are not encoded as expected: fields are in another order")
    varints = tuple((column, offset, widths[column]) for column, offset in zip(present, offsets[5:], strict=True))
    return _Template(first, begin - 1, varints)


def varint(value: int) -> bytes:
    """A non-negative integer in protobuf's variable-length encoding."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _filled(width: int, fill: int) -> int:
    """A value whose varint has `width` bytes, all different from those of another fill; -1 for width 0."""
    return sum((fill & 0x7F) << 7 * place for place in range(width)) if width else -1


def _groups(
    batch: Batch, rows: NDArray[np.intp], brick: NDArray[np.int32], widths: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.intp], list[int]]:
    """Order rows so that those of one template and tail are neighbours; also where each group begins."""
    key = batch.descriptor[rows].astype(np.int64) << 20 | (brick.astype(np.int64) + 1)
    for width in widths:
        key = key << 4 | width
    rare = _rare(batch, rows)
    order = np.argsort(key, kind="stable") if rare is None else np.lexsort((key, rare))
    changes = np.diff(key[order], prepend=-1) != 0
    if rare is not None:
        changes |= np.diff(rare[order], prepend=-1) != 0
    return order, [*np.flatnonzero(changes).tolist(), len(rows)]


def _rare(batch: Batch, rows: NDArray[np.intp]) -> NDArray[np.int64] | None:
    """A number for what few rows have: an error, a trace state. None where no row has any."""
    failed = np.flatnonzero(batch.error[rows] >= 0)
    states = np.array([_state(step.parent) is not None for step in batch.steps], np.bool_)
    if not len(failed) and not states.any():
        return None
    numbers: dict[object, int] = {None: 0}
    of_step = [numbers.setdefault(_state(step.parent), len(numbers)) for step in batch.steps]
    rare = np.array(of_step, np.int64)[batch.step[rows]] << 32
    errors: dict[object, int] = {None: 0}
    for position in failed.tolist():
        rare[position] |= errors.setdefault(_error(batch, int(rows[position])), len(errors))
    return rare


def _error(batch: Batch, row: int) -> tuple[str, str] | None:
    error = int(batch.error[row])
    return None if error < 0 else batch.steps[int(batch.step[row])].error_at(error)


def _state(context: SpanContext | None) -> str | None:
    if context is None or not context.trace_state:
        return None
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items())


def _tails(batch: Batch) -> dict[int, bytes]:
    """The encoded trace state of the steps that have one, by the step's id()."""
    tails: dict[int, bytes] = {}
    for step in batch.steps:
        state = _state(step.parent)
        if state is not None:
            text = state.encode()
            tails[id(step)] = b"\x1a" + varint(len(text)) + text
    return tails


def _heads(batch: Batch, rows: NDArray[np.intp], span_ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
    parents = [step.parent for step in batch.steps]
    traces = b"".join(bytes(16) if parent is None else parent.trace_id.to_bytes(16, "big") for parent in parents)
    of_step = np.array([0 if parent is None else parent.span_id for parent in parents], np.uint64)
    step, above = batch.step[rows], batch.parent[rows]
    heads = np.empty((len(rows), _HEAD_BYTES), np.uint8)
    heads[:, 0:2] = (0x0A, 16)
    heads[:, 2:18] = np.frombuffer(traces, np.uint8).reshape(-1, 16)[step]
    heads[:, 18:20] = (0x12, 8)
    heads[:, 20:28] = _big_endian(span_ids[rows])
    heads[:, 28:30] = (0x22, 8)
    heads[:, 30:38] = _big_endian(np.where(above >= 0, span_ids[above], of_step[step]))
    return heads


def _big_endian(ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return np.frombuffer(ids.astype(">u8").tobytes(), np.uint8).reshape(-1, 8)


def _times(batch: Batch, rows: NDArray[np.intp], ends: NDArray[np.int64]) -> NDArray[np.uint8]:
    offset = np.array([step.offset_ns for step in batch.steps], np.int64)[batch.step[rows]]
    times = np.empty((len(rows), _TIME_BYTES), np.uint8)
    times[:, 0] = 0x39
    times[:, 1:9] = _little_endian(batch.start[rows] + offset)
    times[:, 9] = 0x41
    times[:, 10:18] = _little_endian(ends[rows] + offset)
    return times


def _little_endian(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.frombuffer(values.astype("<i8").tobytes(), np.uint8).reshape(-1, 8)


def _values(batch: Batch, rows: NDArray[np.intp], levels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The values of `VARYING`, -1 where a row does not have the attribute."""
    read, written = batch.bytes_read[rows], batch.bytes_written[rows]
    both = np.maximum(read, 0).astype(np.uint64) + np.maximum(written, 0).astype(np.uint64)
    moved = np.minimum(both, np.uint64((1 << 63) - 1)).astype(np.int64)
    in_layer = (levels == SpanLevel.Layer) | (levels == SpanLevel.Brick)
    return [
        np.where(in_layer, batch.layer[rows], -1).astype(np.int64),
        batch.elements[rows],
        np.where((read >= 0) | (written >= 0), moved, -1),
        read,
        written,
    ]


def _widths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each value's varint, 0 for -1."""
    widths = (values >= 0).astype(np.int64)
    most = int(values.max())
    for width in range(1, MAX_VARINT):
        if most < 1 << 7 * width:
            break
        widths += values >= 1 << 7 * width
    return widths


def _digits(values: NDArray[np.int64], most: int) -> NDArray[np.uint8]:
    """The varint bytes of each value, shape (n, most); bytes beyond a value's width mean nothing."""
    digits = np.empty((len(values), most), np.uint8)
    rest = np.maximum(values, 0)
    for place in range(most):
        digits[:, place] = rest & 0x7F
        rest = rest >> 7
        digits[:, place] |= (rest != 0).astype(np.uint8) << 7
    return digits
