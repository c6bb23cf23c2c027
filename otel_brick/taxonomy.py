"""The vocabulary of the product: bricks, categories, phases, levels and sources, as enumerations.

Everybody stands on this module and it imports nothing of the package. Members keep the spelling of the Rust
`BrickProfiler`, because a member's name is data: it is the name in JSON, in spans and in metrics.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Indexed(Enum):
    """An enumeration that indexes sequences but equals no number.

    Members are keys of hot dictionaries: `Enum` hashes in Python code, and members of an `IntEnum` would be found by
    any equal number.
    """

    __hash__ = object.__hash__

    def __index__(self) -> int:
        return self.value


class BrickCategory(_Indexed):
    """What a brick is for; its value is the index into `category_stats()`."""

    Norm = 0
    Attention = 1
    Ffn = 2
    Other = 3
    Sparse = 4
    Fft = 5
    Solver = 6

    @property
    def label(self) -> str:
        """The name that reports show, for example `FFN`."""
        return _CATEGORY_LABELS.get(self.name, self.name)

    @property
    def attribute_value(self) -> str:
        """The lower-case value of the span and metric attribute `brick.category`."""
        return self.name.lower()


_CATEGORY_LABELS = {"Ffn": "FFN", "Fft": "FFT"}


class BrickId(_Indexed):
    """The known bricks, in the reference's order; the value is the brick's fixed index in every table."""

    RmsNorm = 0
    LayerNorm = 1
    QkvProjection = 2
    RopeEmbedding = 3
    AttentionScore = 4
    AttentionSoftmax = 5
    AttentionOutput = 6
    OutputProjection = 7
    GateProjection = 8
    UpProjection = 9
    Activation = 10
    DownProjection = 11
    Embedding = 12
    LmHead = 13
    Sampling = 14
    SpMV = 15
    SpMM = 16
    FormatConvert = 17
    FFT1D = 18
    FFT2D = 19
    LUFactorize = 20
    QRFactorize = 21
    SVDCompute = 22

    @property
    def category(self) -> BrickCategory:
        """The category that this brick's time is summed into."""
        return _CATEGORY_OF[self]

    @classmethod
    def lookup(cls, name: str, *, exact: bool = False) -> BrickId | None:
        """Find a known brick by canonical name or, unless `exact`, by alias; both are case-sensitive.

        Args:
            name: for example `"RmsNorm"`, or the alias `"Softmax"` of `AttentionSoftmax`.
            exact: True to accept canonical names only.

        Returns:
            The brick, or None for any other string, which then names a dynamic brick.
        """
        known = cls.__members__.get(name)
        if known is None and not exact:
            return BRICK_ALIASES.get(name)
        return known


_CATEGORY_OF = {
    brick: category
    for category, first, last in (
        (BrickCategory.Norm, BrickId.RmsNorm, BrickId.LayerNorm),
        (BrickCategory.Attention, BrickId.QkvProjection, BrickId.OutputProjection),
        (BrickCategory.Ffn, BrickId.GateProjection, BrickId.DownProjection),
        (BrickCategory.Other, BrickId.Embedding, BrickId.Sampling),
        (BrickCategory.Sparse, BrickId.SpMV, BrickId.FormatConvert),
        (BrickCategory.Fft, BrickId.FFT1D, BrickId.FFT2D),
        (BrickCategory.Solver, BrickId.LUFactorize, BrickId.SVDCompute),
    )
    for brick in BrickId
    if first.value <= brick.value <= last.value
}

