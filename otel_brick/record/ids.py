"""Trace and span ids from a source of our own.

Programs that train models reseed Python's and numpy's global generators, which would make ids repeat across steps
and processes; this source is seeded by the operating system and shared with nobody.
"""

from __future__ import annotations

import os
import random
import weakref
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class IdSource:
    """Random, never zero ids; a forked child goes on with a sequence of its own."""

    def __init__(self) -> None:
        self.renew()
        _sources.add(self)

    def renew(self) -> None:
        """Seed again from the operating system."""
        self._pid = os.getpid()
        self._random = random.Random(os.urandom(32))
        self._batch = np.random.Generator(np.random.PCG64(int.from_bytes(os.urandom(32), "little")))

    def _check_process(self) -> None:
        # Not every fork runs Python's hooks; uWSGI's does not.
        if os.getpid() != self._pid:
            self.renew()

    def span_id(self) -> int:
        """One unsigned 64-bit id."""
        self._check_process()
        return self._random.randrange(1, 1 << 64)

    def trace_id(self) -> int:
        """One unsigned 128-bit id."""
        self._check_process()
        return self._random.randrange(1, 1 << 128)

    def span_ids(self, count: int) -> NDArray[np.uint64]:
        """`count` span ids, shape `(count,)`."""
        self._check_process()
        return self._batch.integers(1, (1 << 64) - 1, count, np.uint64, endpoint=True)


_sources: weakref.WeakSet[IdSource] = weakref.WeakSet()


def _renew_all() -> None:
    for source in list(_sources):
        source.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
