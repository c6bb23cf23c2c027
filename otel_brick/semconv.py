"""Names of everything otel_brick puts on the wire.

Owns every attribute and metric: spelling, type, unit, wording and bucket boundaries. Nothing flows in; the
rest of the package takes its names from here, and `docs/attributes.md` is generated from it. Name, unit,
description and buckets of a metric are frozen within a release, since a backend takes a change of any of
them for another metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AttributeType = Literal["string", "boolean", "int", "double"]
AttributeLevel = Literal["step", "layer", "brick", "kernel", "transfer", "span", "metric", "resource"]
InstrumentKind = Literal["histogram", "counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute key and what its value means.

    Attributes:
        name: The key as sent.
        type: Type of the value; scalars only, because a query can not ask for a position in an array.
        unit: UCUM unit of a number, empty when it has none.
        levels: Where the attribute may appear: a level of our own spans, `span` for spans that somebody else
            makes for `BrickSpanProcessor`, `metric` for data points, `resource` for the resource.
        brief: What the value says, for the documentation.
        values: The closed set of values, empty when the set is open.
    """

    name: str
    type: AttributeType
    unit: str
    levels: tuple[AttributeLevel, ...]
    brief: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: the instrument and the attributes of its data points.

    Attributes:
        name: The instrument's name.
        instrument: Kind of the instrument; counters are monotonic, all of them cumulative.
        unit: UCUM unit.
        description: Sent with the metric.
        attributes: Keys on every data point, where the value is known.
        buckets: Explicit upper boundaries of a histogram in its unit, ascending; empty for other instruments.
        opt_in_attributes: Keys added only when the user asks, because they multiply the number of series.
    """

    name: str
    instrument: InstrumentKind
    unit: str
    description: str
    attributes: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    opt_in_attributes: tuple[str, ...] = ()


SCOPE_NAME: Final = "otel_brick"

BRICK_SPAN_LEVEL: Final = "brick.span.level"
BRICK_PHASE: Final = "brick.phase"
BRICK_STEP_INDEX: Final = "brick.step.index"
BRICK_BATCH_SIZE: Final = "brick.batch.size"
BRICK_TOKEN_COUNT: Final = "brick.token.count"
BRICK_LAYER_INDEX: Final = "brick.layer.index"
BRICK_LAYER_TYPE: Final = "brick.layer.type"
BRICK_NAME: Final = "brick.name"
BRICK_CATEGORY: Final = "brick.category"
BRICK_ELEMENT_COUNT: Final = "brick.element.count"
BRICK_IO_SIZE: Final = "brick.io.size"
BRICK_IO_READ_SIZE: Final = "brick.io.read.size"
BRICK_IO_WRITE_SIZE: Final = "brick.io.write.size"
BRICK_IO_DIRECTION: Final = "brick.io.direction"
BRICK_FLOP_COUNT: Final = "brick.flop.count"
BRICK_BUDGET_DURATION: Final = "brick.budget.duration"
BRICK_BUDGET_EXCEEDED: Final = "brick.budget.exceeded"
BRICK_TRANSFER_DIRECTION: Final = "brick.transfer.direction"

BRICK_TIMING_SOURCE: Final = "brick.timing.source"
BRICK_TIMING_ERROR: Final = "brick.timing.error"
BRICK_TIMING_DEFERRED: Final = "brick.timing.deferred"
BRICK_DETAIL_REASON: Final = "brick.detail.reason"
BRICK_SAMPLING_INTERVAL: Final = "brick.sampling.interval"
BRICK_DROPPED_COUNT: Final = "brick.dropped.count"
BRICK_DROP_REASON: Final = "brick.drop.reason"

BRICK_JOB_ID: Final = "brick.job.id"
BRICK_RANK_INDEX: Final = "brick.rank.index"
BRICK_RANK_COUNT: Final = "brick.rank.count"

BRICK_CUDA_KERNEL_NAME: Final = "brick.cuda.kernel.name"
BRICK_CUDA_PTX_HASH: Final = "brick.cuda.ptx.hash"
BRICK_CUDA_GRID_X: Final = "brick.cuda.grid.x"
BRICK_CUDA_GRID_Y: Final = "brick.cuda.grid.y"
BRICK_CUDA_GRID_Z: Final = "brick.cuda.grid.z"
BRICK_CUDA_BLOCK_X: Final = "brick.cuda.block.x"
BRICK_CUDA_BLOCK_Y: Final = "brick.cuda.block.y"
BRICK_CUDA_BLOCK_Z: Final = "brick.cuda.block.z"
BRICK_CUDA_CLUSTER_X: Final = "brick.cuda.cluster.x"
BRICK_CUDA_CLUSTER_Y: Final = "brick.cuda.cluster.y"
BRICK_CUDA_CLUSTER_Z: Final = "brick.cuda.cluster.z"
BRICK_CUDA_SHARED_MEMORY_DYNAMIC_SIZE: Final = "brick.cuda.shared_memory.dynamic.size"
BRICK_CUDA_SHARED_MEMORY_STATIC_SIZE: Final = "brick.cuda.shared_memory.static.size"
BRICK_CUDA_REGISTER_COUNT: Final = "brick.cuda.register.count"
BRICK_CUDA_OCCUPANCY: Final = "brick.cuda.occupancy"
BRICK_CUDA_STREAM_ID: Final = "brick.cuda.stream.id"
BRICK_CUDA_DEVICE_INDEX: Final = "brick.cuda.device.index"
BRICK_CUDA_GRAPH_CAPTURED: Final = "brick.cuda.graph.captured"
BRICK_CUDA_GRAPH_REPLAY: Final = "brick.cuda.graph.replay"

HW_ID: Final = "hw.id"
HW_NAME: Final = "hw.name"
HW_VENDOR: Final = "hw.vendor"
ERROR_TYPE: Final = "error.type"
CODE_FUNCTION_NAME: Final = "code.function.name"
CODE_FILE_PATH: Final = "code.file.path"
CODE_LINE_NUMBER: Final = "code.line.number"
THREAD_ID: Final = "thread.id"
THREAD_NAME: Final = "thread.name"

_Levels = tuple[AttributeLevel, ...]
_STEP: Final[_Levels] = ("step",)
_LAYER: Final[_Levels] = ("layer", "brick")
_BRICK: Final[_Levels] = ("brick",)
_KERNEL: Final[_Levels] = ("kernel",)
_COUNTS: Final[_Levels] = ("brick", "kernel")
_TIMED: Final[_Levels] = ("step", "brick", "kernel", "transfer")
_OWN_SPANS: Final[_Levels] = ("step", "layer", "brick", "kernel", "transfer")
_METRIC: Final[_Levels] = ("metric",)
_RESOURCE: Final[_Levels] = ("resource",)

_PHASES: Final = ("prefill", "decode", "mixed", "train_forward", "train_backward", "idle", "other")
_CATEGORIES: Final = ("norm", "attention", "ffn", "other", "sparse", "fft", "solver")
_SOURCES: Final = ("host", "synced_host", "cuda_event")
_DETAIL_REASONS: Final = ("first", "failed", "slow", "interval", "all", "none", "cap", "unsampled")
_DROP_REASONS: Final = (
    *("log_full", "queue_full", "trace_cap", "encode_error"),
    *("export_failed", "already_shutdown", "fork"),
)

_PHASE_BRIEF: Final = "What the engine did; `mixed` is prefill and decode in one batch, `idle` a dummy step."
_NAME_BRIEF: Final = "The operation, such as `RmsNorm`; few values per model. A kernel has that of its brick."
_KERNEL_NAME_BRIEF: Final = "Demangled, template arguments cut, 128 characters at most. On metrics by opt-in."
_SOURCE_BRIEF: Final = "Clock behind the end time; below the step only where it differs from the step's."
_ERROR_BRIEF: Final = "Uncertainty of device times on the host's time axis."
_DEFERRED_BRIEF: Final = "Asks `BrickSpanProcessor` to keep the span until its device work is timed."
_DEVICE_BRIEF: Final = "CUDA's ordinal of the GPU in this process."
_GRID_BRIEF: Final = "Blocks of the launch along this axis, clusters multiplied out."
_BLOCK_BRIEF: Final = "Threads of a block along this axis."
_CAPTURED_BRIEF: Final = "The stream was capturing a graph, so the times are those of the host's calls."
_REPLAY_BRIEF: Final = "A graph was launched, which hides the launches of its kernels from the host."
_HW_ID_BRIEF: Final = "UUID of the GPU after `GPU-`, equal to the label `UUID` of the DCGM exporter."
_CLUSTER_BRIEF: Final = "Blocks of a cluster along this axis; absent from a launch without clusters."

ATTRIBUTES: Final[tuple[Attribute, ...]] = (
    Attribute(BRICK_SPAN_LEVEL, "string", "", _OWN_SPANS, "What the span stands for.", _OWN_SPANS),
    Attribute(BRICK_PHASE, "string", "", ("step", "metric"), _PHASE_BRIEF, _PHASES),
    Attribute(BRICK_STEP_INDEX, "int", "", _STEP, "Serial number of the step in its process."),
    Attribute(BRICK_BATCH_SIZE, "int", "{sequence}", _STEP, "Sequences computed together."),
    Attribute(BRICK_TOKEN_COUNT, "int", "{token}", _STEP, "Tokens computed, as the engine reported them."),
    Attribute(BRICK_LAYER_INDEX, "int", "", _LAYER, "Place of the layer in the model."),
    Attribute(BRICK_LAYER_TYPE, "string", "", _LAYER, "Kind of layer, such as `decoder`."),
    Attribute(BRICK_NAME, "string", "", ("brick", "kernel", "metric"), _NAME_BRIEF),
    Attribute(BRICK_CATEGORY, "string", "", ("brick", "metric"), "Family of the brick.", _CATEGORIES),
    Attribute(BRICK_ELEMENT_COUNT, "int", "{element}", _COUNTS, "Elements the operation worked on."),
    Attribute(BRICK_IO_SIZE, "int", "By", ("brick", "kernel", "transfer"), "Bytes read and written, added."),
    Attribute(BRICK_IO_READ_SIZE, "int", "By", _COUNTS, "Bytes read."),
    Attribute(BRICK_IO_WRITE_SIZE, "int", "By", _COUNTS, "Bytes written."),
    Attribute(BRICK_IO_DIRECTION, "string", "", _METRIC, "Way the bytes went.", ("read", "write")),
    Attribute(BRICK_FLOP_COUNT, "int", "{operation}", _BRICK, "Arithmetic operations, if the engine says."),
    Attribute(BRICK_BUDGET_DURATION, "double", "s", _BRICK, "Longest time the user allows the brick."),
    Attribute(BRICK_BUDGET_EXCEEDED, "boolean", "", _BRICK, "Whether it took longer; absent without one."),
    Attribute(
        BRICK_TRANSFER_DIRECTION,
        "string",
        "",
        ("transfer",),
        "From where to where; `h` is the host, `d` a device.",
        ("h2d", "d2h", "d2d"),
    ),
    Attribute(BRICK_TIMING_SOURCE, "string", "", _TIMED, _SOURCE_BRIEF, _SOURCES),
    Attribute(BRICK_TIMING_ERROR, "double", "s", _STEP, _ERROR_BRIEF),
    Attribute(BRICK_TIMING_DEFERRED, "boolean", "", ("span",), _DEFERRED_BRIEF),
    Attribute(BRICK_DETAIL_REASON, "string", "", _STEP, "Why there are spans below, or none.", _DETAIL_REASONS),
    Attribute(BRICK_SAMPLING_INTERVAL, "int", "{step}", _STEP, "One step in this many is picked for detail."),
    Attribute(BRICK_DROPPED_COUNT, "int", "{record}", _STEP, "Spans below that a limit kept from leaving."),
    Attribute(BRICK_DROP_REASON, "string", "", _METRIC, "Why records were lost.", _DROP_REASONS),
    Attribute(BRICK_JOB_ID, "string", "", _RESOURCE, "The distributed job, the same on all of its ranks."),
    Attribute(BRICK_RANK_INDEX, "int", "{rank}", _RESOURCE, "Rank of the process in its job."),
    Attribute(BRICK_RANK_COUNT, "int", "{rank}", _RESOURCE, "Ranks the job has."),
    Attribute(BRICK_CUDA_KERNEL_NAME, "string", "", ("kernel", "metric"), _KERNEL_NAME_BRIEF),
    Attribute(BRICK_CUDA_PTX_HASH, "string", "", _KERNEL, "Digest of the PTX or cubin, lower-case hex."),
    Attribute(BRICK_CUDA_GRID_X, "int", "{block}", _KERNEL, _GRID_BRIEF),
    Attribute(BRICK_CUDA_GRID_Y, "int", "{block}", _KERNEL, _GRID_BRIEF),
    Attribute(BRICK_CUDA_GRID_Z, "int", "{block}", _KERNEL, _GRID_BRIEF),
    Attribute(BRICK_CUDA_BLOCK_X, "int", "{thread}", _KERNEL, _BLOCK_BRIEF),
    Attribute(BRICK_CUDA_BLOCK_Y, "int", "{thread}", _KERNEL, _BLOCK_BRIEF),
    Attribute(BRICK_CUDA_BLOCK_Z, "int", "{thread}", _KERNEL, _BLOCK_BRIEF),
    Attribute(BRICK_CUDA_CLUSTER_X, "int", "{block}", _KERNEL, _CLUSTER_BRIEF),
    Attribute(BRICK_CUDA_CLUSTER_Y, "int", "{block}", _KERNEL, _CLUSTER_BRIEF),
    Attribute(BRICK_CUDA_CLUSTER_Z, "int", "{block}", _KERNEL, _CLUSTER_BRIEF),
    Attribute(BRICK_CUDA_SHARED_MEMORY_DYNAMIC_SIZE, "int", "By", _KERNEL, "Shared memory asked for at launch."),
    Attribute(BRICK_CUDA_SHARED_MEMORY_STATIC_SIZE, "int", "By", _KERNEL, "Shared memory that the kernel declares."),
    Attribute(BRICK_CUDA_REGISTER_COUNT, "int", "{register}", _KERNEL, "Registers each thread holds."),
    Attribute(BRICK_CUDA_OCCUPANCY, "double", "1", _KERNEL, "Theoretical share of a full multiprocessor."),
    Attribute(BRICK_CUDA_STREAM_ID, "int", "", _KERNEL, "Ordinal that we gave the stream; never its handle."),
    Attribute(BRICK_CUDA_DEVICE_INDEX, "int", "", ("step", "kernel", "metric"), _DEVICE_BRIEF),
    Attribute(BRICK_CUDA_GRAPH_CAPTURED, "boolean", "", ("brick", "kernel", "transfer"), _CAPTURED_BRIEF),
    Attribute(BRICK_CUDA_GRAPH_REPLAY, "boolean", "", _BRICK, _REPLAY_BRIEF),
    Attribute(HW_ID, "string", "", ("step", "metric", "resource"), _HW_ID_BRIEF),
    Attribute(HW_NAME, "string", "", ("step", "resource"), "Product name of the GPU."),
    Attribute(HW_VENDOR, "string", "", ("step", "resource"), "Maker of the GPU."),
    Attribute(ERROR_TYPE, "string", "", _OWN_SPANS, "Class of the exception that ended it."),
    Attribute(CODE_FUNCTION_NAME, "string", "", _BRICK, "Qualified name of the function that is the brick."),
    Attribute(CODE_FILE_PATH, "string", "", _BRICK, "Source file of that function."),
    Attribute(CODE_LINE_NUMBER, "int", "", _BRICK, "Line of the source file where it begins."),
    Attribute(THREAD_ID, "int", "", _STEP, "Identifier of the thread that ran the step."),
    Attribute(THREAD_NAME, "string", "", _STEP, "Name of the thread that ran the step."),
)

BRICK_DURATION_BUCKETS_S: Final[tuple[float, ...]] = (
    *(1e-6, 2e-6, 5e-6),
    *(1e-5, 2e-5, 5e-5),
    *(1e-4, 2e-4, 5e-4),
    *(1e-3, 2e-3, 5e-3),
    *(1e-2, 2e-2, 5e-2),
    *(0.1, 0.2, 0.5, 1.0),
)
"""Upper boundaries for bricks and kernels, in seconds."""

STEP_DURATION_BUCKETS_S: Final[tuple[float, ...]] = (
    *(5e-4, 1e-3, 2e-3, 5e-3),
    *(1e-2, 2e-2, 5e-2),
    *(0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0),
)
"""Upper boundaries for steps, in seconds."""

_BRICK_LABELS: Final = (BRICK_NAME, BRICK_CATEGORY, BRICK_PHASE)
_KERNEL_LABELS: Final = (BRICK_NAME, BRICK_CUDA_DEVICE_INDEX)

METRIC_BRICK_STEP_DURATION: Final = Metric(
    "brick.step.duration",
    "histogram",
    "s",
    "Time of whole steps.",
    (BRICK_PHASE,),
    STEP_DURATION_BUCKETS_S,
)
METRIC_BRICK_DURATION: Final = Metric(
    "brick.duration",
    "histogram",
    "s",
    "Time of single bricks, nested bricks included.",
    _BRICK_LABELS,
    BRICK_DURATION_BUCKETS_S,
)
METRIC_BRICK_TIME: Final = Metric(
    "brick.time", "counter", "s", "Time spent in bricks, nested bricks included.", _BRICK_LABELS
)
METRIC_BRICK_CALLS: Final = Metric("brick.calls", "counter", "{call}", "Bricks that ended.", _BRICK_LABELS)
METRIC_BRICK_ELEMENTS: Final = Metric(
    "brick.elements", "counter", "{element}", "Elements worked on by bricks.", (BRICK_NAME, BRICK_PHASE)
)
METRIC_BRICK_IO: Final = Metric(
    "brick.io",
    "counter",
    "By",
    "Bytes read and written by bricks.",
    (BRICK_NAME, BRICK_PHASE, BRICK_IO_DIRECTION),
)
METRIC_BRICK_TOKENS: Final = Metric("brick.tokens", "counter", "{token}", "Tokens computed by steps.", (BRICK_PHASE,))
METRIC_BRICK_BUDGET_LIMIT: Final = Metric(
    "brick.budget.limit", "gauge", "s", "Longest time the user allows a brick.", (BRICK_NAME,)
)
METRIC_BRICK_BUDGET_VIOLATIONS: Final = Metric(
    "brick.budget.violations",
    "counter",
    "{violation}",
    "Bricks that took longer than their budget.",
    (BRICK_NAME, BRICK_PHASE),
)
METRIC_BRICK_CUDA_KERNEL_DURATION: Final = Metric(
    "brick.cuda.kernel.duration",
    "histogram",
    "s",
    "Device time of single kernels.",
    _KERNEL_LABELS,
    BRICK_DURATION_BUCKETS_S,
    opt_in_attributes=(BRICK_CUDA_KERNEL_NAME,),
)
METRIC_BRICK_CUDA_KERNEL_LAUNCHES: Final = Metric(
    "brick.cuda.kernel.launches", "counter", "{launch}", "Kernel launches seen.", _KERNEL_LABELS
)
METRIC_BRICK_CUDA_MEMORY_BANDWIDTH_UTILIZATION: Final = Metric(
    "brick.cuda.memory.bandwidth.utilization",
    "gauge",
    "1",
    "Achieved share of the device's peak memory bandwidth.",
    (BRICK_NAME, HW_ID),
)
METRIC_BRICK_FINALIZE_DURATION: Final = Metric(
    "brick.finalize.duration",
    "histogram",
    "s",
    "Time from the end of a step until its rows were counted.",
    (),
    BRICK_DURATION_BUCKETS_S,
)
METRIC_BRICK_RECORDS_DROPPED: Final = Metric(
    "brick.records.dropped", "counter", "{record}", "Records lost before export.", (BRICK_DROP_REASON,)
)

METRICS: Final[tuple[Metric, ...]] = (
    METRIC_BRICK_STEP_DURATION,
    METRIC_BRICK_DURATION,
    METRIC_BRICK_TIME,
    METRIC_BRICK_CALLS,
    METRIC_BRICK_ELEMENTS,
    METRIC_BRICK_IO,
    METRIC_BRICK_TOKENS,
    METRIC_BRICK_BUDGET_LIMIT,
    METRIC_BRICK_BUDGET_VIOLATIONS,
    METRIC_BRICK_CUDA_KERNEL_DURATION,
    METRIC_BRICK_CUDA_KERNEL_LAUNCHES,
    METRIC_BRICK_CUDA_MEMORY_BANDWIDTH_UTILIZATION,
    METRIC_BRICK_FINALIZE_DURATION,
    METRIC_BRICK_RECORDS_DROPPED,
)
