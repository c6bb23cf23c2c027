"""A program as a user would write it: `otel_brick.configure`, then steps of a small decoder that only waits.

Run as a script it obeys commands, one JSON object a line on its input, and answers each with a line of JSON. `Engine`
is the other end, for tests. Durations are real and counts are known, so that a test can say what servers must have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

LAYERS = 2
BRICKS_OF_LAYER = ("RmsNorm", "AttentionScore", "FusedMlp")
ROWS_OF_STEP = LAYERS * (1 + len(BRICKS_OF_LAYER) + 1) + 1
"""Spans below a step: its layers, their bricks and one kernel each, and the head."""
KERNELS_OF_STEP = LAYERS
ANSWER_S = 120.0


class Engine:
    """A process that runs the engine; a context manager that ends it.

    Args:
        service: its `service.name`.
        endpoint: where it sends to; None for what `environ` says.
        protocol: `http/protobuf` or `grpc`; None for what `environ` says.
        environ: variables for it.
        settings: further arguments of `otel_brick.configure`.
    """

    def __init__(
        self,
        service: str,
        endpoint: str | None,
        protocol: str | None = "http/protobuf",
        *,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        arguments = {"service_name": service, "endpoint": endpoint, "protocol": protocol, **settings}
        self._command = [sys.executable, __file__, json.dumps(arguments)]
        self._environ = dict(environ or {})
        self.service = service

    def __enter__(self) -> Engine:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        root = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, "PYTHONPATH": root, **self._environ},
        )
        self._lock = threading.Lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60 if error is None else 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            if error is None:
                raise
        finally:
            self._process.stdout.close()

    def kill(self) -> None:
        """End it at once, with all that it has not sent."""
        self._process.kill()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Give a command and wait for its answer."""
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            with self._lock:
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        assert line, f"the engine {self.service!r} ended or gave no answer to {do!r}"
        return json.loads(line)

    def steps(self, count: int, **arguments: Any) -> list[str]:
        """Run steps, which `Commands.steps` describes, and give their trace ids."""
        return self.ask("steps", count=count, **arguments)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Flush the profiler."""
        return self.ask("flush", timeout_s=timeout_s)

    def losses(self) -> dict[str, int]:
        """The profiler's losses that are not zero."""
        return self.ask("losses")

    def profile(self) -> dict[str, Any]:
        """The profile document."""
        return json.loads(self.ask("profile"))


class Commands:
    """What the script can do; every method is a command."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import otel_brick

        self._profiler = otel_brick.configure(**arguments)

    def steps(
        self, count: int, phase: str = "decode", tokens: int = 1, brick_ms: float = 0.0, fails: bool = False
    ) -> list[str]:
        """Steps of `LAYERS` layers, each a trace of its own.

        Args:
            count: of steps.
            phase: of all of them.
            tokens: of each.
            brick_ms: what each brick takes at least.
            fails: whether the head raises an exception.
        """
        return [self._step(phase, tokens, brick_ms / 1000, fails) for _ in range(count)]

    def _step(self, phase: str, tokens: int, brick_s: float, fails: bool) -> str:
        from opentelemetry import trace

        profiler = self._profiler
        trace_id = ""
        try:
            with profiler.step(phase=phase, tokens=tokens):
                trace_id = f"{trace.get_current_span().get_span_context().trace_id:032x}"
                for index in range(LAYERS):
                    with profiler.layer(index, type="decoder"):
                        for name in BRICKS_OF_LAYER:
                            with profiler.brick(name, elements=64 * tokens, bytes_read=1024, bytes_written=256):
                                if name == "FusedMlp":
                                    with profiler.kernel("mlp_kernel", grid=(8, 4, 1), block=128, shared_mem=4096):
                                        pass
                                if brick_s:
                                    time.sleep(brick_s)
                with profiler.brick("LmHead", elements=1000):
                    if fails:
                        raise RuntimeError("as asked")
        except RuntimeError:
            pass
        return trace_id

    def begin(self, count: int, pause_s: float) -> bool:
        """Begin with steps on a thread; `finish` waits for its end."""

        def work() -> None:
            for _ in range(count):
                self._trace_ids.append(self._step("decode", 1, 0.0, fails=False))
                time.sleep(pause_s)

        self._trace_ids: list[str] = []
        self._worker = threading.Thread(target=work, daemon=True)
        self._worker.start()
        return True

    def finish(self) -> list[str]:
        """Wait for what `begin` began, and give the trace ids."""
        self._worker.join()
        return self._trace_ids

    def wide(self, count: int, rows: int) -> bool:
        """Steps of so many bricks each, as fast as they come."""
        brick = self._profiler.define("Wide", elements=1)
        for _ in range(count):
            with self._profiler.step(phase="other"):
                for _ in range(rows):
                    with brick:
                        pass
        return True

    def run(self, pause_s: float, brick_ms: float = 0.0) -> bool:
        """Go on with steps of all phases until the end of the program."""

        def forever() -> None:
            index = 0
            while True:
                index += 1
                phase = ("prefill", "decode", "decode", "mixed")[index % 4]
                self._step(phase, 16 if phase == "prefill" else 1, brick_ms / 1000, fails=index % 50 == 0)
                time.sleep(pause_s)

        threading.Thread(target=forever, daemon=True).start()
        return True

    def budget(self, name: str, budget_ns: int) -> bool:
        """Set the budget of a brick."""
        self._profiler.set_brick_budget(name, budget_ns)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Flush the profiler."""
        return self._profiler.flush(timeout_s)

    def losses(self) -> dict[str, int]:
        """What was lost."""
        return {reason: count for reason, count in self._profiler.losses().items() if count}

    def profile(self) -> str:
        """The profile document."""
        return self._profiler.to_json()


def main() -> None:
    """Obey until the input ends."""
    commands = Commands(json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(commands, request.pop("do"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
