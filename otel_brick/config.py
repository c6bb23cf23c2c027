"""Configuration of one profiler: arguments over `OTEL_BRICK_*` variables over defaults, as a frozen dataclass.

A bad argument raises at once; a bad variable warns once and its default is used, because an environment must
never stop a program. `SETTINGS` describes every field for the documentation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .taxonomy import SyncMode

logger = logging.getLogger("otel_brick")

DETAIL_POLICIES = ("auto", "all", "none")
HISTOGRAMS = ("explicit", "exponential", "none")
SYNC_MODES = tuple(mode.value for mode in SyncMode)
KERNEL_EVENTS = ("all", "sampled", "off")


@dataclass(frozen=True)
class Setting:
    """One configurable value: how it is spelled, read and explained."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    check: Callable[[Any], str | None]
    """Returns what is expected when the value is not it, else None."""
    brief: str

    @property
    def variable(self) -> str:
        """The environment variable's name."""
        return f"OTEL_BRICK_{self.name.upper()}"


def _positive_integer(value: Any) -> str | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
    return None if good else "an integer from 1 to 2147483647"


def _detail_policy(value: Any) -> str | None:
    return None if value in DETAIL_POLICIES else f"one of {', '.join(DETAIL_POLICIES)}"


def _histograms(value: Any) -> str | None:
    return None if value in HISTOGRAMS else f"one of {', '.join(HISTOGRAMS)}"


def _sync_mode(value: Any) -> str | None:
    return None if value in SYNC_MODES else f"one of {', '.join(SYNC_MODES)}"


def _kernel_events(value: Any) -> str | None:
    return None if value in KERNEL_EVENTS else f"one of {', '.join(KERNEL_EVENTS)}"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _parse_boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), text)


SETTINGS = (
    Setting("detail", "auto", str.lower, _detail_policy, "which recorded steps have spans below them"),
    Setting("detail_interval", 16, int, _positive_integer, "under `auto`, one step in this many has detail"),
    Setting("max_rows_per_step", 2000, int, _positive_integer, "spans below one step"),
    Setting("max_rows_per_trace", 4000, int, _positive_integer, "spans below the steps of one trace"),
    Setting(
        "attach_context",
        False,
        _parse_boolean,
        _boolean,
        "layers and bricks too become the current span, so that other instrumentations nest under them",
    ),
    Setting("histograms", "explicit", str.lower, _histograms, "the kind of the histograms among the metrics"),
    Setting("sync_mode", "deferred", str.lower, _sync_mode, "when device time is taken, and who waits for the device"),
    Setting("kernel_events", "off", str.lower, _kernel_events, "which kernels have device times of their own"),
)


@dataclass(frozen=True)
class Config:
    """The settings of one profiler; build it with `Config.build`."""

    detail: str
    detail_interval: int
    max_rows_per_step: int
    max_rows_per_trace: int
    attach_context: bool
    histograms: str
    sync_mode: str
    kernel_events: str

    @classmethod
    def build(cls, arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
        """Combine arguments (None: not given) with the environment and the defaults.

        Raises:
            ValueError: an argument is out of its range; the message names it, its value and what is expected.
        """
        values = {setting.name: _value(setting, arguments.get(setting.name), environ) for setting in SETTINGS}
        return cls(**values)


_warned: set[tuple[str, str]] = set()


def _value(setting: Setting, argument: Any, environ: Mapping[str, str]) -> Any:
    if argument is not None:
        expected = setting.check(argument)
        if expected:
            raise ValueError(f"{setting.name} must be {expected}; got {argument!r}")
        return argument
    text = environ.get(setting.variable, "").strip()
    if not text:
        return setting.default
    try:
        value = setting.parse(text)
        expected = setting.check(value)
    except ValueError:
        value, expected = None, setting.check(None)
    if expected:
        if (setting.variable, text) not in _warned:
            _warned.add((setting.variable, text))
            logger.warning("%s must be %s; got %r, using %r", setting.variable, expected, text, setting.default)
        return setting.default
    return value
