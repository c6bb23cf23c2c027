"""The profile document: one JSON object that CI tools read, and a way to write it that never leaves half a file.

Its first keys are the reference's, in the reference's order and rounding, with 0 where there is no data. `min_ns`,
`max_ns` and `total_elements` follow, which `pmat brick-score` requires, then what the reference does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..taxonomy import Phase

if TYPE_CHECKING:
    from ..stats.reader import StatsReader
    from ..stats.snapshot import BrickStats

SCHEMA_VERSION: Final = 1
UNITS: Final = {
    "*_ns": "nanoseconds",
    "total_ns": "nanoseconds, bricks inside other bricks counted once",
    "bricks[].total_ns": "nanoseconds, bricks inside included",
    "categories[].total_ns": "nanoseconds, bricks inside excluded",
    "*_us": "microseconds",
    "*bytes*": "bytes",
    "throughput": "elements/s",
    "throughput_gbps": "1e9 bytes/s",
    "total_throughput": "tokens/s of brick time",
    "tokens_per_sec": "tokens/s of step time",
    "pct": "percent of total_ns",
}


def document(
    statistics: StatsReader,
    *,
    losses: Mapping[str, int],
    l2_cache_hit_rate: float | None = None,
    zero_copy: bool = False,
) -> str:
    """The profile of these statistics as a single line of JSON.

    `total_ns` is the sum of exclusive brick time and `pct` a brick's share of it, so that nested bricks add up to 100;
    a brick's own `total_ns` is inclusive. Bricks are ordered by falling `total_ns`, then by name.
    """
    bricks = sorted(statistics.all_brick_stats(), key=lambda brick: (-brick.total_ns, brick.name))
    total = statistics.total_ns()
    coverage = statistics.coverage()
    content: dict[str, Any] = {
        "total_tokens": statistics.total_tokens(),
        "total_ns": total,
        "total_throughput": _rounded(statistics.total_throughput(), 1),
        "bricks": [_brick(brick, total) for brick in bricks],
        "schema_version": SCHEMA_VERSION,
        "generated_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "units": UNITS,
        "tokens_source": "tokens" if statistics.tokens() else "elements",
        "tokens_per_sec": _optional(statistics.tokens_per_sec(), 1),
        "steps": {
            "count": statistics.step_count(),
            "wall_ns": statistics.wall_ns(),
            "union_ns": statistics.union_ns(),
            "sync_ns": statistics.sync_ns(),
            "coverage": _optional(coverage, 4),
            "coverage_above_one": coverage is not None and coverage > 1,
            "tokens_per_sec": {
                phase.attribute_value: _optional(rate, 1)
                for phase in Phase
                if (rate := statistics.phase_tokens_per_sec(phase)) is not None
            },
        },
        "categories": [
            {
                "name": category.category.attribute_value,
                "count": category.count,
                "total_ns": category.total_ns,
                "pct": _rounded(category.percentage(total), 1),
            }
            for category in statistics.category_stats()
            if category.count
        ],
        "l2_cache_hit_rate": l2_cache_hit_rate,
        "is_zero_copy": zero_copy,
        "losses": dict(losses),
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _brick(brick: BrickStats, total_ns: int) -> dict[str, Any]:
    return {
        "name": brick.name,
        "count": brick.count,
        "total_ns": brick.total_ns,
        "avg_us": _rounded(brick.avg_us, 2),
        "min_us": _rounded(brick.min_us, 2),
        "max_us": _rounded(brick.max_us, 2),
        "throughput": _rounded(brick.throughput, 1),
        "pct": _rounded(100.0 * brick.exclusive_ns / total_ns if total_ns else 0.0, 1),
        "total_bytes": brick.total_bytes,
        "compression_ratio": _rounded(brick.compression_ratio, 2, 1.0),
        "throughput_gbps": _rounded(brick.throughput_gbps, 2),
        "bottleneck": brick.bottleneck.value,
        "min_ns": brick.min_ns or 0,
        "max_ns": brick.max_ns or 0,
        "total_elements": brick.total_elements,
        "category": brick.category.attribute_value,
        "exclusive_ns": brick.exclusive_ns,
        "p50_us": _optional(brick.p50_us, 2),
        "p99_us": _optional(brick.p99_us, 2),
        "std_us": _optional(brick.std_us, 2),
        "cv": _optional(brick.cv, 4),
        "bytes_read": brick.bytes_read,
        "bytes_written": brick.bytes_written,
        "failures": brick.failures,
        "timing_source": None if brick.timing_source is None else brick.timing_source.attribute_value,
        "launch_spacing": brick.launch_spacing,
        "budget_ns": brick.budget_ns,
        "budget_violations": brick.budget_violations,
    }


def _rounded(value: float | None, digits: int, missing: float = 0.0) -> float:
    return missing if value is None else round(value, digits)


def _optional(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def write(path: Path, content: str) -> None:
    """Put `content` and a newline into a file, through a temporary file beside it.

    Raises:
        OSError: naming the path and the reason; a file that was there is unchanged.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.parent / f".brick-{secrets.token_hex(8)}"
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        temporary = name
        # What UTF-8 cannot hold, half a surrogate pair in a name, becomes the JSON escape of itself.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content + "\n")
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from error
