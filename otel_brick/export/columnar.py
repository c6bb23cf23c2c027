"""Rows as OTLP bytes without a Python object per row.

Each combination of descriptor, varint widths, verdict on a budget and source of the times is encoded once by the
official protobuf classes, with placeholders where rows differ; rows are then written by copying such templates and
patching ids, times, counts and budgets with numpy, all rows whose templates have their placeholders in the same places
at once. The bytes decode to what the official encoder makes of the same spans; they are never parsed back at run time.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from opentelemetry.trace import SpanContext, Status, TraceFlags

from .. import semconv
from ..record.budgets import judged
from ..record.descriptors import NO_COUNT
from ..record.intervals import heads_of
from ..taxonomy import SpanLevel
from .attributes import (
    budget_attributes,
    count_attributes,
    failure,
    fixed_attributes,
    limited,
    origin_attributes,
    origins,
    span_name,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..record.batch import Batch
    from ..record.descriptors import Registry
    from .display import Shown

MAX_TEMPLATES: Final = 16_384
MAX_VARINT: Final = 9
"""Bytes of the widest non-negative 63-bit varint."""
VARYING: Final = (
    semconv.BRICK_LAYER_INDEX,
    semconv.BRICK_ELEMENT_COUNT,
    semconv.BRICK_IO_SIZE,
    semconv.BRICK_IO_READ_SIZE,
    semconv.BRICK_IO_WRITE_SIZE,
    semconv.BRICK_BUDGET_DURATION,
)
"""The attributes that are patched, in their order in a span: varints, then a double."""
DOUBLE: Final = 8
"""Bytes of a double."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a template has its placeholders.

    Attributes:
        size: bytes of the entry.
        span: where the span's fields begin.
        start: where the value of its start stands; that of its end follows a tag later.
        patched: for each attribute that is patched its index in `VARYING`, place and width.
    """

    size: int
    span: int
    start: int
    patched: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """An encoded entry of `ScopeSpans.spans`, with its tag and length and with placeholders."""

    entry: bytes
    layout: _Layout

    @classmethod
    def of(cls, span: bytes, start: int, patched: Sequence[tuple[int, int, int]]) -> _Template:
        """Complete a span's fields to an entry; `start` and `patched` have places in the span."""
        head = b"\x12" + varint(len(span))
        at = len(head)
        moved = tuple((column, at + place, width) for column, place, width in patched)
        return cls(head + span, _Layout(at + len(span), at, at + start, moved))

    def with_tail(self, tail: bytes) -> _Template:
        """The same with further fields at the span's end."""
        at = self.layout.span
        patched = [(column, place - at, width) for column, place, width in self.layout.patched]
        return _Template.of(self.entry[at:] + tail, self.layout.start - at, patched)


