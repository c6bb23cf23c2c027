"""What the benchmarks on a GPU share: the machine, and the kernels of `examples/cuda_decoder.py` in their order."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from tests.gpu import machine  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "cuda_decoder.py"
POSITION = 63
"""The token whose kernels are launched: with so many before it."""

Launch = tuple[Any, Any, tuple[Any, ...]]
"""A configuration, a kernel and its arguments."""


@dataclass
class Layer:
    """The bricks of one layer, or between layers."""

    index: int | None
    bricks: list[tuple[Any, list[Launch]]] = field(default_factory=list)


def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("cuda_decoder", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def open_gpu() -> tuple[Any, dict[str, Any]]:
    """The GPU, or the stand-in driver where there is no driver, and what a result says of it.

    Raises:
        SystemExit: a driver without GPU, or no NVRTC.
    """
    machine.ask_for_standin_without_driver()
    try:
        device = machine.open_gpu()
    except RuntimeError as error:
        sys.exit(str(error))
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception:
        sys.exit("the kernels are compiled with NVRTC: pip install nvidia-cuda-nvrtc")
    return device, machine.facts(device)


class _Scope:
    """Calls a function when it is entered, and another one when it is left."""

    def __init__(self, enter: Callable[[], object], leave: Callable[[], object] = lambda: None) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


class _Recorder:
    """Stands for a profiler and for `launch` while the example runs one token, and notes what it does."""

    def __init__(self) -> None:
        self.layers = [Layer(None)]

    def define(self, brick: Any, **_: Any) -> _Scope:
        return _Scope(lambda: self.layers[-1].bricks.append((brick, [])))

    def layer(self, index: int, **_: Any) -> _Scope:
        return _Scope(lambda: self.layers.append(Layer(index)), lambda: self.layers.append(Layer(None)))

    def launch(self, stream: Any, config: Any, kernel: Any, *arguments: Any) -> None:
        self.layers[-1].bricks[-1][1].append((config, kernel, arguments))


class Engine:
    """One decode step of the example as a list of launches.

    Attributes:
        layers: what is launched, in order.
        bricks, launches: how many of each one step has.
        launch: `cuda.core.launch` as it is before an instrumentor replaces it.
    """

    def __init__(self, device: Any) -> None:
        module = example()
        self.stream = device.create_stream()
        self.launch = module.launch
        standin = machine.standin()
        if standin is not None:
            standin.set_tracing(False)
            for name in module.KERNELS:
                standin.set_kernel(name, duration_ns=0)
        recorder: Any = _Recorder()
        self._model = module.CudaDecoder(device, self.stream, recorder, module.random_weights())
        self._model.feed(1)
        module.launch = recorder.launch
        self._model.step(POSITION)
        module.launch = self.launch
        self.layers = [layer for layer in recorder.layers if layer.bricks]
        self.bricks = sum(len(layer.bricks) for layer in self.layers)
        self.launches = sum(len(launches) for layer in self.layers for _, launches in layer.bricks)
        for layer in self.layers:  # the first launch loads a kernel
            for _, launches in layer.bricks:
                for config, kernel, arguments in launches:
                    self.launch(self.stream, config, kernel, *arguments)
        self.stream.sync()
