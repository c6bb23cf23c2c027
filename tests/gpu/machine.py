"""The GPU that these tests and benchmarks use, and what a result has to say of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda.core import Device

    from tests.cuda.standin import Driver

ON_STANDIN = "OTEL_BRICK_GPU_ON_STANDIN"
"""The environment variable that makes the stand-in driver of `tests/cuda` take the place of a GPU."""
PACKAGES = ("cuda-bindings", "cuda-core", "cuda-pathfinder", "nvidia-cuda-nvrtc", "torch")


def standin() -> Driver | None:
    """The stand-in driver, loaded before anything else can load a driver, where it is asked for."""
    if os.environ.get(ON_STANDIN, "") in ("", "0"):
        return None
    from tests.cuda.standin import Driver

    return Driver.load()


def ask_for_standin_without_driver() -> None:
    """Let the stand-in driver take the place of a GPU where there is no driver; the result says so."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ[ON_STANDIN] = "1"


def open_gpu() -> Device:
    """The first GPU, current on this thread.

    Raises:
        RuntimeError: there is none, and why.
    """
    standin()
    try:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise RuntimeError(f"no NVIDIA GPU can be used here ({type(error).__name__}: {lines[0]})") from error
    return device


def facts(device: Device) -> dict[str, Any]:
    """What a result depends on."""
    from cuda.bindings import driver

    cuda = driver.cuDriverGetVersion()[1]
    return {
        "device": device.name,
        "driver": "stand-in" if standin() is not None else _driver_version(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "multiprocessors": device.properties.multiprocessor_count,
        "gpu_packages": {package: _version(package) for package in PACKAGES},
    }


def _driver_version() -> str | None:
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
