"""Complete distance matrices with AlphaFold's triangle attention, trained with the gradients of this library.

A chain of N residues in space has N^2 distances. Most of them are hidden, those that are given carry noise, and some residues are missing
altogether. Two sides of a triangle bound the third, |d_ik - d_jk| <= d_ij <= d_ik + d_jk, so a hidden pair ij should look at the pairs ik
of all its triangles, and at their third sides jk. That is triangle self-attention (Jumper et al., "Highly accurate protein structure
prediction with AlphaFold", Nature 2021, Supplementary Methods, Algorithm 13). With a vector z_ij for each pair,

    y_ij = LayerNorm(z_ij)                                                               (1)
    q_ij, k_ij, v_ij = linear maps of y_ij, for every head                               (2)
    b_ij = a linear map of y_ij to one number per head                                   (3)
    g_ij = sigmoid(a linear map of y_ij)                                                 (4)
    a_ijk = softmax_k(q_ij . k_ik / sqrt(D) + b_jk)                                      (5)
    o_ij = g_ij * sum_k a_ijk v_ik                                                       (6)
    z_ij <- z_ij + a linear map of o_ij                                                  (7)

Here i ("the starting node") is a batch axis, j counts queries and k keys: q, k and v are views of shape (B, I, H, J, D), and the bias, of
shape (B, 1, H, J, K), is one and the same for all i. Algorithm 14 ("around the ending node") is Algorithm 13 on the transpose of z. The
network is one layer of each: without them no pair would see another, and the best guess would be the mean distance at each separation.

Needs rich; with matplotlib it also draws the picture.

    python triangle_attention.py [--size 24] [--steps 200] [--backend cpu] [--output triangle_attention.png]
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track
from threadpoolctl import threadpool_limits

import numba_flash

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # everything but the picture

CHANNELS, HEADS = 32, 4
BOND, NOISE = 3.8, 1.0  # of neighbours in the chain, and standard deviation of what is given, in ångström
HIDDEN, MISSING = 0.6, 0.1  # shares of pairs and of residues
FAR = 8  # separations along the chain that are told apart
CENTRES, WIDTH = np.arange(1.0, 40.0, 2.5), 2.5  # of the radial functions that encode a distance
UNIT = 3.0  # ångström per unit of the network's output
TRAINING, TEST = 8, 32  # chains


class Chains(NamedTuple):
    """Distance matrices (B, N, N) of some chains; known and used are booleans, present is (B, N)."""

    true: np.ndarray
    given: np.ndarray  # with noise; 0 where not known
    known: np.ndarray
    present: np.ndarray
    used: np.ndarray  # pairs of two residues that are present


def simulate(rng: np.random.Generator, count: int, size: int) -> Chains:
    """Random chains that prefer to go straight on, and what is known of their distances."""
    step = rng.normal(size=(count, size, 3))
    for i in range(1, size):
        step[:, i] += 0.5 * step[:, i - 1]
    x = np.cumsum(BOND * step / np.linalg.norm(step, axis=-1, keepdims=True), axis=1)
    true = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)
    present = rng.random((count, size)) >= MISSING
    used = present[:, :, None] & present[:, None] & ~np.eye(size, dtype=bool)
    symmetric = lambda half: np.triu(half, 1) + np.triu(half, 1).swapaxes(1, 2)
    known = symmetric(rng.random(true.shape) >= HIDDEN) & used
    given = np.where(known, np.abs(true + symmetric(rng.normal(0, NOISE, true.shape))), 0)
    return Chains(true, given, known, present, used)


def typical_distances(size: int) -> np.ndarray:
    """Mean distance (N, N) at each separation along the chain: the best guess without triangles."""
    mean = simulate(np.random.default_rng(7), 500, size).true.mean(0)
    separation = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return np.array([np.diagonal(mean, n).mean() for n in range(size)])[separation]


def features(chains: Chains, dtype) -> np.ndarray:
    """What the network sees of a pair (B, N, N, channels): the distance, if known, and the separation along the chain."""
    n, known = chains.true.shape[-1], chains.known[..., None]
    separation = np.minimum(np.abs(np.subtract.outer(np.arange(n), np.arange(n))), FAR)
    radial = np.exp(-np.square((chains.given[..., None] - CENTRES) / WIDTH)) * known
    return np.concatenate([known, radial, np.broadcast_to(np.eye(FAR + 1)[separation], (*known.shape[:-1], FAR + 1))], -1, dtype=dtype)


def triangle_bounds(chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """Largest and smallest distances that the triangle inequality allows: u = the shortest path, l_ij = max_k (d_ik - u_jk)."""
    upper = np.where(chains.known, chains.given, np.inf)
    for k in range(upper.shape[-1]):
        upper = np.minimum(upper, upper[:, :, k, None] + upper[:, k, None])
    one_side = np.where(chains.known[:, :, None], chains.given[:, :, None] - upper[:, None], 0).max(-1)
    return upper, np.maximum(one_side, one_side.swapaxes(1, 2))


def layer_norm(z):
    """LayerNorm without learned gain and shift."""
    centred = z - z.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5)
    return centred * scale, scale


def layer_norm_backward(dy, y, scale):
    return scale * (dy - dy.mean(-1, keepdims=True) - y * (dy * y).mean(-1, keepdims=True))


def split_heads(x):
    """View (B, I, H, J, D) of (B, I, J, H D)."""
    return x.reshape(*x.shape[:3], HEADS, -1).swapaxes(2, 3)


def join_heads(x):
    return x.swapaxes(2, 3).reshape(*x.shape[:2], x.shape[3], -1)


def weight_gradient(x, dy):
    """Of w in ``y = x @ w``."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def triangle_attention(p, z, mask, backend=None):
    """Algorithm 13; `mask` (B, 1, 1, 1, K) is False for missing residues."""
    y, scale = layer_norm(z)  # (1)
    q, k, v = (split_heads(part) for part in np.split(y @ p["qkv"], 3, axis=-1))  # (2)
    bias = np.moveaxis(y @ p["bias"], 3, 1)[:, None]  # (3)
    gate = 1 / (1 + np.exp(-(y @ p["gate"] + p["gate0"])))  # (4)
    o, lse = numba_flash.forward(q, k, v, bias=bias, mask=mask, return_lse=True, backend=backend)  # (5, 6)
    return z + (gate * join_heads(o)) @ p["out"], (y, scale, q, k, v, bias, gate, o, lse)  # (7)


