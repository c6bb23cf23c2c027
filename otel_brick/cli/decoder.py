"""A decoder-only transformer in plain numpy: the model that `otel-brick demo` runs and profiles.

It is the real computation (RMSNorm, grouped-query attention with rotary positions and a key/value cache,
gated SiLU network, tied LM head) with random weights, so its times mean something and its text does not.
Every operation is one brick; `bricks.py` says what each of them counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from .bricks import StepBricks

if TYPE_CHECKING:
    from .. import BrickProfiler

FloatArray: TypeAlias = npt.NDArray[np.float32]
TokenArray: TypeAlias = npt.NDArray[np.int64]

BYTE_TOKENS = 256
"""Token ids below this are bytes; a larger vocabulary only gives the LM head its true weight."""


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; every size is a number of elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int
    """The longest sequence, prompt and generated tokens together."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.head_size % 2:
            raise ValueError(f"hidden must be heads x an even head size; got {self.hidden} and {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if self.vocabulary < BYTE_TOKENS:
            raise ValueError(f"vocabulary must hold the {BYTE_TOKENS} bytes; got {self.vocabulary}")

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Elements of one position's keys (and as many of its values), all kv heads together."""
        return self.kv_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        """Elements of one position's fused Q, K and V."""
        return self.hidden + 2 * self.kv_width

    @property
    def parameter_count(self) -> int:
        """Weights of the whole model; the LM head shares the embedding's."""
        layer = self.hidden * (self.qkv_width + self.hidden + 3 * self.ffn + 2)
        return self.layers * layer + self.hidden * (self.vocabulary + 1)


PRESETS = {
    "default": DecoderConfig(layers=6, hidden=384, heads=6, kv_heads=2, ffn=1536, vocabulary=BYTE_TOKENS, context=1024),
    "gpt2-small": DecoderConfig(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocabulary=50257, context=1024),
}
"""`gpt2-small` has the published shape; gated networks of 2048 weigh as much as plain ones of 3072."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's float32 weights; matrices are (inputs, outputs)."""

    attention_norm: FloatArray
    qkv: FloatArray
    output: FloatArray
    ffn_norm: FloatArray
    gate: FloatArray
    up: FloatArray
    down: FloatArray


class KvCache:
    """Keys and values of one sequence, allocated once for `capacity` positions.

    Attributes:
        keys: float32, (layers, kv heads, capacity, head size), rotated.
        values: float32, the same shape.
        length: positions filled so far.
    """

    def __init__(self, config: DecoderConfig, capacity: int) -> None:
        shape = (config.layers, config.kv_heads, capacity, config.head_size)
        self.keys: FloatArray = np.zeros(shape, dtype=np.float32)
        self.values: FloatArray = np.zeros(shape, dtype=np.float32)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.keys.shape[2]


class Decoder:
    """The model. Its weights depend on `config` and `seed` alone, its results never on the profiler.

    Args:
        config: the shape.
        seed: of the weights.
        profiler: records every operation of `forward`, inside whatever step is open; may be disabled.
    """

    def __init__(self, config: DecoderConfig, *, seed: int, profiler: BrickProfiler) -> None:
        self.config = config
        self._profiler = profiler
        random = np.random.default_rng(seed)
        hidden, ffn = config.hidden, config.ffn
        self.embedding = _random_matrix(random, config.vocabulary, hidden, fan_in=hidden)
        self.layers = tuple(
            LayerWeights(
                attention_norm=np.ones(hidden, dtype=np.float32),
                qkv=_random_matrix(random, hidden, config.qkv_width, fan_in=hidden),
                output=_random_matrix(random, hidden, hidden, fan_in=hidden),
                ffn_norm=np.ones(hidden, dtype=np.float32),
                gate=_random_matrix(random, hidden, ffn, fan_in=hidden),
                up=_random_matrix(random, hidden, ffn, fan_in=hidden),
                down=_random_matrix(random, ffn, hidden, fan_in=ffn),
            )
            for _ in range(config.layers)
        )
        self.final_norm: FloatArray = np.ones(hidden, dtype=np.float32)
        self._cosines, self._sines = rope_tables(config.context, config.head_size)
        self._one_token = StepBricks(profiler, config, tokens=1)

    def forward(self, tokens: TokenArray, cache: KvCache) -> FloatArray:
        """Run the tokens that follow what the cache holds, and append them to it.

        Args:
            tokens: int64, (count,): a whole prompt, or the one token of a decode step.
            cache: the sequence so far; grows by `count`.

        Returns:
            The logits after the last token: float32, (vocabulary,).

        Raises:
            ValueError: no token, or more than the cache or the context has room for.
        """
        count = tokens.size
        room = min(cache.capacity, self.config.context) - cache.length
        if not 0 < count <= room:
            raise ValueError(f"forward takes 1 to {room} tokens, what the cache has room for; got {count}")
        one = self._one_token
        bricks = one if count == 1 else StepBricks(self._profiler, self.config, tokens=count)
        with bricks.embedding:
            x: FloatArray = self.embedding[tokens]
        for index, weights in enumerate(self.layers):
            with self._profiler.layer(index, type="decoder"):
                x = self._attention(x, weights, cache.keys[index], cache.values[index], cache.length, bricks)
                x = self._ffn(x, weights, bricks)
        cache.length += count
        with one.rms_norm:
            last = rms_norm(x[-1], self.final_norm)
        with one.lm_head:
            return self.embedding @ last

    def _attention(
        self,
        x: FloatArray,
        weights: LayerWeights,
        keys: FloatArray,
        values: FloatArray,
        start: int,
        bricks: StepBricks,
    ) -> FloatArray:
        config = self.config
        count, end = len(x), start + len(x)
        rotated = config.heads + config.kv_heads
        with bricks.rms_norm:
            normed = rms_norm(x, weights.attention_norm)
        with bricks.qkv_projection:
            qkv = np.reshape(normed @ weights.qkv, (count, rotated + config.kv_heads, config.head_size))
        with bricks.rope:
            qk = rotate(qkv[:, :rotated], self._cosines[start:end], self._sines[start:end])
        with bricks.kv_cache_write:
            keys[:, start:end] = np.swapaxes(qk[:, config.heads :], 0, 1)
            values[:, start:end] = np.swapaxes(qkv[:, rotated:], 0, 1)
        with bricks.attention_score(end):
            scores = attention_scores(qk[:, : config.heads], keys[:, :end])
        with bricks.attention_softmax(end):
            probabilities = causal_softmax(scores, start)
        with bricks.attention_output(end):
            mixed = attention_output(probabilities, values[:, :end])
        with bricks.output_projection:
            projected: FloatArray = mixed @ weights.output
        with bricks.residual_1:
            return x + projected

    def _ffn(self, x: FloatArray, weights: LayerWeights, bricks: StepBricks) -> FloatArray:
        with bricks.rms_norm:
            normed = rms_norm(x, weights.ffn_norm)
        with bricks.gate_projection:
            gate = normed @ weights.gate
        with bricks.up_projection:
            up = normed @ weights.up
        with bricks.activation:
            activated: FloatArray = np.multiply(silu(gate), up)
        with bricks.down_projection:
            projected: FloatArray = activated @ weights.down
        with bricks.residual_2:
            return x + projected


class Sampler:
    """Draws the next token from logits, with its own seeded generator.

    Only printable ASCII is drawn, so that the text fits a terminal whatever the weights are.

    Args:
        config: of the model whose logits these are.
        seed: of the draws.
        profiler: records each draw as a `Sampling` brick.
        temperature: divides the logits; 0 always takes the largest.
        top_k: how many of the largest logits may be drawn.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        seed: int,
        profiler: BrickProfiler,
        temperature: float = 0.8,
        top_k: int = 40,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._temperature = temperature
        self._top_k = min(top_k, config.vocabulary)
        self._printable = np.zeros(config.vocabulary, dtype=np.bool_)
        self._printable[ord(" ") : ord("~") + 1] = True
        self._brick = StepBricks(profiler, config, tokens=1).sampling

    def sample(self, logits: FloatArray) -> int:
        """Choose a token id by float32 logits, (vocabulary,)."""
        with self._brick:
            allowed = np.where(self._printable, logits, -np.inf)
            if self._temperature == 0:
                return int(np.argmax(allowed))
            candidates = np.argpartition(allowed, -self._top_k)[-self._top_k :]
            best = allowed[candidates] / self._temperature
            cumulative = np.cumsum(np.exp(best - best.max(), dtype=np.float64))
            drawn = self._random.random() * float(cumulative[-1])
            return int(candidates[np.searchsorted(cumulative, drawn, side="right")])


def encode(text: str) -> TokenArray:
    """The UTF-8 bytes of a text as token ids; command line bytes that are no UTF-8 stay what they were."""
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), dtype=np.uint8).astype(np.int64)


def rms_norm(x: FloatArray, weight: FloatArray) -> FloatArray:
    """Scale x, (..., hidden), to a root mean square of 1 along its last axis, times `weight`, (hidden,)."""
    mean_square: FloatArray = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.divide(x, np.sqrt(mean_square + np.float32(1e-5))) * weight


def silu(x: FloatArray) -> FloatArray:
    """x times its sigmoid, element by element."""
    return np.divide(x, np.add(np.exp(-x), np.float32(1)))


def rope_tables(context: int, head_size: int, base: float = 10_000.0) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of every position's rotary angles: two float32 arrays, (context, head_size / 2)."""
    frequencies = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    angles = np.outer(np.arange(context), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(heads: FloatArray, cosines: FloatArray, sines: FloatArray) -> FloatArray:
    """Turn each head's pairs (i, i + half) by the angles of its position.

    Args:
        heads: (positions, heads, head size).
        cosines: (positions, head size / 2), as are `sines`.
    """
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    cosines, sines = cosines[:, None, :], sines[:, None, :]
    rotated = np.empty_like(heads)
    rotated[..., :half] = first * cosines - second * sines
    rotated[..., half:] = second * cosines + first * sines
    return rotated


def attention_scores(queries: FloatArray, keys: FloatArray) -> FloatArray:
    """Scaled dot products of every query with every key, before masking.

    Args:
        queries: (count, heads, head size).
        keys: (kv heads, positions, head size); consecutive query heads share one of them.

    Returns:
        (kv heads, heads / kv heads, count, positions).
    """
    count, heads, head_size = queries.shape
    kv_heads, positions, _ = keys.shape
    group = heads // kv_heads
    grouped = np.reshape(np.swapaxes(queries, 0, 1), (kv_heads, group * count, head_size))
    scores = grouped @ np.swapaxes(keys, 1, 2)
    np.multiply(scores, np.float32(head_size**-0.5), out=scores)
    return np.reshape(scores, (kv_heads, group, count, positions))


def causal_softmax(scores: FloatArray, start: int) -> FloatArray:
    """Turn scores, (..., count, positions), into probabilities, in place.

    Query i is the sequence's position `start` + i, and sees no position after its own.
    """
    count, positions = scores.shape[-2:]
    if count > 1:
        seen = np.tri(count, positions, start, dtype=np.bool_)
        np.copyto(scores, np.float32(-np.inf), where=np.logical_not(seen))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def attention_output(probabilities: FloatArray, values: FloatArray) -> FloatArray:
    """Mix the values by probability: (count, heads x head size).

    Args:
        probabilities: (kv heads, heads / kv heads, count, positions).
        values: (kv heads, positions, head size).
    """
    kv_heads, group, count, positions = probabilities.shape
    mixed = np.reshape(probabilities, (kv_heads, group * count, positions)) @ values
    by_head = np.reshape(mixed, (kv_heads * group, count, -1))
    return np.reshape(np.swapaxes(by_head, 0, 1), (count, -1))


def _random_matrix(random: np.random.Generator, rows: int, columns: int, *, fan_in: int) -> FloatArray:
    """Uniform weights of variance 1 / fan_in, which keep activations near 1 and are drawn fast."""
    matrix = random.random((rows, columns), dtype=np.float32)
    np.subtract(matrix, np.float32(0.5), out=matrix)
    np.multiply(matrix, np.float32(math.sqrt(12 / fan_in)), out=matrix)
    return matrix
