"""Reports as plain text, for a terminal or a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..stats.reader import StatsReader


def summary(statistics: StatsReader) -> str:
    """Totals, then bricks by falling time, then categories; shares are of exclusive brick time."""
    total = statistics.total_ns()
    coverage = statistics.coverage()
    lines = ["Brick profile"]
    unit = "tokens" if statistics.tokens() else "elements (no tokens given)"
    lines.append(f"{statistics.total_tokens()} {unit}, {total / 1000:.2f} us of brick time")
    rate = statistics.tokens_per_sec()
    if rate is not None:
        lines.append(f"{rate:.1f} tokens/s of step time")
    if coverage is not None:
        note = " - above 1: measured durations reach outside their steps" if coverage > 1 else ""
        lines.append(f"{statistics.step_count()} steps, bricks cover {coverage:.3f} of their time{note}")
    bricks = sorted(statistics.all_brick_stats(), key=lambda brick: (-brick.total_ns, brick.name))
    if bricks:
        lines.append(f"{'brick':<20} {'avg us':>10} {'p99 us':>10} {'share':>7} {'calls':>9}")
    for brick in bricks:
        share = 100.0 * brick.exclusive_ns / total if total else 0.0
        lines.append(
            f"{brick.name:<20} {brick.avg_us or 0.0:10.2f} {brick.p99_us or 0.0:10.2f} {share:6.1f}% {brick.count:9d}"
        )
    if bricks:
        lines.append(categories(statistics))
    return "\n".join(lines)


def categories(statistics: StatsReader) -> str:
    """The categories that have samples, by index."""
    total = statistics.total_ns()
    lines = [f"{'category':<20} {'avg us':>10} {'share':>7} {'calls':>9}"]
    for category in statistics.category_stats():
        if category.count:
            share = category.percentage(total)
            lines.append(f"{category.name:<20} {category.avg_us or 0.0:10.2f} {share:6.1f}% {category.count:9d}")
    return "\n".join(lines)
