"""Bricks, layers and GPU kernels of ML engines as OpenTelemetry spans, statistics and profiles.

The verbs of this module belong to one process-wide default profiler, which is disabled until somebody enables it:
library authors use them freely, and `default_profiler().enable()` switches them on.
"""

from __future__ import annotations

from .config import Config
from .profiler import BrickProfiler
from .record.clock import Clock
from .stats.reader import LayerMatrix, Statistics
from .stats.snapshot import BrickStats, CategoryStats
from .taxonomy import BrickBottleneck, BrickCategory, BrickId, Phase, SpanLevel, TimingSource
from .version import __version__

_default = BrickProfiler()

step = _default.step
lane = _default.lane
layer = _default.layer
brick = _default.brick
kernel = _default.kernel
define = _default.define


def default_profiler() -> BrickProfiler:
    """The profiler behind the verbs of this module."""
    return _default


__all__ = [
    "BrickBottleneck",
    "BrickCategory",
    "BrickId",
    "BrickProfiler",
    "BrickStats",
    "CategoryStats",
    "Clock",
    "Config",
    "LayerMatrix",
    "Phase",
    "SpanLevel",
    "Statistics",
    "TimingSource",
    "__version__",
    "brick",
    "default_profiler",
    "define",
    "kernel",
    "lane",
    "layer",
    "step",
]
