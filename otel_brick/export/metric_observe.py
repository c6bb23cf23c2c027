"""Metrics by way of a `MeterProvider`: observable counters and gauges, which the provider's own readers collect.

Histograms do not go this way, because the SDK takes no ready-made ones. A callback runs while the SDK holds a lock
that creating an instrument takes too; so no lock of ours is ever held while instruments are created, and the one that
callbacks take guards additions only.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Final

from opentelemetry.metrics import Observation

from .. import semconv
from ..version import __version__
from .metric_series import COUNTERS, GAUGES, levels, number, totals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.metrics import CallbackOptions, MeterProvider

    from ..semconv import Metric
    from .metric_series import Level, MetricSource, Total

logger = logging.getLogger("otel_brick")

_Series = tuple["Metric", tuple[tuple[str, str], ...]]


class Observed:
    """A source that a meter provider reports, until `close`."""

    def __init__(self, instruments: _Instruments, source: Callable[[], MetricSource]) -> None:
        self._instruments = instruments
        self._tally = _Tally(source)
        instruments.add(self._tally)

    def close(self) -> None:
        """Stop reporting the source, for good; may be called again.

        Callbacks yield nothing once all sources of the provider are closed. Until then, and if another one is added
        later, what was collected from this one stays in the sums, since they may never go down; what it has counted
        since the last collection is not collected any more.
        """
        self._instruments.remove(self._tally)


def observe(meter_provider: MeterProvider, source: Callable[[], MetricSource]) -> Observed:
    """Report the counters and gauges of a source through a meter provider.

    The instruments are created once for each provider; counters of the same provider's sources are added together, and
    of a gauge that several have the smallest value is reported. Sums never go down, also when the statistics behind a
    source are forgotten: what they had counted stays in.

    Args:
        meter_provider: whose readers collect.
        source: gives a reading, called once for each collection on the collecting thread. It must not wait for
            anything that may in turn wait for the meter provider. It is kept until it is closed.

    Returns:
        What ends it by `close()`.
    """
    instruments = _Instruments()
    try:
        # Whoever puts its own in first creates them; no lock, see above.
        known = _known.setdefault(meter_provider, instruments)
    except TypeError:  # a provider of which no weak reference can be made
        known = instruments
    if known is instruments:
        instruments.create(meter_provider)
    return Observed(known, source)


class _Tally:
    """What one source has counted so far, and its last levels."""

    def __init__(self, source: Callable[[], MetricSource]) -> None:
        self.source = source
        self.generation = 0
        self.counted: Counter[_Series] = Counter()
        self.levels: dict[_Series, int] = {}


class _Instruments:
    """The observable instruments of one provider, and the sum of the sources that they report."""

    def __init__(self) -> None:
        self._tallies: list[_Tally] = []
        self._warned = False
        self._renew()

    def _renew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._past: Counter[_Series] = Counter()
        self._ready: dict[Metric, list[Observation]] = {}

    def create(self, meter_provider: MeterProvider) -> None:
        meter = meter_provider.get_meter(semconv.SCOPE_NAME, __version__)
        for metric in COUNTERS:
            meter.create_observable_counter(
                metric.name, [self._callback(metric)], unit=metric.unit, description=metric.description
            )
        for metric in GAUGES:
            meter.create_observable_gauge(
                metric.name, [self._callback(metric)], unit=metric.unit, description=metric.description
            )

    def _after_fork(self) -> None:
        """A forked child counts from zero; the parent's sums are the parent's to report."""
        if self._process != os.getpid():
            self._renew()
            for tally in self._tallies:
                tally.generation = 0
                tally.counted.clear()
                tally.levels = {}

    def add(self, tally: _Tally) -> None:
        self._after_fork()
        with self._lock:
            self._tallies = [*self._tallies, tally]
            self._ready = {}

    def remove(self, tally: _Tally) -> None:
        self._after_fork()
        with self._lock:
            if tally in self._tallies:
                self._tallies = [other for other in self._tallies if other is not tally]
                self._past.update(tally.counted)  # keeps zeros, unlike +=
                self._ready = {}

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], list[Observation]]:
        def observations(_: CallbackOptions) -> list[Observation]:
            # One reading serves all of a collection: an instrument that finds its part taken begins the next.
            found = self._ready.pop(metric, None)
            if found is None:
                ready = self._read()
                found = ready.pop(metric, [])
                self._ready = ready
            return found

        return observations

    def _read(self) -> dict[Metric, list[Observation]]:
        self._after_fork()
        readings = [(tally, self._reading(tally)) for tally in self._tallies]
        with self._lock:
            tallies = self._tallies  # without those that were closed while they were read: they are in the past
            for tally, reading in readings:
                if reading is not None and tally in tallies:
                    self._count(tally, *reading)
            sums = self._past.copy()
            smallest: dict[_Series, int] = {}
            for tally in tallies:
                sums.update(tally.counted)
                for series, exact in tally.levels.items():
                    smallest[series] = min(exact, smallest.get(series, exact))
        ready: dict[Metric, list[Observation]] = {metric: [] for metric in (*COUNTERS, *GAUGES)}
        if tallies:
            for (metric, attributes), exact in (*sums.items(), *smallest.items()):
                ready[metric].append(Observation(number(metric, exact), dict(attributes)))
        return ready

    def _reading(self, tally: _Tally) -> tuple[int, dict[_Series, int], dict[_Series, int]] | None:
        try:
            source = tally.source()
            return source.generation, _flat(totals(source)), _flat(levels(source))
        except Exception:
            if not self._warned:
                self._warned = True
                logger.exception("statistics could not be read for metrics")
            return None

    def _count(
        self, tally: _Tally, generation: int, counted: dict[_Series, int], own_levels: dict[_Series, int]
    ) -> None:
        """Take a reading into a tally; one that is older than what the tally has changes nothing."""
        if generation < tally.generation:
            return
        if generation > tally.generation:
            tally.generation = generation
            for series in list(tally.counted):
                if series[0] is not semconv.METRIC_BRICK_RECORDS_DROPPED:  # losses are not forgotten
                    self._past[series] += tally.counted.pop(series)
        for series, exact in counted.items():
            tally.counted[series] = max(tally.counted[series], exact)
        tally.levels = own_levels


def _flat(found: Mapping[Metric, Sequence[Total | Level]]) -> dict[_Series, int]:
    return {(metric, tuple(one.attributes.items())): one.exact for metric, series in found.items() for one in series}


_known: Final[weakref.WeakKeyDictionary[MeterProvider, _Instruments]] = weakref.WeakKeyDictionary()
