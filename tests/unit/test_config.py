"""Settings: arguments come before variables, variables before defaults, and a bad variable never stops a program."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from otel_brick import BrickProfiler, Config
from otel_brick.config import SETTINGS

DEFAULTS = {
    "detail": "auto",
    "detail_interval": 16,
    "max_rows_per_step": 2000,
    "max_rows_per_trace": 4000,
    "attach_context": False,
    "histograms": "explicit",
    "sync_mode": "deferred",
    "kernel_events": "off",
}
FROM_ENVIRONMENT = {
    "detail": ("OTEL_BRICK_DETAIL", "none", "none"),
    "detail_interval": ("OTEL_BRICK_DETAIL_INTERVAL", "3", 3),
    "max_rows_per_step": ("OTEL_BRICK_MAX_ROWS_PER_STEP", "70000", 70_000),
    "max_rows_per_trace": ("OTEL_BRICK_MAX_ROWS_PER_TRACE", "1", 1),
    "attach_context": ("OTEL_BRICK_ATTACH_CONTEXT", "true", True),
    "histograms": ("OTEL_BRICK_HISTOGRAMS", "exponential", "exponential"),
    "sync_mode": ("OTEL_BRICK_SYNC_MODE", "Per_Layer", "per_layer"),
    "kernel_events": ("OTEL_BRICK_KERNEL_EVENTS", "sampled", "sampled"),
}
FROM_ARGUMENTS = {
    "detail": "all",
    "detail_interval": 2_147_483_647,
    "max_rows_per_step": 5,
    "max_rows_per_trace": 6,
    "attach_context": False,
    "histograms": "none",
    "sync_mode": "none",
    "kernel_events": "all",
}
BAD_VARIABLES = {
    "detail": ("some", "all,none", "1", "true"),
    "detail_interval": ("0", "-1", "1.5", "many", "2147483648", "1e3", "0x10", "16 steps"),
    "max_rows_per_step": ("0", "-2000", "2000.0", "unlimited"),
    "max_rows_per_trace": ("0", "-1", "\N{INFINITY}"),
    "attach_context": ("1", "0", "yes", "on", "truthy"),
    "histograms": ("some", "explicit,none", "0", "false", "exponential_histogram"),
    "sync_mode": ("some", "None_", "perlayer", "0", "sync"),
    "kernel_events": ("some", "all,off", "1", "true", "on"),
}
EXPECTATIONS = {
    "detail": "one of auto, all, none",
    "detail_interval": "an integer from 1 to 2147483647",
    "max_rows_per_step": "an integer from 1 to 2147483647",
    "max_rows_per_trace": "an integer from 1 to 2147483647",
    "attach_context": "true or false",
    "histograms": "one of explicit, exponential, none",
    "sync_mode": "one of immediate, per_layer, deferred, none",
    "kernel_events": "one of all, sampled, off",
}
BAD_ARGUMENTS = {
    "detail": ("some", "", "ALL", 1, True, ["all"], b"all"),
    "detail_interval": (0, -1, 1.0, 16.5, "16", True, 1 << 31),
    "max_rows_per_step": (0, -1, 1.0, "2000", False, float("inf")),
    "max_rows_per_trace": (0, -1, 1.0, "2000", True),
    "attach_context": (1, 0, "true", "false", "", [], 1.0),
    "histograms": ("some", "", "EXPLICIT", 0, False, ["none"], b"none"),
    "sync_mode": ("some", "", "DEFERRED"),
    "kernel_events": ("some", "", "ALL", 0, False, ["all"], b"all"),
}
EACH = pytest.mark.parametrize("name", DEFAULTS)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in [name for name in os.environ if name.startswith("OTEL_BRICK_")]:
        monkeypatch.delenv(variable)
    return monkeypatch


def test_the_tests_know_every_setting() -> None:
    assert [setting.name for setting in SETTINGS] == list(DEFAULTS)
    assert [setting.variable for setting in SETTINGS] == [FROM_ENVIRONMENT[name][0] for name in DEFAULTS]


def test_without_arguments_and_variables_the_defaults_hold(environment: pytest.MonkeyPatch) -> None:
    assert asdict(BrickProfiler().config) == DEFAULTS
    assert asdict(BrickProfiler.enabled().config) == DEFAULTS


def test_variables_come_before_defaults(environment: pytest.MonkeyPatch) -> None:
    for variable, text, _ in FROM_ENVIRONMENT.values():
        environment.setenv(variable, text)

    assert asdict(BrickProfiler().config) == {name: value for name, (_, _, value) in FROM_ENVIRONMENT.items()}


def test_arguments_come_before_variables(environment: pytest.MonkeyPatch) -> None:
    for variable, text, _ in FROM_ENVIRONMENT.values():
        environment.setenv(variable, text)

    assert asdict(BrickProfiler(**FROM_ARGUMENTS).config) == FROM_ARGUMENTS
    assert asdict(BrickProfiler.enabled(**FROM_ARGUMENTS).config) == FROM_ARGUMENTS


@EACH
def test_each_setting_is_chosen_by_itself(name: str, environment: pytest.MonkeyPatch) -> None:
    variable, text, value = FROM_ENVIRONMENT[name]
    environment.setenv(variable, text)

    assert asdict(BrickProfiler().config) == DEFAULTS | {name: value}
    assert asdict(BrickProfiler(**{name: FROM_ARGUMENTS[name]}).config) == DEFAULTS | {name: FROM_ARGUMENTS[name]}


def test_the_environment_is_read_when_a_profiler_is_made_and_never_again(
    environment: pytest.MonkeyPatch,
) -> None:
    before = BrickProfiler()
    environment.setenv("OTEL_BRICK_DETAIL", "none")
    after = BrickProfiler()

    before.enable()

    assert (before.config.detail, after.config.detail) == ("auto", "none")


@EACH
@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_an_empty_variable_is_as_good_as_none(
    name: str, text: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv(FROM_ENVIRONMENT[name][0], text)

    assert asdict(BrickProfiler().config) == DEFAULTS
    assert caplog.records == []


@EACH
def test_blanks_around_a_variable_and_the_case_of_its_words_do_not_matter(
    name: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable, text, value = FROM_ENVIRONMENT[name]
    environment.setenv(variable, f"  {text.upper()}\t")

    assert asdict(BrickProfiler().config) == DEFAULTS | {name: value}
    assert caplog.records == []


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD_VARIABLES.items() for text in texts])
def test_a_bad_variable_is_one_warning_that_says_everything_and_the_default_holds(
    name: str, text: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variable = FROM_ENVIRONMENT[name][0]
    environment.setenv(variable, text)

    profiler = BrickProfiler()

    assert asdict(profiler.config) == DEFAULTS
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("otel_brick", logging.WARNING)
    assert record.getMessage() == (f"{variable} must be {EXPECTATIONS[name]}; got {text!r}, using {DEFAULTS[name]!r}")


def test_a_bad_variable_does_not_matter_where_an_argument_is_given(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, texts in BAD_VARIABLES.items():
        environment.setenv(FROM_ENVIRONMENT[name][0], texts[0])

    assert asdict(BrickProfiler(**FROM_ARGUMENTS).config) == FROM_ARGUMENTS
    assert caplog.records == []


def test_a_bad_variable_is_warned_of_once_in_a_process_however_many_profilers_read_it() -> None:
    code = "import otel_brick; [otel_brick.BrickProfiler() for _ in range(3)]"
    environ = {**os.environ, "OTEL_BRICK_DETAIL": "some", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stderr.splitlines() == ["OTEL_BRICK_DETAIL must be one of auto, all, none; got 'some', using 'auto'"]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_ARGUMENTS.items() for value in values]
)
def test_a_bad_argument_is_a_value_error_that_names_it_its_value_and_what_is_expected(
    name: str, value: Any, environment: pytest.MonkeyPatch
) -> None:
    for make in (BrickProfiler, BrickProfiler.enabled):
        with pytest.raises(ValueError, match=rf"\A{name} must be ") as refused:
            make(**{name: value})
        assert str(refused.value) == f"{name} must be {EXPECTATIONS[name]}; got {value!r}"


def test_an_unknown_argument_is_a_type_error_that_names_it() -> None:
    for make in (BrickProfiler, BrickProfiler.enabled):
        with pytest.raises(TypeError, match="detials"):
            make(detials="all")


def test_unknown_variables_of_ours_are_ignored(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("OTEL_BRICK_NO_SUCH_SETTING", "1")

    assert asdict(BrickProfiler().config) == DEFAULTS
    assert caplog.records == []


def test_a_configuration_cannot_be_changed(environment: pytest.MonkeyPatch) -> None:
    config = Config.build({})

    with pytest.raises(FrozenInstanceError):
        config.detail = "all"  # type: ignore[misc]


def test_a_given_environment_is_read_instead_of_the_process_s(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_BRICK_DETAIL", "none")

    assert Config.build({}, {"OTEL_BRICK_DETAIL_INTERVAL": "7"}) == Config(**(DEFAULTS | {"detail_interval": 7}))
