"""What tensor cores make of float32, before attention is built on them: errors of sums that stay in the core for a stretch, by instruction,
by the way a number is split, by data and by length; and how fast three interleaved products are.

A product of (256, N) by (N, 64) matrices of float32, as O or a gradient sums over N keys. Each number is split: float16 after scaling by a
power of two, low parts 2^11 times larger; bfloat16 in two or three parts; TF32 in two. Products of high parts have a sum of their own,
products with low ones another. "IEEE" sums one number after the other. Errors are root mean square, relative to the product in float64.

    python asv_bench/studies/doubt.py --json FILE
"""

import sys
from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import common
import doubt_kernels as kernels
import numpy as np

from numba_flash.bench import timing
from numba_flash.bench.peers import Bound, sentence
from numba_flash.cuda.runtime import launch

ROWS, COLUMNS = 256, 64
LENGTHS = [4096, 16384, 65536]
INTERVALS = (64, 128, 256, None)  # keys after which sums are emptied; None: never
PANELS = 4096  # that are multiplied to find rates
TOP = 13  # the largest float16 is at least 2^TOP


class Split(NamedTuple):
    """How a float32 becomes numbers of tensor cores.

    Attributes
    ----------
    kind : str
        Of the numbers.
    rest : tuple of pairs
        Which parts are multiplied besides the two first.
    weight : float
        Of those products.
    """

    kind: str
    rest: tuple[tuple[int, int], ...] = ()
    weight: float = 1.0

    @property
    def parts(self) -> int:
        return 1 + max((max(pair) for pair in self.rest), default=0)


TWO, THREE = ((1, 0), (0, 1)), ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1))
SPLITS = {
    "float16 x 1": Split("float16"),
    "float16 x 3": Split("float16", TWO, 2.0**-11),
    "bfloat16 x 3": Split("bfloat16", TWO),
    "bfloat16 x 6": Split("bfloat16", THREE),
    "TF32 x 1": Split("tf32"),
    "TF32 x 3": Split("tf32", TWO),
}


# ---- data --------------------------------------------------------------------------------------------------------------------------------


def outliers(rng, x):
    """One number of a thousand is a hundred times larger."""
    return x + 100 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)


def spread(rng, *shape: int):
    """Factors up to a million apart."""
    return 10.0 ** rng.uniform(-3, 3, shape)


DATA = {
    "normal": lambda rng, a, b: (a, b),
    "positive": lambda rng, a, b: (np.abs(a), np.abs(b)),
    "weights x offset": lambda rng, a, b: (np.exp(a) / a.shape[1], 300 + 10 * b),
    "outliers": lambda rng, a, b: (outliers(rng, a), outliers(rng, b)),
    "rows, 1e6": lambda rng, a, b: (a * spread(rng, len(a), 1), b * spread(rng, len(b), 1)),
    "keys, 1e6": lambda rng, a, b: (a, b * spread(rng, 1, b.shape[1])),
}


def matrices(data: str, length: int) -> list[np.ndarray]:
    """A (ROWS, length) and B^T (COLUMNS, length) of float32."""
    rng = np.random.default_rng(0)
    drawn = (rng.standard_normal((rows, length)) for rows in (ROWS, COLUMNS))
    return [np.ascontiguousarray(x, np.float32) for x in DATA[data](rng, *drawn)]


# ---- numbers of tensor cores -------------------------------------------------------------------------------------------------------------


def rounded(x, kind: str):
    """Float32 rounded to nearest to a number of tensor cores, as float32."""
    if kind == "float16":
        return x.astype(np.float16).astype(np.float32)
    dropped = 16 if kind == "bfloat16" else 13
    bits = x.view(np.uint32)
    bits = bits + np.uint32(2 ** (dropped - 1) - 1) + (bits >> np.uint32(dropped) & np.uint32(1))
    return (bits & np.uint32(2**32 - 2**dropped)).view(np.float32)


def as_words(x, kind: str):
    """The numbers as kernels read them, in words of 32 bits."""
    if kind == "float16":
        return x.astype(np.float16).view(np.uint32)
    if kind == "bfloat16":
        return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint32)
    return x.view(np.uint32)


def parts_of(x, split: Split) -> tuple[list, float]:
    """Parts that are numbers of tensor cores, high first, and the power of two that they are to be divided by."""
    scale = np.float32(1)
    if split.kind == "float16":
        scale = np.float32(2.0 ** (TOP - np.frexp(float(abs(x).max()))[1] + 1))
    rest, parts = x * scale, []
    for _ in range(split.parts):
        parts.append(rounded(rest, split.kind))
        rest = (rest - parts[-1]) * np.float32(1 / split.weight)
    return parts, float(scale)


def arranged(parts: list, chosen: list[int], stretch: int, xp):
    """The chosen parts side by side, stretch by stretch, so that what is added up in a stretch lies together."""
    rows = len(parts[0])
    pieces = [parts[i].reshape(rows, -1, 1, stretch) for i in chosen]
    return xp.ascontiguousarray(xp.concatenate(pieces, axis=2).reshape(rows, -1))


# ---- errors ------------------------------------------------------------------------------------------------------------------------------


