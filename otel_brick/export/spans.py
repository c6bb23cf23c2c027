"""The span sink: ends each step's own span with what is known by then, and sends the rows below it on their route.

Runs on the worker only. `ReadableRoute` goes through the user's own provider, `ColumnarRoute` to an exporter of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import semconv
from .attributes import Attributes, failure
from .columnar import ColumnarEncoder
from .display import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Span

    from ..record.batch import Batch
    from ..record.losses import Losses
    from ..record.recorder import Recorder
    from ..record.step import StepRecord
    from .display import Shown
    from .readable import Pace


class RowRoute(Protocol):
    """A way out for rows."""

    def send(self, batch: Batch, times: Shown) -> None:
        """Take the rows of all recorded steps; `times` are those for display."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Deliver what was taken; False if that takes too long."""
        ...


class RowExporter(Protocol):
    """What `exporter=` takes: an exporter of encoded rows, such as `BrickOTLPExporter`."""

    def submit(self, blocks: Sequence[NDArray[np.uint8]], resource: Resource, losses: Losses) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...

    def shutdown(self, timeout_millis: float = 30_000) -> None: ...


class ColumnarRoute:
    """Encodes rows without a Python object per row and submits them to an exporter."""

    def __init__(self, recorder: Recorder, exporter: RowExporter) -> None:
        self._recorder = recorder
        self._exporter = exporter
        self._encoder = ColumnarEncoder(recorder.registry)
        self._own_resource: Resource | None = None

    def send(self, batch: Batch, times: Shown) -> None:
        """Encode and submit the rows of all recorded steps."""
        recorded = np.array([record.recording for record in batch.steps], np.bool_)
        rows = np.flatnonzero(recorded[batch.step])
        if len(rows):
            resource = self._resource(batch)
            self._exporter.submit(
                self._encoder.encode(batch, rows, times, batch.span_id), resource, self._recorder.losses
            )

    def flush(self, timeout_s: float) -> bool:
        """Wait for the exporter."""
        return self._exporter.flush(timeout_s)

    def _resource(self, batch: Batch) -> Resource:
        for record in reversed(batch.steps):
            resource = getattr(record.tracer, "resource", None)
            if resource is not None:
                return resource
        if self._own_resource is None:
            from opentelemetry.sdk.resources import Resource

            self._own_resource = Resource.create()
        return self._own_resource


class SpanSink:
    """Turns batches into spans."""

    def __init__(self, recorder: Recorder, route: RowRoute, pace: Pace) -> None:
        self._recorder = recorder
        self._route = route
        self._pace = pace

    def export(self, batch: Batch) -> None:
        """End the steps of a batch and send their rows; losses are counted."""
        times = shown(batch)
        bounds: list[int] = np.searchsorted(batch.step, np.arange(len(batch.steps) + 1)).tolist()
        for number, record in enumerate(batch.steps):
            if record.span is not None:
                last = int(times.end[bounds[number] : bounds[number + 1]].max(initial=record.end_ns))
                self._end_step(record, record.span, last + record.offset_ns)
        self._route.send(batch, times)

    def flush(self, timeout_s: float) -> bool:
        """Deliver what was exported, the steps by their provider and the rows by their route."""
        steps = self._pace.flush(timeout_s)
        return self._route.flush(timeout_s) and steps

    def _end_step(self, record: StepRecord, span: Span, end_unix_ns: int) -> None:
        attributes: Attributes = {
            semconv.BRICK_TIMING_SOURCE: record.source.attribute_value,
            semconv.BRICK_DETAIL_REASON: record.reason,
        }
        if record.timing_error_ns is not None:
            attributes[semconv.BRICK_TIMING_ERROR] = record.timing_error_ns / 1e9
        if record.timeline is not None and record.device >= 0:
            attributes |= record.timeline.attributes(record.device)
        if record.tokens:
            attributes[semconv.BRICK_TOKEN_COUNT] = min(record.tokens, (1 << 63) - 1)
        if record.dropped:
            attributes[semconv.BRICK_DROPPED_COUNT] = record.dropped
        if record.interval:
            attributes[semconv.BRICK_SAMPLING_INTERVAL] = record.interval
        if record.error is not None:
            attributes[semconv.ERROR_TYPE] = record.error[0]
        try:
            span.set_attributes(attributes)
            if record.error is not None:
                span.set_status(failure(record.error))
            span.end(end_unix_ns)
        except Exception as error:
            self._recorder.losses.remember("a span processor failed on a step span", error)
            self._recorder.losses.add("export_failed")
        record.span = None
        self._pace.note()
