"""Train a small language model with arrays alone: a causal transformer whose gradients are all written by hand.

The model reads bytes and predicts the next one; the text is the language reference that ships with Python (`pydoc_data.topics`, all topics
joined, about half a megabyte). Arrays are CuPy's where numba_flash finds a GPU, NumPy's elsewhere. With tokens t and targets u,

    x = token[t] + position                                                              (1)
    q, k, v = LayerNorm(x) W_qkv, for every head                                         (2)
    x <- x + softmax(q k^T / sqrt(D), no look ahead) v W_out                             (3)
    x <- x + GELU(LayerNorm(x) W_up) W_down                                              (4)
    loss = mean of -log softmax(LayerNorm(x) W_output)[u]                                (5)

where (2) to (4) are repeated in every layer. For (3), `--attention flash` calls numba_flash.forward and numba_flash.backward on views of the
projected array; `--attention standard` stores the N x N matrix of every head. `--scaling` measures one training step of both at growing
lengths, until the matrix does not fit into memory.

`--dtype` is that of matrix products and attention; x, weights, gradients and Adam's moments are float32 (float64 with float64). NumPy and
CuPy do not multiply bfloat16 matrices everywhere, so with bfloat16 only flash attention runs in it and matrix products run in float32.

    python train_transformer.py [--steps 200] [--length 128] [--dtype float32] [--attention flash] [--figure loss.png]
    python train_transformer.py --scaling [--dtype float32] [--lengths 1024,2048,4096]
"""

import argparse
import time
import tracemalloc
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import numba_flash

some = np.zeros((1, 1), np.float32)
if numba_flash.plan(some, some, some).backend == "cpu":
    xp = np
else:
    import cupy as xp

BYTES = 256
LEARNING_RATE, WARM_UP = 3e-3, 10  # the rate grows linearly in the first steps
BETA1, BETA2 = 0.9, 0.99  # of Adam (Kingma and Ba, arXiv:1412.6980)
LOSS_SCALE = 1024.0  # gradients are this much larger on their way back, or float16 would round the small ones to 0
GELU = (2 / np.pi) ** 0.5, 0.044715  # the approximation by tanh (Hendrycks and Gimpel, arXiv:1606.08415)


def one_hot(indices, dtype):
    """Rows of the unit matrix: (..., BYTES)."""
    return (indices[..., None] == xp.arange(BYTES)).astype(dtype)


def embed(p, tokens):
    return p["token"][tokens] + p["position"][: tokens.shape[1]], (p, tokens)


def embed_backward(d_output, cache):
    p, tokens = cache
    d_position = xp.zeros_like(p["position"])
    d_position[: tokens.shape[1]] = d_output.sum(0)
    hot = one_hot(tokens, d_output.dtype).reshape(-1, BYTES)
    return {"token": hot.T @ d_output.reshape(len(hot), -1), "position": d_position}


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


def gelu(x):
    slope, cubic = GELU
    t = xp.tanh(slope * x * (1 + cubic * x * x))
    return 0.5 * x * (1 + t), (x, t)


def gelu_backward(d_output, cache):
    x, t = cache
    slope, cubic = GELU
    return d_output * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * cubic * x * x))


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
    """Writes the gradients of q, k and v into the three arrays `d_qkv`."""
    scaled, k, v, o, p = cache
    transposed_product = lambda matrix, x: (x.swapaxes(2, 3) @ matrix).swapaxes(2, 3)  # matrix^T x; CuPy would copy matrix^T
    d_q, d_k, d_v = d_qkv
    d_v[...] = transposed_product(p, d_output)
    d_s = d_output @ v.swapaxes(2, 3)
    d_s -= (d_output * o).sum(-1, keepdims=True)
    d_s *= p
    d_q[...] = (d_s @ k) * k.shape[3] ** -0.5
    d_k[...] = transposed_product(d_s, scaled)


ATTENTIONS = {
    "flash": (flash_attention, flash_attention_backward),
    "standard": (standard_attention, standard_attention_backward),
}


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
    h, gelu_cache = gelu(h)
    output, down_cache = linear(h, p["down"], dtype)
    return output, (up_cache, gelu_cache, down_cache)


