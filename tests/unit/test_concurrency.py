"""Threads and tasks: every parent and duration right and totals exact with `lane()`, nothing corrupted without."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from otel_brick import BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces, SpanNode

BRICKS = ("RmsNorm", "QkvProjection", "FusedGateUp")


@pytest.fixture
def profiler(traces: InMemoryTraces) -> BrickProfiler:
    return BrickProfiler.enabled(tracer_provider=traces.provider, detail="all", max_rows_per_step=10**5)


def one_step(profiler: BrickProfiler, number: int) -> None:
    with profiler.step(phase="decode", tokens=1, attributes={"test.number": number}):
        for layer in range(2):
            with profiler.layer(layer):
                for brick in BRICKS:
                    with profiler.brick(brick, elements=number):
                        pass


def assert_step(step: SpanNode, number: int) -> None:
    assert [layer.attributes["brick.layer.index"] for layer in step.children] == [0, 1]
    for layer in step.children:
        assert [brick.name for brick in layer.children] == list(BRICKS)
        assert {brick.attributes["brick.element.count"] for brick in layer.children} == {number}
        assert_inside(step)


def assert_inside(node: SpanNode) -> None:
    for child in node.children:
        assert node.span.start_time <= child.span.start_time  # type: ignore[operator]
        assert child.span.end_time <= node.span.end_time  # type: ignore[operator]
        assert_inside(child)


def assert_steps(profiler: BrickProfiler, traces: InMemoryTraces, count: int) -> None:
    assert profiler.flush(timeout_s=60)
    steps = traces.trees()
    assert len(steps) == count
    for step in steps:
        assert_step(step, step.attributes["test.number"])
    assert profiler.step_count() == profiler.total_tokens() == count
    for brick in BRICKS:
        stats = profiler.stats(brick)
        assert stats is not None
        assert stats.count == 2 * count
        assert stats.total_elements == 2 * sum(range(count))
    assert not any(profiler.losses().values())


def test_32_threads_with_100_steps_each(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    def work(thread: int) -> None:
        for step in range(100):
            one_step(profiler, thread * 100 + step)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_steps(profiler, traces, 3_200)


def test_500_concurrent_tasks_with_a_step_each(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    async def work(number: int) -> None:
        with profiler.step(phase="decode", tokens=1, attributes={"test.number": number}):
            for layer in range(2):
                with profiler.layer(layer):
                    await asyncio.sleep(0)
                    for brick in BRICKS:
                        with profiler.brick(brick, elements=number):
                            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(work, range(500)))

    asyncio.run(main())
    assert_steps(profiler, traces, 500)


async def branch(profiler: BrickProfiler, number: int) -> None:
    """A flow of its own: an outer brick, named by its number, round three inner ones."""
    with profiler.lane(), profiler.brick(f"Outer{number}"):
        for brick in BRICKS:
            with profiler.brick(brick, elements=number):
                await asyncio.sleep(0.001)


def assert_branches(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    assert profiler.flush(timeout_s=30)
    (step,) = traces.trees()
    (layer,) = step.children
    (mixture,) = layer.children
    assert mixture.name == "Mixture"
    assert sorted(outer.name for outer in mixture.children) == sorted(f"Outer{n}" for n in range(10))
    for outer in mixture.children:
        number = int(outer.name.removeprefix("Outer"))
        assert [inner.name for inner in outer.children] == list(BRICKS)
        assert {inner.attributes["brick.element.count"] for inner in outer.children} == {number}
        # The lane's rows lie in the layer that was open where it was opened.
        assert {node.attributes["brick.layer.index"] for node in (outer, *outer.children)} == {7}
    assert_inside(step)
    for brick in BRICKS:
        stats = profiler.stats(brick)
        assert stats is not None
        assert (stats.count, stats.total_elements) == (10, sum(range(10)))
        assert stats.min_us is not None
        assert stats.min_us >= 900
    assert not any(profiler.losses().values())


def test_gather_with_lanes(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    async def main() -> None:
        with profiler.step(), profiler.layer(7), profiler.brick("Mixture"):
            await asyncio.gather(*(branch(profiler, number) for number in range(10)))

    asyncio.run(main())
    assert_branches(profiler, traces)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TaskGroup is in Python 3.11 and later")
def test_task_group_with_lanes(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    async def main() -> None:
        with profiler.step(), profiler.layer(7), profiler.brick("Mixture"):
            async with asyncio.TaskGroup() as group:
                for number in range(10):
                    group.create_task(branch(profiler, number))

    asyncio.run(main())
    assert_branches(profiler, traces)


def test_to_thread_with_lanes(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    async def main() -> None:
        with profiler.step(), profiler.layer(7), profiler.brick("Mixture"):
            await asyncio.gather(*(asyncio.to_thread(asyncio.run, branch(profiler, number)) for number in range(10)))

    asyncio.run(main())
    assert_branches(profiler, traces)


def test_lanes_inside_lanes_hang_where_they_were_opened(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    def inner() -> None:
        with profiler.lane(), profiler.brick("Inner"):
            pass

    def outer(pool: ThreadPoolExecutor) -> None:
        with profiler.lane():
            # Nothing is open on this lane yet: what is opened from here hangs where the lane itself does.
            pool.submit(contextvars.copy_context().run, inner).result()
            with profiler.brick("Outer"):
                pool.submit(contextvars.copy_context().run, inner).result()

    with ThreadPoolExecutor(2) as pool, profiler.step(), profiler.brick("Root"):
        pool.submit(contextvars.copy_context().run, outer, pool).result()
    assert profiler.flush()
    (step,) = traces.trees()
    (root,) = step.children
    assert [node.name for node in root.children] == ["Inner", "Outer"]
    assert [node.name for node in root.children[1].children] == ["Inner"]


def test_a_parent_span_lasts_until_its_last_child_on_another_lane(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    started, go = threading.Event(), threading.Event()

    def work() -> None:
        with profiler.lane(), profiler.brick("Long"):
            started.set()
            go.wait(10)

    with profiler.step():
        with profiler.brick("Short"):
            thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
            thread.start()
            started.wait(10)
        go.set()
        thread.join()
    assert profiler.flush()
    (step,) = traces.trees()
    assert_inside(step)
    (short,) = step.children
    (long,) = short.children
    assert short.span.end_time == long.span.end_time
    # The statistics keep the brick's own time.
    assert profiler.stats("Short").total_ns < short.duration_ns  # type: ignore[union-attr]


def test_a_new_thread_sees_no_step(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    def work() -> None:
        with profiler.brick("Alone"):
            pass

    with profiler.step():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert profiler.flush()
    assert [span.name for span in traces.spans] == ["step other"]
    assert profiler.stats("Alone").count == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("flow", ["tasks", "threads"])
def test_sharing_a_lane_is_counted_where_it_shows_and_corrupts_nothing(
    profiler: BrickProfiler, traces: InMemoryTraces, flow: str
) -> None:
    handle = profiler.define("Shared", elements=1)
    barrier = threading.Barrier(10)

    async def task(number: int) -> None:
        with profiler.brick(f"Own{number}", elements=2):
            await asyncio.sleep(0.001 * (number % 3))
            with handle:
                await asyncio.sleep(0.001 * ((number + 1) % 3))

    def thread(number: int) -> None:
        barrier.wait()
        for _ in range(200):
            with profiler.brick(f"Own{number}", elements=2), handle:
                pass

    async def main() -> None:
        with profiler.step():
            if flow == "tasks":
                await asyncio.gather(*map(task, range(10)))
            else:
                with ThreadPoolExecutor(10) as pool:
                    for number in range(10):
                        pool.submit(contextvars.copy_context().run, thread, number)

    asyncio.run(main())
    assert profiler.flush(timeout_s=60)
    calls = 1 if flow == "tasks" else 200
    shared = profiler.stats("Shared")
    assert shared is not None
    assert (shared.count, shared.total_elements) == (10 * calls, 10 * calls)
    for number in range(10):
        own = profiler.stats(f"Own{number}")
        assert own is not None
        assert (own.count, own.total_elements) == (calls, 2 * calls)
    names = Counter(span.name for span in traces.spans)
    assert names == {"step other": 1, "Shared": 10 * calls, **{f"Own{n}": calls for n in range(10)}}
    assert len(traces.trees()) == 1
    losses = profiler.losses()
    if flow == "tasks":
        assert losses["out_of_order"] > 0
    assert not any(count for reason, count in losses.items() if reason != "out_of_order")


def test_a_step_in_an_async_generator_closed_from_another_task_closes_quietly(
    profiler: BrickProfiler, traces: InMemoryTraces, caplog: pytest.LogCaptureFixture
) -> None:
    async def generate() -> AsyncIterator[int]:
        with profiler.step(phase="decode"), profiler.layer(0), profiler.brick(BrickId.RmsNorm):
            for number in range(100):
                yield number

    async def main() -> None:
        generator = generate()
        await asyncio.create_task(anext(generator))  # type: ignore[arg-type]
        await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
        with profiler.step(phase="prefill"), profiler.brick("After"):
            pass

    asyncio.run(main())
    assert profiler.flush()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    decode, prefill = sorted(traces.trees(), key=lambda node: node.name)
    assert decode.name == "step decode"
    assert [child.name for child in prefill.children] == ["After"]
    assert profiler.step_count() == 2
    assert all("error.type" not in (span.attributes or {}) for span in traces.spans)


def test_decorated_coroutines_keep_their_own_steps(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    @profiler.brick("Inner")
    async def inner() -> None:
        await asyncio.sleep(0)

    @profiler.step(phase="decode")
    async def forward() -> None:
        await inner()
        await inner()

    async def main() -> None:
        await asyncio.gather(*(forward() for _ in range(20)))

    asyncio.run(main())
    assert profiler.flush()
    trees = traces.trees()
    assert len(trees) == 20
    assert all([child.name for child in tree.children] == ["Inner", "Inner"] for tree in trees)


def check_every_thread(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_reads_while_others_record_are_consistent(profiler: BrickProfiler) -> None:
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def read() -> None:
        while not stop.is_set():
            stats = profiler.stats("RmsNorm")
            if stats is not None:
                seen.append((stats.count, stats.total_elements))

    reader = threading.Thread(target=read)
    reader.start()

    def write() -> None:
        for _ in range(200):
            with profiler.step():
                for _ in range(10):
                    with profiler.brick("RmsNorm", elements=3):
                        pass

    check_every_thread(write, 4)
    stop.set()
    reader.join()
    assert seen
    assert all(elements == 3 * count for count, elements in seen)
    assert profiler.stats("RmsNorm").count == 8_000  # type: ignore[union-attr]
