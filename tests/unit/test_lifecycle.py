"""Life of a profiler: on and off, decorators, flush and shutdown, exit, import, fork, and being forgotten."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

import otel_brick
from otel_brick import BrickBottleneck, BrickId, BrickProfiler
from otel_brick.testing import InMemoryTraces, ManualClock

SCOPES: dict[str, Callable[[BrickProfiler], AbstractContextManager[Any]]] = {
    "step": lambda profiler: profiler.step(),
    "layer": lambda profiler: profiler.layer(3, type="decoder"),
    "brick": lambda profiler: profiler.brick("B", elements=1),
    "kernel": lambda profiler: profiler.kernel("k", grid=1),
    "handle": lambda profiler: profiler.define("H", elements=1),
}
EACH_SCOPE = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
SPAN_NAMES = {"step": "step other", "layer": "layer decoder", "brick": "B", "kernel": "k", "handle": "H"}


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own; fails if it does."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def span_names(traces: InMemoryTraces) -> list[str]:
    return sorted(span.name for span in traces.spans)


def counted(profiler: BrickProfiler) -> dict[str, int]:
    return {stats.name: stats.count for stats in profiler.all_brick_stats()}


def lost(profiler: BrickProfiler) -> dict[str, int]:
    """The losses that occurred."""
    return {reason: count for reason, count in profiler.losses().items() if count}


# --- on and off ---


def test_a_new_profiler_is_disabled_and_enabled_makes_one_that_is_not() -> None:
    assert not BrickProfiler().is_enabled()
    assert BrickProfiler.enabled().is_enabled()
    assert not otel_brick.default_profiler().is_enabled()


def test_the_state_is_in_the_repr(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.brick("B"):
        pass
    assert repr(profiler) == "<BrickProfiler enabled, 1 steps, 1 bricks>"
    profiler.disable()
    assert repr(profiler) == "<BrickProfiler disabled, 1 steps, 1 bricks>"
    profiler.shutdown()
    assert repr(profiler) == "<BrickProfiler shut down, 1 steps, 1 bricks>"


@EACH_SCOPE
def test_a_disabled_profiler_records_nothing(
    scope: Callable[[BrickProfiler], AbstractContextManager[Any]],
    profiler: BrickProfiler,
    traces: InMemoryTraces,
) -> None:
    profiler.disable()

    with trace.use_span(traces.provider.get_tracer("test").start_span("request")), scope(profiler):
        pass

    assert profiler.flush()
    assert (traces.spans, profiler.step_count(), counted(profiler), lost(profiler)) == ([], 0, {}, {})


@pytest.mark.parametrize("kind", SCOPES)
def test_a_scope_begun_on_counts_though_the_profiler_is_disabled_inside_it(
    kind: str, profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step(), SCOPES[kind](profiler):
        time.advance(10)
        profiler.disable()
        with profiler.brick("Inside"):
            time.advance(20)

    profiler.flush()

    expected = sorted(["step other", SPAN_NAMES[kind]])
    assert span_names(traces) == expected
    assert [span.end_time - span.start_time for span in traces.spans] == [30, 30]
    assert lost(profiler) == {}


@pytest.mark.parametrize("kind", SCOPES)
def test_a_scope_begun_off_does_not_count_though_the_profiler_is_enabled_inside_it(
    kind: str, profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    with profiler.step():
        profiler.disable()
        with SCOPES[kind](profiler):
            profiler.enable()
            with profiler.brick("Inside"):
                time.advance(20)

    profiler.flush()

    assert span_names(traces) == ["Inside", "step other"]
    assert counted(profiler) == {"Inside": 1}
    assert lost(profiler) == {}


def test_handles_follow_their_profiler_wherever_they_were_defined(profiler: BrickProfiler, time: ManualClock) -> None:
    profiler.disable()
    off = profiler.define("DefinedOff", elements=1)
    profiler.enable()
    on = profiler.define("DefinedOn", elements=2)

    for switch in (profiler.enable, profiler.disable, profiler.enable):
        switch()
        with off, on:
            time.advance(1)

    assert counted(profiler) == {"DefinedOff": 2, "DefinedOn": 2}
    assert [profiler.stats(name).total_elements for name in ("DefinedOff", "DefinedOn")] == [2, 4]


def test_profilers_are_switched_one_by_one() -> None:
    first, second = BrickProfiler.enabled(), BrickProfiler.enabled()
    with first.define("A"), second.define("A"):
        pass
    first.disable()
    with first.define("A"), second.define("A"), first.brick("A"), second.brick("A"):
        pass

    assert (counted(first), counted(second)) == ({"A": 1}, {"A": 3})


def test_another_thread_may_switch_a_profiler_and_scopes_still_balance(profiler: BrickProfiler) -> None:
    handle = profiler.define("B")
    stop = threading.Event()

    def switch() -> None:
        while not stop.is_set():
            profiler.disable()
            profiler.enable()

    switcher = threading.Thread(target=switch)
    switcher.start()
    with profiler.step():
        for _ in range(20_000):
            with handle, profiler.brick("C"):
                pass
    stop.set()
    switcher.join()
    profiler.enable()
    with handle:
        pass

    assert lost(profiler) == {}
    assert 0 < profiler.stats("B").count <= 20_001


# --- decorators ---


@pytest.fixture(params=["enabled", "disabled"])
def decorating(request: pytest.FixtureRequest, profiler: BrickProfiler) -> BrickProfiler:
    """A profiler that is on or off while functions are decorated."""
    if request.param == "disabled":
        profiler.disable()
    return profiler


@pytest.mark.parametrize("kind", SCOPES)
def test_each_call_of_a_decorated_function_is_a_scope_while_its_profiler_is_enabled(
    kind: str, decorating: BrickProfiler, traces: InMemoryTraces
) -> None:
    @SCOPES[kind](decorating)
    def double(number: int, *, plus: int = 0) -> int:
        """Doubles."""
        return 2 * number + plus

    def called() -> int:
        with trace.use_span(traces.provider.get_tracer("test").start_span("request")):
            assert double(3, plus=1) == 7
        decorating.flush()
        names = [span.name for span in traces.spans]
        traces.clear()
        assert set(names) <= {SPAN_NAMES[kind]}
        return len(names)

    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    decorating.enable()
    assert called() == 1
    decorating.disable()
    assert called() == 0
    decorating.enable()
    assert called() == 1


@pytest.mark.parametrize("kind", SCOPES)
def test_a_decorated_coroutine_function_is_in_its_scope_while_it_runs(
    kind: str, decorating: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    @SCOPES[kind](decorating)
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        time.advance(50)
        return 2 * number

    decorating.enable()
    with decorating.step():
        assert asyncio.run(double(3)) == 6

    assert inspect.iscoroutinefunction(double)
    decorating.flush()
    assert [span.end_time - span.start_time for span in traces.spans if span.name == SPAN_NAMES[kind]][-1:] == [50]
    assert lost(decorating) == {}


def test_a_decorated_function_may_call_itself(profiler: BrickProfiler, time: ManualClock) -> None:
    @profiler.define("Recursive")
    def recurse(depth: int) -> int:
        time.advance(1)
        return 0 if depth == 0 else 1 + recurse(depth - 1)

    assert recurse(9) == 9

    stats = profiler.stats("Recursive")
    assert (stats.count, stats.total_ns, stats.exclusive_ns) == (10, 55, 10)


def test_an_exception_passes_through_a_decorated_function(profiler: BrickProfiler) -> None:
    error = LookupError("theirs")

    @profiler.step()
    @profiler.brick("B")
    def fail() -> None:
        raise error

    with pytest.raises(LookupError) as passed:
        fail()

    assert passed.value is error
    assert (profiler.stats("B").count, profiler.stats("B").failures) == (1, 1)


@pytest.mark.parametrize("kind", [*SCOPES, "lane"])
def test_generator_functions_cannot_be_decorated(kind: str, decorating: BrickProfiler) -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def generate_async() -> Any:
        yield 1

    scope = decorating.lane() if kind == "lane" else SCOPES[kind](decorating)
    for function in (generate, generate_async):
        with pytest.raises(TypeError, match=f"cannot decorate the generator function .*{function.__name__}"):
            scope(function)


# --- reset ---


def test_reset_forgets_statistics_bottlenecks_and_run_facts(profiler: BrickProfiler, time: ManualClock) -> None:
    fresh = json.loads(BrickProfiler.enabled(clock=time.clock).to_json())
    with profiler.step(tokens=5), profiler.layer(2), profiler.brick("B", elements=3):
        time.advance(10)
    profiler.set_brick_bottleneck("B", BrickBottleneck.Memory)
    profiler.set_l2_cache_hit_rate(0.5)
    profiler.set_zero_copy(True)

    profiler.reset()

    content = json.loads(profiler.to_json())
    assert {**content, "generated_at": ""} == {**fresh, "generated_at": ""}
    assert profiler.layer_matrix().bricks == ()
    assert (profiler.step_count(), profiler.tokens(), profiler.coverage()) == (0, 0, None)
    profiler.record_elapsed("B", 7, 1)
    stats = profiler.stats("B")
    assert (stats.count, stats.min_ns, stats.max_ns, stats.bottleneck) == (1, 7, 7, BrickBottleneck.Unknown)


def test_reset_stats_keeps_what_was_stated(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("B", 7, 1)
    profiler.set_brick_bottleneck("B", BrickBottleneck.Compute)
    profiler.set_l2_cache_hit_rate(0.5)

    profiler.reset_stats()

    assert counted(profiler) == {}
    assert profiler.l2_cache_hit_rate() == 0.5
    profiler.record_elapsed("B", 8, 1)
    assert profiler.stats("B").bottleneck is BrickBottleneck.Compute


def test_a_step_open_at_a_reset_counts_whole_when_it_ends(
    profiler: BrickProfiler, time: ManualClock, traces: InMemoryTraces
) -> None:
    with profiler.step():
        with profiler.brick("Before"):
            time.advance(10)
        profiler.reset()
        with profiler.brick("After"):
            time.advance(20)

    assert counted(profiler) == {"Before": 1, "After": 1}
    assert (profiler.step_count(), profiler.wall_ns()) == (1, 30)


def test_a_reset_takes_no_spans_from_the_trace(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step(), profiler.brick("B"):
        pass

    profiler.reset()
    profiler.flush()

    assert span_names(traces) == ["B", "step other"]


# --- flush and shutdown ---


def work(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.brick("B"):
        pass


@pytest.mark.parametrize("calls", list(itertools.product(["flush", "shutdown"], repeat=3)))
def test_flush_and_shutdown_come_in_any_order_and_deliver_once(calls: tuple[str, ...]) -> None:
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider)
    work(profiler)

    results = [getattr(profiler, call)() for call in calls]

    down = calls.index("shutdown") if "shutdown" in calls else len(calls)
    assert results[: down + 1] == [True] * len(results[: down + 1])
    assert all(results[i] for i in range(len(calls)) if calls[i] == "shutdown")
    assert span_names(traces) == ["B", "step other"]
    assert lost(profiler) == {}
    profiler.shutdown()


@pytest.mark.parametrize("call", ["flush", "shutdown"])
@pytest.mark.parametrize("enabled", [True, False])
def test_there_may_be_nothing_to_flush(call: str, enabled: bool) -> None:
    profiler = BrickProfiler.enabled() if enabled else BrickProfiler()

    assert getattr(profiler, call)() is True
    assert profiler.shutdown() is True


def test_any_threads_may_flush_and_shut_down_at_once() -> None:
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider)
    work(profiler)
    barrier = threading.Barrier(8)
    returned: list[str] = []

    def end(call: str) -> None:
        barrier.wait()
        getattr(profiler, call)(timeout_s=20)
        returned.append(call)

    threads = [threading.Thread(target=end, args=(call,)) for call in ("flush", "shutdown") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)

    assert sorted(returned) == ["flush"] * 4 + ["shutdown"] * 4
    assert span_names(traces) == ["B", "step other"]


class Hanging(SpanProcessor):
    """A processor whose flush returns only when it is released."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.release = threading.Event()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self.reached.set()
        return self.release.wait(60)


