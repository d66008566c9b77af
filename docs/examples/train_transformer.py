"""Train a small language model with arrays alone: a causal transformer whose gradients are all written by hand.

The model reads bytes and predicts the next one; the text is the language reference that ships with Python (`pydoc_data.topics`, all topics
joined, about half a megabyte). Arrays are CuPy's where numba_flash finds a GPU, NumPy's elsewhere. With tokens t and targets u,

    x = token[t] + position                                                              (1)
    q, k, v = LayerNorm(x) W_qkv, for every head                                         (2)
    x <- x + softmax(q k^T / sqrt(D), no look ahead) v W_out                             (3)
    x <- x + GELU(LayerNorm(x) W_up) W_down                                              (4)
    loss = mean of -log softmax(LayerNorm(x) W_output)[u]                                (5)

where (2) to (4) are repeated in every layer. For (3), `--attention flash` calls numba_flash on views of the projected array, `standard`
stores the N x N matrix of every head. `--scaling` measures steps of both at growing lengths, until the matrices do not fit into memory.

`--dtype` is that of matrix products and attention; x, weights, gradients and Adam's moments are float32 (float64 with float64). NumPy and
CuPy do not multiply bfloat16 matrices everywhere, so with bfloat16 only flash attention runs in it and matrix products run in float32.

    python train_transformer.py [--steps 200] [--length 128] [--dtype float32] [--attention flash] [--figure loss.png]
    python train_transformer.py --scaling [--dtype float32] [--lengths 1024,2048,4096] [--json FILE]
"""

import argparse
import json
import time
import tracemalloc
from pydoc_data.topics import topics

import numpy as np

import numba_flash

some = np.zeros((1, 1), np.float32)
if numba_flash.plan(some, some, some).backend == "cpu":
    xp = np
else:
    import cupy as xp

BYTES = 256
LEARNING_RATE, WARM_UP = 2e-3, 20  # the rate grows linearly in the first steps
BETA1, BETA2 = 0.9, 0.99  # of Adam (Kingma and Ba, arXiv:1412.6980)
LOSS_SCALE = 1024.0  # gradients are this much larger on their way back, or float16 would round the small ones to 0
SLOPE, CUBIC = (2 / np.pi) ** 0.5, 0.044715  # of GELU, approximated by tanh (Hendrycks and Gimpel, arXiv:1606.08415)


def one_hot(indices, dtype):
    """Rows of the unit matrix: (..., BYTES)."""
    return (indices[..., None] == xp.arange(BYTES)).astype(dtype)


def embed(p, tokens):
    return p["token"][tokens] + p["position"], tokens


def embed_backward(d_output, tokens):
    hot = one_hot(tokens, d_output.dtype).reshape(-1, BYTES)
    return {"token": hot.T @ d_output.reshape(len(hot), -1), "position": d_output.sum(0)}


def linear(x, w, dtype):
    """x @ w in the dtype of matrix products."""
    dtype = "float32" if dtype == "bfloat16" else dtype
    rows, w = x.reshape(-1, len(w)).astype(dtype, copy=False), w.astype(dtype, copy=False)
    return (rows @ w).reshape(*x.shape[:-1], -1), (rows, w)


def linear_backward(d_output, cache):
    rows, w = cache
    d_rows = d_output.reshape(len(rows), -1).astype(rows.dtype, copy=False)
    return (d_rows @ w.T).reshape(*d_output.shape[:-1], -1), rows.T @ d_rows


def layer_norm(x, gain, shift):
    centred = x - x.mean(-1, keepdims=True)
    scale = 1 / xp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    y = centred * scale
    return y * gain + shift, (y, scale, gain)


def layer_norm_backward(d_output, cache):
    y, scale, gain = cache
    d_output = d_output.astype(y.dtype, copy=False)
    d_y = d_output * gain
    d_x = scale * (d_y - d_y.mean(-1, keepdims=True) - y * (d_y * y).mean(-1, keepdims=True))
    return d_x, (d_output * y).sum((0, 1)), d_output.sum((0, 1))


def flash_attention(q, k, v):
    o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
    return o, (q, k, v, o, lse)


def flash_attention_backward(d_output, cache, d_qkv):
    """Writes the gradients of q, k and v into the three arrays `d_qkv`."""
    numba_flash.backward(d_output, *cache, causal=True, out=tuple(d_qkv))