BRICK_ALIASES: Mapping[str, BrickId] = MappingProxyType(
    {
        "Qkv": BrickId.QkvProjection,
        "Rope": BrickId.RopeEmbedding,
        "RoPE": BrickId.RopeEmbedding,
        "Softmax": BrickId.AttentionSoftmax,
        "OutProj": BrickId.OutputProjection,
        "Gate": BrickId.GateProjection,
        "Up": BrickId.UpProjection,
        "SiLU": BrickId.Activation,
        "GELU": BrickId.Activation,
        "ReLU": BrickId.Activation,
        "Down": BrickId.DownProjection,
        "Embed": BrickId.Embedding,
        "Head": BrickId.LmHead,
        "Sample": BrickId.Sampling,
        "spmv": BrickId.SpMV,
        "spmm": BrickId.SpMM,
        "fft1d": BrickId.FFT1D,
        "FFT": BrickId.FFT1D,
        "fft2d": BrickId.FFT2D,
        "LU": BrickId.LUFactorize,
        "QR": BrickId.QRFactorize,
        "SVD": BrickId.SVDCompute,
    }
)
"""Further names of known bricks. Everything that takes a brick's name accepts them, except with `exact=True`."""


class BrickBottleneck(Enum):
    """What limits a brick, as somebody who knows has said; never inferred."""

    Unknown = "unknown"
    Memory = "memory"
    Compute = "compute"


class Phase(IntEnum):
    """What a step does; part of the key of every statistic."""

    Prefill = 0
    Decode = 1
    Mixed = 2
    TrainForward = 3
    TrainBackward = 4
    Idle = 5
    Other = 6

    @property
    def attribute_value(self) -> str:
        """The value of the attribute `brick.phase`, for example `train_forward`."""
        return _PHASE_VALUES[self]

    @classmethod
    def of(cls, phase: Phase | str | None) -> Phase:
        """Turn an attribute value such as `"decode"` into its phase; None is `Other`.

        Raises:
            ValueError: for any other string, naming the accepted ones.
            TypeError: for any other type.
        """
        if phase is None:
            return cls.Other
        if isinstance(phase, cls):
            return phase
        if not isinstance(phase, str):
            raise TypeError(f"phase must be a string or Phase, not {type(phase).__name__}")
        try:
            return _PHASE_BY_VALUE[phase]
        except KeyError:
            raise ValueError(f"phase must be one of {', '.join(_PHASE_BY_VALUE)}; got {phase!r}") from None


_PHASE_VALUES = ("prefill", "decode", "mixed", "train_forward", "train_backward", "idle", "other")
_PHASE_BY_VALUE: dict[str, Phase] = dict(zip(_PHASE_VALUES, Phase, strict=True))


class SpanLevel(IntEnum):
    """How deep in the hierarchy a span or row stands."""

    Step = 0
    Layer = 1
    Brick = 2
    Kernel = 3
    Transfer = 4

    @property
    def attribute_value(self) -> str:
        """The value of the attribute `brick.span.level`."""
        return self.name.lower()


class SyncMode(Enum):
    """When device time is taken, and who waits for the device."""

    Immediate = "immediate"
    """The stream is synchronised at the end of each brick."""
    PerLayer = "per_layer"
    """The stream is synchronised at the end of each layer."""
    Deferred = "deferred"
    """Nobody waits: the worker finalizes a step when the device is past it."""
    None_ = "none"
    """Host times only."""

    @classmethod
    def of(cls, mode: SyncMode | str) -> SyncMode:
        """Turn a value such as `"per_layer"`, or a member's name, into the mode.

        Raises:
            ValueError: for any other string, naming the accepted ones.
            TypeError: for any other type.
        """
        if isinstance(mode, cls):
            return mode
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a SyncMode or a string, not {type(mode).__name__}")
        for member in cls:
            if mode in (member.value, member.name):
                return member
        raise ValueError(f"mode must be one of {', '.join(member.value for member in cls)}; got {mode!r}")


class TimingSource(IntEnum):
    """Where a duration came from."""

    Host = 0
    """A host clock read before and after: the launch time only, if the work is asynchronous."""
    SyncedHost = 1
    """A host clock read after the device was synchronised."""
    CudaEvent = 2
    """A difference of timed CUDA events on the stream that ran the work."""

    @property
    def attribute_value(self) -> str:
        """The value of the attribute `brick.timing.source`."""
        return ("host", "synced_host", "cuda_event")[self]
