"""Find out whether a path joins two marks in a picture, one token for each pixel: 65,537 tokens and attention among blocks.

The task is made after Path-X of the Long Range Arena (Tay et al., arXiv:2011.04006), whose pictures of 128 x 128 pixels are read as
sequences, and its larger sister Path-256; path_pictures.py draws the pictures. Pixels of a tile of 8 x 16 are neighbours in the sequence.
One more token, at its end, is to give the answer. With the 5 x 5 pixels about each as patch,

    x = patch W_embedding                                                                (1)
    q, k, v = LayerNorm(x) W_qkv, for every head                                         (2)
    q, k <- q + q_0, k + k_0, turned by angles that grow with the pixel's y and x        (3)
    x <- x + softmax(q k^T / sqrt(D), blocks that see each other) v W_out                (4)
    x <- x + GELU(LayerNorm(x) W_up) W_down                                              (5)
    z = LayerNorm(x) W_head + b                                                          (6)

where (2) to (5) are repeated with the same weights, for longer curves more often. (3) makes scores depend on where pixels lie relative to
each other (Su et al., arXiv:2104.09864). In (4) a tile sees itself and its eight neighbours, and the last token sees all and is seen by
all: a `numba_flash.BlockMask`. So what a mark says goes along its curve by a few pixels with each repetition, from both ends.

It is easier than Path-X in two ways. In training every pixel of ink says whether the start, the goal and both can be reached from it (three
of z; the fourth is the last token's answer), where Path-X has one bit for a picture. And small pictures with short curves come first, then
larger ones with the same weights. What is counted is the answer alone, for new pictures.

`--dtype` is that of attention; all else is float32 (float64 with float64).

    python find_path.py [--size 256] [--minutes 4] [--dtype float16] [--figure path.png] [--json FILE]
"""

import argparse
import json
import time
import tracemalloc
from typing import NamedTuple

import numpy as np
import train_transformer as transformer
from path_pictures import PAPER, SCENES, draw, show
from train_transformer import layer_norm, layer_norm_backward, linear, linear_backward, mlp, mlp_backward, split_heads, xp

import numba_flash

TILE_ROWS, TILE_COLUMNS = 8, 16  # pixels of a block
PATCH = 5  # pixels along a side of what a token sees of its own
INPUTS, LOGITS = 3 * PATCH * PATCH + 1, 4
WAVELENGTHS = (8, 16, 32, 64)  # pixels
ROUNDS = {32: 4, 64: 5, 128: 7, 256: 10}  # repetitions by pixels along a side
LOSS_SCALE = 128.0  # gradients are this much larger on their way back, or float16 would round the small ones to 0
LARGEST_NORM = 1.0  # of all gradients together
RATE, FALL = 1.5, 0.4  # over the learning rate of train_transformer.py, until it falls to 0 in this last part of all time
to_host = lambda x: x if xp is np else x.get()


class Grid(NamedTuple):
    """How pictures of one size become sequences: which pixel each token is, who sees whom, and angles (1, N + 1, 1, head_dim / 2)."""

    pixels: object
    mask: numba_flash.BlockMask | None
    cos: object
    sin: object


