"""The run behind `otel-brick demo`: a decoder generates text under the profiler, leaves two files and sends the same.

Options come in; a `DemoResult` with everything that the report shows is handed out when the files are there, and a
`Sent` comes back when all is sent. Nothing here prints.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits  # pyright: ignore[reportMissingTypeStubs]

from .. import BrickProfiler
from .decoder import PRESETS, Decoder, KvCache, Sampler, encode
from .sending import SERVICE_NAME, Outbox, Postman, Sent, interval_s
from .traces import TraceRecorder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from .. import BrickStats
    from .sending import Destination

PROFILE_NAME = "brick_profile.json"
TRACE_NAME = "trace.jsonl"


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose; already checked."""

    preset: str
    prompt: str
    tokens: int
    """Tokens to generate: the first by the prefill step, each other by a decode step."""
    seed: int
    output: Path
    detail: str
    destination: Destination | None = None
    """Where spans and metrics are sent besides the files."""
    seconds: float = 0
    """How long to go on with further texts, which are sent only."""


@dataclass(frozen=True)
class PhaseTime:
    """Wall time of all steps of one phase."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        """None where the phase had no step."""
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True)
class DemoResult:
    """What a run measured, and where it is."""

    text: str
    prefill: PhaseTime
    decode: PhaseTime
    bricks: Sequence[BrickStats]
    total_ns: int
    """Exclusive time of all bricks; a brick's share is of this."""
    coverage: float | None
    losses: Mapping[str, int]
    spans: Sequence[ReadableSpan]
    profile_path: Path
    trace_path: Path | None
    """None where OpenTelemetry's file exporter is not installed."""


def run_demo(
    options: DemoOptions, on_token: Callable[[], None], on_result: Callable[[DemoResult], None]
) -> Sent | None:
    """Generate `options.tokens` tokens, profiled, write both files into `options.output`, and then send.

    With `options.seconds`, further texts are generated and sent meanwhile; files and result are of the first.

    Args:
        options: the choices; the output directory exists.
        on_token: called after each token of the first text, between two steps.
        on_result: called when the files are written, before anything is sent.

    Returns:
        What was sent, also after an interrupt (Ctrl-C) while sending; None where nothing was to be sent.

    Raises:
        OSError: a file cannot be written.
    """
    outbox = None if options.destination is None else Outbox(options.destination)
    # BLAS threads that wait for each other on a busy machine would make short operations a hundred times slower.
    with (
        threadpool_limits(limits=1),
        TraceRecorder(
            options.output / TRACE_NAME, service_name=SERVICE_NAME, send_to=None if outbox is None else outbox.spans
        ) as traces,
    ):
        profiler = BrickProfiler.enabled(
            tracer_provider=traces.provider,
            metric_exporter=None if outbox is None else outbox.metrics,
            detail=options.detail,
        )
        try:
            model = _Model(options, profiler)
            text, prefill, decode = model.generate(options.tokens, on_token)
            profiler.flush()
            on_result(_result(options, profiler, traces, text, prefill, decode))
            return None if outbox is None else _send(outbox, model, profiler, options)
        finally:
            profiler.shutdown()


def _result(
    options: DemoOptions,
    profiler: BrickProfiler,
    traces: TraceRecorder,
    text: str,
    prefill: PhaseTime,
    decode: PhaseTime,
) -> DemoResult:
    """Write both files, and put together what the report shows."""
    profile_path = options.output / PROFILE_NAME
    trace_path = traces.commit()
    profiler.write_json(profile_path)
    return DemoResult(
        text=text,
        prefill=prefill,
        decode=decode,
        bricks=profiler.all_brick_stats(),
        total_ns=profiler.total_ns(),
        coverage=profiler.coverage(),
        losses={reason: count for reason, count in profiler.losses().items() if count},
        spans=traces.spans(),
        profile_path=profile_path,
        trace_path=trace_path,
    )


def _send(outbox: Outbox, model: _Model, profiler: BrickProfiler, options: DemoOptions) -> Sent:
    """Send what there is; with `seconds`, while further texts are generated."""
    with outbox.heard():
        try:
            postman = Postman(outbox, profiler.flush, interval_s())
            end = time.monotonic() + options.seconds
            with _interrupts_noted() as interrupts:

                def go_on() -> bool:
                    return time.monotonic() < end and not outbox.hopeless and not interrupts

                while go_on():
                    model.generate(options.tokens, lambda: None, go_on)
            if interrupts:
                return outbox.sent(interrupted=True)
            profiler.flush()
            postman.finish()
        except KeyboardInterrupt:
            return outbox.sent(interrupted=True)
        return outbox.sent()


def _warm_up(decoder: Decoder, profiler: BrickProfiler) -> None:
    """One step unseen by the profiler, so that what happens once only is nobody's brick."""
    profiler.disable()
    decoder.forward(encode("x"), KvCache(decoder.config, 1))
    profiler.enable()


@contextmanager
def _interrupts_noted() -> Generator[list[int]]:
    """Meanwhile Ctrl-C is noted in the list, so that it ends no step in its midst."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class _Model:
    """A decoder with its sampler, warm, and the prompt that each text begins with."""

    def __init__(self, options: DemoOptions, profiler: BrickProfiler) -> None:
        self._config = PRESETS[options.preset]
        self._prompt = encode(options.prompt)
        self._profiler = profiler
        self._decoder = Decoder(self._config, seed=options.seed, profiler=profiler)
        self._sampler = Sampler(self._config, seed=options.seed, profiler=profiler)
        _warm_up(self._decoder, profiler)

    def generate(
        self, count: int, on_token: Callable[[], None], go_on: Callable[[], bool] | None = None
    ) -> tuple[str, PhaseTime, PhaseTime]:
        """Prefill, then decode, until there are `count` tokens or `go_on`, asked after each step, says no.

        Without `go_on`, spans leave between the steps, where exporting takes no time from a brick. An engine would not
        flush: with it, they leave as those of an engine do, beside the steps.
        """
        profiler = self._profiler
        cache = KvCache(self._config, self._prompt.size + count - 1)
        start = time.perf_counter()
        with profiler.step(phase="prefill", tokens=self._prompt.size):
            generated = [self._sampler.sample(self._decoder.forward(self._prompt, cache))]
        prefill_s = time.perf_counter() - start
        self._between(on_token, flush=go_on is None)
        decode_s = 0.0
        while len(generated) < count and (go_on is None or go_on()):
            token = np.array(generated[-1:], dtype=np.int64)
            start = time.perf_counter()
            with profiler.step(phase="decode", tokens=1):
                generated.append(self._sampler.sample(self._decoder.forward(token, cache)))
            decode_s += time.perf_counter() - start
            self._between(on_token, flush=go_on is None)
        text = bytes(generated).decode("ascii")
        return text, PhaseTime(self._prompt.size, prefill_s), PhaseTime(len(generated) - 1, decode_s)

    def _between(self, on_token: Callable[[], None], *, flush: bool) -> None:
        if flush:
            self._profiler.flush()
        on_token()
