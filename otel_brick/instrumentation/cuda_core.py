"""`CudaCoreInstrumentor`: kernel launches, graph launches and copies of cuda-python programs as rows.

It stands in for functions of `cuda.core` and `cuda.bindings.driver`, and for the classes that make modules, to learn
the hashes of their code. What can not be reached that way has functions here to call instead: `traced_launch`,
`traced_replay`, `traced_copy`, `register_module`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.instrumentation.instrumentor import (  # pyright: ignore[reportMissingTypeStubs]
    BaseInstrumentor,
)

from ..gpu.capture import Capture
from ..gpu.kernels import identities
from ..gpu.launches import (
    driver_launch_ex_recorder,
    driver_launch_recorder,
    graph_recorder,
    launch_recorder,
    replay,
    unload_observer,
)
from ..gpu.transfers import COPIES, copy_recorder, record_copy
from .arrival import Arrivals
from .package import _instruments  # pyright: ignore[reportPrivateUsage]
from .rebinding import rebind

if TYPE_CHECKING:
    from ..gpu.ptx import PtxRegistry
    from ..profiler import BrickProfiler
    from ..record.recorder import Recorder

logger = logging.getLogger("otel_brick")

CORE: Final = "cuda.core"
DRIVER: Final = "cuda.bindings.driver"
_LOADERS: Final = {
    "ObjectCode": ("from_cubin", "from_ptx", "from_fatbin", "from_object", "from_library"),
    "Program": ("compile",),
    "Linker": ("link",),
}
"""The classes of cuda.core that make modules, and with which methods."""


@dataclass
class CudaCoreConfiguration:
    """Options of `CudaCoreInstrumentor`, for configuration files too.

    Attributes:
        launches: kernel and graph launches become rows.
        transfers: copies become rows.
        modules: classes that make modules are observed, so that kernels have the hash of their code.
    """

    launches: bool = True
    transfers: bool = True
    modules: bool = True


class CudaCoreInstrumentor(BaseInstrumentor):
    """Records what programs do through cuda-python; without cuda-python it does nothing.

    A row goes to the step or lane that is open in the calling context, whichever profiler opened it, else to
    `profiler`. `instrument()` takes:

        profiler: for what happens outside every step; default `otel_brick.default_profiler()`, if that is enabled.
        launches, transfers, modules: as in `CudaCoreConfiguration`.
        ptx_registry: a `PtxRegistry` that gets the PTX of the modules that are seen.
    """

    configuration = CudaCoreConfiguration

    _capture: Capture | None = None
    _replaced: list[tuple[object, object]]
    _options: CudaCoreConfiguration
    _arrivals: Arrivals

    def instrumentation_dependencies(self) -> Collection[str]:
        """Nothing: where cuda-python is missing there is nothing to record."""
        return _instruments

    def _instrument(self, **kwargs: Any) -> None:
        profiler, registry = _arguments(kwargs)
        self._options = CudaCoreConfiguration(
            **{name: bool(kwargs[name]) for name in CudaCoreConfiguration.__annotations__ if name in kwargs}
        )
        self._replaced, self._arrivals = [], Arrivals()
        self._capture = Capture(_recorder_of(profiler))
        identities.modules.registry = registry
        if _is_missing(CORE):
            logger.debug("cuda.core is not installed; kernel launches are not recorded")
            return
        self._arrivals.when_imported(DRIVER, _guarded(self._on_driver))
        self._arrivals.when_imported(CORE, _guarded(self._on_core))

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._capture is not None:
            self._capture.close()
            self._arrivals.forget()
        rebind({id(ours): (ours, original) for original, ours in self._replaced})
        self._capture, self._replaced = None, []
        identities.modules.registry = None

    def _put(self, pairs: list[tuple[object, object]], skip: Callable[[str], bool] = lambda name: False) -> None:
        rebind({id(original): (original, ours) for original, ours in pairs}, skip)
        self._replaced += pairs

    def _on_core(self, core: Any) -> None:
        capture = self._capture
        if capture is None:
            return
        if self._options.launches:
            # A program may have put something else in the one place and not in the other.
            launcher: Any = importlib.import_module(f"{CORE}._launcher")
            originals = {id(found): found for found in (core.launch, launcher.launch)}
            self._put([(original, launch_recorder(original, capture, core)) for original in originals.values()])
        if self._options.modules:
            _track_existing(core.ObjectCode)
            classes = {name: getattr(core, name) for name in _LOADERS}
            pairs: list[tuple[object, object]] = [
                (found, _observing(found, _LOADERS[name])) for name, found in classes.items()
            ]
            # Inside cuda.core the classes are used in other ways than by programs.
            self._put(pairs, lambda name: name.startswith(f"{CORE}."))

    def _on_driver(self, driver: Any) -> None:
        capture = self._capture
        if capture is None:
            return
        pairs: list[tuple[object, object]] = []
        if self._options.launches:
            pairs += [
                (driver.cuLaunchKernel, driver_launch_recorder(driver.cuLaunchKernel, capture)),
                (driver.cuLaunchKernelEx, driver_launch_ex_recorder(driver.cuLaunchKernelEx, capture, driver)),
                (driver.cuGraphLaunch, graph_recorder(driver.cuGraphLaunch, capture)),
                (driver.cuModuleUnload, unload_observer(driver.cuModuleUnload)),
                (driver.cuLibraryUnload, unload_observer(driver.cuLibraryUnload)),
            ]
        if self._options.transfers:
            functions = {name: getattr(driver, name, None) for name in COPIES}
            pairs += [
                (function, copy_recorder(name, function, capture))
                for name, function in functions.items()
                if function is not None
            ]
        self._put(pairs)


_ACCEPTED: Final = {
    *("profiler", "ptx_registry", *CudaCoreConfiguration.__annotations__),
    *("tracer_provider", "meter_provider", "logger_provider"),
}
"""Ours, and what every instrumentor is given: those of the profiler are used."""


def _arguments(given: dict[str, Any]) -> tuple[BrickProfiler | None, PtxRegistry | None]:
    """The profiler and the registry among the arguments of `instrument`.

    Raises:
        TypeError: an argument is unknown or not what it should be.
    """
    from ..gpu.ptx import PtxRegistry
    from ..profiler import BrickProfiler

    unknown = sorted(given.keys() - _ACCEPTED)
    if unknown:
        raise TypeError(f"instrument() got unexpected arguments: {', '.join(unknown)}")
    for name, kind in (("profiler", BrickProfiler), ("ptx_registry", PtxRegistry)):
        value = given.get(name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__} ({value!r})")
    return given.get("profiler"), given.get("ptx_registry")


def _recorder_of(profiler: BrickProfiler | None) -> Recorder:
    if profiler is None:
        from .. import default_profiler

        profiler = default_profiler()
    return profiler._recorder  # pyright: ignore[reportPrivateUsage]


def _is_missing(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return False
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:  # a parent is missing
        return True


def _guarded(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same without its exceptions: the program's import goes on."""

    def call(module: Any) -> None:
        try:
            function(module)
        except Exception as error:
            logger.warning("%s can not be instrumented", module.__name__, exc_info=error)

    return call


