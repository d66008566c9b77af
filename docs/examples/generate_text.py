"""Generate text with a small language model, with a cache of keys and values in pages, and without one.

The model is that of train_transformer.py, trained by it on the language reference that ships with Python. It continues several pieces of
that text at once, of different lengths, always by the byte that is most likely. With q, k and v of the tokens that are new,

    write k and v to the pages in which each sequence has room                           (1)
    o = softmax(q k^T / sqrt(D), no look ahead) v over all keys of each sequence         (2)

in every layer: (2) is numba_flash.forward_paged. The first step reads the pieces, and every further one a single token of each sequence.
Without a cache, every step computes all tokens anew. Both give the same text; how many tokens a second, is printed.

    python generate_text.py [--steps 100] [--sequences 4] [--tokens 64] [--page 16]
"""

import argparse
import time
from pydoc_data.topics import topics

import numpy as np
import train_transformer as transformer
from train_transformer import layer_norm, linear, mlp, split_heads, xp

import numba_flash

DTYPE = "float32"
to_host = lambda x: x if xp is np else x.get()


class Cache:
    """Keys and values of every layer in pages, the pages of every sequence in a table, and how many keys each has."""

    def __init__(self, options, layers, sequences, most):
        heads, page = options.heads, options.page
        entries = -(-most // page)
        shape = (layers, sequences * entries, heads, page, options.width // heads)
        self.k, self.v = (xp.zeros(shape, DTYPE) for _ in range(2))
        self.free = list(np.random.default_rng(options.seed).permutation(shape[1]))
        self.table, self.lengths, self.page = np.full((sequences, entries), -1, np.int32), np.zeros(sequences, np.int32), page

    def extend(self, counts):
        """Room for so many new keys of each sequence."""
        for sequence, length in enumerate(self.lengths + counts):
            for entry in range(-(-length // self.page)):
                if self.table[sequence, entry] < 0:
                    self.table[sequence, entry] = self.free.pop()
        new = np.arange(counts.max()) < counts[:, None]
        self.new, (of_sequence, number) = xp.asarray(new), np.nonzero(new)
        at = self.lengths[of_sequence] + number
        self.pages, self.rows = map(xp.asarray, (self.table[of_sequence, at // self.page], at % self.page))
        self.lengths = self.lengths + counts
        self.on_device = [xp.asarray(x) for x in (self.table, self.lengths, counts)]

    def attend(self, layer, q, k, v):
        """(1) and (2): q, k and v of new tokens (sequences, heads, new, head_dim)."""
        for cache, x in ((self.k[layer], k), (self.v[layer], v)):
            cache[self.pages, :, self.rows] = x.swapaxes(1, 2)[self.new]
        table, lengths, counts = self.on_device
        return numba_flash.forward_paged(q, self.k[layer], self.v[layer], table, lengths, q_lengths=counts, causal=True)


def block(p, x, heads, attend):
    """One layer of the model."""
    qkv, _ = linear(layer_norm(x, p["gain1"], p["shift1"])[0], p["qkv"], DTYPE)
    o = attend(*split_heads(qkv, 3, heads))
    x = x + linear(o.swapaxes(1, 2).reshape(x.shape), p["out"], DTYPE)[0]
    return x + mlp(p, layer_norm(x, p["gain2"], p["shift2"])[0], DTYPE)[0]


def most_likely(parameters, heads, tokens, first, last, attend):
    """The token after token `last` of each row of tokens (sequences, n), which stand at `first` and behind it."""
    embedding, head = parameters["embedding"], parameters["head"]
    positions = np.minimum(first[:, None] + np.arange(tokens.shape[1]), len(embedding["position"]) - 1)
    x = embedding["token"][xp.asarray(tokens)] + embedding["position"][xp.asarray(positions)]
    layers = [p for name, p in parameters.items() if name.startswith("block")]
    for number, p in enumerate(layers):
        x = block(p, x, heads, lambda q, k, v, number=number: attend(number, q, k, v))
    x = x[xp.arange(len(tokens)), xp.asarray(last)][:, None]
    logits, _ = linear(layer_norm(x, head["gain"], head["shift"])[0], head["output"], DTYPE)
    return to_host(logits.argmax(-1)[:, 0])


def generate(parameters, options, pieces, cached):
    """Bytes after each of the pieces, (sequences, tokens), and how many a second without the first step."""
    lengths, count, everyone = np.array([len(piece) for piece in pieces]), options.tokens, np.arange(len(pieces))
    tokens = np.zeros((len(pieces), max(lengths) + count), np.int64)
    for row, piece in zip(tokens, pieces, strict=True):
        row[: len(piece)] = piece
    layers = sum(name.startswith("block") for name in parameters)
    cache = Cache(options, layers, len(pieces), tokens.shape[1])
    made = []
    for step in range(count):
        if step == 1:
            start = time.perf_counter()
        if cached:
            counts = lengths if step == 0 else np.ones_like(lengths)
            first = cache.lengths
            new = tokens[:, : max(lengths)] if step == 0 else made[-1][:, None]
            cache.extend(counts)
            made.append(most_likely(parameters, options.heads, new, first, counts - 1, cache.attend))
        else:
            here = lengths + step
            attend = lambda layer, q, k, v: numba_flash.forward(q, k, v, causal=True)
            all_of_them = tokens[:, : max(here)]
            made.append(most_likely(parameters, options.heads, all_of_them, np.zeros_like(here), here - 1, attend))
        tokens[everyone, lengths + step] = made[-1]
    rate = len(pieces) * (count - 1) / (time.perf_counter() - start)
    return np.stack(made, axis=1), rate


def parse(arguments=None):
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"steps": 100, "sequences": 4, "tokens": 64, "page": 16, "length": 128, "layers": 2, "heads": 4, "width": 128, "seed": 0}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(arguments)
    if not 1 < options.tokens < options.length:
        parser.error("--tokens must be at least 2 (the first step is not timed) and less than --length")
    return options


def main(arguments: list[str] | None = None) -> None:
    o = parse(arguments)
    names = ("steps", "length", "layers", "heads", "width", "seed")
    training = transformer.Training(transformer.parse([f"--{name}={getattr(o, name)}" for name in names]))
    losses = [training.step() for _ in range(o.steps)]
    print(f"trained in {o.steps} steps: loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}; arrays of {xp.__name__}")

    text = "\n".join(topics.values()).encode()
    longest = o.length - o.tokens
    pieces = [np.frombuffer(text, np.uint8)[1000 * i :][: longest - i * longest // o.sequences] for i in range(o.sequences)]
    made, rates = {}, {}
    for name, cached in (("with", True), ("without", False)):
        made[name], rates[name] = generate(training.parameters, o, pieces, cached)
        print(f"{name:>7} a cache: {rates[name]:8,.0f} tokens/s")
    same = np.array_equal(made["with"], made["without"])
    print("the same text" if same else "another text")
    piece, bytes_made = pieces[0].tobytes(), made["with"][0].astype(np.uint8).tobytes()
    print((piece + b"|" + bytes_made).decode(errors="replace"))


if __name__ == "__main__":
    main()
