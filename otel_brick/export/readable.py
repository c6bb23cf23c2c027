"""Rows as OpenTelemetry span objects for whatever processors the user's provider has.

They are handed to the provider's processor as `ReadableSpan`s, paced so that a batch processor's queue never evicts
the user's own spans. A tracer that is not the SDK's gets ordinary spans through the OpenTelemetry API instead.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status

from .. import semconv
from ..record.budgets import judged
from ..record.descriptors import NO_COUNT
from ..taxonomy import SpanLevel
from ..version import __version__
from .attributes import (
    Attributes,
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
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Tracer

    from ..record.batch import Batch
    from ..record.recorder import Recorder
    from ..record.step import StepRecord
    from .display import Shown

MAX_CHUNK: Final = 512
"""Spans handed over between two flushes: the default export batch, a quarter of the default queue."""
FLUSH_TIMEOUT_S: Final = 30.0
YIELD_SPANS: Final = 16
YIELD_S: Final = 50e-6


class Pace:
    """Flushes the provider after so many spans that a batch processor's queue cannot overflow through us."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._chunk = _chunk_size()
        self._handed_over = 0

    def note(self) -> None:
        """One more span was handed to the provider's processors."""
        self._handed_over += 1
        if self._handed_over % YIELD_SPANS == 0:
            # Another thread gets the interpreter after 5 ms of asking, or at once when we sleep.
            time.sleep(YIELD_S)
        if self._handed_over >= self._chunk:
            self.flush(FLUSH_TIMEOUT_S)

    def flush(self, timeout_s: float) -> bool:
        """Flush the provider now; True where it has nothing to flush."""
        self._handed_over = 0
        force_flush = getattr(self._recorder.tracing.provider, "force_flush", None)
        try:
            return force_flush is None or bool(force_flush(int(timeout_s * 1000)))
        except Exception as error:
            self._recorder.losses.remember("the tracer provider could not be flushed", error)
            return False


class ReadableRoute:
    """Sends rows through the processors of the provider that made their step."""

    def __init__(self, recorder: Recorder, pace: Pace) -> None:
        self._recorder = recorder
        self._pace = pace

    def send(self, batch: Batch, times: Shown) -> None:
        """Hand over the rows of all recorded steps; losses are counted and nothing is raised."""
        bounds = np.searchsorted(batch.step, np.arange(len(batch.steps) + 1)).tolist()
        builder = _Builder(self._recorder, batch, times)
        for number, record in enumerate(batch.steps):
            if record.recording:
                self._send(record, builder, range(bounds[number], bounds[number + 1]))

    def flush(self, timeout_s: float) -> bool:
        """Rows wait nowhere but in the provider."""
        return True

    def _send(self, record: StepRecord, builder: _Builder, rows: range) -> None:
        tracer, parent = record.tracer, record.parent
        if tracer is None or parent is None:
            return
        sent = 0
        processor = getattr(tracer, "span_processor", None)
        try:
            if processor is None:
                for _ in builder.through_api(record, tracer, parent, rows):
                    sent += 1
                    self._pace.note()
            else:
                for span in builder.readable_spans(record, tracer, parent, rows):
                    processor.on_end(span)
                    sent += 1
                    self._pace.note()
        except Exception as error:
            self._recorder.losses.remember("a span processor failed on the spans below a step", error)
            self._recorder.losses.add("export_failed", len(rows) - sent)