def triangle_attention_backward(p, dz, mask, saved, backend=None):
    """Gradients of z and of the weights."""
    y, scale, q, k, v, bias, gate, o, lse = saved
    joined, g = join_heads(o), {}
    g["out"] = weight_gradient(gate * joined, dz)
    dgated = dz @ p["out"].T
    dgate = dgated * joined * gate * (1 - gate)
    g["gate"], g["gate0"] = weight_gradient(y, dgate), dgate.sum((0, 1, 2))
    do = split_heads(dgated * gate)
    *dqkv, dbias = numba_flash.backward(do, q, k, v, o, lse, bias=bias, mask=mask, bias_grad=True, backend=backend)
    dqkv, dbias = np.concatenate([join_heads(d) for d in dqkv], axis=-1), np.moveaxis(dbias[:, 0], 1, 3)
    g["qkv"], g["bias"] = weight_gradient(y, dqkv), weight_gradient(y, dbias)
    dy = dqkv @ p["qkv"].T + dbias @ p["bias"].T + dgate @ p["gate"].T
    return dz + layer_norm_backward(dy, y, scale), g


def initial_parameters(rng: np.random.Generator, dtype=np.float32) -> dict[str, dict[str, np.ndarray]]:
    """At first the gates are open (AlphaFold's initialisation) and the result is the guess."""
    c, inputs = CHANNELS, 1 + len(CENTRES) + FAR + 1
    draw = lambda rows, columns, size=1.0: (size * rng.normal(size=(rows, columns)) / rows**0.5).astype(dtype)
    gate = lambda: {"gate": np.zeros((c, c), dtype), "gate0": np.ones(c, dtype)}
    attention = lambda: {"qkv": draw(c, 3 * c), "bias": draw(c, HEADS), **gate(), "out": draw(c, c, 0.1)}
    embed, head = {"w": draw(inputs, c, inputs**0.5 / 2)}, {"w": draw(c, 1, 0.0), "w0": np.zeros(1, dtype)}
    return {"embed": embed, "start": attention(), "end": attention(), "head": head}


def predict(p, chains: Chains, typical, backend=None):
    """Distances (B, N, N): what is given or typical, corrected by the network; and what the gradients need."""
    x, mask = features(chains, p["embed"]["w"].dtype), chains.present[:, None, None, None]
    z, start = triangle_attention(p["start"], x @ p["embed"]["w"], mask, backend)
    z, end = triangle_attention(p["end"], z.swapaxes(1, 2), mask, backend)
    y, scale = layer_norm(z + z.swapaxes(1, 2))  # distances are symmetric
    correction = (y @ p["head"]["w"] + p["head"]["w0"])[..., 0]
    return np.where(chains.known, chains.given, typical) + UNIT * correction, (x, mask, start, end, y, scale)


