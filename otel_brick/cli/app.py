"""The click commands of `otel-brick`: options, their checks, and how a run's progress is shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..version import __version__
from .decoder import PRESETS, encode

if TYPE_CHECKING:
    from .sending import Destination

DEFAULT_PROMPT = (
    "A forward pass is a sequence of bricks: norms, projections, attention and a gated network in each layer,"
    " then the head."
)


@click.group("otel-brick", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="otel-brick %(version)s")
def commands() -> None:
    """OpenTelemetry profiling of ML inference and training engines, brick by brick."""


@commands.command()
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="default",
    show_default=True,
    help="Shape of the model.",
)
@click.option("--prompt", default=DEFAULT_PROMPT, help="Text to continue; one token per byte.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Number of tokens to generate.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the weights and of sampling.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("."),
    show_default="current directory",
    help="Directory for brick_profile.json and trace.jsonl; created if missing.",
)
@click.option(
    "--detail",
    type=click.Choice(["all", "none"]),
    default="all",
    show_default=True,
    help="Whether steps have spans for their layers and bricks; statistics are complete either way.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="OTLP endpoint that also gets spans and metrics, such as http://localhost:4318 of a collector on this"
    " machine, or with --protocol grpc http://localhost:4317.",
)
@click.option(
    "--protocol",
    type=click.Choice(["http/protobuf", "grpc"]),
    default="http/protobuf",
    show_default=True,
    help="How to speak to --endpoint.",
)
@click.option(
    "--metrics-endpoint",
    metavar="URL",
    help="Complete HTTP URL of an OTLP endpoint that gets the metrics instead, such as Prometheus'"
    " http://localhost:9090/api/v1/otlp/v1/metrics.",
)
def demo(
    *,
    preset: str,
    prompt: str,
    tokens: int,
    seed: int,
    output: Path,
    detail: str,
    endpoint: str | None,
    protocol: str,
    metrics_endpoint: str | None,
) -> None:
    """Profile a transformer decoder that generates text, in numpy on this machine.

    The model is real, its weights are random (nothing is downloaded), so the text is gibberish and the
    times are not. It runs on one core, so that they are steady. Files of an earlier run in the same directory are
    replaced. Where something was to be sent and did not arrive, the exit status is 1.
    """
    from .demo import DemoOptions, run_demo
    from .report import print_report

    config = PRESETS[preset]
    prompt_tokens = encode(prompt).size
    if not prompt_tokens:
        raise click.BadParameter("must not be empty.", param_hint="'--prompt'")
    if prompt_tokens + tokens - 1 > config.context:
        raise click.BadParameter(
            f"{tokens:,} tokens after a prompt of {prompt_tokens:,} bytes do not fit the context of"
            f" {config.context:,}; shorten one of them.",
            param_hint="'--tokens' / '--prompt'",
        )
    destination = _destination(endpoint, protocol, metrics_endpoint)
    _prepare_directory(output)
    console = _console()
    console.print(
        f"Model     {preset}: {config.layers} layers, hidden size {config.hidden}, {config.heads} heads"
        f" ({config.kv_heads} for keys and values), vocabulary {config.vocabulary:,};"
        f" {config.parameter_count / 1e6:,.1f} M random weights, so expect gibberish\n"
        f"Run       prefill of {prompt_tokens:,} tokens, then {tokens - 1:,} decode steps of one token each",
        soft_wrap=True,
    )
    try:
        with _progress(console, tokens) as on_token:
            result = run_demo(DemoOptions(preset, prompt, tokens, seed, output, detail, destination), on_token)
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(f"cannot write the results to {str(output)!r}: {reason}.") from error
    print_report(console, result)
    if result.sent is not None and not result.sent.complete:
        raise SystemExit(1)


def _destination(endpoint: str | None, protocol: str, metrics_endpoint: str | None) -> Destination | None:
    """What the options name, checked; None where nothing is to be sent."""
    from .sending import HTTP, Destination, check_endpoint

    if endpoint is None and metrics_endpoint is None:
        return None
    for option, url, spoken in (("--endpoint", endpoint, protocol), ("--metrics-endpoint", metrics_endpoint, HTTP)):
        try:
            if url is not None:
                check_endpoint(url, spoken)
        except ValueError as error:
            raise click.BadParameter(f"{error}.", param_hint=f"'{option}'") from error
    return Destination(endpoint, protocol, metrics_endpoint)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a pipe or file has no width, and rich's guess of 80 would cut long names
    return console


def _prepare_directory(directory: Path) -> None:
    """Create the directory, and find out now rather than after the run whether files can be written there."""
    probe = directory / f".otel-brick.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.BadParameter(
            f"cannot write to {str(directory)!r}: {error.strerror or error}.", param_hint="'--output'"
        ) from error


@contextmanager
def _progress(console: Console, tokens: int) -> Generator[Callable[[], None]]:
    """A progress bar on a terminal, nothing elsewhere; it gives what to call after each token.

    The bar is drawn between steps only: a drawing thread would take time away from the bricks being measured.
    """
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (
        TextColumn("Generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=tokens)
        progress.refresh()

        def on_token() -> None:
            progress.advance(task)
            progress.refresh()

        yield on_token
