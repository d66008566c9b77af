"""The command ``python -m numba_flash bench``: its options, and what it does with them."""

import argparse
import importlib.util
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import numpy as np

from numba_flash.bench import peers, report, timing
from numba_flash.bench.cases import BOUNDS, Cell
from numba_flash.plan import BACKENDS, tier

DEFAULTS = {
    "gpu": {"dtype": "bfloat16", "lengths": [2**i for i in range(9, 15)], "head_dims": [64, 128, 256], "tokens": 16384, "width": 2048},
    "cpu": {"dtype": "float32", "lengths": [512, 1024, 2048], "head_dims": [64], "tokens": 2048, "width": 512},
}
REPEATS = {"gpu": 10, "cpu": 5}
PACKAGES = ("numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch", "flash-attn-4", "jax")


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _masks(text: str) -> list[str]:
    masks = text.split(",")
    if unknown := set(masks) - {"full", "causal"}:
        raise argparse.ArgumentTypeError(f"masks are full and causal, not {', '.join(sorted(unknown))}")
    return masks


def _file(text: str) -> Path:
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.resolve().parent}")
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command; the defaults of those without one here depend on whether there is a GPU (`DEFAULTS`)."""
    parser.add_argument("--dtype", choices=BOUNDS, help="default bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="forward")
    parser.add_argument("--lengths", type=_numbers, metavar="N,...", help="default 512,1024,...,16384; on the CPU 512,1024,2048")
    parser.add_argument("--head-dims", type=_numbers, metavar="D,...", help="default 64,128,256; on the CPU 64")
    parser.add_argument("--tokens", type=_positive, metavar="T", help="batch size is T // N; default 16384, on the CPU 2048")
    parser.add_argument("--width", type=_positive, metavar="W", help="W // D query heads; default 2048, on the CPU 512")
    parser.add_argument("--mask", type=_masks, default=["full", "causal"], metavar="full,causal", help="default both")
    parser.add_argument("--heads-kv", type=_positive, default=1, metavar="RATIO", help="query heads per head of keys and values; default 1")
    parser.add_argument("--backend", choices=BACKENDS, help="demand this one of numba_flash; cpu: arrays and peers on the CPU")
    parser.add_argument("--peers", metavar="NAME,...", help=f"compare with these only; default all of {', '.join(_peers())}")
    parser.add_argument("--repeats", type=_positive, metavar="R", help="rounds in which each is timed once; default 10, on the CPU 5")
    parser.add_argument("--plot", type=_file, metavar="FILE", help="also write a figure (needs matplotlib)")
    parser.add_argument("--json", type=_file, metavar="FILE", help="also write everything that was measured")


def _peers() -> list[str]:
    return [contender.name for contender in peers.contenders(None)[1:]]


def cells(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Cell]:
    """The grid; what makes no sense in it is an error of the command line."""
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


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure, print, and write what was asked for.

    Parameters
    ----------
    options : Namespace
        What `parser` made of the command line.
    parser : ArgumentParser
        Whose ``error`` says what is wrong with them.

    Returns
    -------
    int
        1 if numba_flash was wrong in a cell, or could not run it; else 0.
    """
    no_gpu = "the CPU is demanded" if options.backend == "cpu" else _no_gpu()
    place = "cpu" if no_gpu else "gpu"
    for name, value in (DEFAULTS[place] | {"repeats": REPEATS[place]}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    grid = cells(options, parser)
    if unknown := set(_asked(options)) - set(_peers()):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(_peers())}")
    _need(parser, "--dtype bfloat16", "ml_dtypes", options.dtype == "bfloat16")
    _need(parser, "--plot", "matplotlib", options.plot is not None)
    clock = timing.GpuClock() if place == "gpu" else timing.HostClock()
    contenders, absent = _invited(options, place)
    header = {"device": _device(clock), "threads": os.cpu_count(), "packages": _versions(), "not_compared": absent}
    _print_header(header, no_gpu, options.repeats)
    results = []
    with clock.current():
        for cell in grid:
            results.append((cell, timing.compare(cell, contenders, clock, options.repeats)))
            print(report.block(*results[-1]), end="\n\n", flush=True)
        host = timing.host_microseconds(contenders, clock, options.dtype)
    print("TFLOP/s, and our speed over the peer's", report.table(results), "", report.closing(results, host, place), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(results, host, header), indent=1))
    if options.plot is not None:
        report.plot(results, options.plot, f"{header['device']}, {options.dtype}")
    return int(any(outcomes[peers.OURS].status != "ok" for _, outcomes in results))


def _no_gpu() -> str | None:
    """Why the CPU is measured; None if there is a GPU (the simulator is none)."""
    simt = tier("simt")
    reason = simt.why_not("forward", None, {"q": np.empty(0)}, True)
    return reason or ("kernels run in Numba's CUDA simulator" if simt.takes_numpy() else None)


def _need(parser: argparse.ArgumentParser, what: str, package: str, needed: bool) -> None:
    if needed and importlib.util.find_spec(package) is None:
        parser.error(f"{what} needs the package {package}")


def _asked(options: argparse.Namespace) -> list[str]:
    return _peers() if options.peers is None else [name.strip() for name in options.peers.split(",")]


def _invited(options: argparse.Namespace, place: str) -> tuple[list[peers.Contender], dict[str, str]]:
    """The contenders that may be able to run here, and the reasons of the others."""
    invited, absent = [], {}
    for contender in peers.contenders(options.backend):
        asked = contender.name in (peers.OURS, *_asked(options))
        reason = contender.why_not(place, options.dtype) if asked else "not asked for"
        if reason is None:
            invited.append(contender)
        else:
            absent[contender.name] = reason
    return invited, absent


def _device(clock: timing.HostClock) -> str:
    if clock.place == "cpu":
        return f"CPU, {platform.machine()}, {os.cpu_count()} threads"
    return clock.xp.cuda.runtime.getDeviceProperties(clock.xp.cuda.Device().id)["name"].decode()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _print_header(header: dict, no_gpu: str | None, repeats: int) -> None:
    print(header["device"] + (f" (no GPU is used: {no_gpu})" if no_gpu else ""))
    print(", ".join(f"{package} {number}" for package, number in header["packages"].items()))
    for name, reason in header["not_compared"].items():
        print(f"not compared: {name}: {reason}")
    print(f"medians of {repeats} rounds; error: ||x - ref|| / ||ref|| against float64; 1.10x: numba_flash is 10 % faster\n", flush=True)
