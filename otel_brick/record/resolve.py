"""Resolving: the logs of ended steps become one columnar batch, without a Python object or loop per row.

In come `Ended` steps and `Part`s of steps that reached their limit; out goes a `Batch`. Only a lane whose scopes were
closed wrongly is walked row by row (`balance.repair`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from ..taxonomy import SpanLevel, TimingSource
from .balance import Matched, match_lanes
from .batch import CAPTURED, COMPRESSED, CUT, LAUNCH_SPACING, LEFT_OPEN, OPEN, OUT_OF_ORDER, Batch, nearest
from .intervals import union_ns
from .lane import (
    TAG_ABANDONED,
    TAG_BYTES_READ,
    TAG_BYTES_WRITTEN,
    TAG_COMPRESSED,
    TAG_COVERED,
    TAG_DEFERRED,
    TAG_ELEMENTS,
    TAG_ERROR,
    TAG_LANE,
    TAG_LAYER,
    TAG_LIMIT,
    TAG_MARK,
    TAG_SPAN,
    TAG_SYNCED,
    TAG_TIMER,
    Lane,
)
from .marks import CAPTURED_MARK, NO_MARK
from .placing import carry_along, place_rows
from .recorder import Ended, Lanes, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .descriptors import Registry
    from .losses import Losses
    from .recorder import Item
    from .step import StepRecord

TIMER_SHIFT: Final = 32
"""Bits of a label that hold the site; the number of a timer stands above them."""


@dataclass(slots=True)
class _Blocks:
    """The parts of lanes that go into a batch; a list entry for each part."""

    lanes: list[Lane]
    steps: list[int]
    """Index of the part's step."""
    sizes: list[int]
    """Numbers in the part."""
    pieces: list[Sequence[int] | NDArray[np.int64]]
    """All numbers of all parts, in sequence; more than one piece for a part that was spilled."""
    partial: bool
    """There is one part, and its step is still open."""


