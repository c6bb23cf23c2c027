"""Arguments: what a call accepts, what it refuses before it records, and what a disabled profiler lets pass."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags

from otel_brick import BrickBottleneck, BrickCategory, BrickId, BrickProfiler, Phase, SpanLevel
from otel_brick.testing import InMemoryTraces, ManualClock

MOST = (1 << 63) - 1


class Index:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return f"Index({self._value})"


class OnlyInt:
    """A number that is no integer: `int()` would cut it."""

    def __int__(self) -> int:
        return 64


def brick(**counts: Any) -> Callable[[BrickProfiler], None]:
    def use(profiler: BrickProfiler) -> None:
        with profiler.brick("B", **counts):
            pass

    return use


def define(**counts: Any) -> Callable[[BrickProfiler], None]:
    def use(profiler: BrickProfiler) -> None:
        with profiler.define("B", **counts):
            pass

    return use


def kernel(**arguments: Any) -> Callable[[BrickProfiler], None]:
    def use(profiler: BrickProfiler) -> None:
        with profiler.kernel("k", **arguments):
            pass

    return use


def layer(index: Any) -> Callable[[BrickProfiler], None]:
    def use(profiler: BrickProfiler) -> None:
        with profiler.layer(index), profiler.brick("B"):
            pass

    return use


def step(**arguments: Any) -> Callable[[BrickProfiler], None]:
    def use(profiler: BrickProfiler) -> None:
        with profiler.step(**arguments):
            pass

    return use


def record_elapsed(elapsed: Any, *counts: Any, **named: Any) -> Callable[[BrickProfiler], None]:
    return lambda profiler: profiler.record_elapsed("B", elapsed, *counts, **named)


def with_bytes(elapsed: Any, *counts: Any) -> Callable[[BrickProfiler], None]:
    return lambda profiler: profiler.record_elapsed_with_bytes("B", elapsed, *counts)


def stop(**counts: Any) -> Callable[[BrickProfiler], None]:
    return lambda profiler: profiler.stop(profiler.start("B"), **counts)


def stop_brick(elements: Any) -> Callable[[BrickProfiler], None]:
    return lambda profiler: profiler.stop_brick(profiler.start_brick(BrickId.RmsNorm), elements)


def add_tokens(count: Any) -> Callable[[BrickProfiler], None]:
    return lambda profiler: profiler.add_tokens(count)


def span_attribute(name: str, attribute: str) -> Callable[[BrickProfiler, InMemoryTraces], Any]:
    def read(profiler: BrickProfiler, traces: InMemoryTraces) -> Any:
        profiler.flush()
        spans = [span for span in traces.spans if span.name == name and attribute in span.attributes]
        assert len(spans) == 1
        return spans[0].attributes[attribute]

    return read


def of_brick(figure: str) -> Callable[[BrickProfiler, InMemoryTraces], Any]:
    return lambda profiler, traces: getattr(profiler.all_brick_stats()[0], figure)


@dataclass(frozen=True)
class Count:
    """An argument that takes a count.

    Attributes:
        use: makes the call with a value.
        read: what the profiler then knows of it.
        refuses_none: False where None is the default; a step's counts have a test of their own.
    """

    argument: str
    use: Callable[[Any], Callable[[BrickProfiler], None]]
    read: Callable[[BrickProfiler, InMemoryTraces], Any]
    refuses_none: bool = True


def tokens(profiler: BrickProfiler, traces: InMemoryTraces) -> int:
    return profiler.tokens()


COUNTS = {
    "brick elements": Count("elements", lambda v: brick(elements=v), of_brick("total_elements")),
    "brick bytes_read": Count("bytes_read", lambda v: brick(bytes_read=v), of_brick("bytes_read")),
    "brick bytes_written": Count("bytes_written", lambda v: brick(bytes_written=v), of_brick("bytes_written")),
    "define elements": Count("elements", lambda v: define(elements=v), of_brick("total_elements")),
    "define bytes_read": Count("bytes_read", lambda v: define(bytes_read=v), of_brick("bytes_read")),
    "define bytes_written": Count("bytes_written", lambda v: define(bytes_written=v), of_brick("bytes_written")),
    "kernel elements": Count("elements", lambda v: kernel(elements=v), span_attribute("k", "brick.element.count")),
    "kernel bytes_read": Count("bytes_read", lambda v: kernel(bytes_read=v), span_attribute("k", "brick.io.read.size")),
    "kernel bytes_written": Count(
        "bytes_written", lambda v: kernel(bytes_written=v), span_attribute("k", "brick.io.write.size")
    ),
    "kernel shared_mem": Count(
        "shared_mem",
        lambda v: kernel(shared_mem=v),
        span_attribute("k", "brick.cuda.shared_memory.dynamic.size"),
        refuses_none=False,
    ),
    "layer index": Count("index", layer, span_attribute("layer", "brick.layer.index")),
    "step tokens": Count("tokens", lambda v: step(tokens=v), tokens, refuses_none=False),
    "step batch_size": Count(
        "batch_size",
        lambda v: step(batch_size=v),
        span_attribute("step other", "brick.batch.size"),
        refuses_none=False,
    ),
    "stop elements": Count("elements", lambda v: stop(elements=v), of_brick("total_elements")),
    "stop bytes_read": Count("bytes_read", lambda v: stop(bytes_read=v), of_brick("bytes_read")),
    "stop bytes_written": Count("bytes_written", lambda v: stop(bytes_written=v), of_brick("bytes_written")),
    "stop_brick elements": Count("elements", stop_brick, of_brick("total_elements")),
    "record_elapsed elapsed": Count("elapsed", record_elapsed, of_brick("total_ns")),
    "record_elapsed elements": Count("elements", lambda v: record_elapsed(1, v), of_brick("total_elements")),
    "record_elapsed bytes_read": Count("bytes_read", lambda v: record_elapsed(1, bytes_read=v), of_brick("bytes_read")),
    "record_elapsed bytes_written": Count(
        "bytes_written", lambda v: record_elapsed(1, bytes_written=v), of_brick("bytes_written")
    ),
    "with_bytes elapsed": Count("elapsed", lambda v: with_bytes(v, 1, 1, 1), of_brick("total_ns")),
    "with_bytes elements": Count("elements", lambda v: with_bytes(1, v, 1, 1), of_brick("total_elements")),
    "with_bytes input_bytes": Count("input_bytes", lambda v: with_bytes(1, 1, v, 1), of_brick("uncompressed_bytes")),
    "with_bytes output_bytes": Count("output_bytes", lambda v: with_bytes(1, 1, 1, v), of_brick("compressed_bytes")),
    "add_tokens": Count("count", add_tokens, tokens),
}
ALL_COUNTS = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)

INTEGERS = (
    *(64, np.int8(64), np.uint8(64), np.int64(64), np.uint64(64)),
    *(np.array(64), np.array([[64]])[0, 0], Index(64)),
)
NO_INTEGERS = (
    *(64.0, 64.5, float("nan"), float("inf"), 64 + 0j, Decimal(64), Fraction(64)),
    *(np.float64(64), np.float32(64), np.array(64.0), np.array([64, 64]), np.datetime64(64, "ns")),
    *("64", b"64", "", None, (64,), [64], {}, OnlyInt(), timedelta(microseconds=1), object),
)
OUT_OF_RANGE = (-1, np.int64(-1), Index(-1), 1 << 63, 1 << 64, np.uint64(1 << 63), -(1 << 63))


def known(profiler: BrickProfiler) -> dict[str, Any]:
    """Everything that the profiler has counted."""
    content = json.loads(profiler.to_json())
    del content["generated_at"]
    # A refused stop leaves its timer running; thrown away, it is lost whenever Python gets to it.
    del content["losses"]["left_open"]
    return content


def assert_refused(
    profiler: BrickProfiler, use: Callable[[BrickProfiler], None], error: type[Exception], argument: str
) -> None:
    """The call raises exactly this error, whose message begins with the argument's name, and records nothing."""
    before = known(profiler)
    with pytest.raises(error, match=rf"\A{argument}\b") as refused:
        use(profiler)
    assert type(refused.value) is error
    assert known(profiler) == before


