"""What `otel-brick demo` shows at the end: a table of bricks, one step's spans as a tree, and the totals.

It reads statistics snapshots and exported spans, and prints through rich, which leaves colours and line
drawing out where the output cannot show them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .. import semconv
from ..export.tree import SpanNode, span_trees
from .traces import EXPORTER_PACKAGE
from .words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .. import BrickStats
    from .demo import DemoResult, PhaseTime
    from .sending import Destination, Sent

_EXTRA_HINT = 'pip install "otel-brick[cli]"'
_LABEL_WIDTH = 30
_INDENT_WIDTH = 4


def print_report(console: Console, result: DemoResult) -> None:
    """Print everything about a finished run."""
    console.print(f"{'Text':<10}{result.text!r}\n", markup=False, soft_wrap=True)
    console.print(brick_table(result.bricks, result.total_ns, micro=_micro(console)))
    step = typical_step(span_trees(result.spans))
    if step is None:
        console.print("No spans were exported, so there is no tree to show.\n")
    else:
        console.print("One typical step, from its exported spans:\n", style="bold")
        console.print(step_tree(step, micro=_micro(console)))
        console.print()
    for name, phase in (("Prefill", result.prefill), ("Decode", result.decode)):
        console.print(_phase_line(name, phase))
    if result.coverage is not None:
        console.print(f"{'Coverage':<10}{result.coverage:.1%} of the steps' wall time is inside bricks")
    if result.losses:
        losses = ", ".join(f"{reason} {count:,}" for reason, count in sorted(result.losses.items()))
        console.print(f"{'Losses':<10}{losses}", style="yellow")
    _print_files(console, result)


def print_destination(console: Console, destination: Destination, seconds: float) -> None:
    """Say what is done next, before it is done."""
    more = f", and further texts for {seconds:g} s, sent only" if seconds else ""
    console.print(f"\n{'Sending':<10}to {destination}{more}; Ctrl-C ends it", markup=False, soft_wrap=True)


def print_sent(console: Console, sent: Sent) -> None:
    """Say what was accepted, and why the rest was not, or else what there was to warn about."""
    style = None if sent.complete else "yellow"
    console.print(f"{'Sent':<10}{sent}", markup=False, soft_wrap=True, style=style)
    for name, line in zip(("Note" if sent.complete else "Reason", "Hint"), sent.reason.splitlines(), strict=False):
        console.print(f"{name:<10}{line}", markup=False, soft_wrap=True, style=style)


def brick_table(bricks: Sequence[BrickStats], total_ns: int, *, micro: str) -> Table:
    """Statistics of all steps, the costliest brick first.

    Args:
        bricks: snapshots.
        total_ns: what the shares are of.
        micro: how to write a microsecond.
    """
    table = Table(
        title=f"Bricks of all steps, times in {micro}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("brick", no_wrap=True)
    table.add_column("category", no_wrap=True)
    for heading in ("calls", "mean", "p50", "p99", "share %", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for brick in sorted(bricks, key=lambda brick: brick.exclusive_ns, reverse=True):
        share = 100 * brick.exclusive_ns / total_ns if total_ns else None
        figures = (brick.avg_us, brick.p50_us, brick.p99_us, share, brick.throughput_gbps)
        table.add_row(
            escape(brick.name),
            brick.category.label,
            f"{brick.count:,}",
            *(_number(value) for value in figures),
        )
    return table


def typical_step(steps: Sequence[SpanNode]) -> SpanNode | None:
    """The decode step of median duration among those with detail, or of any phase where there is no decode step."""
    decode = [step for step in steps if step.attributes.get(semconv.BRICK_PHASE) == "decode"]
    ordered = sorted([step for step in decode if step.children] or decode or steps, key=lambda step: step.duration_ns)
    return ordered[len(ordered) // 2] if ordered else None


def step_tree(step: SpanNode, *, micro: str) -> Tree:
    """A step's layers and bricks with their durations.

    The first layer shows its bricks; of the other layers only the last is named.
    """
    tree = Tree(_tree_line(step, depth=0, micro=micro))
    layer_count = sum(child.is_layer for child in step.children)
    layers_seen = 0
    for child in step.children:
        layers_seen += child.is_layer
        if child.is_layer and 1 < layers_seen < layer_count:
            if layers_seen == 2:
                hidden = layer_count - 2
                tree.add(f"... {counted(hidden, 'more layer')}")
            continue
        branch = tree.add(_tree_line(child, depth=1, micro=micro))
        if layers_seen <= 1:
            for brick in child.children:
                branch.add(_tree_line(brick, depth=2, micro=micro))
    return tree


def _tree_line(node: SpanNode, *, depth: int, micro: str) -> Text:
    label = f"{node.name} {node.attributes.get(semconv.BRICK_LAYER_INDEX)}" if node.is_layer else node.name
    width = _LABEL_WIDTH - _INDENT_WIDTH * depth
    return Text(f"{label:<{width}}{_duration(node.duration_ns, micro):>12}")


def _phase_line(name: str, phase: PhaseTime) -> str:
    if phase.tokens_per_s is None:
        return f"{name:<10}no step"
    tokens = counted(phase.tokens, "token")
    return f"{name:<10}{tokens} in {1000 * phase.seconds:,.1f} ms: {phase.tokens_per_s:,.0f} tokens/s"


def _print_files(console: Console, result: DemoResult) -> None:
    traces = len({span.context.trace_id for span in result.spans if span.context is not None})
    if result.trace_path is None:
        trace_line = f"not written: {EXPORTER_PACKAGE} is not installed ({_EXTRA_HINT})"
    else:
        size = f"{counted(len(result.spans), 'span')} in {counted(traces, 'trace')}"
        trace_line = f"{result.trace_path} ({size}, OTLP JSON lines)"
    for name, line in (("Profile", str(result.profile_path)), ("Traces", trace_line)):
        console.print(f"{name:<10}{line}", markup=False, soft_wrap=True)


def _duration(duration_ns: int, micro: str) -> str:
    return f"{duration_ns / 1e6:.2f} ms" if duration_ns >= 1_000_000 else f"{duration_ns / 1e3:.1f} {micro}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _micro(console: Console) -> str:
    return "µs" if console.encoding.lower().startswith("utf") else "us"