class _Builder:
    """Builds the spans of one batch; what rows have in common is built once."""

    def __init__(self, recorder: Recorder, batch: Batch, times: Shown) -> None:
        self._descriptors = recorder.registry.descriptors
        self._batch = batch
        self._times = times
        self._origins = origins(batch, recorder.registry)
        self._budgets = judged(batch, recorder.registry)
        self._fixed: dict[tuple[int, int], Attributes] = {}
        self._built: dict[tuple[int, ...], Attributes] = {}

    def readable_spans(
        self, record: StepRecord, tracer: Any, parent: SpanContext, rows: range
    ) -> Iterator[ReadableSpan]:
        """The rows of one step as finished spans, parents first."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        scope = InstrumentationScope(semconv.SCOPE_NAME, __version__)
        ids: list[int] = self._batch.span_id[rows.start : rows.stop].tolist()
        contexts: list[SpanContext] = []
        errors = list(record.errors)
        for row, span_id in zip(rows, ids, strict=True):
            context = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
            contexts.append(context)
            above = int(self._batch.parent[row])
            error = int(self._batch.error[row])
            yield ReadableSpan(
                name=self._name(row),
                context=context,
                parent=contexts[above - rows.start] if above >= 0 else parent,
                resource=tracer.resource,
                attributes=self._attributes(row, errors),
                status=Status() if error < 0 else failure(errors[error]),
                start_time=int(self._times.start[row]) + record.offset_ns,
                end_time=int(self._times.end[row]) + record.offset_ns,
                instrumentation_scope=scope,
            )

    def through_api(self, record: StepRecord, tracer: Tracer, parent: SpanContext, rows: range) -> Iterator[None]:
        """Make the rows of one step with an unknown tracer, parents first; one yield for each span made."""
        contexts: list[SpanContext] = []
        errors = list(record.errors)
        for row in rows:
            above = int(self._batch.parent[row])
            context = contexts[above - rows.start] if above >= 0 else parent
            span = tracer.start_span(
                self._name(row),
                trace.set_span_in_context(NonRecordingSpan(context)),
                attributes=self._attributes(row, errors),
                start_time=int(self._times.start[row]) + record.offset_ns,
            )
            error = int(self._batch.error[row])
            if error >= 0:
                span.set_status(failure(errors[error]))
            contexts.append(span.get_span_context())
            span.end(int(self._times.end[row]) + record.offset_ns)
            yield

    def _name(self, row: int) -> str:
        return span_name(self._descriptors[int(self._batch.descriptor[row])])

    def _attributes(self, row: int, errors: list[tuple[str, str]]) -> Attributes:
        """The attributes of a row, one dictionary shared by all rows that have the same ones."""
        batch = self._batch
        number = int(batch.descriptor[row])
        descriptor = self._descriptors[number]
        above = int(batch.brick_parent[row]) if descriptor.level is SpanLevel.Kernel else -1
        brick = int(batch.descriptor[above]) if above >= 0 else NO_COUNT
        error = int(batch.error[row])
        counts = (
            int(batch.elements[row]),
            int(batch.bytes_read[row]),
            int(batch.bytes_written[row]),
            int(batch.layer[row]),
        )
        verdict = 0 if self._budgets is None else int(self._budgets.verdict[row])
        origin = 0 if self._origins is None else int(self._origins[row])
        key = (number, brick, *counts, verdict, origin, -1 if error < 0 else hash(errors[error][0]))
        attributes = self._built.get(key)
        if attributes is None:
            fixed = self._fixed.get((number, brick))
            if fixed is None:
                of_brick = self._descriptors[brick] if brick >= 0 else None
                fixed = self._fixed[number, brick] = fixed_attributes(descriptor, of_brick)
            attributes = fixed | count_attributes(descriptor.level, *counts)
            if self._budgets is not None:
                attributes |= budget_attributes(int(self._budgets.budget[row]) / 1e9, verdict)
            attributes |= origin_attributes(origin)
            if error >= 0:
                attributes[semconv.ERROR_TYPE] = errors[error][0]
            attributes = self._built[key] = limited(attributes)
        return attributes


def _chunk_size() -> int:
    """At most a quarter of the batch processor's queue, as far as the environment tells its size."""
    try:
        queue = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", ""))
    except ValueError:
        return MAX_CHUNK
    return max(1, min(MAX_CHUNK, queue // 4))