def mlp_backward(d_output, cache):
    up_cache, gelu_cache, down_cache = cache
    d_h, d_w_down = linear_backward(d_output, down_cache)
    d_x, d_w_up = linear_backward(gelu_backward(d_h, gelu_cache), up_cache)
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


def head(p, x, dtype):
    """Scores of the next byte."""
    y, norm_cache = layer_norm(x, p["gain"], p["shift"])
    logits, output_cache = linear(y, p["output"], dtype)
    return logits, (norm_cache, output_cache)


def head_backward(d_logits, cache):
    norm_cache, output_cache = cache
    g = {}
    d_y, g["output"] = linear_backward(d_logits, output_cache)
    d_x, g["gain"], g["shift"] = layer_norm_backward(d_y, norm_cache)
    return d_x, g


def cross_entropy(logits, targets):
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
    hot = one_hot(targets, logits.dtype)
    return -(hot * log_p).sum() / targets.size, (log_p, hot)


def cross_entropy_backward(d_loss, cache):
    log_p, hot = cache
    return (xp.exp(log_p) - hot) * (d_loss * BYTES / hot.size)


def loss_and_gradients(parameters, tokens, targets, heads, attention, dtype):
    """Mean loss (5), and its gradient in the form of `parameters`; tokens and targets are (batch, length)."""
    caches, d_w, precision = {}, {}, parameters["head"]["output"].dtype
    layers = [name for name in parameters if name.startswith("block")]
    x, caches["embedding"] = embed(parameters["embedding"], tokens)
    for name in layers:
        x, caches[name] = block(parameters[name], x, heads, attention, dtype)
    logits, caches["head"] = head(parameters["head"], x, dtype)
    loss, loss_cache = cross_entropy(logits.astype(precision, copy=False), targets)

    d_logits = cross_entropy_backward(LOSS_SCALE, loss_cache)
    d_x, d_w["head"] = head_backward(d_logits, caches["head"])
    for name in reversed(layers):
        d_x, d_w[name] = block_backward(d_x, caches.pop(name))
    d_w["embedding"] = embed_backward(d_x, caches["embedding"])
    unscaled = lambda g: g.astype(precision, copy=False) / LOSS_SCALE
    return loss, {layer: {name: unscaled(d_w[layer][name]) for name in weights} for layer, weights in parameters.items()}


def adam(parameters, gradients, moments, step):
    """Changes the parameters and the moments in place; `step` counts from 1."""
    rate = LEARNING_RATE * min(1, step / WARM_UP)
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
    draw = lambda rows, columns, size=1.0: xp.asarray((size * rng.normal(size=(rows, columns)) / rows**0.5).astype(precision))
    norm = lambda i="": {f"gain{i}": xp.ones(width, precision), f"shift{i}": xp.zeros(width, precision)}
    attention = lambda: {"qkv": draw(width, 3 * width), "out": draw(width, width, residual)}
    layer = lambda: norm(1) | attention() | norm(2) | {"up": draw(width, 4 * width), "down": draw(4 * width, width, residual)}
    embedding = {"token": draw(BYTES, width), "position": draw(options.length, width)}
    blocks = {f"block{i}": layer() for i in range(options.layers)}
    return {"embedding": embedding, **blocks, "head": norm() | {"output": draw(width, BYTES, 0.1)}}


def initial_moments(parameters):
    zeros = lambda w: (xp.zeros_like(w), xp.zeros_like(w))
    return {layer: {name: zeros(w) for name, w in weights.items()} for layer, weights in parameters.items()}


def read_text():
    """The bytes of Python's language reference."""
    return np.frombuffer("\n".join(topics.values()).encode(), np.uint8)


def random_batch(rng, text, batch, length):
    """Tokens and targets (batch, length): pieces of the text, and the same one byte later."""
    starts = rng.integers(len(text) - length, size=(batch, 1))
    pieces = xp.asarray(text[starts + np.arange(length + 1)].astype(np.int32))
    return pieces[:, :-1], pieces[:, 1:]
