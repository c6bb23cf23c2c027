"""Deferred bricks and sync modes where no device is in use: what `finalize` makes of starts alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from otel_brick import BrickId, BrickProfiler, SyncMode, TimingSource
from otel_brick.record import deferred, device
from otel_brick.testing import InMemoryTraces, ManualClock


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.fixture
def traces() -> InMemoryTraces:
    return InMemoryTraces()


@pytest.fixture
def profiler(time: ManualClock, traces: InMemoryTraces) -> Iterator[BrickProfiler]:
    profiler = BrickProfiler.enabled(clock=time.clock, tracer_provider=traces.provider, detail="all")
    yield profiler
    profiler.shutdown()


def totals(profiler: BrickProfiler) -> dict[str, int]:
    return {brick.name: brick.total_ns for brick in profiler.all_brick_stats()}


def record(profiler: BrickProfiler, *starts: int) -> None:
    for number, start in enumerate(starts):
        profiler.record_deferred_dynamic(f"B{number}", start)


def test_each_brick_ends_where_the_next_begins_and_the_last_at_the_end(profiler: BrickProfiler) -> None:
    record(profiler, 1000, 4000)
    profiler.finalize(10_000)
    assert totals(profiler) == {"B0": 3000, "B1": 6000}
    assert profiler.total_ns() == 9000


def test_a_common_end_gives_the_numbers_of_the_reference(profiler: BrickProfiler) -> None:
    profiler.record_deferred(BrickId.RmsNorm, 1000, 7)
    profiler.record_deferred(BrickId.LmHead, 4000, 5)
    profiler.finalize(10_000, attribution="common_end")
    assert totals(profiler) == {"RmsNorm": 9000, "LmHead": 6000}
    assert profiler.total_ns() == 15_000
    norm = profiler.brick_stats(BrickId.RmsNorm)
    assert (norm.count, norm.total_elements, norm.launch_spacing) == (1, 7, 0)


def test_deferred_bricks_are_counted_once_and_only_by_finalize(profiler: BrickProfiler) -> None:
    assert (profiler.has_pending(), profiler.pending_count()) == (False, 0)
    record(profiler, 0, 10, 20)
    assert (profiler.has_pending(), profiler.pending_count(), totals(profiler)) == (True, 3, {})
    profiler.finalize(30)
    assert (profiler.has_pending(), profiler.pending_count()) == (False, 0)
    profiler.finalize(40)
    profiler.finalize()
    assert totals(profiler) == {"B0": 10, "B1": 10, "B2": 10}


def test_without_an_end_and_without_a_device_the_end_is_now(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.reset_epoch()
    profiler.record_deferred(BrickId.RmsNorm, profiler.elapsed_ns())
    time.advance(250)
    profiler.finalize()
    stats = profiler.brick_stats(BrickId.RmsNorm)
    assert (stats.total_ns, stats.timing_source, stats.launch_spacing) == (250, TimingSource.Host, 1)


def test_the_epoch_is_the_origin_of_starts_and_pending_bricks_keep_theirs(
    profiler: BrickProfiler, time: ManualClock
) -> None:
    time.advance(500)
    assert profiler.elapsed_ns() == 500
    profiler.record_deferred_dynamic("Old", 100)
    profiler.reset_epoch()
    assert profiler.elapsed_ns() == 0
    profiler.finalize(50)  # 550 of the old epoch
    assert totals(profiler) == {"Old": 450}


@pytest.mark.parametrize(
    ("starts", "end", "anomalies", "expected"),
    [
        ((10, 10), 30, 1, {"B0": 0, "B1": 20}),
        ((20, 10), 30, 1, {"B0": 10, "B1": 10}),
        ((10, 40), 30, 1, {"B0": 20, "B1": 0}),
        ((10, 20), 30, 0, {"B0": 10, "B1": 10}),
    ],
)
def test_starts_out_of_order_equal_or_beyond_the_end_are_counted_and_still_recorded(
    profiler: BrickProfiler, starts: tuple[int, ...], end: int, anomalies: int, expected: dict[str, int]
) -> None:
    record(profiler, *starts)
    profiler.finalize(end)
    assert profiler.losses()["clock_anomaly"] == anomalies
    assert totals(profiler) == expected


def test_starts_from_another_clock_that_lie_in_the_future_are_no_anomaly(profiler: BrickProfiler) -> None:
    record(profiler, 10**15, 10**15 + 100)
    profiler.finalize(10**15 + 300)
    assert totals(profiler) == {"B0": 100, "B1": 200}
    assert profiler.losses()["clock_anomaly"] == 0


def test_streams_are_attributed_apart(profiler: BrickProfiler) -> None:
    profiler.record_deferred_dynamic("A", 0)
    profiler.record_deferred_dynamic("B", 40)
    profiler.finalize(100)
    assert totals(profiler) == {"A": 40, "B": 60}


def test_a_last_brick_that_holds_more_than_half_of_the_window_is_told(
    profiler: BrickProfiler, caplog: pytest.LogCaptureFixture
) -> None:
    record(profiler, 0, 10, 20)
    profiler.finalize(100)
    profiler.losses()
    assert [line for line in caplog.messages if "more than half of its window" in line]


def test_deferred_bricks_hang_where_they_were_recorded_and_their_step_leaves_after_finalize(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    profiler.reset_epoch()
    with profiler.step(phase="decode"), profiler.layer(3):
        profiler.record_deferred(BrickId.RmsNorm, profiler.elapsed_ns())
        time.advance(100)
        profiler.record_deferred(BrickId.LmHead, profiler.elapsed_ns())
        time.advance(50)
    assert profiler.flush()
    assert traces.spans == []
    profiler.finalize(profiler.elapsed_ns())
    profiler.flush()
    (step,) = traces.trees()
    assert step.outline() == ("step decode", 150, (("layer", 150, (("RmsNorm", 100, ()), ("LmHead", 50, ()))),))
    assert [child.span.attributes["brick.layer.index"] for child in step.children[0].children] == [3, 3]


def test_a_step_whose_deferred_bricks_nobody_finalizes_leaves_when_the_profiler_ends(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    with profiler.step():
        profiler.record_deferred(BrickId.RmsNorm, 0)
    profiler.shutdown()
    assert [span.name for span in traces.spans].count("step other") == 1


def test_a_disabled_profiler_records_nothing_and_finalize_applies_what_was_recorded_before(
    profiler: BrickProfiler,
) -> None:
    record(profiler, 0)
    profiler.disable()
    profiler.record_deferred(BrickId.RmsNorm, 10)
    profiler.record_deferred(BrickId.RmsNorm, -1)  # arguments are not checked
    profiler.finalize(20)
    assert totals(profiler) == {"B0": 20}


def test_a_reset_forgets_what_is_pending(profiler: BrickProfiler) -> None:
    record(profiler, 0, 10)
    profiler.reset()
    assert not profiler.has_pending()
    profiler.finalize(100)
    assert totals(profiler) == {}


def test_pending_bricks_are_bounded_and_those_beyond_are_counted(
    profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "MAX_PENDING", 5)
    record(profiler, *range(8))
    assert profiler.pending_count() == 5
    assert profiler.losses()["log_full"] == 3


def test_threads_may_record_and_finalize_at_the_same_time(profiler: BrickProfiler) -> None:
    def work() -> None:
        for number in range(200):
            profiler.record_deferred(BrickId.RmsNorm, number)
            if number % 10 == 0:
                profiler.finalize(number + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiler.finalize(1000)
    assert profiler.brick_stats(BrickId.RmsNorm).count == 800


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda p: p.record_deferred("RmsNorm", 0), TypeError, "brick"),
        (lambda p: p.record_deferred(BrickId.RmsNorm, -1), ValueError, "start_ns"),
        (lambda p: p.record_deferred(BrickId.RmsNorm, 1.0), TypeError, "start_ns"),
        (lambda p: p.record_deferred(BrickId.RmsNorm, 0, -1), ValueError, "elements"),
        (lambda p: p.record_deferred(BrickId.RmsNorm, 0, stream="s"), TypeError, "stream"),
        (lambda p: p.record_deferred_dynamic("", 0), ValueError, "name"),
        (lambda p: p.finalize(-1), ValueError, "end_ns"),
        (lambda p: p.finalize(attribution="last"), ValueError, "attribution"),
        (lambda p: p.set_sync_mode("often"), ValueError, "mode"),
        (lambda p: p.set_sync_mode(2), TypeError, "mode"),
        (lambda p: p.brick("B", stream=1.5), TypeError, "stream"),
        (lambda p: p.define("B", stream=True), TypeError, "stream"),
        (lambda p: p.kernel("k", stream=object()), TypeError, "stream"),
    ],
)
def test_a_bad_argument_is_an_error_that_names_it_and_records_nothing(
    profiler: BrickProfiler, call: object, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        call(profiler)  # type: ignore[operator]
    assert (profiler.pending_count(), totals(profiler)) == (0, {})


def test_the_mode_is_deferred_unless_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BrickProfiler().sync_mode() is SyncMode.Deferred
    assert BrickProfiler(sync_mode=SyncMode.PerLayer).sync_mode() is SyncMode.PerLayer
    assert BrickProfiler(sync_mode="immediate").sync_mode() is SyncMode.Immediate
    monkeypatch.setenv("OTEL_BRICK_SYNC_MODE", "none")
    assert BrickProfiler().sync_mode() is SyncMode.None_
    profiler = BrickProfiler()
    profiler.set_sync_mode("per_layer")
    assert profiler.sync_mode() is SyncMode.PerLayer


def test_a_step_waits_for_finalize_no_longer_than_the_limit(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step():
        profiler.record_deferred(BrickId.RmsNorm, 0)
    profiler.flush()
    assert traces.spans == []
    time.advance(int(device.LIMIT_S * 1e9) + 1)
    profiler.flush()
    assert [span.name for span in traces.spans if span.name.startswith("step")] == ["step other"]
    assert (profiler.losses()["left_open"], totals(profiler)) == (1, {})
    assert profiler.has_pending()
    profiler.finalize(10)
    assert totals(profiler) == {}
