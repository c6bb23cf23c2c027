"""What kernels are: `KernelIdentities` asks the driver once for each kernel, `Modules` knows the code they came from.

A launch of an unknown kernel only puts it on a list. `describe`, which runs before the rows of ended steps are
resolved, asks for what is on it. Kernels are held until then and modules never, so that both can go when the user lets
go of them.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..record.descriptors import KernelIdentity
from .driver import Driver, open_driver
from .names import kernel_name
from .ptx import PtxRegistry, fnv1a

if TYPE_CHECKING:
    from ..record.losses import Losses

MAX_PENDING: Final = 4_096
"""Kernels that may wait to be described; those beyond it stay without a name."""
MAX_KNOWN: Final = 1 << 16
MAX_MODULES: Final = 4_096
"""Modules that are remembered; beyond it the oldest are forgotten, and kernels of theirs stay without a hash."""
_PTX_ENTRY: Final = re.compile(rb"\.entry\s+([\w$]+)")
_CUBIN_ENTRY: Final = re.compile(rb"\.text\.([\w$.]+)\0")


class _Module:
    """The code of an `ObjectCode`, first as it is, then as its hash and the kernels in it."""

    def __init__(self, module: Any) -> None:
        self.ref: Callable[[], Any] = weakref.ref(module)
        self.name: str = module.name
        self.is_ptx: bool = module.code_type == "ptx"
        self.code: Any = module.code
        self.hash: int | None = None
        self.library: int | None = None
        self.kernels: frozenset[bytes] = frozenset()

    def read(self, registry: PtxRegistry | None) -> None:
        """Hash the code, and let go of it."""
        code, self.code = self.code, None
        data = Path(code).read_bytes() if isinstance(code, str) else bytes(code)
        if self.is_ptx:
            data = data.rstrip(b"\0")
        self.kernels = frozenset((_PTX_ENTRY if self.is_ptx else _CUBIN_ENTRY).findall(data))
        self.hash = fnv1a(data)
        if registry is not None and self.is_ptx and data:
            registry.register(self.name or "ptx", data, code if isinstance(code, str) else None)

    def may_hold(self, kernel: bytes) -> bool:
        """Whether a kernel may be in it; of packed code nobody knows."""
        return self.hash is not None and (not self.kernels or kernel in self.kernels)


class Modules:
    """The hashes of modules by the handles of their libraries.

    Nothing here may ask an `ObjectCode` for its repr, hash or equality: they load it into the driver.

    Attributes:
        registry: gets the PTX of every module; None to keep only hashes.
    """

    def __init__(self) -> None:
        self.registry: PtxRegistry | None = None
        self._lock = threading.RLock()
        self._modules: deque[_Module] = deque(maxlen=MAX_MODULES)
        self._hashes: dict[int, int] = {}

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        self._lock = threading.RLock()

    def track(self, module: Any) -> None:
        """Remember a module that was made; its code is held until the next call of `hash_of` or `read`."""
        found = _Module(module)
        with self._lock:
            self._modules.append(found)

    def register(self, module: Any) -> None:
        """Remember a module that is loaded or will be now, and its library.

        Raises:
            Exception: the driver can not load it.
        """
        found = _Module(module)
        found.read(self.registry)
        found.library = int(module.handle)
        assert found.hash is not None
        with self._lock:
            self._modules.append(found)
            self._hashes[found.library] = found.hash

    def read(self, losses: Losses) -> None:
        """Hash what came since the last call."""
        with self._lock:
            fresh = [module for module in self._modules if module.code is not None]
        for module in fresh:
            try:
                module.read(self.registry)
            except Exception as error:
                losses.remember(f"the code of the module {module.name!r} could not be hashed", error)

    def hash_of(self, library: int, kernel: bytes) -> int | None:
        """The hash of the module behind a library, by one of its kernels; None where nobody saw it being made."""
        with self._lock:
            fitting = [module for module in self._modules if module.may_hold(kernel)]
        for module in reversed(fitting):
            alive = module.ref()
            if alive is not None and module.library is None and module.hash is not None:
                # This loads a module that is not loaded yet, which is why only those with the kernel are asked.
                module.library = int(alive.handle)
                self._hashes[module.library] = module.hash
        if len(self._hashes) > MAX_KNOWN:
            self._hashes.clear()
        known = self._hashes.get(library)
        if known is None:
            # A module that its owner dropped after taking the kernel from it can only be told by the kernel's name.
            gone = {module.hash for module in fitting if module.kernels and module.ref() is None and not module.library}
            if len(gone) == 1:
                known = gone.pop()
        return known

    def clear(self) -> None:
        """Forget all modules."""
        with self._lock:
            self._modules.clear()
            self._hashes.clear()


@dataclass(slots=True)
class _Known:
    """A kernel by its handle: one of the objects that stand for it, and what the driver said of it."""

    identity: KernelIdentity
    ref: Callable[[], Any]
    name: bytes | None = None
    library: int | None = None


class KernelIdentities:
    """The identities of this process's kernels, shared by all profilers."""

    def __init__(self) -> None:
        self.modules = Modules()
        self._lock = threading.RLock()
        self._pending: deque[tuple[_Known, Any, int | None]] = deque()
        self._known: dict[int, _Known] = {}
        self._functions: dict[int, KernelIdentity] = {}

    def renew_locks(self) -> None:
        """Replace the locks in a forked child, where their holders may not exist."""
        self._lock = threading.RLock()
        self.modules.renew_lock()
        if self.modules.registry is not None:
            self.modules.registry.renew_lock()

    def of(self, kernel: Any, device: int | None) -> KernelIdentity:
        """The identity of a `cuda.core.Kernel`, complete after the next `describe`."""
        handle = int(kernel.handle)
        with self._lock:
            known = self._known.get(handle)
            if known is not None:
                if known.ref() is not None:
                    return known.identity
                if self._is_same(known, kernel):
                    known.ref = weakref.ref(kernel)
                    return known.identity
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[handle] = _Known(KernelIdentity(), weakref.ref(kernel))
            if len(self._pending) < MAX_PENDING:
                self._pending.append((known, kernel, device))
        return known.identity

    def _is_same(self, known: _Known, kernel: Any) -> bool:
        """Whether a handle still stands for the kernel that it stood for when all objects of that were dropped."""
        driver = open_driver()
        if driver is None or known.name is None:
            return False
        with driver.relaxed():
            return (known.name, known.library) == _name_and_library(driver, kernel.handle)

    def of_function(self, function: Any, device: int | None) -> KernelIdentity:
        """The identity of a `CUfunction` or `CUkernel`, asked for now, while the handle is good."""
        handle = int(function)
        identity = self._functions.get(handle)
        if identity is None:
            if len(self._functions) >= MAX_KNOWN:
                self._functions.clear()
            identity = self._functions[handle] = KernelIdentity()
            driver = open_driver()
            if driver is not None:
                with driver.relaxed():
                    self._ask(driver, identity, function, device)
        return identity

    def forget_functions(self) -> None:
        """Forget the identities of bare handles, because modules were unloaded and handles come again."""
        self._functions.clear()

    def _ask(self, driver: Driver, identity: KernelIdentity, function: Any, device: int | None) -> None:
        bindings = driver.bindings
        attribute = bindings.CUfunction_attribute
        kinds = (attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        if isinstance(function, bindings.CUkernel):
            name, library = _name_and_library(driver, function)
            values = [_ask(driver, "cuKernelGetAttribute", kind, function, device or 0) for kind in kinds]
            if name is not None and library is not None:
                identity.ptx_hash = self.modules.hash_of(library, name)
        elif isinstance(function, bindings.CUfunction):
            name = _ask(driver, "cuFuncGetName", function)
            values = [_ask(driver, "cuFuncGetAttribute", kind, function) for kind in kinds]
        else:  # an integer does not say which kind of handle it is
            return
        identity.registers, identity.static_shared_mem = values
        identity.name = "" if name is None else kernel_name(name.decode("utf-8", "replace"))

    def describe(self, losses: Losses) -> None:
        """Ask the driver for the kernels that were launched for the first time since the last call; never raises."""
        self.modules.read(losses)
        while self._pending:
            try:
                known, kernel, device = self._pending.popleft()
            except IndexError:  # another thread was quicker
                return
            driver = open_driver()
            if driver is None:  # a forked child
                continue
            try:
                with driver.relaxed():
                    self._fill(driver, known, kernel, device)
            except Exception as error:
                losses.remember("a kernel could not be described", error)

    def _fill(self, driver: Driver, known: _Known, kernel: Any, device: int | None) -> None:
        identity = known.identity
        known.name, known.library = _name_and_library(driver, kernel.handle)
        if known.name is not None:
            identity.name = kernel_name(known.name.decode("utf-8", "replace"))
            if known.library is not None:
                identity.ptx_hash = self.modules.hash_of(known.library, known.name)
        attributes = kernel.attributes if device is None else kernel.attributes[device]
        identity.registers = int(attributes.num_regs)
        identity.static_shared_mem = int(attributes.shared_size_bytes)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pending.clear()
            self._known.clear()
            self._functions.clear()
            self.modules.clear()


def _name_and_library(driver: Driver, kernel: Any) -> tuple[bytes | None, int | None]:
    library = _ask(driver, "cuKernelGetLibrary", kernel)
    return _ask(driver, "cuKernelGetName", kernel), None if library is None else int(library)


def _ask(driver: Driver, function: str, *arguments: Any) -> Any:
    """What a driver function says; None where it fails or the driver is too old to have it."""
    try:
        error, value = getattr(driver.bindings, function)(*arguments)
    except RuntimeError:
        return None
    return value if error == driver.success else None


identities: Final = KernelIdentities()
"""The one for this process: handles are the process's too."""
