"""A bounded queue of requests and the one thread that sends them.

Whoever submits never waits for the network. Every span of every request ends in exactly one of two ways: delivered, or
counted with a reason, also when the queue overflows, a request is delivered in part or the end comes first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from .transport import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..record.losses import Losses
    from .transport import Transport

logger = logging.getLogger("otel_brick")

MAX_REQUEST_BYTES: Final = 3 << 20
"""Collectors commonly take no more than 4 MiB."""
LEAST_REQUEST_BYTES: Final = 1 << 16
"""A collector that refuses even this does so for another reason than size."""
MAX_QUEUE_BYTES: Final = 32 << 20
IDLE_S: Final = 5.0
"""After so long without work the thread ends; the next request starts another."""
LOG_INTERVAL_S: Final = 60.0
MAX_MESSAGES: Final = 16


class Payload(Protocol):
    """A request that can be cut in two between its spans."""

    @property
    def rows(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def body(self) -> bytes: ...

    def halves(self) -> tuple[Payload, Payload]: ...


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of some of a request's spans: taken, refused by an answer that took others, or failed."""

    delivered: int = 0
    rejected: int = 0
    failed: int = 0


class _Item:
    """A queued request, and how many of its spans are neither delivered nor counted yet."""

    __slots__ = ("losses", "number", "payload", "unsettled")

    def __init__(self, number: int, payload: Payload, losses: Losses) -> None:
        self.number = number
        self.payload = payload
        self.losses = losses
        self.unsettled = payload.rows


