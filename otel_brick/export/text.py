"""Reports as plain text, for a terminal or a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..taxonomy import TimingSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..stats.reader import StatsReader
    from ..stats.snapshot import BrickStats

_NAME_WIDTH: Final = 20


def summary(statistics: StatsReader, losses: Mapping[str, int] | None = None) -> str:
    """Totals, then bricks by falling time, then categories, then what was lost."""
    total = statistics.total_ns()
    coverage = statistics.coverage()
    lines = ["Brick profile"]
    count = statistics.total_tokens()
    unit = ("token" if statistics.tokens() else "element") + ("" if count == 1 else "s")
    unit += "" if statistics.tokens() else " (no tokens given)"
    lines.append(f"{count} {unit}, {total / 1000:.2f} us of brick time")
    rate = statistics.tokens_per_sec()
    if rate is not None:
        lines.append(f"{rate:.1f} tokens/s of step time")
    if coverage is not None:
        note = " - above 1: measured durations reach outside their steps" if coverage > 1 else ""
        count = statistics.step_count()
        lines.append(f"{count} {'step' if count == 1 else 'steps'}, bricks cover {coverage:.3f} of their time{note}")
    waited = statistics.sync_ns()
    if waited:
        lines.append(f"steps waited {waited / 1000:.2f} us for the device because of the sync mode")
    bricks = sorted(statistics.all_brick_stats(), key=lambda brick: (-brick.total_ns, brick.name))
    width = max((len(brick.name) for brick in bricks), default=0)
    width = max(width, _NAME_WIDTH)
    if bricks:
        lines.append(f"{'brick':<{width}} {'avg us':>10} {'p99 us':>10} {'share':>7} {'calls':>9}")
    for brick in bricks:
        share = 100.0 * brick.exclusive_ns / total if total else 0.0
        failed = f" ({brick.failures} failed)" if brick.failures else ""
        slow = f" ({brick.budget_violations} over budget)" if brick.budget_violations else ""
        lines.append(
            f"{brick.name:<{width}} {brick.avg_us or 0.0:10.2f} {brick.p99_us or 0.0:10.2f} {share:6.1f}% "
            f"{brick.count:9d}{failed}{slow}"
        )
    if bricks:
        lines += _sources(statistics, bricks)
        lines.append(categories(statistics, width))
        lines.append("A brick's times include the bricks inside it; shares, and times of categories, do not.")
    lost = ", ".join(f"{reason} {count}" for reason, count in (losses or {}).items() if count)
    if lost:
        lines.append(f"lost or wrong: {lost}")
    return "\n".join(lines)


def _sources(statistics: StatsReader, bricks: Sequence[BrickStats]) -> list[str]:
    """Where the times come from, for profiles with more than the host's clock."""
    samples = statistics.sample_sources()
    spacing = sum(brick.launch_spacing for brick in bricks)
    named = {
        "of CUDA events": samples[TimingSource.CudaEvent],
        "of the host after waiting for the device": samples[TimingSource.SyncedHost],
        "of the host alone": samples[TimingSource.Host] - spacing,
        "launch spacing (no device time)": spacing,
    }
    if samples[TimingSource.Host] == sum(samples.values()) and not spacing:
        return []
    return ["times: " + ", ".join(f"{count} {words}" for words, count in named.items() if count)]


def categories(statistics: StatsReader, width: int = _NAME_WIDTH) -> str:
    """The categories that have samples, by index."""
    total = statistics.total_ns()
    lines = [f"{'category':<{width}} {'avg us':>10} {'share':>7} {'calls':>9}"]
    for category in statistics.category_stats():
        if category.count:
            share = category.percentage(total)
            lines.append(f"{category.name:<{width}} {category.avg_us or 0.0:10.2f} {share:6.1f}% {category.count:9d}")
    return "\n".join(lines)
