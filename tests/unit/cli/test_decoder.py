"""The demo's model is a real transformer: its parts agree with naive ones, its paths with each other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otel_brick import BrickCategory, BrickId, BrickProfiler
from otel_brick.cli import decoder
from otel_brick.cli.bricks import StepBricks
from otel_brick.cli.decoder import PRESETS, Decoder, DecoderConfig, KvCache, Sampler

FloatArray = npt.NDArray[np.float32]

GROUPED = DecoderConfig(layers=3, hidden=48, heads=6, kv_heads=2, ffn=80, vocabulary=300, context=64)
FULL = DecoderConfig(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocabulary=256, context=64)
TOKENS = decoder.encode("every brick is measured")


def random_array(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def logits_at_once(config: DecoderConfig, count: int) -> FloatArray:
    model = Decoder(config, seed=3, profiler=BrickProfiler())
    return model.forward(TOKENS[:count], KvCache(config, count))


@pytest.mark.parametrize("config", [GROUPED, FULL], ids=["grouped", "full"])
def test_prefill_at_once_and_token_by_token_give_the_same_logits(config: DecoderConfig) -> None:
    model = Decoder(config, seed=3, profiler=BrickProfiler())
    cache = KvCache(config, TOKENS.size)
    for position in range(TOKENS.size):
        stepwise = model.forward(TOKENS[position : position + 1], cache)
        np.testing.assert_allclose(stepwise, logits_at_once(config, position + 1), rtol=1e-4, atol=1e-5)


def test_a_prompt_in_two_parts_gives_the_same_logits_as_in_one() -> None:
    model = Decoder(GROUPED, seed=3, profiler=BrickProfiler())
    cache = KvCache(GROUPED, TOKENS.size)
    model.forward(TOKENS[:9], cache)
    np.testing.assert_allclose(
        model.forward(TOKENS[9:], cache), logits_at_once(GROUPED, TOKENS.size), rtol=1e-4, atol=1e-5
    )


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (Decoder(FULL, seed=seed, profiler=BrickProfiler()) for seed in (1, 1, 2))
    assert np.array_equal(first.layers[1].gate, again.layers[1].gate)
    assert not np.array_equal(first.layers[1].gate, other.layers[1].gate)


def test_profiling_changes_no_result() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    results: list[tuple[FloatArray, list[int]]] = []
    for observer in (BrickProfiler(), profiler):
        model = Decoder(GROUPED, seed=3, profiler=observer)
        sampler = Sampler(GROUPED, seed=4, profiler=observer)
        cache = KvCache(GROUPED, 40)
        with observer.step(phase="prefill", tokens=TOKENS.size):
            logits = model.forward(TOKENS, cache)
        tokens = [sampler.sample(logits)]
        for _ in range(8):
            logits = model.forward(np.array(tokens[-1:]), cache)
            tokens.append(sampler.sample(logits))
        results.append((logits, tokens))
    profiler.shutdown()
    assert np.array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_parameter_count_is_the_size_of_the_weights() -> None:
    model = Decoder(GROUPED, seed=0, profiler=BrickProfiler())
    layers = sum(weight.size for layer in model.layers for weight in vars(layer).values())
    assert model.embedding.size + model.final_norm.size + layers == GROUPED.parameter_count


def test_gpt2_small_has_the_published_number_of_parameters() -> None:
    assert PRESETS["gpt2-small"].parameter_count == pytest.approx(124e6, rel=0.01)


def naive_attention(queries: FloatArray, keys: FloatArray, values: FloatArray, start: int) -> FloatArray:
    """One query and one head after the other, in float64."""
    count, heads, size = queries.shape
    group = heads // keys.shape[0]
    mixed = np.zeros((count, heads, size))
    for head in range(heads):
        for row in range(count):
            seen = start + row + 1
            scores = [float(queries[row, head] @ keys[head // group, column]) for column in range(seen)]
            weights = np.exp(np.array(scores) / np.sqrt(size))
            mixed[row, head] = weights / weights.sum() @ values[head // group, :seen]
    return mixed.reshape(count, -1).astype(np.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 1), (4, 4)])
@pytest.mark.parametrize(("count", "start"), [(1, 0), (1, 6), (7, 0), (4, 3)])
def test_grouped_query_attention_is_naive_attention(heads: int, kv_heads: int, count: int, start: int) -> None:
    queries = random_array(count, heads, 8, seed=1)
    keys = random_array(kv_heads, start + count, 8, seed=2)
    values = random_array(kv_heads, start + count, 8, seed=3)
    probabilities = decoder.causal_softmax(decoder.attention_scores(queries, keys), start)
    np.testing.assert_allclose(
        decoder.attention_output(probabilities, values),
        naive_attention(queries, keys, values, start),
        rtol=1e-4,
        atol=1e-5,
    )


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cosines, sines = decoder.rope_tables(32, 16)
    query, key = random_array(1, 1, 16, seed=1), random_array(1, 1, 16, seed=2)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            decoder.rotate(x, cosines[at : at + 1], sines[at : at + 1])[0, 0]
            for x, at in ((query, query_position), (key, key_position))
        ]
        return float(rotated[0] @ rotated[1])

    for distance in (0, 1, 7):
        scores = [score(position + distance, position) for position in (0, 3, 20)]
        np.testing.assert_allclose(scores, scores[0], rtol=1e-4)
    assert score(7, 0) != pytest.approx(score(1, 0))


def test_rotation_keeps_lengths_and_leaves_position_zero_alone() -> None:
    heads = random_array(5, 2, 16)
    rotated = decoder.rotate(heads, *decoder.rope_tables(5, 16))
    assert np.array_equal(rotated[0], heads[0])
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(heads, axis=-1), rtol=1e-5)


def test_rms_norm_gives_a_root_mean_square_of_one_times_the_weight() -> None:
    normed = decoder.rms_norm(7 * random_array(3, 64), np.full(64, 2, dtype=np.float32))
    np.testing.assert_allclose(np.sqrt(np.mean(normed**2, axis=-1)), 2, rtol=1e-4)


def test_temperature_zero_takes_the_likeliest_printable_token() -> None:
    logits = random_array(GROUPED.vocabulary)
    logits[[10, ord("Q"), 290]] = 50, 40, 60
    sampler = Sampler(GROUPED, seed=0, profiler=BrickProfiler(), temperature=0)
    assert sampler.sample(logits) == ord("Q")


def test_sampling_draws_printable_tokens_of_the_top_k_in_proportion() -> None:
    logits = np.zeros(GROUPED.vocabulary, dtype=np.float32)
    logits[[ord("a"), ord("b"), ord("c")]] = np.log([6, 3, 1])
    logits[299] = 9
    sampler = Sampler(GROUPED, seed=0, profiler=BrickProfiler(), temperature=1, top_k=2)
    drawn = [sampler.sample(logits) for _ in range(3000)]
    assert set(drawn) == {ord("a"), ord("b")}
    assert drawn.count(ord("a")) / 3000 == pytest.approx(2 / 3, abs=0.04)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 50}, "hidden must be heads x an even head size"),
        ({"hidden": 18}, "hidden must be heads x an even head size"),
        ({"kv_heads": 4}, "heads must be a multiple of kv_heads"),
        ({"vocabulary": 100}, "vocabulary must hold the 256 bytes"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**vars(GROUPED), **change})


@pytest.mark.parametrize("count", [0, 5])
def test_forward_refuses_what_the_cache_has_no_room_for(count: int) -> None:
    model = Decoder(FULL, seed=0, profiler=BrickProfiler())
    with pytest.raises(ValueError, match="takes 1 to 4 tokens"):
        model.forward(TOKENS[:count], KvCache(FULL, 4))


class CountingProfiler:
    """Keeps the counts that the decoder gives, by brick name, and times nothing."""

    def __init__(self) -> None:
        self.counts: dict[str, list[dict[str, Any]]] = {}

    def brick(self, brick: BrickId | str, **counts: Any) -> AbstractContextManager[None]:
        name = brick.name if isinstance(brick, BrickId) else brick
        self.counts.setdefault(name, []).append(counts)
        return nullcontext()

    define = brick

    def layer(self, index: int, *, type: str) -> AbstractContextManager[None]:
        return nullcontext()


def counts_of(tokens: int, context: int) -> dict[str, tuple[int, int, int]]:
    """Elements, bytes read and bytes written that the bricks of a step claim."""
    profiler: Any = CountingProfiler()
    bricks = StepBricks(profiler, GROUPED, tokens=tokens)
    for scope in (bricks.attention_score, bricks.attention_softmax, bricks.attention_output):
        scope(context)
    return {
        name: (counts["elements"], counts["bytes_read"], counts["bytes_written"])
        for name, (counts,) in profiler.counts.items()
    }


def true_counts(output: npt.NDArray[Any], *inputs: npt.NDArray[Any]) -> tuple[int, int, int]:
    return output.size, sum(array.nbytes for array in inputs), output.nbytes


@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 12), (9, 0), (5, 4)])
def test_counts_are_the_sizes_of_the_arrays_that_the_bricks_read_and_write(tokens: int, start: int) -> None:
    config, end = GROUPED, start + tokens
    model = Decoder(config, seed=0, profiler=BrickProfiler())
    weights = model.layers[0]
    counts = counts_of(tokens, end)

    x = random_array(tokens, config.hidden)
    assert counts["RmsNorm"] == true_counts(decoder.rms_norm(x, weights.ffn_norm), x, weights.ffn_norm)
    qkv = x @ weights.qkv
    assert counts["QkvProjection"] == true_counts(qkv, x, weights.qkv)
    heads = qkv.reshape(tokens, config.heads + 2 * config.kv_heads, config.head_size)
    unrotated = heads[:, : config.heads + config.kv_heads]
    angles = [table[start:end] for table in decoder.rope_tables(config.context, config.head_size)]
    qk = decoder.rotate(unrotated, *angles)
    assert counts["RopeEmbedding"] == true_counts(qk, unrotated, *angles)
    written = heads[:, -2 * config.kv_heads :]
    assert counts["KvCacheWrite"] == true_counts(written, written)
    queries, keys = qk[:, : config.heads], random_array(config.kv_heads, end, config.head_size)
    scores = decoder.attention_scores(queries, keys)
    assert counts["AttentionScore"] == true_counts(scores, queries, keys)
    mask = np.zeros((tokens, end) if tokens > 1 else 0, dtype=np.bool_)
    assert counts["AttentionSoftmax"] == true_counts(scores, scores, mask)
    mixed = decoder.attention_output(decoder.causal_softmax(scores, start), keys)
    assert counts["AttentionOutput"] == true_counts(mixed, scores, keys)
    assert counts["OutputProjection"] == true_counts(mixed @ weights.output, mixed, weights.output)
    assert counts["Residual1"] == counts["Residual2"] == true_counts(x + mixed, x, mixed)
    gate = x @ weights.gate
    assert counts["GateProjection"] == counts["UpProjection"] == true_counts(gate, x, weights.gate)
    assert counts["Activation"] == true_counts(decoder.silu(gate) * gate, gate, gate)
    assert counts["DownProjection"] == true_counts(gate @ weights.down, gate, weights.down)
    ids = TOKENS[:tokens]
    embedded = model.embedding[ids]
    assert counts["Embedding"] == true_counts(embedded, ids, embedded)
    if tokens == 1:
        logits = model.embedding @ x[0]
        assert counts["LmHead"] == true_counts(logits, x[0], model.embedding)
        printable = np.zeros(config.vocabulary, dtype=np.bool_)
        assert counts["Sampling"] == true_counts(np.zeros(1, dtype=np.int64), logits, printable)


def test_a_step_records_every_operation_in_order_with_its_category() -> None:
    profiler = BrickProfiler.enabled(detail="none")
    model = Decoder(GROUPED, seed=0, profiler=profiler)
    sampler = Sampler(GROUPED, seed=0, profiler=profiler)
    cache = KvCache(GROUPED, 10)
    with profiler.step(phase="prefill", tokens=5):
        token = sampler.sample(model.forward(TOKENS[:5], cache))
    with profiler.step(phase="decode", tokens=1):
        sampler.sample(model.forward(np.array([token]), cache))
    profiler.flush()
    stats = {brick.name: brick for brick in profiler.all_brick_stats()}
    profiler.shutdown()

    once_per_layer = {
        "QkvProjection", "RopeEmbedding", "KvCacheWrite", "AttentionScore", "AttentionSoftmax",
        "AttentionOutput", "OutputProjection", "Residual1", "GateProjection", "UpProjection", "Activation",
        "DownProjection", "Residual2",
    }  # fmt: skip
    expected = dict.fromkeys(once_per_layer, 2 * GROUPED.layers)
    expected |= {"Embedding": 2, "RmsNorm": 2 * (2 * GROUPED.layers + 1), "LmHead": 2, "Sampling": 2}
    assert {name: brick.count for name, brick in stats.items() if brick.count} == expected
    assert stats["Residual1"].category is stats["KvCacheWrite"].category is BrickCategory.Attention
    assert stats["Residual2"].category is BrickCategory.Ffn
    prefill, decode = counts_of(5, 5), counts_of(1, 6)
    for name in once_per_layer:
        both = np.add(prefill[name], decode[name]) * GROUPED.layers
        brick = stats[name]
        assert (brick.total_elements, brick.bytes_read, brick.bytes_written) == tuple(both), name


def test_a_longer_context_costs_attention_more_and_nothing_else() -> None:
    changed = {name for name, counts in counts_of(1, 20).items() if counts != counts_of(1, 21)[name]}
    assert changed == {"AttentionScore", "AttentionSoftmax", "AttentionOutput"}
    reads = [counts_of(1, context)["AttentionOutput"][1] for context in range(1, 6)]
    assert len({after - before for before, after in pairwise(reads)}) == 1
