"""The problems that ``bench`` measures and ``warmup`` compiles for: a grid of options of the command line, and which place they run at."""

import argparse
import importlib.util
from itertools import product
from pathlib import Path

import numpy as np

from numba_flash.arguments.problem import ForwardInputs
from numba_flash.bench.cases import BOUNDS, Cell
from numba_flash.plan import BACKENDS, tier

DEFAULTS = {
    "gpu": {"dtype": "bfloat16", "lengths": [2**i for i in range(9, 15)], "head_dims": [64, 128, 256], "tokens": 16384, "width": 2048},
    "cpu": {"dtype": "float32", "lengths": [512, 1024, 2048], "head_dims": [64], "tokens": 2048, "width": 512},
}


def positive(text: str) -> int:
    """A positive integer."""
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _masks(text: str) -> list[str]:
    masks = text.split(",")
    if unknown := set(masks) - {"full", "causal"}:
        raise argparse.ArgumentTypeError(f"masks are full and causal, not {', '.join(sorted(unknown))}")
    return masks


def file(text: str) -> Path:
    """A path in a directory that there is."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.resolve().parent}")
    return path


def add_options(parser: argparse.ArgumentParser, direction: str) -> None:
    """Options that describe the grid; the defaults of those without one here depend on whether there is a GPU (`DEFAULTS`)."""
    parser.add_argument("--dtype", choices=BOUNDS, help="default bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default=direction, help=f"default {direction}")
    parser.add_argument("--lengths", type=_numbers, metavar="N,...", help="default 512,1024,...,16384; on the CPU 512,1024,2048")
    parser.add_argument("--head-dims", type=_numbers, metavar="D,...", help="default 64,128,256; on the CPU 64")
    parser.add_argument("--tokens", type=positive, metavar="T", help="batch size is T // N; default 16384, on the CPU 2048")
    parser.add_argument("--width", type=positive, metavar="W", help="W // D query heads; default 2048, on the CPU 512")
    parser.add_argument("--mask", type=_masks, default=["full", "causal"], metavar="full,causal", help="default both")
    parser.add_argument("--heads-kv", type=positive, default=1, metavar="RATIO", help="query heads per head of keys and values; default 1")
    parser.add_argument("--backend", choices=BACKENDS, help="demand this one of numba_flash; cpu: arrays on the CPU")
    parser.add_argument("--json", type=file, metavar="FILE", help="also write everything to a file")


def no_gpu(options: argparse.Namespace) -> str | None:
    """Why the CPU is the place; None if there is a GPU to use (the simulator is none)."""
    if options.backend == "cpu":
        return "the CPU is demanded"
    simt, x = tier("simt"), np.empty(0)
    reason = simt.why_not("forward", None, ForwardInputs(x, x, x), True)
    return reason or ("kernels run in Numba's CUDA simulator" if simt.takes_numpy() else None)


def need(parser: argparse.ArgumentParser, what: str, package: str, needed: bool) -> None:
    """End with a message if a package is `needed` and missing."""
    if needed and importlib.util.find_spec(package) is None:
        parser.error(f"{what} needs the package {package}")


def cells(options: argparse.Namespace, parser: argparse.ArgumentParser, place: str) -> list[Cell]:
    """The grid, after options that were not given got the defaults of the `place`; what makes no sense is an error of the command line."""
    for name, value in DEFAULTS[place].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    need(parser, "--dtype bfloat16", "ml_dtypes", options.dtype == "bfloat16")
    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    if max(options.lengths) > options.tokens:
        parser.error(f"--lengths: {max(options.lengths)} is more than --tokens {options.tokens}")
    if max(options.head_dims) > min(256, options.width):
        parser.error(f"--head-dims: {max(options.head_dims)} is more than {'256' if options.width > 256 else f'--width {options.width}'}")
    grid = []
    for direction, mask, d, n in product(directions, options.mask, options.head_dims, options.lengths):
        heads = options.width // d
        if heads % options.heads_kv:
            parser.error(f"--heads-kv: {heads} heads (--width {options.width} // {d}) cannot be shared by {options.heads_kv}")
        grid.append(Cell(direction, mask, options.dtype, options.tokens // n, heads, heads // options.heads_kv, n, d))
    return grid