def standard_attention(q, k, v):
    """The textbook: one array operation after the other on the N x N matrix of every head, in place where it can be."""
    n, scaled = q.shape[2], q * q.shape[3] ** -0.5
    p = scaled @ k.swapaxes(2, 3)
    p = xp.where(xp.tri(n, dtype=bool), p, p.dtype.type(-np.inf))
    p -= p.max(-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(-1, keepdims=True)
    o = p @ v
    return o, (scaled, k, v, o, p)


def standard_attention_backward(d_output, cache, d_qkv):
    (scaled, k, v, o, p), (d_q, d_k, d_v) = cache, d_qkv
    transposed_product = lambda matrix, x: (x.swapaxes(2, 3) @ matrix).swapaxes(2, 3)  # matrix^T x; CuPy would copy matrix^T
    d_v[...] = transposed_product(p, d_output)
    d_s = d_output @ v.swapaxes(2, 3)
    d_s -= (d_output * o).sum(-1, keepdims=True)
    d_s *= p
    d_q[...] = (d_s @ k) * k.shape[3] ** -0.5
    d_k[...] = transposed_product(d_s, scaled)


ATTENTIONS = {"flash": (flash_attention, flash_attention_backward), "standard": (standard_attention, standard_attention_backward)}


def split_heads(x, parts, heads):
    """View (parts, batch, heads, length, head_dim) of (batch, length, parts * heads * head_dim)."""
    return x.reshape(*x.shape[:2], parts, heads, -1).transpose(2, 0, 3, 1, 4)


def self_attention(p, x, heads, attention, dtype):
    forward, backward = ATTENTIONS[attention]
    qkv, qkv_cache = linear(x, p["qkv"], dtype)
    if attention == "flash":
        qkv = qkv.astype(dtype, copy=False)
    o, attention_cache = forward(*split_heads(qkv, 3, heads))
    joined = o.swapaxes(1, 2).reshape(x.shape)  # o lies in memory like q, heads last: no copy
    output, out_cache = linear(joined, p["out"], dtype)
    return output, (heads, backward, qkv, qkv_cache, attention_cache, out_cache)


def self_attention_backward(d_output, cache):
    heads, backward, qkv, qkv_cache, attention_cache, out_cache = cache
    d_joined, d_w_out = linear_backward(d_output, out_cache)
    (d_o,) = split_heads(d_joined.astype(qkv.dtype, copy=False), 1, heads)
    d_qkv = xp.empty_like(qkv)
    backward(d_o, attention_cache, split_heads(d_qkv, 3, heads))
    d_x, d_w_qkv = linear_backward(d_qkv, qkv_cache)
    return d_x, d_w_qkv, d_w_out


def mlp(p, x, dtype):
    h, up_cache = linear(x, p["up"], dtype)
    t = xp.tanh(SLOPE * h * (1 + CUBIC * h * h))
    output, down_cache = linear(0.5 * h * (1 + t), p["down"], dtype)
    return output, (up_cache, h, t, down_cache)


def mlp_backward(d_output, cache):
    up_cache, h, t, down_cache = cache
    d_gelu, d_w_down = linear_backward(d_output, down_cache)
    d_h = d_gelu * (0.5 * (1 + t) + 0.5 * h * (1 - t * t) * SLOPE * (1 + 3 * CUBIC * h * h))
    d_x, d_w_up = linear_backward(d_h, up_cache)
    return d_x, d_w_up, d_w_down


def block(p, x, heads, attention, dtype):
    """One layer: (2), (3) and (4)."""
    y, norm1_cache = layer_norm(x, p["gain1"], p["shift1"])
    y, attention_cache = self_attention(p, y, heads, attention, dtype)
    x = x + y
    y, norm2_cache = layer_norm(x, p["gain2"], p["shift2"])
    y, mlp_cache = mlp(p, y, dtype)
    return x + y, (norm1_cache, attention_cache, norm2_cache, mlp_cache)


def block_backward(d_output, cache):
    norm1_cache, attention_cache, norm2_cache, mlp_cache = cache
    g = {}
    d_y, g["up"], g["down"] = mlp_backward(d_output, mlp_cache)
    d_y, g["gain2"], g["shift2"] = layer_norm_backward(d_y, norm2_cache)
    d_x = d_output + d_y
    d_y, g["qkv"], g["out"] = self_attention_backward(d_x, attention_cache)
    d_y, g["gain1"], g["shift1"] = layer_norm_backward(d_y, norm1_cache)
    return d_x + d_y, g


def cross_entropy(logits, targets):
    """Mean loss, and LOSS_SCALE times its gradient."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
    hot = one_hot(targets, logits.dtype)
    return -(hot * log_p).sum() / targets.size, (xp.exp(log_p) - hot) * (LOSS_SCALE / targets.size)


def loss_and_gradients(parameters, tokens, targets, heads, attention, dtype):
    """Mean loss (5), and its gradient in the form of `parameters`; tokens and targets are (batch, length)."""
    head, caches, g = parameters["head"], {}, {"head": {}}
    layers = [name for name in parameters if name.startswith("block")]
    x, embedding_cache = embed(parameters["embedding"], tokens)
    for name in layers:
        x, caches[name] = block(parameters[name], x, heads, attention, dtype)
    y, norm_cache = layer_norm(x, head["gain"], head["shift"])
    logits, output_cache = linear(y, head["output"], dtype)
    loss, d_logits = cross_entropy(logits.astype(x.dtype, copy=False), targets)

    d_y, g["head"]["output"] = linear_backward(d_logits, output_cache)
    d_x, g["head"]["gain"], g["head"]["shift"] = layer_norm_backward(d_y, norm_cache)
    for name in reversed(layers):
        d_x, g[name] = block_backward(d_x, caches.pop(name))
    g["embedding"] = embed_backward(d_x, embedding_cache)
    unscaled = lambda d_w: d_w.astype(x.dtype, copy=False) / LOSS_SCALE
    return loss, {layer: {name: unscaled(g[layer][name]) for name in weights} for layer, weights in parameters.items()}


def adam(parameters, gradients, moments, step, share=1.0):
    """Changes the parameters and the moments in place, at a share of the learning rate; `step` counts from 1."""
    rate = share * LEARNING_RATE * min(1, step / WARM_UP)
    for layer, weights in parameters.items():
        for name, w in weights.items():
            g, (m, v) = gradients[layer][name], moments[layer][name]
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            w -= rate / (1 - BETA1**step) * m / (xp.sqrt(v / (1 - BETA2**step)) + 1e-8)


def initial_parameters(rng, options):
    """Drawn by NumPy in float64, so that they are the same on every device, and then rounded."""
    precision = "float64" if options.dtype == "float64" else "float32"
    width, residual = options.width, (2 * options.layers) ** -0.5
    draw = lambda rows, columns, deviation: xp.asarray(rng.normal(0, deviation, (rows, columns)).astype(precision))
    matrix = lambda rows, columns, size=1.0: draw(rows, columns, size * rows**-0.5)
    norm = lambda i="": {f"gain{i}": xp.ones(width, precision), f"shift{i}": xp.zeros(width, precision)}
    attention = lambda: {"qkv": matrix(width, 3 * width), "out": matrix(width, width, residual)}
    perceptron = lambda: {"up": matrix(width, 4 * width), "down": matrix(4 * width, width, residual)}
    embedding = {"token": draw(BYTES, width, 1.0), "position": draw(options.length, width, 0.3)}
    blocks = {f"block{i}": norm(1) | attention() | norm(2) | perceptron() for i in range(options.layers)}
    return {"embedding": embedding, **blocks, "head": norm() | {"output": matrix(width, BYTES, 0.1)}}


class Training:
    """A model, the moments of its gradients, and the text."""

    def __init__(self, options):
        if options.dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  (makes the name known to NumPy)
        self.options, self.rng, self.steps = options, np.random.default_rng(options.seed), 0
        self.text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
        self.parameters = initial_parameters(self.rng, options)
        zeros = lambda w: (xp.zeros_like(w), xp.zeros_like(w))
        self.moments = {layer: {name: zeros(w) for name, w in weights.items()} for layer, weights in self.parameters.items()}

    def step(self):
        """One step on random pieces of the text; the loss before it stays on the GPU, so that nothing waits."""
        o = self.options
        starts = self.rng.integers(len(self.text) - o.length, size=(o.batch, 1))
        pieces = xp.asarray(self.text[starts + np.arange(o.length + 1)].astype(np.int32))
        loss, gradients = loss_and_gradients(self.parameters, pieces[:, :-1], pieces[:, 1:], o.heads, o.attention, o.dtype)
        self.steps += 1
        adam(self.parameters, gradients, self.moments, self.steps)
        return loss


def train(options):
    """Losses of all steps, and tokens per second without the first step, which compiles."""
    training = Training(options)
    losses = [float(training.step())]
    print(f"step {1:5}   loss {losses[0]:6.3f}", flush=True)
    start = time.perf_counter()
    for step in range(2, options.steps + 1):
        losses.append(training.step())
        if step % max(1, options.steps // 10) == 0 or step == options.steps:
            loss = float(losses[-1])  # waits for the GPU
            rate = (step - 1) * options.batch * options.length / (time.perf_counter() - start)
            print(f"step {step:5}   loss {loss:6.3f} {rate:10,.0f} tokens/s", flush=True)
    return [float(loss) for loss in losses], rate


def measure_step(options):
    """Seconds of one step of training, and bytes that it takes on top of parameters and moments."""
    pool = None if xp is np else xp.get_default_memory_pool()
    if pool:
        pool.free_all_blocks()
    training, seconds = Training(options), []
    before = pool and pool.total_bytes()
    for _ in range(4):
        start = time.perf_counter()
        training.step()
        float(training.parameters["head"]["output"][0, 0])  # what changes last: waits for the GPU
        seconds.append(time.perf_counter() - start)
    if pool:
        return min(seconds), pool.total_bytes() - before
    tracemalloc.start()
    training.step()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), memory


def print_scaling(options):
    """A row for every length and attention; all of them as JSON, if a file for that is named."""
    rows = [{"batch": 1, "length": length, "attention": attention} for length in options.lengths for attention in ATTENTIONS]
    print(f"{'length':>8}  {'attention':10}{'s / step':>10}{'tokens/s':>12}{'memory':>13}")
    for row in rows:
        print(f"{row['length']:8}  {row['attention']:10}", end="", flush=True)
        try:
            row["seconds"], row["bytes"] = seconds, memory = measure_step(argparse.Namespace(**vars(options) | row))
            print(f"{seconds:10.4f}{row['length'] / seconds:12,.0f}{memory / 1e6:10,.0f} MB")
        except MemoryError as error:  # CuPy's OutOfMemoryError is one
            print("   out of memory")
            row["reason"] = str(error)
    if options.json:
        about = {name: getattr(options, name) for name in ("layers", "heads", "width", "seed", "dtype")}
        with open(options.json, "w") as file:
            json.dump({"study": "training", "arrays": xp.__name__, **about, "rows": rows}, file, indent=1)


def parse(arguments=None):
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 200, "batch": 8, "length": 128, "layers": 2, "heads": 4, "width": 128, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="flash")
    parser.add_argument("--figure", help="where to save the curve of the loss")
    parser.add_argument("--json", help="where to write what --scaling measures")
    parser.add_argument("--scaling", action="store_true", help="measure single steps of both attentions instead of training")
    lengths, integers = [2**i for i in range(10, 13 if xp is np else 17)], lambda text: [int(n) for n in text.split(",")]
    parser.add_argument("--lengths", type=integers, default=lengths, help="for --scaling, with commas")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.width % options.heads:
        parser.error("--steps must be at least 2 (the first compiles and is not timed), and --width a multiple of --heads")
    return options


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    print(f"{o.layers} layers of {o.heads} heads, width {o.width}; {o.dtype}; arrays of {xp.__name__}")
    if o.scaling:
        return print_scaling(o)
    print(f"{o.batch} x {o.length} bytes per step, {o.attention} attention")
    losses, rate = train(o)
    print(summary := f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {o.steps} steps, {rate:,.0f} tokens/s")
    if o.figure:
        from matplotlib.figure import Figure

        axis = Figure(figsize=(6, 4), layout="constrained").subplots()
        axis.plot(np.arange(1, o.steps + 1), losses)
        axis.set(title=summary, xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
        axis.figure.savefig(o.figure)


if __name__ == "__main__":
    main()
