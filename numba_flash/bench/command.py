"""The command ``python -m numba_flash bench``: its options, and what it does with them."""

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from numba_flash.bench import grid, peers, report, timing
from numba_flash.bench.options import OPTIONS
from numba_flash.bench.progress import track

REPEATS = {"gpu": 10, "cpu": 5}
PACKAGES = ("numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x")
PACKAGES += ("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4", "jax")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    grid.add_options(parser, "forward")
    said = "what changes scores: softcap, alibi, a table of relative positions; several, and none, with commas between them; default none"
    parser.add_argument("--option", type=_options, default=["none"], metavar="NAME,...", help=said)
    parser.add_argument("--peers", metavar="NAME,...", help=f"compare with these only; default all of {', '.join(_peers())}")
    parser.add_argument("--repeats", type=grid.positive, metavar="R", help="rounds in which each is timed once; default 10, on the CPU 5")
    parser.add_argument(
        "--watts", action="store_true", help="also tell what the GPU draws for each, and its clock; a second or two for each"
    )
    parser.add_argument("--plot", type=grid.file, metavar="FILE", help="also write a figure (needs matplotlib)")


def _options(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {*OPTIONS}:
        raise argparse.ArgumentTypeError(f"options are {', '.join(OPTIONS)}, not {', '.join(sorted(unknown))}")
    return names


def _peers() -> list[str]:
    return [contender.name for contender in peers.contenders(None)[1:]]


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
        1 if numba_flash was wrong, or could not run a cell; else 0.
    """
    no_gpu = grid.no_gpu(options)
    place = "cpu" if no_gpu else "gpu"
    cells = [replace(cell, option=option) for cell in grid.cells(options, parser, place) for option in options.option]
    repeats = options.repeats or REPEATS[place]
    if unknown := set(_asked(options)) - set(_peers()):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(_peers())}")
    grid.need(parser, "--plot", "matplotlib", options.plot is not None)
    clock = timing.GpuClock() if place == "gpu" else timing.HostClock()
    contenders, absent = _invited(options, place)
    header = {"device": _device(clock), "threads": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    header |= {"packages": _versions(), "not_compared": absent}
    _print_header(header, no_gpu, repeats)
    results = []
    with clock.current():
        for cell in track(cells, len(cells), lambda cell: " ".join(str(cell).split())):
            results.append((cell, timing.compare(cell, contenders, clock, repeats, options.watts)))
            print(report.block(*results[-1]), end="\n\n", flush=True)
        host = timing.host_microseconds(contenders, clock, options.dtype)
    print("TFLOP/s, and our speed over the peer's", report.table(results), "", report.closing(results, host, place), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(results, host, header), indent=1))
    if options.plot is not None:
        report.plot(results, options.plot, f"{header['device']}, {options.dtype}")
    return int(peers.OURS not in host or any(outcomes[peers.OURS].status != "ok" for _, outcomes in results))


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
