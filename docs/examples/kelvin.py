"""Temperatures in kelvin: gradients of float32 beside float64, and what it takes to keep their digits.

Each of N weather stations has temperatures of the last D days, around 288 K. With these as keys and values, attention finds for each query,
a pattern of D anomalies, the stations where the weather was like that, and averages them. Its gradient by the queries is

    dq = scale * dS k,        where each row of dS sums to 0,

so that the 288 K which all keys share cancel: what is left are the anomalies, some kelvin. Ordinary sums of float32 round at the size of
288 K, not at that of the anomalies, and lose two digits or more. Degrees Celsius help, if somebody thinks of them. On GPUs whose tensor
cores compute float32, this library takes out what the keys have in common before it multiplies (docs/numerics.md).

PyTorch is asked, too, if it is installed; with matplotlib there is a picture of all errors.

    python kelvin.py [--stations 2048] [--days 64] [--backend cpu] [--output kelvin.png] [--json kelvin.json]
"""

import argparse
import json
from pathlib import Path

import numpy as np

import numba_flash

try:
    import torch
except ImportError:
    torch = None  # everything but its results
try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # everything but the picture

FREEZING = 273.15  # K
HEADS = 4  # regions, each with its own stations


def temperatures(rng: np.random.Generator, stations: int, days: int) -> np.ndarray:
    """(HEADS, stations, days), in kelvin: climate of the station, weather that changes slowly, and noise."""
    climate = 288 + 8 * rng.standard_normal((HEADS, stations, 1))
    phase, period = rng.uniform(0, 2 * np.pi, (HEADS, stations, 1)), rng.uniform(8, 40, (HEADS, stations, 1))
    weather = 5 * np.sin(2 * np.pi * np.arange(days) / period + phase)
    return climate + weather + rng.standard_normal((HEADS, stations, days))


def gradient(q, k, v, do, precision: str | None = None, backend: str | None = None) -> np.ndarray:
    """dq, as NumPy array; on a GPU if there is one."""
    o, lse = numba_flash.forward(q, k, v, return_lse=True, precision=precision, backend=backend)
    return numba_flash.backward(do, q, k, v, o, lse, precision=precision, backend=backend)[0]


def gradient_of_torch(q, k, v, do) -> np.ndarray:
    """The same by PyTorch: on a GPU by its memory-efficient kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    place, kernel = ("cuda", SDPBackend.EFFICIENT_ATTENTION) if torch.cuda.is_available() else ("cpu", SDPBackend.MATH)
    q, k, v, do = (torch.from_numpy(x)[None].to(place) for x in (q, k, v, do))
    q.requires_grad_()
    with sdpa_kernel(kernel):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(o, q, do)[0][0].cpu().numpy()


def device_of(backend: str) -> str:
    """The GPU that a backend computes on, or that it is the CPU."""
    if backend == "cpu":
        return "CPU"
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def save_figure(output: Path, exact: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """Left, one query's gradient, and how far each is from it; right, how many queries have an error of at most so much."""
    figure = Figure((10, 4), layout="constrained")
    days, queries = figure.subplots(1, 2)
    days.plot(exact[0, 0], "k", label="float64")
    size = np.linalg.norm(exact, axis=-1)
    for name, dq in found.items():
        days.plot(np.abs(dq[0, 0] - exact[0, 0]), label=f"error, {name}")
        errors = np.sort((np.linalg.norm(dq - exact, axis=-1) / size).ravel())
        queries.plot(errors, np.arange(1, errors.size + 1) / errors.size, label=name)
    days.set(title="gradient of one query, keys in kelvin", xlabel="day")
    days.set_yscale("symlog", linthresh=float(np.abs(exact[0, 0]).max()) * 1e-7)
    queries.set(title="all queries", xscale="log", xlabel="relative error of a gradient", ylabel="share of queries")
    days.legend(fontsize=7)
    queries.legend(fontsize=7)
    figure.savefig(output, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Print the error of each way to compute the gradient, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stations", type=int, default=2048)
    parser.add_argument("--days", type=int, default=64)
    parser.add_argument("--backend", help="cpu, simt, sm80, sm90; default: the fastest")
    parser.add_argument("--output", type=Path, default=Path("kelvin.png"), help="the picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the errors")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    kelvin = temperatures(rng, options.stations, options.days).astype(np.float32)
    q = (0.1 * rng.standard_normal(kelvin.shape)).astype(np.float32)
    do = rng.standard_normal(kelvin.shape).astype(np.float32)
    celsius = (kelvin.astype(np.float64) - FREEZING).astype(np.float32)
    exact_of = lambda keys: gradient(*(x.astype(np.float64) for x in (q, keys, keys, do)))
    ours = lambda keys, precision=None: gradient(q, keys, keys, do, precision, options.backend)
    exact, exact_celsius = exact_of(kelvin), exact_of(celsius)
    found = {"kelvin": ours(kelvin), "kelvin, precision='ieee'": ours(kelvin, "ieee")}
    if torch is not None:
        found["kelvin, PyTorch"] = gradient_of_torch(q, kelvin, kelvin, do)

    rows = []

    def tell(name, dq, exact):
        rows.append({"what": name, "error": float(np.linalg.norm(dq - exact) / np.linalg.norm(exact))})
        print(f"relative error of dq, {name}: {rows[-1]['error']:.1e}")

    plan = numba_flash.plan(q, kelvin, kelvin, backend=options.backend)
    print(f"{HEADS} regions of {options.stations} stations, {options.days} days; {plan.backend}: {plan.algorithm}")
    for name, dq in found.items():
        tell(name, dq, exact)
    tell("degrees Celsius", ours(celsius), exact_celsius)
    if options.json is not None:
        about = {"device": device_of(plan.backend), "backend": plan.backend, "heads": HEADS, "stations": options.stations}
        options.json.write_text(json.dumps(about | {"days": options.days, "rows": rows}, indent=1) + "\n")
    if Figure is None:
        print("no picture: matplotlib is not installed (numba_flash[examples] has it)")
        return
    save_figure(options.output, exact, found)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