class _Transparent(type):
    """The class of classes that stand in for another one: what is an instance of that is one of them."""

    stand_ins: Final[weakref.WeakKeyDictionary[type, type]] = weakref.WeakKeyDictionary()

    def __instancecheck__(cls, instance: Any) -> bool:
        original = cls.stand_ins.get(cls)
        return super().__instancecheck__(instance) if original is None else isinstance(instance, original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        original = cls.stand_ins.get(cls)
        return super().__subclasscheck__(subclass) if original is None else issubclass(subclass, original)


def _observing(original: type, methods: tuple[str, ...]) -> type:
    """A subclass in whose methods modules are seen as they are made."""

    def observed(name: str) -> Any:
        static = isinstance(original.__dict__.get(name), staticmethod)
        function = getattr(original, name)

        @wraps(function)
        def make(*arguments: Any, **keywords: Any) -> Any:
            module = function(*arguments, **keywords)
            try:
                identities.modules.track(module)
            except Exception as error:
                logger.debug("a module could not be observed", exc_info=error)
            return module

        return staticmethod(make) if static else make

    namespace: dict[str, Any] = {name: observed(name) for name in methods if hasattr(original, name)}
    namespace |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    stand_in = _Transparent(original.__name__, (original,), {"__slots__": (), **namespace})
    _Transparent.stand_ins[stand_in] = original
    return stand_in


def _track_existing(kind: type) -> None:
    """Remember the modules that were made before us."""
    for found in gc.get_objects():
        if type(found) is kind:
            identities.modules.track(found)


def register_module(module: Any) -> None:
    """Tell of an `ObjectCode` that `CudaCoreInstrumentor` could not see being made, so that its kernels have a hash.

    It is loaded if it is not yet. Without a driver nothing happens.

    Raises:
        TypeError: `module` is no `ObjectCode`.
        Exception: what cuda.core raises where the driver can not load it.
    """
    from ..gpu.driver import open_driver

    driver = open_driver()
    if driver is None:
        return
    if not isinstance(module, driver.core.ObjectCode):
        raise TypeError(f"module must be an ObjectCode, not {type(module).__name__}")
    identities.modules.register(module)


_explicit: Capture | None = None
_explicit_launch: Callable[..., Any] | None = None


def _capture() -> Capture:
    """What the functions below record with, whether the instrumentor is at work or not."""
    global _explicit
    if _explicit is None:
        _explicit = Capture(_recorder_of(None))
    return _explicit


def traced_launch(stream: Any, config: Any, kernel: Any, *kernel_args: Any) -> Any:
    """`cuda.core.launch`, recorded, where the instrumentor is not used or can not reach."""
    global _explicit_launch
    if _explicit_launch is None:
        launch: Any = importlib.import_module(f"{CORE}._launcher").launch
        _explicit_launch = launch_recorder(_unwrapped(launch), _capture(), importlib.import_module(CORE))
    return _explicit_launch(stream, config, kernel, *kernel_args)


def traced_replay(graph: Any, stream: Any) -> Any:
    """`graph.launch(stream)` of a `cuda.core.graph.Graph`, recorded as a brick: its class can not be observed."""
    return replay(_capture(), lambda given: given, stream, graph.launch, (stream,), {})


def traced_copy(source: Any, target: Any, *, stream: Any) -> Any:
    """`source.copy_to(target, stream=stream)` of a `cuda.core.Buffer`, recorded: its class can not be observed.

    Args:
        target: a buffer, or None for a new one, as for `copy_to`.

    Returns:
        The buffer that was copied to.
    """

    def described() -> tuple[str, int, Any]:
        # Pinned memory of the host is accessible to both.
        ends = ["h" if end is not None and end.is_host_accessible else "d" for end in (source, target)]
        return "" if ends == ["h", "h"] else "2".join(ends), source.size, stream

    return record_copy(_capture(), described, source.copy_to, (target,), {"stream": stream})


def _unwrapped(function: Any) -> Any:
    """The original behind a function of ours."""
    for original, ours in getattr(CudaCoreInstrumentor(), "_replaced", ()):
        if ours is function:
            return original
    return function


# Kernels that wait to be described must not outlive the interpreter's modules.
atexit.register(identities.clear)
