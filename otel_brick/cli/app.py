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
from .words import counted

if TYPE_CHECKING:
    from .demo import DemoResult
    from .sending import Destination

MAX_SECONDS = 86_400

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
    type=click.Choice(["all", "auto", "none"]),
    show_default="all, with --seconds auto",
    help="Which steps have spans for their layers and bricks: auto takes the first, one in 16, and once there were a"
    " hundred those slower than 99 % of their kind. Statistics are complete in any case.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="OTLP endpoint that also gets spans and metrics, such as http://localhost:4318 of a collector on this"
    " machine, or with --protocol grpc http://localhost:4317. With grpc and no scheme, localhost:4317, TLS is spoken,"
    " unless OTEL_EXPORTER_OTLP_INSECURE=true.",
)
@click.option(
    "--protocol",
    type=click.Choice(["http/protobuf", "grpc"]),
    show_default="http/protobuf",
    help="How to speak to --endpoint.",
)
@click.option(
    "--metrics-endpoint",
    metavar="URL",
    help="Complete HTTP URL of an OTLP endpoint that gets the metrics instead, such as Prometheus'"
    " http://localhost:9090/api/v1/otlp/v1/metrics.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=MAX_SECONDS),
    help="Go on with further texts for so long, sending spans and metrics every 3 s (or every"
    " OTEL_METRIC_EXPORT_INTERVAL milliseconds), so that there is something to chart; with an endpoint only. Tables and"
    " files are those of the first text.",
)
def demo(
    *,
    preset: str,
    prompt: str,
    tokens: int,
    seed: int,
    output: Path,
    detail: str | None,
    endpoint: str | None,
    protocol: str | None,
    metrics_endpoint: str | None,
    seconds: float | None,
) -> None:
    """Profile a transformer decoder that generates text, in numpy on this machine.

    The model is real, its weights are random (nothing is downloaded), so the text is gibberish and the
    times are not. It runs on one core, so that they are steady. Files of an earlier run in the same directory are
    replaced. Where something was to be sent and was not accepted, the exit status is 1; after Ctrl-C while sending 130.
    """
    from .demo import DemoOptions, run_demo
    from .report import print_destination, print_report, print_sent

    config = PRESETS[preset]
    prompt_tokens = encode(prompt).size
    if not prompt_tokens:
        raise click.BadParameter("must not be empty.", param_hint="'--prompt'")
    if prompt_tokens + tokens - 1 > config.context:
        raise click.BadParameter(
            f"{counted(tokens, 'token')} after a prompt of {counted(prompt_tokens, 'byte')} do not fit the context of"
            f" {config.context:,}; shorten one of them.",
            param_hint="'--tokens' / '--prompt'",
        )
    destination = _destination(endpoint, protocol, metrics_endpoint)
    if seconds is not None and destination is None:
        raise click.UsageError("'--seconds' needs '--endpoint' or '--metrics-endpoint': further texts are sent only.")
    _prepare_directory(output)
    console = _console()
    console.print(
        f"Model     {preset}: {config.layers} layers, hidden size {config.hidden}, {config.heads} heads"
        f" ({config.kv_heads} for keys and values), vocabulary {config.vocabulary:,};"
        f" {config.parameter_count / 1e6:,.1f} M random weights, so expect gibberish\n"
        f"Run       prefill of {counted(prompt_tokens, 'token')}, then {counted(tokens - 1, 'decode step')} of one"
        " token each",
        soft_wrap=True,
    )
    detail = detail or ("all" if seconds is None else "auto")
    options = DemoOptions(preset, prompt, tokens, seed, output, detail, destination, seconds or 0)
    try:
        with _progress(console, tokens) as (on_token, stop):

            def on_result(result: DemoResult) -> None:
                stop()
                print_report(console, result)
                if destination is not None:
                    print_destination(console, destination, options.seconds)

            sent = run_demo(options, on_token, on_result)
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(f"cannot write the results to {str(output)!r}: {reason}.") from error
    if sent is not None:
        print_sent(console, sent)
        if not sent.complete:
            raise SystemExit(130 if sent.interrupted else 1)


def _destination(endpoint: str | None, protocol: str | None, metrics_endpoint: str | None) -> Destination | None:
    """What the options name, checked; None where nothing is to be sent."""
    from .sending import HTTP, Destination, check_endpoint

    if protocol is not None and endpoint is None:
        raise click.UsageError("'--protocol' needs '--endpoint', which it is about.")
    protocol = protocol or HTTP
    if protocol == "grpc":
        # gRPC's own lines about a failed handshake; what they mean is said at the end.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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
def _progress(console: Console, tokens: int) -> Generator[tuple[Callable[[], None], Callable[[], None]]]:
    """A progress bar on a terminal, nothing elsewhere; it gives what to call after each token, and after the last.

    The bar is drawn between steps only: a drawing thread would take time away from the bricks being measured.
    """
    if not console.is_terminal:
        yield (lambda: None), (lambda: None)
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

        yield on_token, progress.stop
