"""Servers as processes: built if missing, started on free ports of the loopback interface, watched, and always ended.

A `Server` is one process with its log. It counts as started when its health check answers, and says what its log holds
where it does not. Each has a session of its own, so that ending it ends whatever it started; should the tests be
killed, Linux ends the servers with them.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

SCRIPT = Path(__file__).parent / "servers" / "build.sh"
NAMES = ("collector", "jaeger", "prometheus", "promtool")
BUILD_S = 3600
START_S = 30.0
STOP_S = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

T = TypeVar("T")


class Binaries:
    """The programs; building them takes minutes the first time and nothing afterwards."""

    def __init__(self) -> None:
        given = os.environ.get("OTEL_BRICK_STACK_SERVERS")
        self.folder = Path(given) if given else self._built()
        missing = [name for name in NAMES if not os.access(self.folder / name, os.X_OK)]
        if missing:
            raise FileNotFoundError(
                f"{self.folder} has no {', '.join(missing)}; run {SCRIPT}, which says where they are"
            )

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    @staticmethod
    def _built() -> Path:
        build = subprocess.run([SCRIPT], stdout=subprocess.PIPE, text=True, timeout=BUILD_S, check=False)
        if build.returncode:
            raise RuntimeError(f"{SCRIPT} failed with status {build.returncode}; what it wrote is above")
        return Path(build.stdout.splitlines()[-1])


def free_address() -> str:
    """An address of the loopback interface on which nobody listens now, a new one each time.

    It is below the ports that Linux takes for outgoing connections, one of which could else be there first.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"


_given: set[int] = set()


def wait_for(what: str, probe: Callable[[], T], timeout_s: float = 30.0, interval_s: float = 0.1) -> T:
    """Ask until the answer is true, and give it.

    Raises:
        AssertionError: with the last answer, or the last assertion that failed, when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        problem: object
        try:
            answer = probe()
        except (AssertionError, OSError) as error:
            problem = error
        else:
            if answer:
                return answer
            problem = answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}; the last answer was: {problem!r}")
        time.sleep(interval_s)


class Server:
    """One process and its log.

    Args:
        name: what it is called in messages; unique within `folder`.
        command: the program and its arguments.
        health_url: answers with status 200 once the server is ready.
        folder: where the log is, and the working directory.
        environ: variables in addition to those of this process without any `OTEL_*`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        health_url: str,
        folder: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._health_url = health_url
        self._folder = folder
        self._environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        self._environ |= environ or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = folder / f"{name}.log"

    @property
    def log(self) -> str:
        """Everything that it has written so far, of all its lives."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            AssertionError: it ended, or is not ready in time; the message has its log.
        """
        assert self._process is None, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if _LIBC else None,  # noqa: PLW1509 (a single call to the kernel)
            )
        try:
            wait_for(f"{self.name} at {self._health_url}", self._is_ready, START_S)
        except BaseException as error:
            self.kill()
            raise AssertionError(f"{error}\n--- log of {self.name}\n{self.log[-8000:]}") from None

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with status {self._process.returncode}")
        try:
            with urllib.request.urlopen(self._health_url, timeout=2) as answer:
                return answer.status == 200
        except urllib.error.HTTPError:
            return False

    def stop(self) -> None:
        """End it in an orderly way, or the hard way when that takes too long."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the process and what it started; the group has the number of the process that we started."""
    if process.poll() is None:
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