@dataclass(slots=True)
class _Rows:
    """Rows on their way to a batch; all columns have length n, except `of_event`."""

    entry: NDArray[np.int64]
    """Position of the entry among the events."""
    of_event: NDArray[np.int32]
    """The row of each event, -1 for an exit that closed nothing."""
    block: NDArray[np.int32]
    parent: NDArray[np.int32]
    lane_parent: NDArray[np.int32]
    """The parent on the same lane."""
    site: NDArray[np.int64]
    timer: NDArray[np.int64]
    """The number of the row's timer plus 1, 0 for none."""
    flags: NDArray[np.uint8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    elements: NDArray[np.int64]
    bytes_read: NDArray[np.int64]
    bytes_written: NDArray[np.int64]
    layer: NDArray[np.int64]
    """The row's own layer index, -1 unless it is a layer."""
    error: NDArray[np.int64]
    span_id: NDArray[np.int64]
    covered: NDArray[np.int64]
    """Nanoseconds that bricks directly below account for."""
    source: NDArray[np.uint8]
    mark: NDArray[np.int64]
    """The token of the mark at the entry, `NO_MARK` for none."""


@dataclass(frozen=True, slots=True)
class _Tags:
    """What stands behind events; all of length t."""

    owner: NDArray[np.int64]
    """Position of the event before it, -1 for none."""
    kind: NDArray[np.int64]
    value: NDArray[np.int64]
    block: NDArray[np.int32]


def resolve(items: Sequence[Item], registry: Registry, losses: Losses) -> Batch:
    """Turn what was taken from the recorder into a batch, and count what was wrong with it."""
    steps, blocks = _blocks(items)
    flat = _concatenate(blocks)
    code, value = np.ascontiguousarray(flat[0::2]), np.ascontiguousarray(flat[1::2])
    block = np.repeat(np.arange(len(blocks.lanes), dtype=np.int32), np.array(blocks.sizes, np.int64) // 2)
    at = np.flatnonzero(code < TAG_LIMIT)
    # Each tag's owner is the event before it: its own position less the tags up to and including it.
    tags = _Tags(at - np.arange(1, len(at) + 1), code[at], value[at], block[at])
    if len(at):
        is_event = code > TAG_LIMIT
        code, value, block = code[is_event], value[is_event], block[is_event]
    label = code ^ (code >> 63)  # ~code for exits
    of_timer = (tags.kind == TAG_TIMER) & (tags.owner >= 0)
    label[tags.owner[of_timer]] += tags.value[of_timer] + 1 << TIMER_SHIFT
    rows = _rows(code, label, value, block, blocks, steps, registry, losses)
    losses.add("left_open", _apply(tags, rows))
    losses.add("out_of_order", int(np.count_nonzero(rows.flags & (OUT_OF_ORDER | LEFT_OPEN) == OUT_OF_ORDER)))
    if np.any(tags.kind == TAG_LANE):
        _join_lanes(tags, rows, code, block, blocks)
    if isinstance(items[0], Lanes):
        rows.flags |= CUT
    levels = registry.descriptor_level.data[registry.site_descriptor.data[rows.site]]
    step_of_block = np.array(blocks.steps, np.int32)
    overdue, ended = np.array([item.overdue for item in items], np.bool_), isinstance(items[0], Ended)
    _move(tags, rows, code, steps, step_of_block, levels, losses, overdue, ended=ended)
    brick_parent = _measure(rows, (levels == SpanLevel.Brick) & (rows.flags & LEFT_OPEN == 0))
    if blocks.partial:
        blocks.lanes[0].carry = _carry(rows, np.flatnonzero(rows.flags & OPEN))
    number_of_block = np.array([lane.number for lane in blocks.lanes], np.int32)
    return Batch(
        steps=steps,
        ended=ended,
        step=step_of_block[rows.block],
        lane=rows.block,
        lane_number=number_of_block[rows.block],
        descriptor=registry.site_descriptor.data[rows.site].astype(np.int32),
        parent=rows.parent,
        brick_parent=brick_parent,
        start=rows.start,
        end=rows.end,
        exclusive=np.where(levels == SpanLevel.Brick, np.maximum(rows.end - rows.start - rows.covered, 0), 0),
        elements=rows.elements,
        bytes_read=rows.bytes_read,
        bytes_written=rows.bytes_written,
        layer=_layers(rows),
        source=rows.source,
        error=rows.error.astype(np.int32),
        span_id=rows.span_id.astype(np.uint64),
        flags=rows.flags,
    )


def _blocks(items: Sequence[Item]) -> tuple[list[StepRecord], _Blocks]:
    if isinstance(items[0], Part):  # a part comes alone
        part = items[0]
        lane = part.lane
        chunks = part.chunks if lane.carry is None else [lane.carry, *part.chunks]
        lane.carry = None
        return [lane.record], _Blocks([lane], [0], [sum(map(len, chunks))], [*chunks], True)
    whole = cast("Sequence[Ended | Lanes]", items)
    records = [item.record for item in whole]
    blocks = _Blocks([], [], [], [], False)
    lanes, steps, sizes, pieces = blocks.lanes, blocks.steps, blocks.sizes, blocks.pieces
    groups = [items[0].lanes] if isinstance(items[0], Lanes) else [record.lanes for record in records]
    # One list for all lanes: many small ones would keep the garbage collector busier than the rows do us.
    run: list[int] = []
    for step, group in enumerate(groups):
        for lane in group:
            size = 0
            if lane.chunks or lane.carry is not None:
                arrays = lane.chunks if lane.carry is None else [lane.carry, *lane.chunks]
                lane.chunks, lane.carry = [], None
                size = sum(map(len, arrays))
                pieces += (run, *arrays)
                run = []
            # A thread that looked the lane up before it closed may still write to it; that stays behind.
            before = len(run)
            run += lane
            added = len(run) - before
            del lane[:added]
            if size + added:
                lanes.append(lane)
                steps.append(step)
                sizes.append(size + added)
    pieces.append(run)
    return records, blocks


def _concatenate(blocks: _Blocks) -> NDArray[np.int64]:
    """All numbers of all parts."""
    if len(blocks.pieces) == 1:
        return np.fromiter(blocks.pieces[0], np.int64, sum(blocks.sizes))
    return np.concatenate([np.asarray(piece, np.int64) for piece in blocks.pieces])


def _rows(
    code: NDArray[np.int64],
    label: NDArray[np.int64],
    value: NDArray[np.int64],
    block: NDArray[np.int32],
    blocks: _Blocks,
    steps: list[StepRecord],
    registry: Registry,
    losses: Losses,
) -> _Rows:
    """Match the events and fill the columns with what sites know."""
    if len(code):
        matched = match_lanes(code, label, np.flatnonzero(np.diff(block, prepend=-1)))
    else:
        none = np.empty(0, np.int64)
        matched = Matched(none, none, none, np.empty(0, np.bool_))
    entry, closed = matched.entry, matched.exit >= 0
    count = len(entry)
    of_event = np.full(len(code) + 1, -1, np.int32)
    of_event[entry] = of_event[matched.exit] = np.arange(count, dtype=np.int32)
    of_event[-1] = -1
    parent = of_event[matched.parent]
    row_block, site, start = block[entry], code[entry], value[entry]
    flags = np.where(matched.out_of_order, np.uint8(OUT_OF_ORDER), np.uint8(0))
    losses.add("closed_twice", matched.closed_twice)
    end = value[matched.exit] if count else start
    if blocks.partial:
        flags |= np.where(closed, np.uint8(CUT), np.uint8(OPEN))
        end = np.where(closed, end, np.iinfo(np.int64).max)
    elif not closed.all():
        losses.add("left_open", int(np.count_nonzero(~closed)))
        flags[~closed] |= LEFT_OPEN
        step_end = np.array([steps[step].end_ns for step in blocks.steps], np.int64)
        end = np.where(closed, end, np.maximum(step_end[row_block], start))
    backwards = end < start
    if backwards.any():
        losses.add("clock_anomaly", int(np.count_nonzero(backwards)))
        end = np.where(backwards, start, end)
    return _Rows(
        entry=entry,
        of_event=of_event,
        block=row_block,
        parent=parent,
        lane_parent=parent,
        site=site,
        timer=label[entry] >> TIMER_SHIFT,
        flags=flags,
        start=start,
        end=end,
        elements=registry.site_elements.data[site],
        bytes_read=registry.site_bytes_read.data[site],
        bytes_written=registry.site_bytes_written.data[site],
        layer=registry.site_layer.data[site],
        error=np.full(count, -1, np.int64),
        span_id=np.zeros(count, np.int64),
        covered=np.zeros(count, np.int64),
        source=np.full(count, TimingSource.Host, np.uint8),
        mark=np.full(count, NO_MARK, np.int64),
    )


def _apply(tags: _Tags, rows: _Rows) -> int:
    """Write the values of tags into the rows whose entry or exit they follow; returns how many were abandoned."""
    if not len(tags.kind):
        return 0
    row = rows.of_event[tags.owner]
    for kind, column in (
        (TAG_ELEMENTS, rows.elements),
        (TAG_BYTES_READ, rows.bytes_read),
        (TAG_BYTES_WRITTEN, rows.bytes_written),
        (TAG_LAYER, rows.layer),
        (TAG_ERROR, rows.error),
        (TAG_SPAN, rows.span_id),
        (TAG_COVERED, rows.covered),
    ):
        chosen = (tags.kind == kind) & (row >= 0)
        column[row[chosen]] = tags.value[chosen]
    rows.flags[row[(tags.kind == TAG_COMPRESSED) & (row >= 0)]] |= COMPRESSED
    abandoned = row[(tags.kind == TAG_ABANDONED) & (row >= 0)]
    rows.flags[abandoned] |= LEFT_OPEN
    return len(abandoned)


def _join_lanes(tags: _Tags, rows: _Rows, code: NDArray[np.int64], block: NDArray[np.int32], blocks: _Blocks) -> None:
    """Hang each further lane below the row that was innermost where the lane was opened."""
    rows.parent = np.copy(rows.lane_parent)
    parent_of: dict[tuple[int, int], int] = {}
    for at in np.flatnonzero(tags.kind == TAG_LANE).tolist():
        owner, number = int(tags.owner[at]), int(tags.block[at])
        if owner >= 0 and block[owner] == number:
            row = int(rows.of_event[owner])
            parent = row if code[owner] >= 0 or row < 0 else int(rows.lane_parent[row])
        else:
            parent = -1
        if parent < 0:
            parent = parent_of.get((blocks.steps[number], blocks.lanes[number].number), -1)
        parent_of[blocks.steps[number], int(tags.value[at])] = parent
    first = np.searchsorted(rows.block, np.arange(len(blocks.lanes) + 1))
    for number, (step, lane) in enumerate(zip(blocks.steps, blocks.lanes, strict=True)):
        parent = parent_of.get((step, lane.number), -1)
        if parent >= 0 and lane.number > 0:
            own = slice(first[number], first[number + 1])
            roots = (rows.lane_parent[own] < 0) & (rows.flags[own] & OUT_OF_ORDER == 0)
            rows.parent[own][roots] = parent


def _move(
    tags: _Tags,
    rows: _Rows,
    code: NDArray[np.int64],
    steps: list[StepRecord],
    step_of_block: NDArray[np.int32],
    levels: NDArray[np.int64],
    losses: Losses,
    overdue: NDArray[np.bool_],
    *,
    ended: bool,
) -> None:
    """Give rows the times that the device and `finalize` tell of them."""
    timeline = next((record.timeline for record in steps if record.timeline is not None), None)
    deferred = np.flatnonzero(tags.kind == TAG_DEFERRED)
    if timeline is None and not len(deferred):
        return
    step = step_of_block[rows.block]
    host_start = np.copy(rows.start)
    for at in deferred.tolist():
        row = int(rows.of_event[tags.owner[at]])
        rows_of_step, number = steps[int(step[row])].deferred, int(tags.value[at])
        known, rows_of_step[number] = rows_of_step[number], None
        assert known is not None
        if not known.settled:
            rows.flags[row] |= LEFT_OPEN
            losses.add("left_open")
            continue
        rows.start[row], rows.end[row], rows.source[row] = known.start_ns, known.end_ns, known.source
        if known.spacing:
            rows.flags[row] |= LAUNCH_SPACING
        if known.token == CAPTURED_MARK:
            rows.flags[row] |= CAPTURED
    if timeline is None:
        return
    starts, ends = rows.mark, np.full(len(rows.start), NO_MARK, np.int64)
    marks = (tags.kind == TAG_MARK) & (tags.owner >= 0)
    row, value, entered = rows.of_event[tags.owner[marks]], tags.value[marks], code[tags.owner[marks]] >= 0
    starts[row[entered & (row >= 0)]] = value[entered & (row >= 0)]
    ends[row[~entered & (row >= 0)]] = value[~entered & (row >= 0)]
    lost = value[(row < 0) & (value >= 0)]
    timeline.release(lost.tolist(), passed=False)
    synced = rows.of_event[tags.owner[tags.kind == TAG_SYNCED]]
    rows.source[synced[synced >= 0]] = TimingSource.SyncedHost
    place_rows(
        timeline,
        steps,
        step,
        (starts, ends),
        (rows.start, rows.end),
        rows.source,
        rows.flags,
        overdue,
        losses,
        ended=ended,
    )
    carry_along(rows.parent, levels, rows.source, rows.flags, host_start, rows.start, rows.end)


def _layers(rows: _Rows) -> NDArray[np.int32]:
    """The index of the layer that each row is or lies in."""
    is_layer = rows.layer >= 0
    if not is_layer.any():
        return np.full(len(is_layer), -1, np.int32)
    above = nearest(rows.parent, is_layer)
    return np.where(above >= 0, rows.layer[above], -1).astype(np.int32)


def _measure(rows: _Rows, is_brick: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Add to each brick what the bricks directly below it cover; returns the nearest brick above each row."""
    below = nearest(rows.lane_parent, is_brick)
    brick_parent = np.where(rows.lane_parent >= 0, below[rows.lane_parent], -1).astype(np.int32)
    child = np.flatnonzero(is_brick & (brick_parent >= 0) & (rows.flags & OPEN == 0))
    parent = brick_parent[child]
    covering, nanoseconds = union_ns(
        parent,
        np.maximum(rows.start[child], rows.start[parent]),
        np.minimum(rows.end[child], rows.end[parent]),
    )
    rows.covered[covering] += nanoseconds
    return brick_parent


def _carry(rows: _Rows, still_open: NDArray[np.int64]) -> NDArray[np.int64]:
    """The events that open these rows again at the head of their lane's next block."""
    events: list[int] = []
    for row in still_open.tolist():
        events += (int(rows.site[row]), int(rows.start[row]), TAG_COVERED, int(rows.covered[row]))
        if rows.layer[row] >= 0:
            events += (TAG_LAYER, int(rows.layer[row]))
        if rows.timer[row]:
            events += (TAG_TIMER, int(rows.timer[row]) - 1)
        if rows.mark[row] != NO_MARK:
            events += (TAG_MARK, int(rows.mark[row]))
        if rows.span_id[row]:
            events += (TAG_SPAN, int(rows.span_id[row]))
    return np.array(events, np.int64)
