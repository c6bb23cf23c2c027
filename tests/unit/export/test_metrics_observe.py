"""Counters by way of a meter provider: what readers collect, and that nobody waits for anybody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

import otel_brick
from otel_brick import BrickProfiler, semconv
from otel_brick.export.metric_observe import observe
from otel_brick.export.metric_series import COUNTERS, DROP_REASONS, GAUGES, MetricSource
from otel_brick.stats.reader import Tables
from otel_brick.testing import ManualClock

DELTA = {ObservableCounter: AggregationTemporality.DELTA}
BY_NAME = {metric.name: metric for metric in semconv.METRICS}

Sums = dict[str, dict[tuple[Any, ...], int | float]]


def reading(profiler: BrickProfiler, generation: int = 0) -> MetricSource:
    """What a profiler has counted, as a copy."""
    with profiler.snapshot()._tables() as tables:
        return MetricSource(tables, profiler.losses(), generation=generation)


def metrics_of(data: MetricsData | None) -> list[Any]:
    if data is None:
        return []
    return [
        metric
        for of in data.resource_metrics
        for scope_metrics in of.scope_metrics
        if scope_metrics.scope.name == "otel_brick"
        for metric in scope_metrics.metrics
        if metric.data.data_points
    ]


def sums_of(data: MetricsData | None) -> Sums:
    return {
        metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}
        for metric in metrics_of(data)
    }


def sums(reader: InMemoryMetricReader) -> Sums:
    return sums_of(reader.get_metrics_data())


def calls(reader: InMemoryMetricReader) -> dict[str, int | float]:
    return {name: value for (name, *_), value in sums(reader).get("brick.calls", {}).items()}


def times(count: int, name: str = "RmsNorm") -> BrickProfiler:
    """A profiler that has counted a brick this often."""
    profiler = BrickProfiler.enabled(detail="none")
    for _ in range(count):
        profiler.record_elapsed(name, 1_000)
    return profiler


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> MeterProvider:
    return MeterProvider([reader])


@pytest.fixture
def busy(profiler: BrickProfiler, time: ManualClock) -> BrickProfiler:
    profiler.set_brick_budget("Fused", 2_000_000)
    for phase in ("prefill", "decode"):
        with profiler.step(phase=phase, tokens=7):
            with profiler.brick("RmsNorm", elements=64, bytes_read=10, bytes_written=20):
                time.advance(1_500)
            with profiler.brick("Fused"):
                time.advance(3_000_000)
    return profiler


# --- what is collected ---


def test_names_units_descriptions_and_attributes_are_those_of_semconv(
    busy: BrickProfiler, provider: MeterProvider, reader: InMemoryMetricReader
) -> None:
    observe(provider, lambda: reading(busy))

    metrics = metrics_of(reader.get_metrics_data())
    assert {metric.name for metric in metrics} == {metric.name for metric in (*COUNTERS, *GAUGES)}
    for metric in metrics:
        said = BY_NAME[metric.name]
        assert (metric.unit, metric.description) == (said.unit, said.description)
        assert isinstance(metric.data, Gauge) if said.instrument == "gauge" else metric.data.is_monotonic
        for point in metric.data.data_points:
            assert tuple(point.attributes) == said.attributes


def test_values_are_those_of_the_statistics(
    busy: BrickProfiler, provider: MeterProvider, reader: InMemoryMetricReader
) -> None:
    observe(provider, lambda: reading(busy))

    assert sums(reader) == {
        "brick.time": {
            (name, category, phase): ns / 10**9
            for name, category, ns in (("RmsNorm", "norm", 1_500), ("Fused", "other", 3_000_000))
            for phase in ("prefill", "decode")
        },
        "brick.calls": {
            (name, category, phase): 1
            for name, category in (("RmsNorm", "norm"), ("Fused", "other"))
            for phase in ("prefill", "decode")
        },
        "brick.elements": {("RmsNorm", phase): 64 for phase in ("prefill", "decode")},
        "brick.io": {
            ("RmsNorm", phase, direction): amount
            for phase in ("prefill", "decode")
            for direction, amount in (("read", 10), ("write", 20))
        },
        "brick.tokens": {("prefill",): 7, ("decode",): 7},
        "brick.budget.limit": {("Fused",): 0.002},
        "brick.budget.violations": {("Fused", phase): 1 for phase in ("prefill", "decode")},
        "brick.records.dropped": {(reason,): 0 for reason in DROP_REASONS},
    }


def test_without_samples_nothing_is_collected(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    observe(provider, lambda: MetricSource(Tables(), {}))

    assert sums(reader) == {}


def test_a_delta_reader_gets_what_came_since_its_last_collection() -> None:
    reader = InMemoryMetricReader(preferred_temporality=DELTA)
    profiler = times(3)
    observe(MeterProvider([reader]), lambda: reading(profiler))

    assert calls(reader) == {"RmsNorm": 3}
    for _ in range(4):
        profiler.record_elapsed("RmsNorm", 1)
    assert calls(reader) == {"RmsNorm": 4}
    assert calls(reader) == {"RmsNorm": 0}


def test_a_periodic_reader_exports_it() -> None:
    class Kept(MetricExporter):
        batches: list[MetricsData] = []  # noqa: RUF012

        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
        ) -> MetricExportResult:
            self.batches.append(metrics_data)
            return MetricExportResult.SUCCESS

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            return True

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            pass

    exporter, profiler = Kept(), times(2)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, 60_000)])
    observe(provider, lambda: reading(profiler))

    assert provider.force_flush(5_000)
    provider.shutdown()
    assert sums_of(exporter.batches[0])["brick.calls"] == {("RmsNorm", "norm", "other"): 2}


def test_a_collection_reads_once_and_each_collection_anew() -> None:
    readers = [InMemoryMetricReader(), InMemoryMetricReader(preferred_temporality=DELTA)]
    profiler, reads = times(1), []

    def source() -> MetricSource:
        reads.append(1)
        return reading(profiler)

    observe(MeterProvider(readers), source)
    for expected in (1, 2, 3):
        assert calls(readers[0]) == {"RmsNorm": expected}
        assert calls(readers[1]) == {"RmsNorm": 1}
        assert len(reads) == 2 * expected
        profiler.record_elapsed("RmsNorm", 1)


# --- several sources, and their end ---


def test_sources_of_one_provider_share_its_instruments_and_are_added(
    provider: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = times(2), times(3)
    observe(provider, lambda: reading(one))
    observe(provider, lambda: reading(other))

    assert calls(reader) == {"RmsNorm": 5}
    assert caplog.records == []


def test_of_a_gauge_that_several_sources_have_the_smallest_value_is_reported(
    provider: MeterProvider, reader: InMemoryMetricReader
) -> None:
    profilers = [times(2), times(2)]
    for profiler, budget_ns in zip(profilers, (20_000, 10_000), strict=True):
        profiler.set_brick_budget("RmsNorm", budget_ns)
    profilers[0].set_brick_budget("Own", 30_000)
    observed = [observe(provider, lambda profiler=profiler: reading(profiler)) for profiler in profilers]

    assert sums(reader)["brick.budget.limit"] == {("RmsNorm",): 1e-5, ("Own",): 3e-5}
    profilers[1].set_brick_budget("RmsNorm", 40_000)
    assert sums(reader)["brick.budget.limit"] == {("RmsNorm",): 2e-5, ("Own",): 3e-5}
    observed[0].close()
    assert sums(reader)["brick.budget.limit"] == {("RmsNorm",): 4e-5}
    observed[1].close()
    assert sums(reader) == {}


def test_after_close_callbacks_yield_nothing(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    reads: list[int] = []
    profiler = times(2)

    def source() -> MetricSource:
        reads.append(1)
        return reading(profiler)

    observed = observe(provider, source)
    assert calls(reader) == {"RmsNorm": 2}
    observed.close()
    observed.close()

    assert sums(reader) == {}
    assert len(reads) == 1


def test_what_a_closed_source_had_counted_stays_in_the_sums_of_the_others(
    provider: MeterProvider, reader: InMemoryMetricReader
) -> None:
    one, other, third = times(2), times(3), times(4)
    first = observe(provider, lambda: reading(one))
    second = observe(provider, lambda: reading(other))
    assert calls(reader) == {"RmsNorm": 5}

    first.close()
    assert calls(reader) == {"RmsNorm": 5}
    assert sums(reader)["brick.records.dropped"] == {(reason,): 0 for reason in DROP_REASONS}
    second.close()
    assert calls(reader) == {}
    observe(provider, lambda: MetricSource(Tables(), {}))
    assert calls(reader) == {"RmsNorm": 5}
    assert sums(reader)["brick.records.dropped"] == {(reason,): 0 for reason in DROP_REASONS}
    observe(provider, lambda: reading(third))
    assert calls(reader) == {"RmsNorm": 9}


def test_a_closed_source_is_let_go(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    import gc
    import weakref

    class Source:
        def __call__(self) -> MetricSource:
            return MetricSource(Tables(), {"log_full": 1})

    source = Source()
    observed, alive = observe(provider, source), weakref.ref(source)
    assert sums(reader)["brick.records.dropped"][("log_full",)] == 1
    observed.close()
    del source, observed
    gc.collect()

    assert alive() is None


@pytest.mark.parametrize("temporality", [{}, DELTA], ids=["cumulative", "delta"])
def test_sums_never_go_down_when_statistics_are_forgotten(temporality: Any) -> None:
    reader = InMemoryMetricReader(preferred_temporality=temporality)
    state = {"now": reading(times(3))}
    observe(MeterProvider([reader]), lambda: state["now"])
    assert calls(reader) == {"RmsNorm": 3}

    # More than before: that it starts again can not be seen from the value.
    state["now"] = reading(times(5), generation=1)
    assert calls(reader) == {"RmsNorm": 5 if temporality else 8}
    state["now"] = reading(times(1, "Other"), generation=2)
    assert calls(reader) == ({"RmsNorm": 0, "Other": 1} if temporality else {"RmsNorm": 8, "Other": 1})


def test_losses_outlive_the_statistics(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    state = {"now": MetricSource(Tables(), {"log_full": 5})}
    observe(provider, lambda: state["now"])
    assert sums(reader)["brick.records.dropped"][("log_full",)] == 5

    state["now"] = MetricSource(Tables(), {"log_full": 6}, generation=1)
    assert sums(reader)["brick.records.dropped"][("log_full",)] == 6


def test_an_older_reading_changes_nothing(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    readings = [reading(times(count), generation) for count, generation in ((3, 0), (2, 0), (1, 1), (9, 0), (2, 1))]
    observe(provider, lambda: readings.pop(0))

    assert [calls(reader)["RmsNorm"] for _ in range(5)] == [3, 3, 4, 4, 5]


# --- what may go wrong ---


def test_a_source_that_raises_is_logged_once_and_keeps_its_sums(
    provider: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    profiler, broken = times(2), [False]

    def source() -> MetricSource:
        if broken[0]:
            raise OSError("gone")
        return reading(profiler)

    observe(provider, source)
    other = times(1, "Other")
    observe(provider, lambda: reading(other))
    assert calls(reader) == {"RmsNorm": 2, "Other": 1}
    broken[0] = True
    other.record_elapsed("Other", 1)

    assert calls(reader) == {"RmsNorm": 2, "Other": 2}
    assert calls(reader) == {"RmsNorm": 2, "Other": 2}
    assert [record.message for record in caplog.records] == ["statistics could not be read for metrics"]


def test_a_source_that_is_closed_while_it_is_read_is_counted_once(
    provider: MeterProvider, reader: InMemoryMetricReader
) -> None:
    closing, profiler, other = [False], times(2), times(1, "Other")

    def source() -> MetricSource:
        if closing[0]:
            observed.close()
        return reading(profiler)

    observed = observe(provider, source)
    observe(provider, lambda: reading(other))
    assert calls(reader) == {"RmsNorm": 2, "Other": 1}
    closing[0] = True
    assert calls(reader) == {"RmsNorm": 2, "Other": 1}
    assert calls(reader) == {"RmsNorm": 2, "Other": 1}


def test_instruments_are_created_without_holding_a_lock_that_callbacks_take() -> None:
    """While each instrument is being created, another thread collects and a third one observes and closes."""
    finished: list[str] = []

    class Meter:
        def __init__(self) -> None:
            self.callbacks: list[Callable[[Any], Any]] = []

        def create_observable_counter(self, name: str, callbacks: list[Any], **_: Any) -> None:
            self.callbacks += callbacks
            for task in (self.collect, self.observe_and_close):
                thread = threading.Thread(target=task, args=(name,), daemon=True)
                thread.start()
                thread.join(5)

        create_observable_gauge = create_observable_counter

        def collect(self, name: str) -> None:
            for callback in self.callbacks:
                list(callback(None))
            finished.append(f"collect {name}")

        def observe_and_close(self, name: str) -> None:
            observe(provider, lambda: MetricSource(Tables(), {"log_full": 1})).close()
            finished.append(f"observe {name}")

    class Provider:
        def __init__(self) -> None:
            self.meter = Meter()

        def get_meter(self, *_: Any) -> Meter:
            return self.meter

    provider: Any = Provider()
    observe(provider, lambda: MetricSource(Tables(), {"log_full": 1}))

    assert finished == [f"{task} {metric.name}" for metric in (*COUNTERS, *GAUGES) for task in ("collect", "observe")]
    assert len(provider.meter.callbacks) == len(COUNTERS) + len(GAUGES)


def test_collections_and_observers_in_many_threads_neither_lose_nor_repeat() -> None:
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(readers)
    profilers = [times(10) for _ in range(8)]

    def run(profiler: BrickProfiler) -> None:
        observed = observe(provider, lambda: reading(profiler))
        for reader in readers:
            calls(reader)
        observed.close()

    threads = [threading.Thread(target=run, args=(profiler,)) for profiler in profilers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    observe(provider, lambda: MetricSource(Tables(), {}))
    assert [calls(reader) for reader in readers] == [{"RmsNorm": 80}] * 2


def test_a_provider_that_does_nothing_and_one_without_weak_references_will_do() -> None:
    class Slotted(NoOpMeterProvider):
        __slots__ = ()

        def __hash__(self) -> int:
            raise TypeError("unhashable")

    for provider in (NoOpMeterProvider(), Slotted()):
        observe(provider, lambda: MetricSource(Tables(), {})).close()


def test_a_provider_that_nobody_holds_is_let_go() -> None:
    import gc
    import weakref

    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    alive = weakref.ref(provider)
    observe(provider, lambda: MetricSource(Tables(), {}))
    del provider
    gc.collect()

    assert alive() is None


FORK = """
import os
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from otel_brick.export.metric_observe import observe
from tests_observe import calls, reading, times

reader = InMemoryMetricReader()
state = [reading(times(5), generation=3)]
observed = observe(MeterProvider([reader]), lambda: state[0])
assert calls(reader) == {"RmsNorm": 5}
child = os.fork()
if not child:
    state[0] = reading(times(2, "Child"))
    os._exit(0 if calls(reader) == {"Child": 2} else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), calls(reader))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_repeat_what_its_parent_counted(tmp_path: Path) -> None:
    (tmp_path / "tests_observe.py").write_text(Path(__file__).read_text())
    root = Path(otel_brick.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root)))},
    )

    assert (done.returncode, done.stdout) == (0, "0 {'RmsNorm': 5}\n"), done.stderr