class Sender:
    """Sends requests in the order in which they come; a forked child starts with an empty queue.

    Args:
        destination: what logs call the collector.
    """

    def __init__(self, transport: Transport, destination: str) -> None:
        self._transport = transport
        self._log = _Log(destination)
        self._size_limit = MAX_REQUEST_BYTES
        self._closed = False
        self._renew()
        _senders.add(self)

    def _renew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        # Held while counting, which may log, so that shutdown returns after everything is counted.
        self._counting = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0
        self._numbered = 0
        self._sending: _Item | None = None
        self._direct = 0
        self._thread: threading.Thread | None = None

    @property
    def request_bytes(self) -> int:
        """The size to which requests are cut: ours, or what the collector takes if that is less."""
        return self._size_limit

    def restart_in_child(self) -> None:
        """Forget what the parent has to send; its thread and connections do not exist here."""
        if self._process != os.getpid():
            self._renew()
            self._log.renew_lock()
            self._transport.renew()

    def submit(self, payloads: Iterable[Payload], losses: Losses) -> None:
        """Queue requests and return at once; what does not fit takes the place of the oldest."""
        self.restart_in_child()  # servers that fork in C do not run Python's handlers
        refused = 0
        dropped: list[_Item] = []
        with self._changed:
            for payload in payloads:
                if self._closed:
                    refused += payload.rows
                    continue
                self._numbered += 1
                self._queue.append(_Item(self._numbered, payload, losses))
                self._queued_bytes += payload.size_bytes
            while self._queued_bytes > MAX_QUEUE_BYTES and len(self._queue) > 1:
                dropped.append(self._take())
            if self._queue:
                self._start()
            self._changed.notify_all()
        losses.add("already_shutdown", refused)
        for item in dropped:
            item.losses.add("queue_full", item.unsettled)

    def deliver(self, payload: Payload) -> Receipt | None:
        """Send a request on the calling thread; None after shutdown."""
        self.restart_in_child()
        with self._changed:
            if self._closed:
                return None
            self._direct += 1
        try:
            receipts = list(self._deliveries(payload))
        finally:
            with self._changed:
                self._direct -= 1
                self._changed.notify_all()
        return Receipt(
            delivered=sum(receipt.delivered for receipt in receipts),
            rejected=sum(receipt.rejected for receipt in receipts),
            failed=sum(receipt.failed for receipt in receipts),
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is delivered or counted; False if that takes longer."""
        self.restart_in_child()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            last = self._numbered
            if self._queue:
                self._start()
            stranded = bool(self._queue) and self._thread is None
        if stranded:
            self._send_here(deadline)
        with self._changed:
            return self._changed.wait_for(lambda: self._oldest() > last, max(0.0, deadline - time.monotonic()))

    def _send_here(self, deadline: float) -> None:
        """Send what is queued on the calling thread, because none can be started any more."""
        while time.monotonic() < deadline:
            with self._changed:
                if not self._queue or self._sending is not None:
                    return
                item = self._sending = self._take()
            for receipt in self._deliveries(item.payload):
                self._settle(item, receipt)
            self._settle(item, Receipt(failed=item.unsettled))
            with self._changed:
                self._sending = None
                self._changed.notify_all()

    def shutdown(self, timeout_s: float) -> None:
        """Refuse further requests, give those that wait one more chance within the time and count the rest."""
        self.restart_in_child()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
        self._transport.interrupt(deadline)
        self._drain_without_thread()
        with self._changed:
            self._changed.wait_for(
                lambda: self._sending is None and not self._queue and not self._direct,
                max(0.0, deadline - time.monotonic()),
            )
        self._count_the_rest()
        self._transport.close()

    def _count_the_rest(self) -> None:
        with self._counting:
            with self._changed:
                left = [*self._queue] if self._sending is None else [self._sending, *self._queue]
                rows = [(item.losses, item.unsettled) for item in left]
                for item in left:
                    item.unsettled = 0
                self._queue.clear()
                self._queued_bytes = 0
                self._sending = None
                self._changed.notify_all()
            for losses, unsettled in rows:
                losses.add("export_failed", unsettled)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="otel-brick-sender", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too late in the life of the process; shutdown sends what is queued
                self._thread = None
            else:
                self._thread = thread

    def _drain_without_thread(self) -> None:
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        self._work()

    def _take(self) -> _Item:
        item = self._queue.popleft()
        self._queued_bytes -= item.payload.size_bytes
        return item

    def _oldest(self) -> int:
        """The number of the first request that is not settled."""
        if self._sending is not None:
            return self._sending.number
        return self._queue[0].number if self._queue else self._numbered + 1

    def _work(self) -> None:
        while (item := self._next()) is not None:
            for receipt in self._deliveries(item.payload):
                self._settle(item, receipt)
            self._settle(item, Receipt(failed=item.unsettled))

    def _next(self) -> _Item | None:
        """The next request; None when the thread should end."""
        with self._changed:
            self._sending = None
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._queue or self._closed, IDLE_S) or not self._queue:
                self._thread = None
                return None
            self._sending = self._take()
            return self._sending

    def _settle(self, item: _Item, receipt: Receipt) -> None:
        with self._counting:
            with self._changed:
                # Nothing is left where shutdown did not wait and has counted everything.
                lost = min(receipt.rejected + receipt.failed, item.unsettled)
                item.unsettled = max(0, item.unsettled - receipt.delivered - lost)
            item.losses.add("export_failed", lost)

    def _deliveries(self, payload: Payload) -> Iterator[Receipt]:
        """Send a request, in parts where it is too large; together the receipts tell of all of its spans."""
        waiting = [payload]
        while waiting:
            part = waiting.pop()
            if part.rows > 1 and part.size_bytes > self._size_limit:
                waiting.extend(reversed(part.halves()))
                continue
            outcome = self._sent(part)
            if outcome.verdict is Verdict.TooLarge and part.rows > 1:
                # Whoever refused this would refuse its like too.
                self._size_limit = max(LEAST_REQUEST_BYTES, min(self._size_limit, part.size_bytes // 2))
                waiting.extend(reversed(part.halves()))
                continue
            receipt = Receipt(failed=part.rows)
            if outcome.verdict is Verdict.Delivered:
                rejected = min(outcome.rejected, part.rows)
                receipt = Receipt(delivered=part.rows - rejected, rejected=rejected)
            self._log.note(outcome, receipt.rejected + receipt.failed)
            yield receipt

    def _sent(self, part: Payload) -> Outcome:
        try:
            return self._transport.send(part.body())
        except Exception as error:
            logger.exception("spans could not be encoded")
            return Outcome(Verdict.Failed, message=repr(error))


class _Log:
    """Says that spans are lost and when they no longer are, at most once a minute."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._said_at = -LOG_INTERVAL_S
        self._failing = False
        self._lost = 0
        self._messages: set[str] = set()
        self.renew_lock()

    def renew_lock(self) -> None:
        self._lock = threading.Lock()

    def note(self, outcome: Outcome, lost: int) -> None:
        with self._lock:
            if outcome.verdict is Verdict.Delivered:
                said = self._recovered() or self._partial(outcome, lost)
            else:
                said = self._failed(outcome, lost)
        if said is not None:
            logger.log(*said)

    def _failed(self, outcome: Outcome, lost: int) -> tuple[int, str] | None:
        self._lost += lost
        now = time.monotonic()
        if now - self._said_at < LOG_INTERVAL_S:
            return None
        self._said_at, self._failing = now, True
        text = f"{self._lost} spans could not be exported to {self._destination}: {outcome.message}"
        self._lost = 0
        return logging.WARNING, text

    def _recovered(self) -> tuple[int, str] | None:
        if not self._failing:
            return None
        self._failing = False
        return logging.INFO, f"spans are exported to {self._destination} again"

    def _partial(self, outcome: Outcome, lost: int) -> tuple[int, str] | None:
        """Each message of a collector that took only some spans is passed on once."""
        message = outcome.message
        if not (message or lost) or message in self._messages or len(self._messages) >= MAX_MESSAGES:
            return None
        self._messages.add(message)
        return logging.WARNING, f"{self._destination} rejected {lost} spans of a request: {message or 'no reason'}"


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _renew_all() -> None:
    for sender in list(_senders):
        sender.restart_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
