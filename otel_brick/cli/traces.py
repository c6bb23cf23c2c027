"""The demo's own tracing: a TracerProvider whose spans go to an OTLP JSON lines file, to memory, and out if wanted.

The file is written beside its final place and moved there by `commit`, so that an earlier run's file is
neither appended to nor lost when this run fails. It needs OpenTelemetry's file exporter; without it spans
stay in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from ..export.ids import PrivateIdGenerator
from .sending import CountingExporter

EXPORTER_PACKAGE = "opentelemetry-exporter-otlp-json-file"


class _SpanExporterClass(Protocol):
    def __call__(self, path: Path) -> SpanExporter: ...


class TraceRecorder:
    """Records the spans of one run. A context manager: leaving it without `commit` leaves no file behind.

    Args:
        path: where the OTLP JSON lines file goes; its directory exists.
        service_name: of the spans' resource.
        send_to: an exporter that gets the spans too; shut down with the file.

    Raises:
        OSError: the file cannot be written there.
    """

    def __init__(self, path: Path, *, service_name: str, send_to: SpanExporter | None = None) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._memory = InMemorySpanExporter()
        self._file: CountingExporter | None = None
        self._is_shut_down = False
        exporter_class = _file_exporter_class()
        if exporter_class is not None:
            self._temporary.unlink(missing_ok=True)
            self._file = CountingExporter(exporter_class(self._temporary))
        # The environment's sampler and ids are the user's service's business, not the demo's.
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({SERVICE_NAME: service_name}),
            id_generator=PrivateIdGenerator(),
            shutdown_on_exit=False,
        )
        if self._file is not None:
            self.provider.add_span_processor(BatchSpanProcessor(self._file))
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        if send_to is not None:
            self.provider.add_span_processor(BatchSpanProcessor(send_to))

    def spans(self) -> Sequence[ReadableSpan]:
        """Every span that has been exported so far."""
        return self._memory.get_finished_spans()

    def commit(self) -> Path | None:
        """Finish the file and put it in its place.

        Returns:
            The file's path, or None where the file exporter is not installed.

        Raises:
            OSError: spans could not be written; an earlier file is still what it was.
        """
        self._shut_down()
        if self._file is None:
            return None
        missing = len(self.spans()) - self._file.written
        if missing:
            raise OSError(f"{missing} of {len(self.spans())} spans could not be written to {self._path}")
        os.replace(self._temporary, self._path)
        return self._path

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down()
        if self._file is not None:
            self._temporary.unlink(missing_ok=True)

    def _shut_down(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self.provider.shutdown()


def _file_exporter_class() -> _SpanExporterClass | None:
    try:
        from opentelemetry.exporter.otlp.json.file import FileSpanExporter
    except ImportError:
        return None
    return FileSpanExporter
