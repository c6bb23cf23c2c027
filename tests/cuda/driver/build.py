"""Builds the stand-in driver with the system's C compiler, once for each state of its sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
SONAME = "libcuda.so.1"
FLAGS = [
    *("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"),
    *("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{SONAME}"),
]


class BuildError(Exception):
    """The stand-in driver can not be built here; the message says what to do."""


def compiler() -> str:
    """The C compiler to use: `$CC`, else `cc`.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CC", "cc")
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(
            f"tests/cuda need a C compiler, and there is no `{wanted}` here: install one (on Debian: apt-get install "
            "gcc libc6-dev) or name one in the environment variable CC"
        )
    return found


def build() -> Path:
    """The path of the library, which is built unless that was done before.

    Raises:
        BuildError: no compiler, or it failed; the message then has its output.
    """
    cc = compiler()
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(repr([cc, FLAGS]).encode())
    for path in sorted([*sources, *SOURCES.glob("*.h"), *SOURCES.glob("*.def")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    # A directory of this user's alone: what lies in it is loaded into the process.
    directory = Path(tempfile.gettempdir()) / f"otel-brick-standin-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise BuildError(f"{directory} belongs to someone else")
    library = directory / digest.hexdigest()[:16] / SONAME
    if library.exists():
        return library
    # Built aside and moved into place, for several test runs may begin at once.
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        built = Path(aside) / SONAME
        run = subprocess.run(
            [cc, *FLAGS, "-o", str(built), *map(str, sources)], capture_output=True, text=True, check=False, timeout=300
        )
        if run.returncode:
            raise BuildError(f"{cc} could not build the stand-in driver:\n{run.stderr}")
        library.parent.mkdir(exist_ok=True)
        built.replace(library)
    return library
