"""Detail: which ended steps have spans below them, and which of their rows.

A local tail sampling: it is decided when a step has ended and its duration is known. Statistics never ask here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ..record.batch import CUT, drop_detail
from ..stats import histogram
from ..taxonomy import Phase, SpanLevel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..config import Config
    from ..record.batch import Batch
    from ..record.losses import Losses
    from ..record.step import StepRecord
    from ..stats.steps import StepTable

FIRST_STEPS: Final = 2
MIN_STEPS_FOR_P99: Final = 100
MAX_TRACES: Final = 4_096
"""Traces whose steps and rows are counted at the same time; the one unused for longest is forgotten."""

ALL: Final = "all"
CAP: Final = "cap"
FAILED: Final = "failed"
FIRST: Final = "first"
INTERVAL: Final = "interval"
NONE: Final = "none"
SLOW: Final = "slow"
UNSAMPLED: Final = "unsampled"


@dataclass(slots=True)
class _Trace:
    """What one trace has had so far; root steps share one in which only steps are counted."""

    rows: int = 0
    steps: list[int] = field(default_factory=lambda: [0] * len(Phase))


class DetailPolicy:
    """Chooses rows under one profiler's configuration; called by one thread at a time."""

    def __init__(self, config: Config, losses: Losses) -> None:
        self._policy = config.detail
        self._interval = config.detail_interval
        self._max_step = config.max_rows_per_step
        self._max_trace = config.max_rows_per_trace
        self._attach = config.attach_context
        self._losses = losses
        self._traces: OrderedDict[int, _Trace] = OrderedDict()
        self._roots = _Trace()

    def select(self, batch: Batch, levels: NDArray[np.int64], steps: StepTable) -> NDArray[np.intp]:
        """The rows of a batch that become spans; says at each step why, and counts what caps cut.

        Args:
            levels: shape (n,), the `SpanLevel` of each row.
            steps: the statistics of the steps before this batch.
        """
        if not batch.ended:
            if self._policy == NONE:
                return np.empty(0, np.intp)
            drop_detail(batch, np.flatnonzero(batch.flags & CUT), "log_full", self._losses)
            return np.empty(0, np.intp)
        slow = self._slow_ns(batch, steps)
        bounds: list[int] = np.searchsorted(batch.step, np.arange(len(batch.steps) + 1)).tolist()
        kept: list[NDArray[np.intp]] = []
        for number, record in enumerate(batch.steps):
            own = np.arange(bounds[number], bounds[number + 1])
            chosen = self._of_step(record, own, levels, slow)
            if self._attach and record.recording:
                chosen = np.union1d(chosen, own[batch.span_id[own] != 0])
            if record.recording and record.reason != NONE:
                cut = len(own) - len(chosen)
                record.dropped += cut
                self._losses.add("trace_cap", cut)
            kept.append(chosen)
        return np.concatenate(kept)

    def _of_step(
        self, record: StepRecord, own: NDArray[np.intp], levels: NDArray[np.int64], slow: dict[Phase, float]
    ) -> NDArray[np.intp]:
        nothing = own[:0]
        if not record.recording:
            record.reason = UNSAMPLED
            return nothing
        trace = self._trace(record)
        record.reason = self._reason(record, trace, slow)
        if record.reason == NONE:
            return nothing
        chosen = _within(own, levels, self._max_step)
        if trace is not self._roots and trace.rows + len(chosen) > self._max_trace:
            record.reason = CAP
            chosen = nothing
        elif len(chosen) > self._max_trace:
            chosen = _within(own, levels, self._max_trace)
        trace.rows += len(chosen)
        return chosen

    def _reason(self, record: StepRecord, trace: _Trace, slow: dict[Phase, float]) -> str:
        if record.loose or self._policy == ALL:
            return ALL
        if self._policy == NONE:
            return NONE
        record.interval = self._interval
        index = trace.steps[record.phase]
        trace.steps[record.phase] = index + 1
        if index < FIRST_STEPS:
            return FIRST
        if record.error is not None:
            return FAILED
        if record.wall_ns > slow.get(record.phase, float("inf")):
            return SLOW
        return INTERVAL if index % self._interval == 0 else NONE

    def _trace(self, record: StepRecord) -> _Trace:
        if record.root or record.parent is None:
            return self._roots
        trace_id = record.parent.trace_id
        trace = self._traces.pop(trace_id, None) or _Trace()
        self._traces[trace_id] = trace
        if len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        return trace

    def _slow_ns(self, batch: Batch, steps: StepTable) -> dict[Phase, float]:
        """For each phase in the batch, the duration beyond which a step is slow: the 99th percentile so far."""
        slow: dict[Phase, float] = {}
        if self._policy == "auto":
            for phase in {record.phase for record in batch.steps}:
                if steps.columns["count"][phase] >= MIN_STEPS_FOR_P99:
                    p99 = histogram.percentile(steps.columns["grid"][phase], 99, 0, 1 << 62)
                    slow[phase] = float("inf") if p99 is None else p99
        return slow


def _within(own: NDArray[np.intp], levels: NDArray[np.int64], limit: int) -> NDArray[np.intp]:
    """At most `limit` of a step's rows: kernels go first, then what was entered last."""
    if len(own) <= limit:
        return own
    below = levels[own] >= SpanLevel.Kernel
    others = own[~below]
    if len(others) >= limit:
        return others[:limit]
    return np.sort(np.concatenate((others, own[below][: limit - len(others)])))
