"""The example on a GPU runs on the stand-in driver: every call of cuda-python that it makes, its rows and its report.

Kernels do not run there, so it is called with `--no-check`. Where NVRTC is not installed, what it would make of the
example's source is made from the parameters of its kernels. One test compiles that source for this machine's processor
and runs it there whenever a kernel is launched, which the example's comparison with numpy then has to accept.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cuda import core
from cuda.bindings import driver as cuda
from cuda.core import ObjectCode

from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor

from .standin import Driver, ptx

EXAMPLE = Path(__file__).parents[2] / "examples" / "cuda_decoder.py"
PTX_TYPES = {"*": "u64", "int": "u32", "float": "f32"}

# CUDA's C++ on one thread of the host: the threads of a block are coroutines that take turns at each barrier.
ON_THE_HOST = r"""
#include <cmath>
#include <cstddef>
#include <functional>
#include <ucontext.h>

struct Three { int x, y, z; };
static Three threadIdx, blockIdx, gridDim;
static ucontext_t turn, threads[BLOCK];
static char stacks[BLOCK][1 << 16];
static bool ended[BLOCK];
static std::function<void()> kernel;

#define __device__
#define __global__
#define __shared__ static
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }

static void __syncthreads()
{
    int own = threadIdx.x;
    swapcontext(&threads[own], &turn);
}

static void thread()
{
    kernel();
    ended[threadIdx.x] = true;
}

