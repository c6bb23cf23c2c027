"""A small decoder on an NVIDIA GPU, its kernels compiled at run time: device times of every brick and every kernel.

python examples/cuda_decoder.py [--tokens 16] [--no-check]

Needs a GPU with its driver, and `pip install 'otel-brick[cuda]' nvidia-cuda-nvrtc`, of the driver's CUDA version or
older. The model has random weights. What the kernels compute is compared with the same model in numpy.
"""

import argparse
import ctypes
import sys

import numpy as np
from cuda.bindings import driver, nvrtc
from cuda.core import (
    Buffer,
    Device,
    Kernel,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Program,
    ProgramOptions,
    Stream,
    launch,
)

from otel_brick import BrickId, BrickProfiler
from otel_brick.instrumentation.cuda_core import CudaCoreInstrumentor
from otel_brick.testing import InMemoryTraces, SpanNode

LAYERS, HIDDEN, HEADS, FFN, VOCAB, CONTEXT = 4, 512, 8, 1408, 2048, 128
HEAD = HIDDEN // HEADS
BLOCK = 128
EPSILON, ROPE_BASE = np.float32(1e-6), np.float32(10_000)

SOURCE = r"""
// Every kernel runs in blocks of BLOCK threads.
template <typename Combine> __device__ float over_block(float value, Combine combine)
{
    __shared__ float partial[BLOCK];
    partial[threadIdx.x] = value;
    __syncthreads();
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + half]);
        __syncthreads();
    }
    float all = partial[0];
    __syncthreads();
    return all;
}
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };

extern "C" __global__ void embed(const float *table, const int *token, float *x, int hidden)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < hidden) x[i] = table[(size_t)*token * hidden + i];
}

extern "C" __global__ void rms_norm(const float *x, const float *weight, float *out, int n, float epsilon)
{
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += BLOCK) squares += x[i] * x[i];
    float scale = rsqrtf(over_block(squares, Sum()) / n + epsilon);
    for (int i = threadIdx.x; i < n; i += BLOCK) out[i] = x[i] * scale * weight[i];
}

// One block for each row of the matrix.
extern "C" __global__ void gemv(const float *matrix, const float *x, float *out, int columns)
{
    const float *row = matrix + (size_t)blockIdx.x * columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += BLOCK) sum += row[i] * x[i];
    sum = over_block(sum, Sum());
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Turns q and k by the angle of their position; one block for each head, which has up to 2 * BLOCK values.
extern "C" __global__ void rope(float *q, float *k, int position, int size, float base)
{
    int half = size / 2, i = threadIdx.x;
    if (i >= half) return;
    float angle = position * powf(base, -2.0f * i / size), sine = sinf(angle), cosine = cosf(angle);
    float *both[2] = {q + blockIdx.x * size, k + blockIdx.x * size};
    for (float *head : both) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

// One block for each head; scores has a row of `context` values for each.
extern "C" __global__ void attention_scores(
    const float *q, const float *keys, float *scores, int length, int context, int size)
{
    const float *query = q + blockIdx.x * size;
    for (int t = threadIdx.x; t < length; t += BLOCK) {
        const float *key = keys + (size_t)t * gridDim.x * size + blockIdx.x * size;
        float dot = 0.0f;
        for (int i = 0; i < size; ++i) dot += query[i] * key[i];
        scores[blockIdx.x * context + t] = dot * rsqrtf(size);
    }
}

extern "C" __global__ void softmax(float *scores, int length, int context)
{
    float *row = scores + blockIdx.x * context, most = row[0], sum = 0.0f;
    for (int t = threadIdx.x; t < length; t += BLOCK) most = fmaxf(most, row[t]);
    most = over_block(most, Max());
    for (int t = threadIdx.x; t < length; t += BLOCK) sum += row[t] = expf(row[t] - most);
    sum = over_block(sum, Sum());
    for (int t = threadIdx.x; t < length; t += BLOCK) row[t] /= sum;
}

extern "C" __global__ void attention_output(
    const float *weights, const float *values, float *out, int length, int context, int size)
{
    for (int i = threadIdx.x; i < size; i += BLOCK) {
        float sum = 0.0f;
        for (int t = 0; t < length; ++t)
            sum += weights[blockIdx.x * context + t] * values[(size_t)t * gridDim.x * size + blockIdx.x * size + i];
        out[blockIdx.x * size + i] = sum;
    }
}

extern "C" __global__ void swiglu(const float *gate, const float *up, float *out, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

extern "C" __global__ void add(float *x, const float *y, int n)
{
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) x[i] += y[i];
}

extern "C" __global__ void argmax(const float *logits, int *token, int n)
{
    float most = logits[0];
    for (int i = threadIdx.x; i < n; i += BLOCK) most = fmaxf(most, logits[i]);
    most = over_block(most, Max());
    for (int i = threadIdx.x; i < n; i += BLOCK)
        if (logits[i] == most) *token = i;
}
"""
KERNELS = (
    *("embed", "rms_norm", "gemv", "rope", "attention_scores", "softmax"),
    *("attention_output", "swiglu", "add", "argmax"),
)


