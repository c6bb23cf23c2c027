"""What each brick of the demo's decoder counts.

Counts are what the operation cannot avoid: `elements` is the size of its output, `bytes_read` every weight
and input once, `bytes_written` the output once. Temporaries inside an operation are not counted, so GB/s is
the useful bandwidth, a lower bound of what the memory moved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

from ..taxonomy import BrickCategory, BrickId

if TYPE_CHECKING:
    from .. import BrickProfiler
    from .decoder import DecoderConfig

Scope: TypeAlias = AbstractContextManager[object]

FLOAT_BYTES = 4
TOKEN_BYTES = 8
MASK_BYTES = 1


class StepBricks:
    """The bricks of a step of `tokens` tokens: reusable handles, as their counts depend on nothing else.

    Attention's counts grow with the context, so those three are methods that give a new scope each time.

    Args:
        profiler: the profiler that the bricks report to.
        config: the model's shape.
        tokens: tokens that the step puts through each layer.
    """

    def __init__(self, profiler: BrickProfiler, config: DecoderConfig, *, tokens: int) -> None:
        self._profiler = profiler
        self._config = config
        self._tokens = tokens
        hidden, ffn, vocabulary = config.hidden, config.ffn, config.vocabulary
        kv, angles = 2 * config.kv_width, config.head_size

        def define(
            brick: BrickId | str,
            *,
            weights: int = 0,
            inputs: int,
            outputs: int,
            category: BrickCategory | None = None,
        ) -> Scope:
            """Sizes in float32 elements; `inputs` and `outputs` are those of one token."""
            return profiler.define(
                brick,
                category=category,
                elements=tokens * outputs,
                bytes_read=FLOAT_BYTES * (weights + tokens * inputs),
                bytes_written=FLOAT_BYTES * tokens * outputs,
            )

        self.embedding: Scope = profiler.define(
            BrickId.Embedding,
            elements=tokens * hidden,
            bytes_read=tokens * (TOKEN_BYTES + FLOAT_BYTES * hidden),
            bytes_written=tokens * FLOAT_BYTES * hidden,
        )
        self.rms_norm = define(BrickId.RmsNorm, weights=hidden, inputs=hidden, outputs=hidden)
        self.qkv_projection = define(
            BrickId.QkvProjection, weights=hidden * config.qkv_width, inputs=hidden, outputs=config.qkv_width
        )
        rotated = hidden + config.kv_width
        self.rope = define(BrickId.RopeEmbedding, inputs=rotated + angles, outputs=rotated)
        self.kv_cache_write = define("KvCacheWrite", inputs=kv, outputs=kv, category=BrickCategory.Attention)
        self.output_projection = define(
            BrickId.OutputProjection, weights=hidden * hidden, inputs=hidden, outputs=hidden
        )
        self.residual_1 = define("Residual1", inputs=2 * hidden, outputs=hidden, category=BrickCategory.Attention)
        self.gate_projection = define(BrickId.GateProjection, weights=hidden * ffn, inputs=hidden, outputs=ffn)
        self.up_projection = define(BrickId.UpProjection, weights=hidden * ffn, inputs=hidden, outputs=ffn)
        self.activation = define(BrickId.Activation, inputs=2 * ffn, outputs=ffn)
        self.down_projection = define(BrickId.DownProjection, weights=ffn * hidden, inputs=ffn, outputs=hidden)
        self.residual_2 = define("Residual2", inputs=2 * hidden, outputs=hidden, category=BrickCategory.Ffn)
        self.lm_head = define(BrickId.LmHead, weights=vocabulary * hidden, inputs=hidden, outputs=vocabulary)
        self.sampling: Scope = profiler.define(
            BrickId.Sampling,
            elements=1,
            bytes_read=vocabulary * (FLOAT_BYTES + MASK_BYTES),
            bytes_written=TOKEN_BYTES,
        )

    def attention_score(self, context: int) -> Scope:
        """Queries times the keys of `context` positions."""
        config = self._config
        scores = config.heads * self._tokens * context
        return self._profiler.brick(
            BrickId.AttentionScore,
            elements=scores,
            bytes_read=FLOAT_BYTES * (self._tokens * config.hidden + context * config.kv_width),
            bytes_written=FLOAT_BYTES * scores,
        )

    def attention_softmax(self, context: int) -> Scope:
        """Softmax over `context` positions; with several tokens also the causal mask."""
        scores = self._config.heads * self._tokens * context
        mask_bytes = MASK_BYTES * self._tokens * context if self._tokens > 1 else 0
        return self._profiler.brick(
            BrickId.AttentionSoftmax,
            elements=scores,
            bytes_read=FLOAT_BYTES * scores + mask_bytes,
            bytes_written=FLOAT_BYTES * scores,
        )

    def attention_output(self, context: int) -> Scope:
        """Probabilities times the values of `context` positions."""
        config = self._config
        outputs = self._tokens * config.hidden
        return self._profiler.brick(
            BrickId.AttentionOutput,
            elements=outputs,
            bytes_read=FLOAT_BYTES * (config.heads * self._tokens * context + context * config.kv_width),
            bytes_written=FLOAT_BYTES * outputs,
        )
