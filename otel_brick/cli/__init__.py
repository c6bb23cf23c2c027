"""The `otel-brick` command: its entry point, which works without the `cli` extra.

click and rich belong to that extra, so they are imported only when the command runs, and their absence is one
clear line instead of a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `otel-brick` and leave the process with its exit status.

    Args:
        arguments: the command line without the program's name; None takes it from `sys.argv`.

    Raises:
        SystemExit: always; 0 after success, 1 after a failure, 2 for bad arguments or a missing `cli` extra.
    """
    try:
        from .app import commands
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich", "threadpoolctl"):
            raise
        hint = 'pip install "otel-brick[cli]"'
        print(f"otel-brick: {package} is not installed, the command needs it: {hint}", file=sys.stderr)
        raise SystemExit(2) from None
    commands.main(args=None if arguments is None else list(arguments), prog_name="otel-brick")
