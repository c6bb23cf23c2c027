"""Programs that a review found to go wrong with device time: on two devices, and after forks at any moment."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("loaded_driver")  # skips where there is none


def run(program: str, *, devices: int = 1) -> None:
    """Run a program that prints nothing, in a process of its own with the stand-in driver."""
    head = f"""
from tests.cuda.standin import Driver
driver = Driver.load()
driver.set_devices({devices})
import faulthandler, os, sys, threading
from contextlib import ExitStack
from cuda.core import Device, LaunchConfig, launch
import cuda.core
from otel_brick import BrickProfiler, TimingSource
from otel_brick.testing import InMemoryTraces
MS, US, ONE = 1_000_000, 1_000, LaunchConfig(grid=1, block=32)
Device(0).set_current()
"""
    done = subprocess.run(
        # Newer Pythons warn of every fork beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", head + textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("own", [0, 1])
def test_bricks_on_streams_of_two_devices_are_right_whichever_device_is_current(own: int, current: int) -> None:
    run(
        f"""
        own, current = {own}, {current}
        devices, streams, kernels = [Device(0), Device(1)], [], []
        for device in devices:
            device.set_current()
            streams.append(device.create_stream())
            kernels.append(driver.kernel(f"k{{len(kernels)}}", duration_ns=(1 + 4 * len(kernels)) * MS))
        devices[current].set_current()
        driver.use_virtual_clock()
        traces = InMemoryTraces()
        profiler = BrickProfiler.enabled(
            stream=streams[own], clock=driver.clock, tracer_provider=traces.provider, detail="all")
        defined = [profiler.define(f"Defined {{number}}", stream=stream) for number, stream in enumerate(streams)]
        def work(number):
            devices[number].set_current()
            launch(streams[number], ONE, kernels[number])
            devices[current].set_current()
        for _ in range(3):
            with profiler.step(attributes={{"used": "both"}}):
                for number in (own, 1 - own):
                    with profiler.brick(f"Brick {{number}}", stream=streams[number]): work(number)
                    with defined[number]: work(number)
                    start = profiler.elapsed_ns(stream=streams[number])
                    work(number)
                    driver.advance(US)
                    profiler.record_deferred_dynamic(f"Deferred {{number}}", start, 1, stream=streams[number])
                profiler.finalize()
            profiler.finalize()
            driver.advance(700 * MS)
            profiler.losses()
        with profiler.step(attributes={{"used": "own"}}):
            with profiler.brick("Own"): work(own)
        profiler.finalize()
        found = {{brick.name: (brick.min_ns, brick.max_ns, brick.timing_source)
            for brick in profiler.all_brick_stats()}}
        times = [(1 + 4 * number) * MS for number in (0, 1)]
        expected = {{f"{{kind}} {{number}}": (times[number], times[number], 2)
            for kind in ("Brick", "Defined", "Deferred") for number in (0, 1)}}
        expected["Own"] = (times[own], times[own], 2)
        assert found == expected, found
        assert profiler.losses()["device_error"] == 0
        profiler.flush()
        for step in traces.trees():
            attributes = step.span.attributes
            said = attributes.get("brick.cuda.device.index"), attributes.get("hw.id")
            if attributes["used"] == "own":
                assert said == (own, f"GPU-{{devices[own].uuid}}"), said
            else:
                assert said == (None, None), said
        profiler.shutdown(1)
        """,
        devices=2,
    )


def test_a_fork_while_other_threads_hold_locks_of_ours_does_not_hang_the_child() -> None:
    run(
        """
        from otel_brick.gpu.kernels import identities
        from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
        stream, gemv = Device(0).create_stream(), driver.kernel("gemv", duration_ns=MS)
        profiler = BrickProfiler.enabled(stream=stream)
        CudaCoreInstrumentor().instrument(profiler=profiler)
        def use():
            with profiler.step(), profiler.brick("B"):
                profiler.record_deferred_dynamic("D", profiler.elapsed_ns(), 1)
        with profiler.step(), profiler.brick("B"):
            cuda.core.launch(stream, ONE, gemv)
        use()
        profiler.finalize()
        profiler.step_count()
        recorder = profiler._recorder
        owners = [identities, identities.modules, profiler, profiler._pipeline, recorder, recorder.device,
            recorder.deferred, recorder.device.timeline, recorder.registry, recorder.losses]
        locks = [lock for owner in owners for lock in vars(owner).values() if hasattr(lock, "acquire")]
        assert len(locks) > 6
        held, go = threading.Event(), threading.Event()
        def hold():
            with ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                go.wait()
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(10, exit=True)
            use()
            profiler.finalize()
            assert profiler.stats("B").count == 1
            assert profiler.shutdown(1)
            os._exit(0)
        go.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        """
    )


@pytest.mark.parametrize("attach", [True, False], ids=["attached to the context", "not attached"])
def test_a_forked_child_makes_no_call_of_the_driver_through_any_handle(attach: bool) -> None:
    run(
        f"""
        stream, gemv = Device(0).create_stream(), driver.kernel("gemv", duration_ns=MS)
        profiler = BrickProfiler.enabled(stream=stream, attach_context={attach})
        handles = [profiler.define("B"), profiler.define("B", stream=stream), profiler.layer(0),
            profiler.brick("B", elements=3, stream=stream), profiler.kernel("k", stream=stream)]
        def use():
            with profiler.step():
                for handle in handles:
                    with handle: pass
                profiler.record_deferred_dynamic("D", profiler.elapsed_ns(), 1)
                profiler.stop(profiler.start("T"))
        use()
        profiler.finalize()
        driver.clear_trace()
        child = os.fork()
        if not child:
            use()
            profiler.finalize()
            counts = {{brick.name: (brick.count, brick.timing_source) for brick in profiler.all_brick_stats()}}
            assert counts == {{"B": (3, 0), "D": (1, 0), "T": (1, 0)}}, counts
            assert profiler.losses()["device_error"] == 0
            # Refused calls are not traced: that there were none is told by the loss above.
            assert driver.trace() == []
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