class ColumnarEncoder:
    """Encodes rows of batches; keeps a bounded number of templates between batches."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._templates: dict[tuple[int, ...], _Template] = {}

    def encode(
        self, batch: Batch, rows: NDArray[np.intp], times: Shown, span_ids: NDArray[np.uint64]
    ) -> list[NDArray[np.uint8]]:
        """Encode rows of a batch.

        Args:
            rows: shape (n,), the rows to encode; the steps of all of them are recorded.
            times: when spans begin and end.
            span_ids: shape (len(batch),), never zero.

        Returns:
            Arrays of shape (spans, bytes), together n spans in no particular order: entries of `ScopeSpans.spans`,
            each with its tag and length.
        """
        if not len(rows):
            return []
        descriptor = batch.descriptor[rows]
        levels = self._registry.descriptor_level.data[descriptor]
        values = _values(batch, rows, levels)
        widths = [None if column is None else _widths(column) for column in values]
        budgets = judged(batch, self._registry)
        verdict = None if budgets is None else budgets.verdict[rows]
        brick = np.where(levels == SpanLevel.Kernel, batch.brick_parent[rows], -1)
        brick = np.where(brick >= 0, batch.descriptor[brick], -1)
        origin = origins(batch, self._registry)
        further = [*widths, verdict, None if origin is None else origin[rows]]
        order, heads = _groups(batch, rows, descriptor, brick, further)
        templates = self._found(batch, rows, order[heads], [descriptor, brick, *further])
        layouts: dict[_Layout, list[int]] = {}
        for number, template in enumerate(templates):
            layouts.setdefault(template.layout, []).append(number)
        counts = np.diff(heads, append=len(rows))
        if len(layouts) < len(templates):
            groups = list(itertools.chain.from_iterable(layouts.values()))
            order = order[_ranges(heads[groups], counts[groups])]
        columns = _Columns(batch, rows[order], times, span_ids)
        digits = [None if column is None else _digits(column[order]) for column in values]
        digits.append(None if budgets is None else _doubles(budgets.budget[rows[order]] / 1e9))
        blocks: list[NDArray[np.uint8]] = []
        first = 0
        for layout, groups in layouts.items():
            block = _copies([templates[number].entry for number in groups], counts[groups])
            own = slice(first, first + len(block))
            columns.patch(block, layout, own)
            for column, place, width in layout.patched:
                found = digits[column]
                assert found is not None
                block[:, place : place + width] = found[own, :width]
            blocks.append(block)
            first = own.stop
        return blocks

    def _found(
        self, batch: Batch, rows: NDArray[np.intp], leads: NDArray[np.intp], columns: Sequence[NDArray[Any] | None]
    ) -> list[_Template]:
        """The templates of some rows, by the columns that tell them apart."""
        none = [0] * len(leads)
        keys = zip(*(none if column is None else column[leads].tolist() for column in columns), strict=True)
        tails = _tails(batch)
        failed: list[int] = batch.error[rows[leads]].tolist()
        steps: list[int] = batch.step[rows[leads]].tolist()
        templates: list[_Template] = []
        for key, error, step in zip(keys, failed, steps, strict=True):
            template = self._templates.get(key) if error < 0 else None
            if template is None:
                template = self._made(key, None if error < 0 else batch.steps[step].error_at(error))
            templates.append(template.with_tail(tails[step]) if step in tails else template)
        return templates

    def _made(self, key: tuple[int, ...], error: tuple[str, str] | None) -> _Template:
        first, present = self._encoded(key, error, 0xAA)
        second, _ = self._encoded(key, error, 0x55)
        template = _located(first, second, present, [*key[2:-2], DOUBLE])
        if error is None and len(self._templates) < MAX_TEMPLATES:
            self._templates[key] = template
        return template

    def _encoded(self, key: tuple[int, ...], error: tuple[str, str] | None, fill: int) -> tuple[bytes, list[int]]:
        """Encode one span with every byte that may vary set to `fill`; also which attributes it has."""
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan

        descriptor, brick, *widths, verdict, origin = key
        known = self._registry.descriptors
        identity = known[descriptor]
        layer, elements, _, read, written = (_filled(width, fill) for width in widths)
        attributes = fixed_attributes(identity, known[brick] if brick >= 0 else None)
        attributes |= count_attributes(identity.level, elements, read, written, layer)
        if widths[2]:
            attributes[semconv.BRICK_IO_SIZE] = _filled(widths[2], fill)
        attributes |= budget_attributes(struct.unpack("<d", bytes([fill]) * DOUBLE)[0], verdict)
        attributes |= origin_attributes(origin)
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
        return message.SerializeToString(deterministic=True), present


class _Columns:
    """What every span has, in the order of `rows` and in the bytes of the encoding."""

    def __init__(self, batch: Batch, rows: NDArray[np.intp], times: Shown, span_ids: NDArray[np.uint64]) -> None:
        parents = [step.parent for step in batch.steps]
        traces = b"".join(bytes(16) if parent is None else parent.trace_id.to_bytes(16, "big") for parent in parents)
        of_step = np.array([0 if parent is None else parent.span_id for parent in parents], np.uint64)
        offset = np.array([step.offset_ns for step in batch.steps], np.int64)
        step, above = batch.step[rows], batch.parent[rows]
        self._ids: tuple[tuple[int, NDArray[Any]], ...] = (
            (2, np.frombuffer(traces, "V16")[step]),
            (20, span_ids[rows].astype(">u8")),
            (30, np.where(above >= 0, span_ids[above], of_step[step]).astype(">u8")),
        )
        self._start = (times.start[rows] + offset[step]).astype("<i8")
        self._end = (times.end[rows] + offset[step]).astype("<i8")

    def patch(self, block: NDArray[np.uint8], layout: _Layout, rows: slice) -> None:
        """Write the ids and times of some rows into their entries."""
        for place, column in self._ids:
            _write(block, layout.span + place, column[rows])
        _write(block, layout.start, self._start[rows])
        _write(block, layout.start + 9, self._end[rows])


def _write(block: NDArray[np.uint8], place: int, values: NDArray[Any]) -> None:
    block[:, place : place + values.itemsize].view(values.dtype)[:, 0] = values


def _copies(entries: list[bytes], counts: NDArray[np.intp]) -> NDArray[np.uint8]:
    """As many copies of each entry as `counts` says; all have the same size."""
    known = np.frombuffer(b"".join(entries), np.uint8).reshape(len(entries), -1)
    if len(known) == 1:
        block = np.empty((int(counts[0]), known.shape[1]), np.uint8)
        block[:] = known
        return block
    return np.take(known, np.repeat(np.arange(len(known)), counts), axis=0)


def _ranges(first: NDArray[np.intp], counts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The numbers from each `first` on, as many as `counts` says, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1])) + np.repeat(first - (ends - counts), counts)


def _located(first: bytes, second: bytes, present: list[int], widths: Sequence[int]) -> _Template:
    """Find the placeholders: the two encodings differ in exactly their bytes.

    Raises:
        RuntimeError: the protobuf library lays spans out in another way than by field number.
    """
    places = np.empty(0, np.intp)
    if len(first) == len(second):
        places = np.flatnonzero(np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8))
    sizes = [16, 8, 8, 8, 8, *(widths[column] for column in present)]
    starts = np.cumsum([0, *sizes])
    if len(places) != starts[-1]:
        raise RuntimeError("spans are not encoded as expected: placeholders are missing")
    offsets = places[starts[:-1]].tolist()
    begin, end = offsets[3], offsets[4]
    if offsets[:3] != [2, 20, 30] or end != begin + 9:
        raise RuntimeError("spans are not encoded as expected: fields are in another order")
    patched = [(column, offset, widths[column]) for column, offset in zip(present, offsets[5:], strict=True)]
    return _Template.of(first, begin, patched)


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
    batch: Batch,
    rows: NDArray[np.intp],
    descriptor: NDArray[np.int32],
    brick: NDArray[np.int32],
    further: Sequence[NDArray[np.int64] | None],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Order rows so that those of one template and tail are neighbours; also where each group begins.

    Args:
        further: what tells templates apart besides, numbers below 16; None for a column of zeros.
    """
    key = descriptor.astype(np.int64) << 20 | (brick.astype(np.int64) + 1)
    for column in further:
        if column is not None:
            key = key << 4 | column
    rare = _rare(batch, rows)
    if rare is None:
        order = np.argsort(key, kind="stable")
        return order, heads_of(key[order])
    order = np.lexsort((key, rare))
    return order, np.union1d(heads_of(key[order]), heads_of(rare[order]))


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
    """The encoded trace state of the steps that have one, by the step's number."""
    tails: dict[int, bytes] = {}
    for number, step in enumerate(batch.steps):
        state = _state(step.parent)
        if state is not None:
            text = state.encode()
            tails[number] = b"\x1a" + varint(len(text)) + text
    return tails