@pytest.mark.parametrize("call", ["flush", "shutdown"])
def test_a_provider_that_hangs_makes_the_call_return_false_in_time_and_keeps_the_statistics(
    call: str,
) -> None:
    hanging = Hanging()
    provider = TracerProvider()
    provider.add_span_processor(hanging)
    profiler = BrickProfiler.enabled(tracer_provider=provider)
    work(profiler)
    try:
        assert getattr(profiler, call)(timeout_s=0.2) is False
        assert hanging.reached.wait(20)
        assert counted(profiler) == {"B": 1}
        assert not hanging.release.is_set()
    finally:
        hanging.release.set()
        profiler.shutdown()


def test_after_shutdown_the_profiler_cannot_be_enabled(profiler: BrickProfiler) -> None:
    profiler.shutdown()

    profiler.enable()

    assert not profiler.is_enabled()


AFTER_SHUTDOWN: dict[str, Callable[[BrickProfiler], None]] = {
    "step": lambda profiler: profiler.step().__enter__().__exit__(None, None, None),
    "layer": lambda profiler: scoped(profiler.layer(0)),
    "brick": lambda profiler: scoped(profiler.brick("B")),
    "kernel": lambda profiler: scoped(profiler.kernel("k")),
    "handle defined after": lambda profiler: scoped(profiler.define("B")),
    "record_elapsed": lambda profiler: profiler.record_elapsed("B", 1),
    "record_elapsed_with_bytes": lambda profiler: profiler.record_elapsed_with_bytes("B", 1, 1, 1, 1),
    "start and stop": lambda profiler: profiler.stop(profiler.start("B")),
    "start_brick and stop_brick": lambda profiler: profiler.stop_brick(profiler.start_brick(BrickId.RmsNorm), 1),
}