def compile_kernels(device: Device) -> dict[str, Kernel]:
    """Compile the kernels for this device."""
    # Spans name the PTX by its hash. A driver older than NVRTC can not read its PTX, but the machine code.
    _, *written = nvrtc.nvrtcVersion()
    _, read = driver.cuDriverGetVersion()
    kind = "ptx" if written[0] * 1000 + written[1] * 10 <= read else "cubin"
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}", define_macro=("BLOCK", str(BLOCK)))
    code = Program(SOURCE, "c++", options).compile(kind)
    return {name: code.get_kernel(name) for name in KERNELS}


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of the model, by name; those of layer 3 begin with `3.`."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))

    weights = {"embedding": matrix(VOCAB, HIDDEN) * 20, "norm": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        for name in ("query", "key", "value", "output"):
            weights[f"{layer}.{name}"] = matrix(HIDDEN, HIDDEN)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            weights[f"{layer}.{name}"] = matrix(*shape)
        for name in ("norm1", "norm2"):
            weights[f"{layer}.{name}"] = 1 + random.standard_normal(HIDDEN, dtype=np.float32) / 10
    weights["head"] = matrix(VOCAB, HIDDEN)
    return weights


class CudaDecoder:
    """The model on the GPU: every call queues kernels and returns, until the token is read."""

    def __init__(self, device: Device, stream: Stream, profiler: BrickProfiler, weights: dict[str, np.ndarray]) -> None:
        self._stream = stream
        self._profiler = profiler
        self._kernels = compile_kernels(device)
        self._pinned = LegacyPinnedMemoryResource()
        self._weights = {name: self._upload(device, array) for name, array in weights.items()}
        sizes = {name: HIDDEN for name in ("x", "normed", "query", "attended", "projected")}
        sizes |= {"scores": HEADS * CONTEXT, "gate": FFN, "up": FFN, "active": FFN, "logits": VOCAB, "token": 1}
        for layer in range(LAYERS):
            sizes |= {f"{layer}.keys": CONTEXT * HIDDEN, f"{layer}.values": CONTEXT * HIDDEN}
        self._memory = {name: device.allocate(4 * size, stream=stream) for name, size in sizes.items()}

        brick = profiler.define
        self._embedding = brick(BrickId.Embedding, elements=HIDDEN)
        self._norm = brick(BrickId.RmsNorm, elements=HIDDEN)
        self._qkv = brick(BrickId.QkvProjection, elements=3 * HIDDEN, bytes_read=12 * HIDDEN * HIDDEN)
        self._rope = brick(BrickId.RopeEmbedding, elements=2 * HIDDEN)
        self._score = brick(BrickId.AttentionScore)
        self._softmax = brick(BrickId.AttentionSoftmax)
        self._attention = brick(BrickId.AttentionOutput, elements=HIDDEN)
        self._projection = brick(BrickId.OutputProjection, elements=HIDDEN, bytes_read=4 * HIDDEN * HIDDEN)
        self._residual = brick("Residual", elements=HIDDEN)
        self._gate = brick(BrickId.GateProjection, elements=FFN, bytes_read=4 * FFN * HIDDEN)
        self._up = brick(BrickId.UpProjection, elements=FFN, bytes_read=4 * FFN * HIDDEN)
        self._activation = brick(BrickId.Activation, elements=FFN)
        self._down = brick(BrickId.DownProjection, elements=HIDDEN, bytes_read=4 * FFN * HIDDEN)
        self._head = brick(BrickId.LmHead, elements=VOCAB, bytes_read=4 * VOCAB * HIDDEN)
        self._sampling = brick(BrickId.Sampling, elements=VOCAB)

    def _host(self, array: np.ndarray) -> Buffer:
        """A copy of an array in memory that the GPU can read."""
        buffer = self._pinned.allocate(array.nbytes)
        ctypes.memmove(int(buffer.handle), np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return buffer

    def _upload(self, device: Device, array: np.ndarray) -> Buffer:
        buffer = device.allocate(array.nbytes, stream=self._stream)
        host = self._host(array)
        buffer.copy_from(host, stream=self._stream)
        self._stream.sync()
        host.close()
        return buffer

    def _download(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        device = self._memory[name]
        host = self._pinned.allocate(device.size)
        device.copy_to(host, stream=self._stream)
        self._stream.sync()
        array = np.from_dlpack(host).view(dtype).copy()
        host.close()
        return array

    def _launch(self, name: str, blocks: int, *arguments: object) -> None:
        launch(self._stream, LaunchConfig(grid=blocks, block=BLOCK), self._kernels[name], *arguments)

    def _gemv(self, weight: str, x: Buffer, out: Buffer | int, rows: int, columns: int) -> None:
        self._launch("gemv", rows, self._weights[weight], x, out, np.int32(columns))

    def feed(self, token: int) -> None:
        """Give the token that the next step begins with."""
        host = self._host(np.array([token], np.int32))
        self._memory["token"].copy_from(host, stream=self._stream)
        self._stream.sync()
        host.close()

    def step(self, position: int) -> int:
        """Read the token at a position, and return the most probable one after it."""
        m, hidden = self._memory, np.int32(HIDDEN)
        with self._embedding:
            table, blocks = self._weights["embedding"], -(-HIDDEN // BLOCK)
            self._launch("embed", blocks, table, m["token"], m["x"], hidden)
        for layer in range(LAYERS):
            with self._profiler.layer(layer, type="decoder"):
                self._layer(layer, position)
        with self._norm:
            self._launch("rms_norm", 1, m["x"], self._weights["norm"], m["normed"], hidden, EPSILON)
        with self._head:
            self._gemv("head", m["normed"], m["logits"], VOCAB, HIDDEN)
        with self._sampling:
            self._launch("argmax", 1, m["logits"], m["token"], np.int32(VOCAB))
        return int(self._download("token", np.int32)[0])

    def _layer(self, layer: int, position: int) -> None:
        m, w = self._memory, self._weights
        hidden, ffn, head, context = np.int32(HIDDEN), np.int32(FFN), np.int32(HEAD), np.int32(CONTEXT)
        length = np.int32(position + 1)
        blocks = -(-HIDDEN // BLOCK)
        keys, values = m[f"{layer}.keys"], m[f"{layer}.values"]
        key, value = (int(cache.handle) + 4 * HIDDEN * position for cache in (keys, values))
        with self._norm:
            self._launch("rms_norm", 1, m["x"], w[f"{layer}.norm1"], m["normed"], hidden, EPSILON)
        with self._qkv:
            self._gemv(f"{layer}.query", m["normed"], m["query"], HIDDEN, HIDDEN)
            self._gemv(f"{layer}.key", m["normed"], key, HIDDEN, HIDDEN)
            self._gemv(f"{layer}.value", m["normed"], value, HIDDEN, HIDDEN)
        with self._rope:
            self._launch("rope", HEADS, m["query"], key, np.int32(position), head, ROPE_BASE)
        with self._score:
            self._launch("attention_scores", HEADS, m["query"], keys, m["scores"], length, context, head)
        with self._softmax:
            self._launch("softmax", HEADS, m["scores"], length, context)
        with self._attention:
            self._launch("attention_output", HEADS, m["scores"], values, m["attended"], length, context, head)
        with self._projection:
            self._gemv(f"{layer}.output", m["attended"], m["projected"], HIDDEN, HIDDEN)
        with self._residual:
            self._launch("add", blocks, m["x"], m["projected"], hidden)
        with self._norm:
            self._launch("rms_norm", 1, m["x"], w[f"{layer}.norm2"], m["normed"], hidden, EPSILON)
        with self._gate:
            self._gemv(f"{layer}.gate", m["normed"], m["gate"], FFN, HIDDEN)
        with self._up:
            self._gemv(f"{layer}.up", m["normed"], m["up"], FFN, HIDDEN)
        with self._activation:
            self._launch("swiglu", -(-FFN // BLOCK), m["gate"], m["up"], m["active"], ffn)
        with self._down:
            self._gemv(f"{layer}.down", m["active"], m["projected"], HIDDEN, FFN)
        with self._residual:
            self._launch("add", blocks, m["x"], m["projected"], hidden)

    def logits(self) -> np.ndarray:
        """The logits of the last step."""
        return self._download("logits", np.float32)


class NumpyDecoder:
    """The same model in numpy."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self._weights = weights
        self._keys = np.zeros((LAYERS, CONTEXT, HEADS, HEAD), np.float32)
        self._values = np.zeros_like(self._keys)

    def logits(self, token: int, position: int) -> np.ndarray:
        """The logits after the token at this position."""
        x = self._weights["embedding"][token].copy()
        for layer in range(LAYERS):
            query, key, value, output, gate, up, down, norm1, norm2 = (
                self._weights[f"{layer}.{name}"]
                for name in ("query", "key", "value", "output", "gate", "up", "down", "norm1", "norm2")
            )
            normed = rms_norm(x, norm1)
            self._keys[layer, position] = rope(key @ normed, position)
            self._values[layer, position] = (value @ normed).reshape(HEADS, HEAD)
            keys, values = self._keys[layer, : position + 1], self._values[layer, : position + 1]
            scores = np.einsum("hd,thd->ht", rope(query @ normed, position), keys) / np.sqrt(HEAD)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            x = x + output @ np.einsum("ht,thd->hd", weights, values).ravel()
            normed = rms_norm(x, norm2)
            gated = gate @ normed
            x = x + down @ (gated / (1 + np.exp(-gated)) * (up @ normed))
        return self._weights["head"] @ rms_norm(x, self._weights["norm"])


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + EPSILON) * weight


def rope(x: np.ndarray, position: int) -> np.ndarray:
    a, b = x.reshape(HEADS, 2, HEAD // 2).transpose(1, 0, 2)
    angle = position * ROPE_BASE ** (-2 * np.arange(HEAD // 2, dtype=np.float32) / HEAD)
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), axis=1)


def check(tokens: list[int], logits: np.ndarray, weights: dict[str, np.ndarray]) -> None:
    """Compare the last logits of the GPU with those of numpy."""
    model = NumpyDecoder(weights)
    for position, token in enumerate(tokens[:-1]):
        expected = model.logits(token, position)
    off = float(np.abs(logits - expected).max() / np.abs(expected).max())
    if not off < 1e-3:
        sys.exit(f"the kernels are wrong: the last logits differ from numpy's by {off:.2g} of the largest one")
    print(f"the last logits are those of numpy, up to {off:.2g} of the largest one")


def print_tree(node: SpanNode, depth: int = 0) -> None:
    """Print a span and what is below it with their durations, of kernels with registers too."""
    registers = node.attributes.get("brick.cuda.register.count")
    detail = "" if registers is None else f"   {registers} registers"
    print(f"{'  ' * depth + node.name:<32}{node.duration_ns / 1000:>10.1f} us{detail}")
    for child in node.children:
        print_tree(child, depth + 1)


def open_device() -> Device:
    """The first GPU, or the end of the program with a message."""
    try:
        device = Device(0)
        device.set_current()
        nvrtc.nvrtcVersion()
    except Exception as error:
        if "nvrtc" in str(error).lower():
            sys.exit("the compiler of kernels, NVRTC, is not installed: pip install nvidia-cuda-nvrtc")
        sys.exit(
            f"this example needs an NVIDIA GPU and its driver ({type(error).__name__}: {str(error).splitlines()[0]})"
        )
    return device


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16, help=f"up to {CONTEXT} (default: 16)")
    parser.add_argument("--no-check", action="store_true", help="do not compare with numpy")
    options = parser.parse_args(arguments)
    if not 1 <= options.tokens <= CONTEXT:
        parser.error(f"--tokens must be from 1 to {CONTEXT}")

    device = open_device()
    stream = device.create_stream()
    traces = InMemoryTraces()
    profiler = BrickProfiler(stream=stream, kernel_events="all", tracer_provider=traces.provider, detail="all")
    CudaCoreInstrumentor().instrument(profiler=profiler)
    weights = random_weights()
    model = CudaDecoder(device, stream, profiler, weights)

    # The first run loads every kernel; the profiler is off and does not see it.
    model.feed(1)
    model.step(0)

    profiler.enable()
    tokens = [1]
    model.feed(1)
    for position in range(options.tokens):
        with profiler.step(phase="decode", tokens=1):
            tokens.append(model.step(position))
        # Reading the token has waited for the GPU, so this does not. Without it a worker does the same, a moment later.
        profiler.finalize()

    print(f"{device.name}: token {' '.join(map(str, tokens))}\n")
    if not options.no_check:
        check(tokens, model.logits(), weights)
    print(profiler.summary())
    profiler.flush()
    print("\nThe last step:")
    print_tree(traces.trees()[-1])
    profiler.shutdown()
    CudaCoreInstrumentor().uninstrument()


if __name__ == "__main__":
    main()