@ALL_COUNTS
@pytest.mark.parametrize("value", INTEGERS, ids=lambda value: f"{type(value).__name__}-{value!r}")
def test_an_integer_of_any_type_is_a_count(
    count: Count, value: Any, profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    with profiler.step():
        count.use(value)(profiler)

    found = count.read(profiler, traces)
    assert (type(found), found) == (int, 64)


@ALL_COUNTS
def test_a_bool_counts_as_the_python_integer_that_it_is(
    count: Count, profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    with profiler.step():
        count.use(True)(profiler)

    found = count.read(profiler, traces)
    assert (type(found), found) == (int, 1)


@pytest.mark.parametrize("count", [COUNTS[name] for name in COUNTS if not name.endswith(("elapsed", "index"))])
def test_the_largest_count_has_63_bits(count: Count, profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step():
        count.use(MOST)(profiler)

    assert count.read(profiler, traces) == MOST


@ALL_COUNTS
def test_what_is_no_integer_is_no_count_even_where_an_equal_integer_was_used_before(
    count: Count, profiler: BrickProfiler
) -> None:
    with profiler.step():
        count.use(64)(profiler)

    for value in NO_INTEGERS:
        if (value is None and not count.refuses_none) or (isinstance(value, timedelta) and count.argument == "elapsed"):
            continue
        assert_refused(profiler, count.use(value), TypeError, count.argument)


@pytest.mark.parametrize("argument", ["tokens", "batch_size"])
def test_none_given_as_a_count_of_a_step_is_an_error_like_everywhere(argument: str, profiler: BrickProfiler) -> None:
    assert_refused(profiler, step(**{argument: None}), TypeError, argument)


@ALL_COUNTS
def test_a_negative_number_or_one_above_63_bits_is_no_count(count: Count, profiler: BrickProfiler) -> None:
    for value in OUT_OF_RANGE:
        assert_refused(profiler, count.use(value), ValueError, count.argument)


def test_a_number_too_long_to_print_is_no_count(profiler: BrickProfiler) -> None:
    for count in COUNTS.values():
        assert_refused(profiler, count.use(10**5_000), ValueError, count.argument)
    for argument in ("ptx_hash", "grid", "block"):
        assert_refused(profiler, kernel(**{argument: 10**5_000}), ValueError, argument)


def test_an_open_step_counts_the_tokens_that_are_integers_and_refuses_others(profiler: BrickProfiler) -> None:
    with profiler.step(tokens=1) as scope:
        for value in INTEGERS:
            scope.add_tokens(value)
        for value in NO_INTEGERS:
            with pytest.raises(TypeError, match=r"\Acount\b"):
                scope.add_tokens(value)
        for value in OUT_OF_RANGE:
            with pytest.raises(ValueError, match=r"\Acount\b"):
                scope.add_tokens(value)

    assert profiler.tokens() == 1 + 64 * len(INTEGERS)


def test_a_timer_goes_on_after_a_stop_with_a_bad_count(profiler: BrickProfiler, time: ManualClock) -> None:
    timer = profiler.start("B")
    time.advance(10)
    for bad in (1.0, -1, "1", None):
        with pytest.raises((TypeError, ValueError), match=r"\Aelements\b"):
            profiler.stop(timer, bad)
        with pytest.raises((TypeError, ValueError), match=r"\Abytes_written\b"):
            profiler.stop(timer, 1, bytes_written=bad)
    time.advance(20)
    assert timer.running

    profiler.stop(timer, 5)

    stats = profiler.stats("B")
    assert (stats.count, stats.total_ns, stats.total_elements, stats.bytes_written) == (1, 30, 5, 0)
    assert sum(profiler.losses().values()) == 0


def test_a_count_of_zero_is_sent_and_one_that_is_not_given_is_not_in_either_order(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    with profiler.step():
        for name, counts in (
            ("A", ({}, {"elements": 0}, {"bytes_read": 0}, {})),
            ("B", ({"elements": 0}, {}, {"bytes_written": 0}, {"elements": 0})),
        ):
            for given in counts:
                with profiler.brick(name, **given):
                    pass
                with profiler.define(name, **given):
                    pass

    profiler.flush()

    names = ("brick.element.count", "brick.io.read.size", "brick.io.write.size")
    sent = [
        (span.name, {name: span.attributes[name] for name in names if name in span.attributes})
        for span in traces.spans
        if span.name in ("A", "B")
    ]
    elements, read, written = ({name: 0} for name in names)
    assert sent == [
        *(("A", counts) for counts in ({}, {}, elements, elements, read, read, {}, {})),
        *(("B", counts) for counts in (elements, elements, {}, {}, written, written, elements, elements)),
    ]


@pytest.mark.parametrize("call", ["record_elapsed", "record_elapsed_with_bytes"])
def test_a_duration_may_be_a_timedelta(call: str, profiler: BrickProfiler) -> None:
    arguments = (1, 1, 1) if call == "record_elapsed_with_bytes" else (1,)
    record = getattr(profiler, call)

    record("B", timedelta(days=2, seconds=3, microseconds=5), *arguments)
    record("B", timedelta(0), *arguments)

    stats = profiler.stats("B")
    assert (stats.count, stats.max_ns, stats.min_ns) == (2, 172_803_000_005_000, 0)
    for bad in (timedelta(microseconds=-1), timedelta(days=-2, hours=3), timedelta(days=60_000)):
        assert_refused(profiler, lambda p: record("B", bad, *arguments), ValueError, "elapsed")  # noqa: B023


def test_a_duration_has_at_most_62_bits(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("B", (1 << 53) - 1)

    assert profiler.stats("B").total_ns == (1 << 53) - 1
    assert_refused(profiler, record_elapsed(1 << 53), ValueError, "elapsed")
    assert_refused(profiler, with_bytes(1 << 53, 1, 1, 1), ValueError, "elapsed")


def test_a_layer_index_has_at_most_31_bits(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step():
        layer((1 << 31) - 1)(profiler)

    assert span_attribute("layer", "brick.layer.index")(profiler, traces) == (1 << 31) - 1
    assert_refused(profiler, layer(1 << 31), ValueError, "index")


NO_BRICKS = (0, 0.0, False, BrickCategory.Norm, SpanLevel.Step, np.int64(0), None, b"RmsNorm", (), [], {}, 1)


@pytest.mark.parametrize("value", NO_BRICKS, ids=lambda value: f"{type(value).__name__}-{value!r}")
def test_only_a_brick_id_or_a_string_names_a_brick_even_where_an_equal_id_was_used_before(
    value: Any, profiler: BrickProfiler
) -> None:
    for known_brick in BrickId:
        with profiler.brick(known_brick), profiler.define(known_brick):
            pass

    assert_refused(profiler, lambda p: p.brick(value), TypeError, "brick")
    assert_refused(profiler, lambda p: p.define(value), TypeError, "brick")
    assert_refused(profiler, lambda p: p.start_brick(value), TypeError, "brick")


@pytest.mark.parametrize("value", NO_BRICKS, ids=lambda value: f"{type(value).__name__}-{value!r}")
def test_the_error_for_a_name_calls_it_name_where_the_call_does(value: Any, profiler: BrickProfiler) -> None:
    assert_refused(profiler, lambda p: p.start(value), TypeError, "name")
    assert_refused(profiler, lambda p: p.record_elapsed(value, 1), TypeError, "name")
    assert_refused(profiler, lambda p: p.record_elapsed_with_bytes(value, 1, 1, 1, 1), TypeError, "name")
    assert_refused(profiler, lambda p: p.set_brick_bottleneck(value, BrickBottleneck.Memory), TypeError, "name")
    assert_refused(profiler, lambda p: p.set_brick_budget(value, 1), TypeError, "name")


def test_start_brick_takes_no_names(profiler: BrickProfiler) -> None:
    assert_refused(profiler, lambda p: p.start_brick("RmsNorm"), TypeError, "brick")


def test_an_empty_string_names_no_brick(profiler: BrickProfiler) -> None:
    assert_refused(profiler, lambda p: p.brick(""), ValueError, "brick")
    assert_refused(profiler, lambda p: p.define(""), ValueError, "brick")
    assert_refused(profiler, lambda p: p.start(""), ValueError, "name")
    assert_refused(profiler, lambda p: p.record_elapsed("", 1), ValueError, "name")
    assert_refused(profiler, lambda p: p.record_elapsed_with_bytes("", 1, 1, 1, 1), ValueError, "name")


NO_CATEGORIES = ("Ffn", "FFN", 2, 2.0, np.int64(2), BrickId.QkvProjection, [], {}, object())


@pytest.mark.parametrize("value", NO_CATEGORIES, ids=lambda value: f"{type(value).__name__}-{value!r:.9}")
def test_only_a_category_is_a_category_even_where_an_equal_one_was_used_before(
    value: Any, profiler: BrickProfiler
) -> None:
    with profiler.brick("B", category=BrickCategory.Ffn):
        pass

    assert_refused(profiler, lambda p: p.brick("B", category=value), TypeError, "category")
    assert_refused(profiler, lambda p: p.define("B", category=value), TypeError, "category")
    assert_refused(profiler, lambda p: p.record_elapsed("B", 1, category=value), TypeError, "category")


def test_a_category_that_contradicts_the_brick_s_own_is_refused_and_its_own_is_accepted(
    profiler: BrickProfiler,
) -> None:
    profiler.record_elapsed("B", 1, category=BrickCategory.Ffn)
    profiler.record_elapsed("Plain", 1)
    profiler.record_elapsed("B", 1, category=BrickCategory.Ffn)
    profiler.record_elapsed("RmsNorm", 1, category=BrickCategory.Norm)
    profiler.record_elapsed("B", 1)

    for name, category in (
        ("B", BrickCategory.Norm),
        ("Plain", BrickCategory.Ffn),
        (BrickId.RmsNorm, BrickCategory.Ffn),
        ("Softmax", BrickCategory.Norm),
    ):
        message = r"category of|\bcategory\b"
        before = known(profiler)
        for use in (profiler.brick, profiler.define):
            with pytest.raises(ValueError, match=message):
                use(name, category=category)
        with pytest.raises(ValueError, match=message):
            profiler.record_elapsed(name, 1, category=category)
        assert known(profiler) == before
    assert [(stats.name, stats.count, stats.category) for stats in profiler.all_brick_stats()] == [
        ("RmsNorm", 1, BrickCategory.Norm),
        ("B", 3, BrickCategory.Ffn),
        ("Plain", 1, BrickCategory.Other),
    ]


def test_a_refused_call_does_not_make_a_dynamic_brick_known(profiler: BrickProfiler) -> None:
    for use in (
        lambda: profiler.brick("New", elements=-1),
        lambda: profiler.define("New", bytes_read=1.0),
        lambda: profiler.record_elapsed("New", -1),
        lambda: profiler.record_elapsed("New", 1, elements="1"),
        lambda: profiler.record_elapsed_with_bytes("New", 1, 1, 1, None),
        lambda: profiler.brick("New", category="Ffn"),
    ):
        with pytest.raises((TypeError, ValueError)):
            use()

    with pytest.raises(KeyError, match="New"):
        profiler.set_brick_bottleneck("New", BrickBottleneck.Memory)


def test_a_layer_type_is_a_string(profiler: BrickProfiler) -> None:
    for bad in (None, 5, b"decoder", [], {}):
        assert_refused(profiler, lambda p: p.layer(0, type=bad), TypeError, "type")  # noqa: B023


@pytest.mark.parametrize("phase", [*Phase, *(phase.attribute_value for phase in Phase), None])
def test_a_phase_is_a_member_or_its_value(phase: Any, profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    with profiler.step(phase=phase):
        pass

    profiler.flush()
    expected = "other" if phase is None else phase if isinstance(phase, str) else phase.attribute_value
    assert [span.attributes["brick.phase"] for span in traces.spans] == [expected]


def test_nothing_else_is_a_phase(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    for bad in ("", "Decode", "DECODE", "train", "0"):
        assert_refused(profiler, step(phase=bad), ValueError, "phase")
    for bad in (0, 1.0, True, b"decode", BrickId.LayerNorm, [], {}):
        assert_refused(profiler, step(phase=bad), TypeError, "phase")
    assert profiler.flush()
    assert traces.spans == []


def span_context(number: int) -> SpanContext:
    return SpanContext(number, number, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def test_links_are_spans_contexts_or_links(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    first, second, third = (span_context(number) for number in (1, 2, 3))

    with profiler.step(links=iter([first, NonRecordingSpan(second), Link(third, {"queue": "a"})])):
        pass

    profiler.flush()
    (span,) = traces.spans
    assert [(link.context, dict(link.attributes or {})) for link in span.links] == [
        (first, {}),
        (second, {}),
        (third, {"queue": "a"}),
    ]


def test_nothing_else_is_a_link(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    for bad in (5, object(), [5], ["00-1-2-01"], [None], [span_context(1), "x"], span_context(1), "links"):
        assert_refused(profiler, step(links=bad), TypeError, "links")
    assert profiler.flush()
    assert traces.spans == []


@pytest.mark.parametrize("form", ["span", "span context", "context"])
def test_a_parent_is_a_span_a_span_context_or_a_context(
    form: str, profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    span = NonRecordingSpan(span_context(7))
    parent = {
        "span": span,
        "span context": span_context(7),
        "context": trace.set_span_in_context(span),
    }[form]

    with profiler.step(parent=parent):
        pass

    profiler.flush()
    assert [(span.context.trace_id, span.parent) for span in traces.spans] == [(7, span_context(7))]


def test_nothing_else_is_a_parent(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    for bad in (5, "00-1-2-01", {}, [], Link(span_context(1)), object()):
        assert_refused(profiler, step(parent=bad), TypeError, "parent")
    assert profiler.flush()
    assert traces.spans == []


def test_step_attributes_are_a_mapping(profiler: BrickProfiler, traces: InMemoryTraces) -> None:
    for bad in (5, "ab", ["ab"], object()):
        assert_refused(profiler, step(attributes=bad), TypeError, "attributes")
    assert profiler.flush()
    assert traces.spans == []


@pytest.mark.parametrize("dimension", ["grid", "block"])
def test_a_launch_shape_is_one_to_three_positive_integers_and_missing_ones_are_1(
    dimension: str, profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    shapes = [128, (128,), (128, 2), [128, 2, 3], np.array([128, 2, 3]), np.int32(128), (np.int8(9), Index(2))]
    with profiler.step():
        for shape in shapes:
            kernel(**{dimension: shape})(profiler)

    profiler.flush()

    assert [
        tuple(span.attributes[f"brick.cuda.{dimension}.{axis}"] for axis in "xyz")
        for span in traces.spans
        if span.name == "k"
    ] == [(128, 1, 1), (128, 1, 1), (128, 2, 1), (128, 2, 3), (128, 2, 3), (128, 1, 1), (9, 2, 1)]


@pytest.mark.parametrize("dimension", ["grid", "block"])
def test_nothing_else_is_a_launch_shape(dimension: str, profiler: BrickProfiler) -> None:
    kernel(**{dimension: (1, 2)})(profiler)
    for bad in (1.0, (1.0, 2.0), "1", "12", (1, None), ((1, 2),), object()):
        assert_refused(profiler, kernel(**{dimension: bad}), TypeError, dimension)
    for bad in ((), [], (1, 2, 3, 4), 0, (1, 0), (1, 1, -1), -5, (1 << 63, 1)):
        assert_refused(profiler, kernel(**{dimension: bad}), ValueError, dimension)


@pytest.mark.parametrize("dimension", ["grid", "block"])
def test_what_has_no_order_or_is_text_in_bytes_is_no_launch_shape(dimension: str, profiler: BrickProfiler) -> None:
    for bad in (b"12", bytearray(b"1"), {1, 2}, {1: 2}, frozenset((1,))):
        assert_refused(profiler, kernel(**{dimension: bad}), TypeError, dimension)


def test_a_ptx_hash_is_an_unsigned_64_bit_integer_or_its_16_digits(
    profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    hashes = [0, (1 << 64) - 1, np.uint64(1 << 63), Index(255), "0123456789abcdef", "0123456789ABCDEF"]
    with profiler.step():
        for ptx_hash in hashes:
            kernel(ptx_hash=ptx_hash)(profiler)

    profiler.flush()

    assert [span.attributes["brick.cuda.ptx.hash"] for span in traces.spans if span.name == "k"] == [
        *("0" * 16, "f" * 16, "8" + "0" * 15),
        *("00000000000000ff", "0123456789abcdef", "0123456789abcdef"),
    ]


def test_nothing_else_is_a_ptx_hash(profiler: BrickProfiler) -> None:
    kernel(ptx_hash=1)(profiler)
    for bad in (1.0, b"0123456789abcdef", [], (1,), object(), np.float64(1)):
        assert_refused(profiler, kernel(ptx_hash=bad), TypeError, "ptx_hash")
    for bad in (
        *(-1, 1 << 64, "", "1", "0x23456789abcdef", "0123456789abcdeg", "0123456789abcde"),
        *("0123456789abcdef0", " 123456789abcdef", "012345678_abcdef", "\N{FULLWIDTH DIGIT ZERO}123456789abcdef"),
    ):
        assert_refused(profiler, kernel(ptx_hash=bad), ValueError, "ptx_hash")


def test_a_kernel_name_is_a_string(profiler: BrickProfiler) -> None:
    for bad in (None, 5, b"k", BrickId.RmsNorm, []):
        assert_refused(profiler, lambda p: p.kernel(bad), TypeError, "name")  # noqa: B023


def test_only_a_timer_can_be_stopped(profiler: BrickProfiler) -> None:
    for bad in (None, 5, "B", BrickId.RmsNorm, profiler.define("B")):
        assert_refused(profiler, lambda p: p.stop(bad), TypeError, "timer")  # noqa: B023
        assert_refused(profiler, lambda p: p.stop_brick(bad, 1), TypeError, "timer")  # noqa: B023


def test_only_a_bottleneck_is_a_bottleneck(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("B", 1)
    for bad in ("memory", 1, None, BrickCategory.Norm):
        assert_refused(profiler, lambda p: p.set_brick_bottleneck("B", bad), TypeError, "bottleneck")  # noqa: B023
    with pytest.raises(KeyError, match="Unseen"):
        profiler.set_brick_bottleneck("Unseen", BrickBottleneck.Memory)


def test_a_cache_hit_rate_is_a_number_from_0_to_1(profiler: BrickProfiler) -> None:
    for rate in (0, 1, 0.5, 0.0, 1.0, np.float64(0.25)):
        profiler.set_l2_cache_hit_rate(rate)
        assert profiler.l2_cache_hit_rate() == rate
        assert known(profiler)["l2_cache_hit_rate"] == rate
    for bad in (-0.1, 1.1, float("nan"), float("inf"), 2):
        assert_refused(profiler, lambda p: p.set_l2_cache_hit_rate(bad), ValueError, "rate")  # noqa: B023
    for bad in ("0.5", None, True, [0.5], 0.5j):
        assert_refused(profiler, lambda p: p.set_l2_cache_hit_rate(bad), TypeError, "rate")  # noqa: B023
    assert profiler.l2_cache_hit_rate() == 0.25


def test_a_percentile_is_from_0_to_100(profiler: BrickProfiler) -> None:
    profiler.record_elapsed("B", 1_000)
    stats = profiler.stats("B")

    assert [stats.percentile_us(percent) for percent in (0, 50.0, 100)] == [1.0, 1.0, 1.0]
    for bad in (-1, 100.1, float("nan")):
        with pytest.raises(ValueError, match=r"\Apercent\b"):
            stats.percentile_us(bad)


def test_statistics_are_read_by_brick_id_name_or_alias(profiler: BrickProfiler) -> None:
    profiler.record_elapsed(BrickId.AttentionSoftmax, 1)
    profiler.record_elapsed("RmsNorm", 1)

    for key in (BrickId.AttentionSoftmax, "AttentionSoftmax", "Softmax"):
        assert profiler.stats(key).name == "AttentionSoftmax"
    assert profiler.stats(BrickId.RmsNorm).count == 1
    assert profiler.stats("Softmax", exact=True) is None


def test_readers_refuse_what_they_cannot_look_up(profiler: BrickProfiler) -> None:
    with pytest.raises(TypeError, match=r"\Abrick\b"):
        profiler.brick_stats("RmsNorm")
    with pytest.raises(ValueError, match=r"\Aphase\b"):
        profiler.stats("RmsNorm", phase="Decode")
    with pytest.raises(ValueError, match=r"\Aphase\b"):
        profiler.phase_tokens_per_sec("Decode")
    for lane in (-1, 64):
        with pytest.raises(ValueError, match=r"\Alane\b"):
            profiler.coverage(lane)


BAD = object()
UNCHECKED: dict[str, Callable[[BrickProfiler], Any]] = {
    "brick": lambda p: p.brick(BAD, elements=1.5, bytes_read=-1, bytes_written=None, category=BAD, exact=BAD),
    "kernel": lambda p: p.kernel(BAD, ptx_hash=BAD, grid=BAD, block=BAD, shared_mem=BAD, elements=BAD),
    "layer": lambda p: p.layer(BAD, type=BAD),
    "step": lambda p: p.step(phase=BAD, tokens=BAD, batch_size=BAD, links=BAD, parent=BAD, attributes=BAD),
}


@pytest.mark.parametrize("verb", UNCHECKED.values(), ids=UNCHECKED)
def test_scopes_of_a_disabled_profiler_check_nothing(
    verb: Callable[[BrickProfiler], Any], profiler: BrickProfiler, traces: InMemoryTraces
) -> None:
    before = known(profiler)
    profiler.disable()

    with verb(profiler) as scope:
        if scope is not None:
            scope.add_tokens(BAD)

    assert known(profiler) == before
    assert traces.spans == []


def test_other_calls_of_a_disabled_profiler_check_nothing(profiler: BrickProfiler) -> None:
    before = known(profiler)
    profiler.disable()

    profiler.record_elapsed(BAD, BAD, BAD, category=BAD, bytes_read=BAD, bytes_written=BAD)
    profiler.record_elapsed_with_bytes(BAD, BAD, BAD, BAD, BAD)
    profiler.stop(profiler.start(BAD, exact=BAD), BAD, bytes_read=BAD, bytes_written=BAD)
    profiler.stop_brick(profiler.start_brick(BAD), BAD)
    profiler.add_tokens(BAD)

    assert known(profiler) == before


def test_define_checks_on_a_disabled_profiler_too_because_its_handle_may_record_later() -> None:
    profiler = BrickProfiler()

    assert_refused(profiler, lambda p: p.define(BAD), TypeError, "brick")
    assert_refused(profiler, lambda p: p.define("B", elements=-1), ValueError, "elements")


# --- files ---


def files_below(path: Path) -> dict[str, bytes | None]:
    return {
        str(entry.relative_to(path)): entry.read_bytes() if entry.is_file() else None
        for entry in sorted(path.rglob("*"))
    }


def test_a_profile_is_written_into_folders_that_did_not_exist(profiler: BrickProfiler, tmp_path: Path) -> None:
    profiler.write_json(tmp_path / "a" / "b" / "profile.json")

    assert list(files_below(tmp_path)) == ["a", "a/b", "a/b/profile.json"]


def test_a_path_may_be_a_string_or_relative(
    profiler: BrickProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    profiler.write_json("relative.json")
    profiler.write_json(str(tmp_path / "absolute.json"))

    assert list(files_below(tmp_path)) == ["absolute.json", "relative.json"]


def test_an_older_profile_is_replaced_by_a_new_file_so_that_readers_of_the_old_one_go_on(
    profiler: BrickProfiler, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")
    with path.open() as reader:
        profiler.write_json(path)

        assert reader.read() == "old"
    assert json.loads(path.read_text())["bricks"] == []
    assert list(files_below(tmp_path)) == ["profile.json"]


def test_a_profile_has_the_permissions_of_any_new_file(profiler: BrickProfiler, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()

    profiler.write_json(tmp_path / "profile.json")

    assert (tmp_path / "profile.json").stat().st_mode == plain.stat().st_mode


def test_a_profile_may_have_any_name_that_the_file_system_takes(profiler: BrickProfiler, tmp_path: Path) -> None:
    name = "n" * os.pathconf(tmp_path, "PC_NAME_MAX")

    profiler.write_json(tmp_path / name)

    assert list(files_below(tmp_path)) == [name]


def unwritable(kind: str, tmp_path: Path) -> Path:
    if kind == "a folder":
        (tmp_path / "profile.json").mkdir()
    elif kind == "below a file":
        (tmp_path / "file").write_text("old")
        return tmp_path / "file" / "profile.json"
    elif kind == "far below a file":
        (tmp_path / "file").write_text("old")
        return tmp_path / "file" / "a" / "b" / "profile.json"
    elif kind == "a name too long":
        return tmp_path / ("n" * 5_000)
    elif kind == "a folder name too long":
        return tmp_path / ("n" * 5_000) / "profile.json"
    elif kind == "in a read-only folder":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "profile.json").write_text("old")
        (tmp_path / "folder").chmod(0o555)
        return tmp_path / "folder" / "profile.json"
    return tmp_path / "profile.json"


@pytest.mark.parametrize(
    "kind",
    [
        *("a folder", "below a file", "far below a file", "a name too long", "a folder name too long"),
        "in a read-only folder",
    ],
)
def test_a_file_that_cannot_be_written_is_one_error_that_names_it_and_changes_nothing(
    kind: str, profiler: BrickProfiler, tmp_path: Path
) -> None:
    path = unwritable(kind, tmp_path)
    before = files_below(tmp_path)

    with pytest.raises(OSError, match=r"cannot write") as refused:
        profiler.write_json(path)

    assert str(path) in str(refused.value)
    assert refused.value.errno is not None
    assert files_below(tmp_path) == before


def test_an_older_profile_stays_whole_when_its_replacement_fails_halfway(
    profiler: BrickProfiler, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource", reason="the size of files is limited with the resource module")
    signal = pytest.importorskip("signal")
    path = tmp_path / "profile.json"
    path.write_text("old")
    profiler.record_elapsed("n" * 100_000, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write") as refused:
            profiler.write_json(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert str(path) in str(refused.value)
    assert files_below(tmp_path) == {"profile.json": b"old"}