def _values(batch: Batch, rows: NDArray[np.intp], levels: NDArray[np.int64]) -> list[NDArray[np.int64] | None]:
    """The values of `VARYING`, -1 where a row does not have the attribute and None where no row has it."""
    layer, read, written = batch.layer[rows], batch.bytes_read[rows], batch.bytes_written[rows]
    moved: NDArray[np.int64] | None = None
    if int(read.max()) >= 0 or int(written.max()) >= 0:
        both = np.maximum(read, 0).astype(np.uint64) + np.maximum(written, 0).astype(np.uint64)
        bounded = np.minimum(both, np.uint64((1 << 63) - 1)).astype(np.int64)
        moved = np.where((read >= 0) | (written >= 0), bounded, -1)
        # A transfer reads what it writes, so it only says how much.
        copied = levels == SpanLevel.Transfer
        read, written = np.where(copied, NO_COUNT, read), np.where(copied, NO_COUNT, written)
    if int(layer.max()) >= 0:
        layer = np.where((levels == SpanLevel.Layer) | (levels == SpanLevel.Brick), layer, -1)
    columns = (layer.astype(np.int64), batch.elements[rows], moved, read, written)
    return [None if column is None or int(column.max()) < 0 else column for column in columns]


def _widths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each value's varint, 0 for -1."""
    widths = (values >= 0).astype(np.int64)
    most = int(values.max())
    for width in range(1, MAX_VARINT):
        if most < 1 << 7 * width:
            break
        widths += values >= 1 << 7 * width
    return widths


def _digits(values: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The varint bytes of each value, shape (n, bytes); bytes beyond a value's width mean nothing."""
    most = len(varint(int(values.max())))
    digits = np.empty((len(values), most), np.uint8)
    rest = np.maximum(values, 0)
    for place in range(most):
        digits[:, place] = rest & 0x7F
        rest = rest >> 7
        digits[:, place] |= (rest != 0).astype(np.uint8) << 7
    return digits


def _doubles(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """The bytes of each value, shape (n, DOUBLE)."""
    return values.astype("<f8").view(np.uint8).reshape(-1, DOUBLE)