def scoped(scope: AbstractContextManager[Any]) -> None:
    with scope:
        pass


@pytest.mark.parametrize("use", AFTER_SHUTDOWN.values(), ids=AFTER_SHUTDOWN)
def test_what_comes_after_shutdown_is_dropped_and_counted(
    use: Callable[[BrickProfiler], None], profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    profiler.shutdown()

    use(profiler)
    use(profiler)

    assert lost(profiler) == {"already_shutdown": 2}
    assert (counted(profiler), profiler.step_count(), traces.spans) == ({}, 0, [])


def test_handles_decorated_functions_and_timers_from_before_shutdown_are_counted_too(
    profiler: BrickProfiler,
) -> None:
    handle = profiler.define("B")
    decorated = profiler.brick("C")(lambda: None)
    decorated_step = profiler.step()(lambda: None)
    profiler.shutdown()

    scoped(handle)
    decorated()
    decorated_step()

    assert lost(profiler) == {"already_shutdown": 3}
    assert (counted(profiler), profiler.step_count()) == ({}, 0)


def test_a_step_open_at_shutdown_is_counted_or_delivered_but_never_lost_in_silence(
    profiler: BrickProfiler, traces: InMemoryTraces, time: ManualClock
) -> None:
    handle = profiler.define("B")
    with profiler.step():
        with handle:
            time.advance(1)
        profiler.shutdown()
        with handle:
            time.advance(1)

    profiler.flush()

    delivered = len(traces.spans)
    dropped = sum(lost(profiler).values())
    assert delivered + dropped == 3, (delivered, dropped)


def test_a_profiler_that_is_shut_down_leaves_the_provider_to_its_owner(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    work(profiler)
    profiler.shutdown()

    traces.provider.get_tracer("test").start_span("theirs").end()

    assert span_names(traces) == ["B", "step other", "theirs"]


def test_shutdown_ends_the_worker() -> None:
    before = set(threading.enumerate())
    profiler = BrickProfiler.enabled(tracer_provider=InMemoryTraces().provider)
    work(profiler)
    workers = set(threading.enumerate()) - before
    assert [worker.name for worker in workers] == ["otel-brick"]

    assert profiler.shutdown()

    assert not any(worker.is_alive() for worker in workers)


# --- processes ---


def spans_printed(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a `ConsoleSpanExporter`, one after another."""
    decoder = json.JSONDecoder()
    spans = []
    while text := text.lstrip():
        span, end = decoder.raw_decode(text)
        spans.append(span)
        text = text[end:]
    return spans


EXIT = """
    import sys
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    import otel_brick

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    trace.set_tracer_provider(provider)
    profiler = otel_brick.BrickProfiler.enabled(detail="all")
    with profiler.step():
        with profiler.layer(0), profiler.brick("RmsNorm"):
            with profiler.kernel("k"):
                pass
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('theirs')", 1), ("profiler.disable()", 0)],
)
def test_a_program_that_ends_without_a_flush_delivers_its_spans(end: str, code: int) -> None:
    done = run_python(EXIT.format(end=end))

    assert done.returncode == code, done.stderr
    spans = {span["name"]: span for span in spans_printed(done.stdout)}
    assert sorted(spans) == ["RmsNorm", "k", "layer", "step other"]
    for above, below in itertools.pairwise(["step other", "layer", "RmsNorm", "k"]):
        assert spans[below]["parent_id"] == spans[above]["context"]["span_id"]
    if end == "pass":
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("worker", "held"),
    [
        (True, "timer = profiler.start('T')"),
        (False, "timer = profiler.start('T')"),
        (False, "cycle = [profiler.start('T')]; cycle.append(cycle)"),
    ],
    ids=["after the worker has started", "by a global", "by a cycle"],
)
def test_a_program_ends_though_a_timer_was_never_stopped(worker: bool, held: str) -> None:
    done = run_python(
        f"""
        import signal
        signal.alarm(10)
        from otel_brick import BrickProfiler
        profiler = BrickProfiler.enabled()
        if {worker}:
            profiler.record_elapsed("B", 1)
        {held}
        """
    )

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scope", ["profiler.step()", "profiler.brick('Around')", "nullcontext()"])
def test_a_timer_collected_by_a_thread_that_holds_a_lock_of_ours_does_not_wait_for_it(scope: str) -> None:
    """Python collects garbage wherever it makes an object, and so also where that thread holds a lock."""
    done = run_python(
        f"""
        import signal
        from contextlib import nullcontext
        from otel_brick import BrickProfiler

        signal.alarm(10)
        for which in ("of the lane", "of the recorder", "of the losses"):
            print(which, flush=True)
            profiler = BrickProfiler.enabled(detail="none")
            recorder = profiler._recorder
            with {scope}:
                timer = profiler.start("Abandoned")
                locks = recorder.current.get().record.lock, recorder._lock, recorder.losses._lock
                with dict(zip(("of the lane", "of the recorder", "of the losses"), locks))[which]:
                    del timer
                with profiler.brick("B"):
                    pass
            assert profiler.stats("B").count == 1
            assert profiler.losses()["left_open"] == 1, profiler.losses()
        """
    )

    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["of the losses"]), done.stderr


