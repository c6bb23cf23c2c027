"""The demo's own tracing: a TracerProvider whose spans stay in memory, until `commit` writes an OTLP JSON lines file.

The file is written beside its final place and moved there, so that an earlier run's file is neither appended to nor
lost when this run fails. It needs OpenTelemetry's file exporter; without it spans stay in memory. What comes after
`commit` goes out only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from ..export.ids import PrivateIdGenerator

EXPORTER_PACKAGE = "opentelemetry-exporter-otlp-json-file"
_LINE_SPANS = 512


class _SpanExporterClass(Protocol):
    def __call__(self, path: Path) -> SpanExporter: ...


class TraceRecorder:
    """Records the spans of one run. A context manager: leaving it without `commit` leaves no file behind.

    Args:
        path: where the OTLP JSON lines file goes; its directory exists.
        service_name: of the spans' resource.
        send_to: an exporter that gets each span too, at once, on the thread that ended it.

    Raises:
        OSError: the file cannot be written there.
    """

    def __init__(self, path: Path, *, service_name: str, send_to: SpanExporter | None = None) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._memory = InMemorySpanExporter()
        self._spans: Sequence[ReadableSpan] | None = None
        self._file: SpanExporter | None = None
        self._is_closed = False
        exporter_class = _file_exporter_class()
        if exporter_class is not None:
            self._temporary.unlink(missing_ok=True)
            self._file = exporter_class(self._temporary)
        # The environment's sampler and ids are the user's service's business, not the demo's.
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({SERVICE_NAME: service_name}),
            id_generator=PrivateIdGenerator(),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        if send_to is not None:
            self.provider.add_span_processor(SimpleSpanProcessor(send_to))

    def spans(self) -> Sequence[ReadableSpan]:
        """Every span that ended before `commit`."""
        return self._memory.get_finished_spans() if self._spans is None else self._spans

    def commit(self) -> Path | None:
        """Write the file and put it in its place; spans that end later are not kept.

        Returns:
            The file's path, or None where the file exporter is not installed.

        Raises:
            OSError: spans could not be written; an earlier file is still what it was.
        """
        self._spans = self._memory.get_finished_spans()
        self._memory.shutdown()
        self._memory.clear()
        if self._file is None:
            return None
        missing = 0
        for start in range(0, len(self._spans), _LINE_SPANS):
            batch = self._spans[start : start + _LINE_SPANS]
            if self._file.export(batch) is not SpanExportResult.SUCCESS:
                missing += len(batch)
        self._close_file()
        if missing:
            raise OSError(f"{missing} of {len(self._spans)} spans could not be written to {self._path}")
        os.replace(self._temporary, self._path)
        return self._path

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.provider.shutdown()
        if self._file is not None:
            self._close_file()
            self._temporary.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file is not None and not self._is_closed:
            self._is_closed = True
            self._file.shutdown()


def _file_exporter_class() -> _SpanExporterClass | None:
    try:
        from opentelemetry.exporter.otlp.json.file import FileSpanExporter
    except ImportError:
        return None
    return FileSpanExporter