def loss_and_gradients(p, chains: Chains, typical, backend=None):
    """Mean square error over the pairs that are used, and its gradient in the form of `p`."""
    prediction, (x, mask, start, end, y, scale) = predict(p, chains, typical, backend)
    error, g = np.where(chains.used, prediction - chains.true, 0), {}
    du = (2 * UNIT / chains.used.sum() * error)[..., None].astype(x.dtype)
    g["head"] = {"w": weight_gradient(y, du), "w0": du.sum((0, 1, 2))}
    dz = layer_norm_backward(du @ p["head"]["w"].T, y, scale)
    dz, g["end"] = triangle_attention_backward(p["end"], dz + dz.swapaxes(1, 2), mask, end, backend)
    dz, g["start"] = triangle_attention_backward(p["start"], dz.swapaxes(1, 2), mask, start, backend)
    g["embed"] = {"w": weight_gradient(x, dz)}
    return np.square(error).sum() / chains.used.sum(), g


def train(p, steps: int, size: int, typical, backend=None, report=lambda step, loss: None, progress=lambda steps: steps) -> list[float]:
    """Adam (Kingma and Ba, arXiv:1412.6980) with a warm-up and a cosine, on new chains at every step; changes `p`."""
    rng, losses = np.random.default_rng(1), []
    moments = {(layer, name): (np.zeros_like(w), np.zeros_like(w)) for layer in p for name, w in p[layer].items()}
    for t in progress(range(1, steps + 1)):
        loss, g = loss_and_gradients(p, simulate(rng, TRAINING, size), typical, backend)
        learning_rate = 0.005 * min(1, t / 10) * (1 + np.cos(np.pi * t / steps))
        for (layer, name), (m, v) in moments.items():
            m += 0.1 * (g[layer][name] - m)
            v += 0.01 * (np.square(g[layer][name]) - v)
            p[layer][name] -= learning_rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        losses.append(float(loss))
        report(t, losses[-1])
    return losses


def root_mean_square(distances, chains: Chains, where) -> float:
    return float(np.sqrt(np.square(distances - chains.true)[where].mean()))


def save_figure(path: Path, losses: list[float], chains: Chains, prediction) -> None:
    """Loss, and the matrices of the first chain, grey where nothing is known or wanted."""
    figure = Figure(figsize=(17, 4.2), layout="constrained")
    axes = figure.subplots(1, 4)
    axes[0].plot(np.arange(1, len(losses) + 1), losses)
    axes[0].set(title="loss (Å²)", xlabel="step", ylim=(0, None))
    used, known = chains.used[0], chains.known[0]
    panels = ("true", chains.true[0], used), ("given: noisy, most pairs hidden", chains.given[0], known), ("predicted", prediction[0], used)
    for axis, (title, matrix, seen) in zip(axes[1:], panels, strict=True):
        axis.set(title=title, facecolor="0.8")
        image = axis.imshow(np.where(seen, matrix, np.nan), vmin=0, vmax=chains.true[0].max())
    figure.colorbar(image, ax=axes[3], label="Å")
    figure.savefig(path, dpi=80)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=24, help="residues per chain")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=("simt", "cpu"), help="default: the fastest that can run")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)

    p, typical = initial_parameters(np.random.default_rng(0)), typical_distances(options.size)
    test = simulate(np.random.default_rng(2), TEST, options.size)
    hidden = test.used & ~test.known
    loss_and_gradients(p, test, typical, options.backend)  # compile, or load the compiled kernels

    def report(step, loss):
        if step in (1, options.steps) or step % max(1, options.steps // 10) == 0:
            error = root_mean_square(predict(p, test, typical, options.backend)[0], test, hidden)
            print(f"step {step:4d}   loss {loss:6.2f} Å²   hidden pairs of new chains {error:5.2f} Å")

    start = time.perf_counter()
    progress = lambda steps: track(steps, description="training")
    with threadpool_limits(1, "blas"):  # the linear layers are small: threads would only wait for each other
        losses = train(p, options.steps, options.size, typical, options.backend, report, progress)
    print(f"trained in {time.perf_counter() - start:.1f} s; errors (root mean square) of {TEST} new chains:\n{'':34}hidden    given")
    prediction = predict(p, test, typical, options.backend)[0]
    upper, lower = triangle_bounds(test)
    upper = np.where(np.isfinite(upper), upper, typical)
    plain = np.where(test.known, test.given, typical)
    results = ("as given, or typical", plain), ("shortest path", upper), ("middle of the triangle bounds", (upper + lower) / 2)
    for title, distances in (*results, ("triangle attention", prediction)):
        print(f"{title:32}{root_mean_square(distances, test, hidden):6.2f} Å{root_mean_square(distances, test, test.known):7.2f} Å")
    if Figure is None:
        print("no picture: matplotlib is not installed (numba_flash[examples] has it)")
        return
    save_figure(options.output, losses, test, prediction)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
