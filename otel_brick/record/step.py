"""The record of one step: its lanes, its span, its times and what is known of it beside its rows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from ..taxonomy import Phase, TimingSource
from .descriptors import MAX_ERROR_TEXT, printable
from .lane import NO_LAUNCHES, TAG_ERROR, KnownLaunches
from .marks import NO_MARK

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

    from .deferred import Deferred
    from .lane import Lane
    from .marks import DeviceTimeline

MAX_ERRORS: Final = 1_024
FROM_START: Final = -(1 << 62)
"""Earlier than any time: a step's time counts from its start."""
OTHER_ERROR: Final = "_OTHER"
"""OpenTelemetry's value of `error.type` for errors that are not told apart."""


class StepRecord:
    """One step, or a group of bricks outside any step (`loose`).

    Attributes:
        start_ns, end_ns: monotonic nanoseconds.
        offset_ns: what has to be added to monotonic time to get Unix time, fixed when the step began.
        span: the step's own span, ended by the span sink; None where nothing records it.
        parent: the context of the span that rows without another parent belong to.
        root: whether the step's span begins a trace.
        reason: the value of `brick.detail.reason`, decided after the step.
        interval: under an interval policy, one step in how many has detail; 0 otherwise.
        recording: whether rows become spans; statistics are kept in any case.
        errors: (error type, message) to index.
        handed_over: whether rows were resolved before the step ended, because it reached its row limit.
        lane_count: how many lanes the step has had; `lanes` are those whose rows were not handed over.
        finished, finished_rows: the lanes whose scope has closed, and about how many rows they hold.
        spilling: whether a lane is becoming an array, which a finalizer must not begin again.
        dropped: rows whose span detail was dropped before the step ended.
        timeline: gives the device times of the rows; None where they have host times only.
        start_mark, end_mark: the marks at the step's start and end.
        kernel_marks: whether kernels have marks of their own.
        launches: the kernel launches that may be written to its lanes at once.
        deferred: the rows of `record_deferred`, to index, None once resolved; the first `settled` have their times.
        synced: whether the last wait for the device because of the sync mode succeeded.
        device: the ordinal of the device that all its marks are of, -1 if there is none or more than one.
        counted_ns: when the device reached the step; its time counts from then on.
        sync_ns: host time that the step has spent waiting for the device because of its sync mode.
        source: the clock behind the step's end; `timing_error_ns` is how far device times may be off, None without any.
    """

    __slots__ = (
        "__weakref__",
        "counted_ns",
        "deferred",
        "device",
        "dropped",
        "end_mark",
        "end_ns",
        "error",
        "errors",
        "finished",
        "finished_rows",
        "handed_over",
        "index",
        "interval",
        "kernel_marks",
        "lane_count",
        "lanes",
        "launches",
        "lock",
        "loose",
        "offset_ns",
        "parent",
        "phase",
        "reason",
        "recording",
        "root",
        "rows",
        "settled",
        "source",
        "span",
        "spilling",
        "start_mark",
        "start_ns",
        "sync_ns",
        "synced",
        "timeline",
        "timing_error_ns",
        "tokens",
        "tracer",
    )

    def __init__(self, phase: Phase, *, index: int = -1, loose: bool = False, tokens: int = 0) -> None:
        self.phase = phase
        self.index = index
        self.loose = loose
        self.tokens = tokens
        self.lock = threading.RLock()
        self.rows = 0
        self.lanes: list[Lane] = []
        self.lane_count = 1
        self.finished: list[Lane] = []
        self.finished_rows = 0
        self.spilling = False
        self.errors: dict[tuple[str, str], int] = {}
        self.error: tuple[str, str] | None = None
        self.start_ns = self.end_ns = self.offset_ns = 0
        self.span: Span | None = None
        self.parent: SpanContext | None = None
        self.tracer: Tracer | None = None
        self.recording = False
        self.dropped = 0
        self.handed_over = False
        self.reason = ""
        self.interval = 0
        self.root = False
        self.timeline: DeviceTimeline | None = None
        self.start_mark = self.end_mark = NO_MARK
        self.kernel_marks = False
        self.launches: KnownLaunches = NO_LAUNCHES
        self.deferred: list[Deferred | None] = []
        self.settled = 0
        self.synced = False
        self.device = -1
        self.counted_ns = FROM_START
        self.sync_ns = 0
        self.source = TimingSource.Host
        self.timing_error_ns: float | None = None

    @property
    def wall_ns(self) -> int:
        """The step's time: to its end from its start or, where the device was not free by then, from when it was."""
        return self.end_ns - max(self.start_ns, self.counted_ns)

    def error_at(self, index: int) -> tuple[str, str]:
        """The error type and message behind the index of a row."""
        return list(self.errors)[index]

    def fail(self, error: type[BaseException], value: object) -> tuple[int, ...]:
        """The tag that marks a row as failed; empty for the orderly end of a generator."""
        described = describe_error(error, value)
        if described is None:
            return ()
        with self.lock:
            if len(self.errors) >= MAX_ERRORS and described not in self.errors:
                described = (OTHER_ERROR, "")
            return (TAG_ERROR, self.errors.setdefault(described, len(self.errors)))


def describe_error(error: type[BaseException], value: object) -> tuple[str, str] | None:
    """The qualified class name and the message of an exception; None for `GeneratorExit`, which is no failure."""
    if issubclass(error, GeneratorExit):
        return None
    name = error.__qualname__ if error.__module__ == "builtins" else f"{error.__module__}.{error.__qualname__}"
    try:
        text = printable(str(value)[:MAX_ERROR_TEXT])[:MAX_ERROR_TEXT]
    except Exception:  # the user's own __str__ must not break the user's own exception
        text = ""
    return printable(name), text