def visible(size):
    """Which blocks see each other, the last one being that of the last token."""
    rows, columns = np.divmod(np.arange(size * size // (TILE_ROWS * TILE_COLUMNS)), size // TILE_COLUMNS)
    blocks = np.ones((len(rows) + 1, len(rows) + 1), bool)
    blocks[:-1, :-1] = (abs(rows[:, None] - rows) <= 1) & (abs(columns[:, None] - columns) <= 1)
    return blocks


def make_grid(size, head_dim, precision):
    by_tile = np.arange(size * size).reshape(size // TILE_ROWS, TILE_ROWS, size // TILE_COLUMNS, TILE_COLUMNS)
    pixels = by_tile.swapaxes(1, 2).reshape(-1)
    turns = (np.stack(np.divmod(pixels, size), axis=1)[..., None] / np.array(WAVELENGTHS)).reshape(len(pixels), -1)
    cos, sin, turned = np.ones((len(pixels) + 1, head_dim // 2)), np.zeros((len(pixels) + 1, head_dim // 2)), turns.shape[1]
    cos[:-1, :turned], sin[:-1, :turned] = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)
    cos[-1, :turned] = 0  # the last token is nowhere
    cos[-1, turned:] = np.log(len(pixels)) / np.log(min(SCENES) ** 2)  # what it looks for stands out from more of them, too
    mask = numba_flash.BlockMask(xp.asarray(visible(size)), TILE_ROWS * TILE_COLUMNS)
    return Grid(xp.asarray(pixels), mask, *(xp.asarray(table[None, :, None].astype(precision)) for table in (cos, sin)))


def turn(x, cos, sin):
    """(3): pairs of numbers of (batch, tokens, heads, head_dim) as points in the plane, turned."""
    a, b = xp.split(x, 2, axis=-1)
    return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def features(pictures, grid, precision):
    """Patches (B, N + 1, INPUTS), of each pixel which of the three greys it has, if any; the last input is 1 for the last token alone."""
    count, size, half = *pictures.grey.shape[:2], PATCH // 2
    padded = xp.asarray(np.pad(pictures.grey, ((0, 0), (half, half), (half, half)), constant_values=PAPER))
    x = xp.zeros((count, size * size + 1, INPUTS), precision)
    for i in range(PATCH * PATCH):
        top, left = divmod(i, PATCH)
        shifted = padded[:, top : top + size, left : left + size].reshape(count, -1)[:, grid.pixels]
        x[:, :-1, 3 * i : 3 * i + 3] = shifted[..., None] == xp.arange(1, 4)
    x[:, -1, -1] = 1
    return x


def targets(pictures, grid, precision):
    """What z should say (B, N + 1, LOGITS), and how much it matters: ink as much where it can be reached as where it cannot."""
    count = len(pictures.answer)
    in_order = lambda x: xp.asarray(x.reshape(count, -1))[:, grid.pixels]
    start, goal, ink = in_order(pictures.reached[0]), in_order(pictures.reached[1]), in_order(pictures.grey != PAPER)
    target, weight = (xp.zeros((count, ink.shape[1] + 1, LOGITS), precision) for _ in range(2))
    for i, reached in enumerate((start, goal, start & goal)):
        target[:, :-1, i] = reached
        for those in (reached & ink, ~reached & ink):
            weight[:, :-1, i] += those / (4.0 * count * xp.maximum(those.sum(1, keepdims=True), 1))
    target[:, -1, -1] = xp.asarray(pictures.answer)
    weight[:, -1, -1] = 1 / count
    return target, weight


def attend(p, x, grid, options):
    """(2) to (4) without the sum."""
    qkv, qkv_cache = linear(x, p["qkv"], x.dtype.name)
    q, k, v = split_heads(qkv, 3, options.heads).swapaxes(2, 3)
    q, k = (turn(part + shift, grid.cos, grid.sin) for part, shift in ((q, p["q0"]), (k, p["k0"])))
    q, k, v = (part.swapaxes(1, 2).astype(options.dtype, copy=False) for part in (q, k, v))
    o, lse = numba_flash.forward(q, k, v, mask=grid.mask, return_lse=True)
    output, out_cache = linear(o.swapaxes(1, 2).reshape(x.shape), p["out"], x.dtype.name)
    return output, (grid, (q, k, v, o, lse), qkv_cache, out_cache)


def attend_backward(d_output, cache):
    grid, (q, *others), qkv_cache, out_cache = cache
    d_joined, d_out = linear_backward(d_output, out_cache)
    (d_o,) = split_heads(d_joined.astype(q.dtype, copy=False), 1, q.shape[1])
    d_q, d_k, d_v = numba_flash.backward(d_o, q, *others, mask=grid.mask)
    d_q, d_k, d_v = (part.swapaxes(1, 2).astype(d_joined.dtype, copy=False) for part in (d_q, d_k, d_v))
    d_q, d_k = (turn(part, grid.cos, -grid.sin) for part in (d_q, d_k))
    d_x, d_qkv = linear_backward(xp.stack([d_q, d_k, d_v], axis=2).reshape(*d_joined.shape[:2], -1), qkv_cache)
    return d_x, {"qkv": d_qkv, "out": d_out, "q0": d_q.sum((0, 1)), "k0": d_k.sum((0, 1))}


def repeat(p, x, grid, options):
    """One round: (2) to (5)."""
    y, norm1_cache = layer_norm(x, p["gain1"], p["shift1"])
    y, attention_cache = attend(p, y, grid, options)
    x = x + y
    y, norm2_cache = layer_norm(x, p["gain2"], p["shift2"])
    y, mlp_cache = mlp(p, y, x.dtype.name)
    return x + y, (norm1_cache, attention_cache, norm2_cache, mlp_cache)


def repeat_backward(d_output, cache):
    norm1_cache, attention_cache, norm2_cache, mlp_cache = cache
    g = {}
    d_y, g["up"], g["down"] = mlp_backward(d_output, mlp_cache)
    d_y, g["gain2"], g["shift2"] = layer_norm_backward(d_y, norm2_cache)
    d_x = d_output + d_y
    d_y, of_attention = attend_backward(d_x, attention_cache)
    d_y, g["gain1"], g["shift1"] = layer_norm_backward(d_y, norm1_cache)
    return d_x + d_y, g | of_attention


def predict(parameters, pictures, grid, options, caches=None):
    """z, and what the gradients need of (1) and (6); of rounds it is added to the list `caches`, if there is one."""
    head, precision = parameters["head"], parameters["head"]["w"].dtype.name
    x, embedding_cache = linear(features(pictures, grid, precision), parameters["embedding"]["w"], precision)
    for _ in range(ROUNDS[pictures.grey.shape[1]]):
        x, cache = repeat(parameters["round"], x, grid, options)
        if caches is not None:
            caches.append(cache)
    y, norm_cache = layer_norm(x, head["gain"], head["shift"])
    z, head_cache = linear(y, head["w"], precision)
    return z + head["b"], (embedding_cache, norm_cache, head_cache)


def loss_and_gradients(parameters, pictures, grid, options):
    """Weighted mean of the cross-entropies of z, and its gradient in the form of `parameters`."""
    caches = []
    z, (embedding_cache, norm_cache, head_cache) = predict(parameters, pictures, grid, options, caches)
    target, weight = targets(pictures, grid, z.dtype)
    tail = xp.exp(-abs(z))
    loss = (weight * (xp.maximum(z, 0) - z * target + xp.log1p(tail))).sum()

    d_z = weight * (xp.exp(xp.minimum(z, 0)) / (1 + tail) - target) * LOSS_SCALE
    g = {layer: {name: xp.zeros_like(w) for name, w in weights.items()} for layer, weights in parameters.items()}
    g["head"]["b"] = d_z.sum((0, 1))
    d_x, g["head"]["w"] = linear_backward(d_z, head_cache)
    d_x, g["head"]["gain"], g["head"]["shift"] = layer_norm_backward(d_x, norm_cache)
    while caches:
        d_x, of_round = repeat_backward(d_x, caches.pop())
        for name, d_w in of_round.items():
            g["round"][name] += d_w
    g["embedding"]["w"] = linear_backward(d_x, embedding_cache)[1]
    return loss, {layer: {name: d_w / LOSS_SCALE for name, d_w in of.items()} for layer, of in g.items()}


def clipped(gradients):
    """All of them smaller by one factor where they are larger than LARGEST_NORM; 0 where they are no finite numbers."""
    norm = xp.sqrt(sum((d_w * d_w).sum() for of in gradients.values() for d_w in of.values()))
    smaller = lambda d_w: xp.where(xp.isfinite(norm), d_w * (LARGEST_NORM / xp.maximum(norm, LARGEST_NORM)), xp.zeros_like(d_w))
    return {layer: {name: smaller(d_w) for name, d_w in of.items()} for layer, of in gradients.items()}


def initial_parameters(rng, options):
    """Drawn by NumPy. At first a token looks for its like, a pixel nearby, and the last token, which is like ink, anywhere."""
    precision = "float64" if options.dtype == "float64" else "float32"
    width, heads, head_dim = options.width, options.heads, options.width // options.heads
    array = lambda x: xp.asarray(np.asarray(x).astype(precision))
    random = lambda rows, columns, size=1.0: rng.normal(0, size * rows**-0.5, (rows, columns))
    norm = lambda i="": {f"gain{i}": array(np.ones(width)), f"shift{i}": array(np.zeros(width))}
    embedding, qkv, near = random(INPUTS, width, 3.0), random(width, 3 * width), np.zeros((heads, head_dim))
    embedding[-1] = embedding[3 * (PATCH * PATCH // 2)]  # that of ink in the middle of the patch
    qkv[:, :width] = qkv[:, width : 2 * width]
    near[:, : 2 * len(WAVELENGTHS)] = 1.5
    attention = {"qkv": array(qkv), "q0": array(near), "k0": array(near), "out": array(random(width, width, 0.5))}
    perceptron = {"up": array(random(width, 2 * width)), "down": array(random(2 * width, width, 0.5))}
    head = norm() | {"w": array(random(width, LOGITS, 0.1)), "b": array(np.zeros(LOGITS))}
    return {"embedding": {"w": array(embedding)}, "round": norm(1) | attention | norm(2) | perceptron, "head": head}


class Training:
    """A model, the moments of its gradients, and pictures of one size at a time."""

    def __init__(self, options):
        if options.dtype == "bfloat16":
            import ml_dtypes  # noqa: F401  (makes the name known to NumPy)
        self.options, self.rng, self.steps = options, np.random.default_rng(options.seed), 0
        self.parameters = initial_parameters(self.rng, options)
        zeros = lambda w: (xp.zeros_like(w), xp.zeros_like(w))
        self.moments = {layer: {name: zeros(w) for name, w in weights.items()} for layer, weights in self.parameters.items()}

    def begin(self, size):
        """From now on with pictures of that size."""
        self.size, self.batch = size, max(1, self.options.tokens // size**2)
        self.grid = make_grid(size, self.options.width // self.options.heads, self.parameters["head"]["w"].dtype)
        self.next = draw(self.rng, self.batch, size)

    def step(self, rate):
        """One step, at a share of the learning rate; the loss before it. The next pictures are drawn while a GPU works."""
        loss, gradients = loss_and_gradients(self.parameters, self.next, self.grid, self.options)
        self.steps += 1
        transformer.adam(self.parameters, clipped(gradients), self.moments, self.steps, rate)
        self.next = draw(self.rng, self.batch, self.size)
        return float(loss)

    def right(self, count):
        """Share of right answers for so many pictures that nobody has seen, and its standard error."""
        rng, right = np.random.default_rng([self.options.seed, self.size]), []
        while len(right) < count:
            pictures = draw(rng, self.batch, self.size)
            z, _ = predict(self.parameters, pictures, self.grid, self.options)
            right.extend((to_host(z[:, -1, -1]) > 0) == pictures.answer)
        share = float(np.mean(right[:count]))
        return share, (share * (1 - share) / count) ** 0.5


def train_at(training, size, done, share):
    """What came of training with pictures of one size, for a share of all time of which the part `done` is over."""
    o, part, rate = training.options, 0.0, lambda part: RATE * min(1, (1 - done - part * share) / FALL)
    training.begin(size)
    before, _ = training.right(-(-o.test // 4))
    print(f"{size} x {size} pixels, {training.batch} pictures per step; right before {before:.3f}", flush=True)
    losses, start = [training.step(rate(0))], time.perf_counter()  # the first step compiles
    while part < 1:
        tenths = int(10 * part)
        losses.append(training.step(rate(part)))
        seconds = time.perf_counter() - start
        part = max(seconds / (60 * o.minutes * share), len(losses) / o.steps)
        if int(10 * part) > tenths:
            print(f"step {len(losses):5}   loss {np.mean(losses[-20:]):6.3f} {seconds:8.1f} s", flush=True)
    right, error = training.right(o.test)
    print(f"right {right:.3f} +- {error:.3f} of {o.test} new pictures; {seconds / (len(losses) - 1):.4f} s per step", flush=True)
    about = {"size": size, "tokens": size**2 + 1, "rounds": ROUNDS[size], "visible": float(visible(size).mean())} | SCENES[size]._asdict()
    result = {"before": before, "right": right, "error": error, "test": o.test, "loss": float(np.mean(losses[-20:]))}
    return about | result | {"batch": training.batch, "steps": len(losses), "seconds": seconds}


def train(options):
    """The trained model, and a row for each size. Half of the time is for the largest, the others share the rest."""
    training, sizes = Training(options), [size for size in SCENES if size <= options.size]
    parts = [1] * (len(sizes) - 1) + [max(1, len(sizes) - 1)]
    return training, [train_at(training, size, sum(parts[:i]) / sum(parts), parts[i] / sum(parts)) for i, size in enumerate(sizes)]


def measure(training, attention):
    """Time and memory of the loss and its gradients with attention among blocks, or with all pairs."""
    grid = training.grid if attention == "blocks" else training.grid._replace(mask=None)
    arguments = (training.parameters, training.next, grid, training.options)
    once = lambda: float(loss_and_gradients(*arguments)[1]["embedding"]["w"][0, 0])  # what is computed last: waits for the GPU
    pool = None if xp is np else xp.get_default_memory_pool()
    if pool:
        pool.free_all_blocks()
    before = pool and pool.total_bytes()
    tracemalloc.start()
    once()  # compiles
    memory = pool.total_bytes() - before if pool else tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.perf_counter()
    once()
    return {"attention": attention, "size": training.size, "seconds": time.perf_counter() - start, "bytes": memory}


def print_costs(training):
    """What a step takes with attention among blocks, and with all pairs; and what matrices of pairs would take."""
    o, costs = training.options, []
    print(f"gradients of {training.batch} pictures of {training.size} x {training.size} pixels:")
    for attention in ("blocks", "all pairs"):
        costs.append(row := measure(training, attention))
        print(f"{attention:12}{row['seconds']:10.4f} s{row['bytes'] / 1e6:10,.0f} MB", flush=True)
    pairs = o.heads * ROUNDS[training.size] * training.batch * (training.size**2 + 1) ** 2
    print(f"matrices of all pairs would take {pairs * np.zeros(1, o.dtype).itemsize / 1e9:,.1f} GB more")
    return costs


def save_figure(path, training):
    """Some pictures, and how much the model believes of their ink that the start can be reached from there."""
    pictures = draw(np.random.default_rng(training.options.seed + 1), 3, training.size)
    z, reached = to_host(predict(training.parameters, pictures, training.grid, training.options)[0]), np.zeros((3, training.size**2))
    reached[:, to_host(training.grid.pixels)] = z[:, :-1, 0]
    show(path, pictures, reached.reshape(pictures.grey.shape), z[:, -1, -1])


def parse(arguments=None):
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = {"size": 256, "width": 64, "heads": 2, "tokens": 2**18, "test": 1024, "seed": 0}
    on_cpu = {"size": 32, "width": 32, "heads": 1, "tokens": 2**14, "test": 512, "seed": 0}
    meant = {"size": "pixels along a side of the largest pictures; ", "tokens": "of a step; ", "test": "new pictures to count answers of; "}
    for name, default in (on_cpu if xp is np else on_gpu).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meant.get(name, '')}default {default}")
    parser.add_argument("--minutes", type=float, default=4, help="of training in all; default 4")
    parser.add_argument("--steps", type=int, default=float("inf"), help="with pictures of one size, at most; default: while there is time")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"), default="float32" if xp is np else "float16")
    parser.add_argument("--costs", action=argparse.BooleanOptionalAction, default=True, help="measure what all pairs would cost")
    parser.add_argument("--figure", help="where to save pictures and what the model makes of them")
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args(arguments)
    if options.size not in SCENES or options.width % options.heads or options.width < 6 * len(WAVELENGTHS) * options.heads:
        parser.error(f"--size must be one of {', '.join(map(str, SCENES))}, and --width a multiple of --heads, 24 at least for each")
    return options


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    print(f"{o.heads} heads, width {o.width}; attention in {o.dtype}; arrays of {xp.__name__}", flush=True)
    training, rows = train(o)
    costs = print_costs(training) if o.costs else []
    if o.figure:
        save_figure(o.figure, training)
    if o.json:
        device = "CPU" if xp is np else xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        about = {name: getattr(o, name) for name in ("minutes", "width", "heads", "dtype", "seed")}
        with open(o.json, "w") as file:
            json.dump({"study": "path", "device": device, **about, "rows": rows, "costs": costs}, file, indent=1)


if __name__ == "__main__":
    main()