static void run(int blocks, std::function<void()> launched)
{
    kernel = launched;
    gridDim = {blocks, 1, 1};
    for (blockIdx = {0, 0, 0}; blockIdx.x < blocks; ++blockIdx.x) {
        for (int i = 0; i < BLOCK; ++i) {
            ended[i] = false;
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = stacks[i];
            threads[i].uc_stack.ss_size = sizeof stacks[i];
            threads[i].uc_link = &turn;
            makecontext(&threads[i], thread, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (int i = 0; i < BLOCK; ++i) {
                if (ended[i]) continue;
                any = true;
                threadIdx = {i, 0, 0};
                swapcontext(&turn, &threads[i]);
            }
        }
    }
}
"""


def signatures(code: str) -> dict[str, list[str]]:
    """The types of the kernels' parameters in CUDA's C++, by name."""
    found = re.findall(r"__global__ void (\w+)\(([^)]*)\)", code)
    return {name: [re.sub(r"\w+$", "", given.strip()) for given in listed.split(",")] for name, listed in found}


class NoCompiler:
    """`cuda.core.Program` for kernels that do nothing."""

    def __init__(self, code: str, code_type: str, options: Any) -> None:
        assert code_type == "c++"
        self._kernels = {
            name: [next(kind for text, kind in PTX_TYPES.items() if text in given) for given in types]
            for name, types in signatures(code).items()
        }

    def compile(self, target_type: str) -> ObjectCode:
        assert target_type == "ptx"
        return ObjectCode.from_ptx(ptx(self._kernels))


@pytest.fixture
def example(real_time_driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cuda_decoder", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The instrumentor looks for the names of cuda.core in the modules that are imported.
    monkeypatch.setitem(sys.modules, "cuda_decoder", module)
    spec.loader.exec_module(module)
    yield module
    if CudaCoreInstrumentor().is_instrumented_by_opentelemetry:
        CudaCoreInstrumentor().uninstrument()


@pytest.fixture(params=["NVRTC", "no NVRTC"])
def compiler(request: pytest.FixtureRequest, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no NVRTC":
        monkeypatch.setattr(example, "Program", NoCompiler)
        monkeypatch.setattr(example, "nvrtc", SimpleNamespace(nvrtcVersion=lambda: (0, 12, 0)))
        return
    try:
        example.nvrtc.nvrtcVersion()
    except Exception:
        pytest.skip("NVRTC is not installed")


@pytest.mark.usefixtures("compiler")
def test_the_example_prints_its_bricks_and_a_tree_with_device_times_of_bricks_and_kernels(
    example: ModuleType, real_time_driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    for kernel in example.KERNELS:
        real_time_driver.set_kernel(kernel, duration_ns=20_000)
    example.main(["--tokens", "3", "--no-check"])
    printed = capsys.readouterr().out
    for brick, calls in (("RmsNorm", 3 * 9), ("QkvProjection", 3 * 4), ("LmHead", 3), ("Residual", 3 * 8)):
        assert re.search(rf"^{brick} .* {calls}$", printed, re.MULTILINE), printed
    tree = printed.partition("The last step:\n")[2].splitlines()
    assert [line.split()[0] for line in tree[:8]] == [
        *("step", "Embedding", "embed", "layer", "RmsNorm", "rms_norm", "QkvProjection", "gemv")
    ]
    gemv = [line.split() for line in tree if line.split()[0] == "gemv"]
    assert len(gemv) == 4 * 7 + 1
    assert min(float(line[1]) for line in gemv) >= 20
    assert all(line[2:] == ["us", "32", "registers"] for line in gemv)
    assert len(real_time_driver.launches()) == 4 * (4 * 16 + 4)


@pytest.fixture
def on_the_host(example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every launch of the example also runs its kernel on the host, whose memory the stand-in's device memory is."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sizes = {"LAYERS": 2, "HIDDEN": 64, "HEADS": 2, "HEAD": 32, "FFN": 96, "VOCAB": 128, "CONTEXT": 8, "BLOCK": 32}
    for name, size in sizes.items():
        monkeypatch.setattr(example, name, size)
    types = signatures(example.SOURCE)
    source = ON_THE_HOST + example.SOURCE
    for name, kinds in types.items():
        parameters = ", ".join(f"{kind} p{number}" for number, kind in enumerate(kinds))
        passed = ", ".join(f"p{number}" for number in range(len(kinds)))
        source += (
            f'extern "C" void host_{name}(int blocks, {parameters}) {{ run(blocks, [=] {{ {name}({passed}); }}); }}\n'
        )
    (tmp_path / "kernels.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-DBLOCK={sizes['BLOCK']}"]
    subprocess.run([*command, "-o", tmp_path / "kernels.so", tmp_path / "kernels.cpp"], check=True, timeout=300)
    kernels = ctypes.CDLL(str(tmp_path / "kernels.so"))
    as_c: dict[str, Callable[[Any], Any]] = {
        "*": lambda buffer: ctypes.c_void_p(int(getattr(buffer, "handle", buffer))),
        "int": lambda number: ctypes.c_int(int(number)),
        "float": lambda number: ctypes.c_float(float(number)),
    }

    def launch(stream: Any, config: Any, kernel: Any, *arguments: Any) -> None:
        core.launch(stream, config, kernel, *arguments)
        assert config.block == (sizes["BLOCK"], 1, 1)
        name = cuda.cuKernelGetName(kernel.handle)[1].decode()
        convert = [next(how for text, how in as_c.items() if text in kind) for kind in types[name]]
        passed = [how(argument) for how, argument in zip(convert, arguments, strict=True)]
        getattr(kernels, f"host_{name}")(config.grid[0], *passed)

    monkeypatch.setattr(example, "launch", launch)


@pytest.mark.usefixtures("compiler", "on_the_host")
def test_the_kernels_of_the_example_compute_what_numpy_does(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(["--tokens", "5"])
    printed = capsys.readouterr().out
    assert "the last logits are those of numpy" in printed
    tokens = printed.splitlines()[0].partition("token ")[2].split()
    assert len(tokens) == 6
    assert len(set(tokens)) > 2


@pytest.mark.usefixtures("compiler")
def test_the_example_says_so_where_its_kernels_compute_something_else(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="the kernels are wrong"):
        example.main(["--tokens", "2"])


def test_without_a_driver_the_example_says_what_it_needs() -> None:
    probe = "from cuda.bindings import driver; driver.cuInit(0)"
    if not subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("there is a driver")
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("this example needs an NVIDIA GPU and its driver (")
    assert len(done.stderr.splitlines()) == 1