def run(instruction: str, kind: str, a, b, every: int, clock):
    """A B^T of words that lie side by side, emptied after so many panels."""
    out = clock.xp.empty((len(a), COLUMNS), np.float32)
    a, b = a[None], b[None]
    numbers = (a.shape[2] // kernels.PANEL_WORDS, every)
    with kernels.reading_tf32() if kind == "tf32" else nullcontext():
        made = kernels.launch_of(instruction, kind, kernels.TO_CHECK, a, b, out, clock.gpu, numbers)
        made(a.view(np.float16), a, b, out)
    return out


def product(instruction: str, split: Split, interval: int | None, a, b, clock):
    """A B^T of float32 as tensor cores make it."""
    (of_a, scale_a), (of_b, scale_b) = parts_of(a, split), parts_of(b, split)
    width, length = kernels.columns_of_panel(split.kind), a.shape[1]
    stretch = interval or width
    total = 0
    for pairs, weight in ((split.rest, split.weight), (((0, 0),), 1.0)):
        if pairs:
            sides = (arranged(parts, [pair[i] for pair in pairs], stretch, clock.xp) for i, parts in enumerate((of_a, of_b)))
            every = len(pairs) * (interval or length) // width
            total = total + run(instruction, split.kind, *(as_words(x, split.kind) for x in sides), every, clock) * np.float32(weight)
    return total.astype(np.float64) / scale_a / scale_b


CHAIN = """
float sum = 0;
for (int j = 0; j < length; ++j) sum = fmaf(a[i / columns * length + j], b[i % columns * length + j], sum);
out = sum;
"""


def ieee(a, b, clock):
    """A B^T by fused multiplications and additions, one after the other."""
    if clock.place == "cpu":
        total = np.zeros((len(a), len(b)), np.float32)
        for j in range(a.shape[1]):
            total = (np.multiply(a[:, j, None], b[None, :, j], dtype=np.float64) + total).astype(np.float32)
        return total
    one = clock.xp.ElementwiseKernel("raw float32 a, raw float32 b, int32 length, int32 columns", "float32 out", CHAIN, "chain")
    return one(a.ravel(), b.ravel(), a.shape[1], len(b), clock.xp.empty((len(a), len(b)), np.float32))


def errors(data: str, length: int, instructions, clock) -> list[dict]:
    """A row for each way."""
    a, b = map(clock.xp.asarray, matrices(data, length))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    size = lambda x: float(((x - exact) ** 2).mean() ** 0.5 / (exact**2).mean() ** 0.5)
    about = {"data": data, "length": length}
    rows = [about | {"instruction": "IEEE", "error": size(ieee(a, b, clock))}]
    for instruction in instructions:
        for name, split in SPLITS.items():
            for interval in INTERVALS:
                found = size(product(instruction, split, interval, a, b, clock))
                rows.append(about | {"instruction": instruction, "split": name, "interval": interval, "error": found})
    return rows


# ---- rates -------------------------------------------------------------------------------------------------------------------------------


def timed(instruction: str, kind: str, clock, repeats: int) -> list[dict]:
    """TFLOP/s of one product, and of three that are interleaved, as products of float32."""
    bound, flops, xp = {}, {}, clock.xp
    for products in (1, 3):
        shape = kernels.TO_TIME[instruction]._replace(products=products)
        rows, planes = shape.rows * clock.gpu.multiprocessors, 1 if products == 1 else 2
        draw = lambda n: xp.asarray(np.random.default_rng(0).standard_normal((n, 64), np.float32))
        a, b = (as_words(rounded(draw(planes * n), kind), kind) for n in (rows, shape.columns))
        a, b = a.reshape(planes, rows, -1), b.reshape(planes, shape.columns, -1)
        out, columns = xp.empty((rows, shape.columns), np.float32), kernels.columns_of_panel(kind)
        for interval in INTERVALS:
            every = PANELS if interval is None else interval // columns
            made = kernels.launch_of(instruction, kind, shape, a, b, out, clock.gpu, (PANELS, every))
            given = (a.view(np.float16), a, b, out)
            repeat = lambda count, made=made, given=given: [made(*given) for _ in range(count)]
            with kernels.reading_tf32() if kind == "tf32" else nullcontext():
                repeat(1)
            bound[products, interval], flops[products, interval] = Bound(repeat, tuple), 2 * rows * shape.columns * PANELS * columns
    times = timing.take_turns(bound, clock, repeats)
    about = {"instruction": instruction, "kind": kind}
    rates = {key: flops[key] / median(ms) / 1e9 for key, ms in times.items()}
    return [about | {"products": products, "interval": interval, "tflops": rate} for (products, interval), rate in rates.items()]


def about(row: dict, data: str, length: int) -> bool:
    """Whether a row is told at once: what the chosen way makes of the data."""
    chosen = row.get("split", "float16 x 3") == "float16 x 3" and row.get("interval", 128) == 128
    return (row["data"], row["length"]) == (data, length) and chosen


def main(arguments: list[str] | None = None) -> None:
    """Run the study; rates first."""
    parser = common.parser(__doc__)
    parser.add_argument("--lengths", type=common.numbers, default=LENGTHS, metavar="N,...", help="default 4096,16384,65536")
    options = parser.parse_args(arguments)
    clock = common.clock()
    if clock.place != "gpu":
        parser.error("this study needs a GPU")
    clock.gpu, rows, rates = launch.gpu(clock.cuda.runtime.getDevice()), [], []
    instructions = kernels.INSTRUCTIONS if clock.gpu.capability == (9, 0) else ("mma.sync",)
    with clock.current():
        for instruction in instructions:
            for kind in ("float16", "tf32"):
                try:
                    rates += timed(instruction, kind, clock, common.repeats(options, clock.place))
                except Exception as failure:  # the others are none the worse
                    print(f"{instruction}, {kind}: {sentence(failure)}", flush=True)
                print(*rates[-8:], sep="\n", flush=True)
        for length in options.lengths:
            for data in DATA:
                rows += errors(data, length, instructions, clock)
                print(*(row for row in rows if about(row, data, length)), sep="\n", flush=True)
                common.write(options, "doubt", clock.place, rows, rates=rates)


if __name__ == "__main__":
    sys.exit(main())