def test_an_import_starts_no_thread_and_loads_no_sdk_no_exporter_and_no_heavy_package() -> None:
    done = run_python(
        """
        import json, sys, threading
        before = threading.active_count()
        import otel_brick
        otel_brick.BrickProfiler.enabled().define("B")
        print(json.dumps([threading.active_count() - before, sorted(sys.modules)]))
        """
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    threads, modules = json.loads(done.stdout)
    assert threads == 0
    assert "otel_brick.profiler" in modules
    heavy = {"grpc", "google", "requests", "torch", "triton", "cupy", "cuda", "rich", "click", "jsonschema"}
    assert heavy.isdisjoint(module.partition(".")[0] for module in modules)
    assert [m for m in modules if m.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))] == []


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

FORK = """
    import json, os, signal
    from otel_brick import BrickProfiler
    from otel_brick.testing import InMemoryTraces

    signal.alarm(50)
    traces = InMemoryTraces()
    profiler = BrickProfiler.enabled(tracer_provider=traces.provider, detail="all")
    handle = profiler.define("Handle", elements=2)

    def seen():
        profiler.flush()
        return {
            "bricks": {stats.name: stats.count for stats in profiler.all_brick_stats()},
            "steps": profiler.step_count(),
            "losses": {reason: count for reason, count in profiler.losses().items() if count},
            "spans": sorted(span.name for span in traces.spans),
            "ids": [span.context.span_id for span in traces.spans],
        }

    with profiler.step(), profiler.brick("Done before"):
        pass
    profiler.stop(profiler.start("Twice"))
    before = seen()
    traces.clear()
    report, answer = os.pipe()
    with profiler.step(phase="prefill"), profiler.brick("Open at fork"):
        with profiler.brick("In parent"):
            pass
        child = os.fork()
        if not child:
            fresh = seen()
            for name in ("Child", "Child again"):
                with profiler.step(phase="decode"), profiler.layer(1), profiler.brick(name), handle:
                    pass
            with profiler.brick("Loose"):
                pass
            os.write(answer, json.dumps([fresh, seen()]).encode())
            os._exit(0)
        os.close(answer)
        with profiler.brick("Parent after"):
            pass
    with profiler.step(), handle:
        pass
    with open(report) as pipe:
        fresh, after = json.load(pipe)
    assert os.waitpid(child, 0)[1] == 0
    print(json.dumps({"before": before, "fresh": fresh, "child": after, "parent": seen()}))
"""


@pytest.fixture(scope="module")
def forked() -> dict[str, Any]:
    """What parent and child saw of a fork in the middle of a step."""
    done = run_python(FORK, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_fork
def test_a_forked_child_starts_with_empty_statistics_and_without_the_parent_s_losses(
    forked: dict[str, Any],
) -> None:
    assert forked["before"]["bricks"] == {"Done before": 1, "Twice": 1}
    fresh = forked["fresh"]
    assert (fresh["bricks"], fresh["steps"], fresh["spans"]) == ({}, 0, [])
    assert set(fresh["losses"]) <= {"fork"}


@needs_fork
def test_a_child_forked_in_the_middle_of_a_step_records_its_own_steps(forked: dict[str, Any]) -> None:
    child = forked["child"]

    assert child["bricks"] == {"Handle": 2, "Child": 1, "Child again": 1, "Loose": 1}
    assert child["steps"] == 2
    assert [name for name in child["spans"] if name != "Loose"] == sorted(
        ["Child", "Child again", "Handle", "Handle", "layer", "layer", "step decode", "step decode"]
    )
    assert child["losses"] == forked["fresh"]["losses"]


@needs_fork
def test_a_fork_in_the_middle_of_a_step_does_not_affect_the_parent(forked: dict[str, Any]) -> None:
    parent = forked["parent"]

    assert parent["bricks"] == {
        **{"Done before": 1, "Twice": 1, "Open at fork": 1, "In parent": 1},
        **{"Parent after": 1, "Handle": 1},
    }
    assert (parent["steps"], parent["losses"]) == (3, {})
    assert parent["spans"] == sorted(
        ["step prefill", "Open at fork", "In parent", "Parent after", "step other", "Handle"]
    )


@needs_fork
def test_ids_of_a_forked_child_differ_from_those_of_its_parent(forked: dict[str, Any]) -> None:
    parent, child = forked["parent"]["ids"], forked["child"]["ids"]

    assert len(parent) == 6
    assert len(child) >= 8
    assert len({*parent, *child}) == len(parent) + len(child)


@needs_fork
def test_a_child_forked_while_another_thread_switches_the_profiler_can_go_on() -> None:
    done = run_python(
        """
        import os, signal, threading
        from otel_brick import BrickProfiler

        profiler = BrickProfiler.enabled()
        handles = [profiler.define("B", elements=number) for number in range(20_000)]
        end = False

        def switch():
            while not end:
                profiler.enable()

        threading.Thread(target=switch, daemon=True).start()
        children = []
        for _ in range(5):
            child = os.fork()
            if not child:
                signal.alarm(10)
                with profiler.define("New", elements=1):
                    pass
                profiler.disable()
                os._exit(0 if profiler.stats("New").count == 1 else 1)
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        end = True
        """,
        PYTHONWARNINGS="ignore",
    )

    assert (done.returncode, done.stdout) == (0, "[0, 0, 0, 0, 0]\n"), done.stderr


# --- being forgotten ---


def in_steps(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.layer(0), profiler.brick("B"), profiler.kernel("k"):
        pass


def outside_steps(profiler: BrickProfiler) -> None:
    with profiler.brick("B"):
        pass
    profiler.record_elapsed("B", 1)
    profiler.stop(profiler.start("B"))


def in_lanes(profiler: BrickProfiler) -> None:
    with profiler.step(), profiler.lane(), profiler.brick("B"):
        pass


def nothing(profiler: BrickProfiler) -> None:
    pass


@pytest.mark.parametrize("use", [in_steps, outside_steps, in_lanes, nothing])
def test_a_profiler_that_nobody_holds_is_collected_and_its_worker_ends(
    use: Callable[[BrickProfiler], None],
) -> None:
    before = set(threading.enumerate())
    profiler = BrickProfiler.enabled(tracer_provider=InMemoryTraces().provider)
    use(profiler)
    assert profiler.flush()
    (worker,) = set(threading.enumerate()) - before
    forgotten = weakref.ref(profiler)
    recorder = weakref.ref(profiler._recorder)

    del profiler

    # The worker holds its pipeline for the length of a round, at most a fraction of a second.
    for _ in range(50):
        gc.collect()
        worker.join(timeout=0.1)
        if not worker.is_alive():
            break
    gc.collect()
    assert forgotten() is None
    assert not worker.is_alive()
    assert recorder() is None
