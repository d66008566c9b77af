"""Temperatures in kelvin: gradients of float32 beside float64, and what it takes to keep their digits.

Each of N weather stations has temperatures of the last D days, around 288 K. With these as keys and values, attention finds for each query,
a pattern of D anomalies, the stations where the weather was like that, and averages them. Its gradient by the queries is

    dq = scale * dS k,        where each row of dS sums to 0,

so that the 288 K which all keys share cancel: what is left are the anomalies, some kelvin. Ordinary sums of float32 round at the size of
288 K, not at that of the anomalies, and lose two digits or more. Degrees Celsius help, if somebody thinks of them. On GPUs whose tensor
cores compute float32, this library takes out what the keys have in common before it multiplies (docs/numerics.md).

    python kelvin.py [--stations 2048] [--days 64] [--backend cpu]
"""

import argparse

import numpy as np

import numba_flash

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


def main(arguments: list[str] | None = None) -> None:
    """Print the error of each way to compute the gradient."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stations", type=int, default=2048)
    parser.add_argument("--days", type=int, default=64)
    parser.add_argument("--backend", help="cpu, simt, sm80; default: the fastest")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    kelvin = temperatures(rng, options.stations, options.days).astype(np.float32)
    q = (0.1 * rng.standard_normal(kelvin.shape)).astype(np.float32)
    do = rng.standard_normal(kelvin.shape).astype(np.float32)
    celsius = (kelvin.astype(np.float64) - FREEZING).astype(np.float32)

    def error(keys, precision):
        """Of dq, relative to the float64 result on the same numbers."""
        dq, exact = (
            gradient(*(x.astype(dtype) for x in (q, keys, keys, do)), precision, backend)
            for dtype, backend in (("float32", options.backend), ("float64", None))
        )
        return np.linalg.norm(dq - exact) / np.linalg.norm(exact)

    plan = numba_flash.plan(q, kelvin, kelvin, backend=options.backend)
    print(f"{HEADS} regions of {options.stations} stations, {options.days} days; {plan.backend}: {plan.algorithm}")
    for what, keys, precision in (
        ("kelvin", kelvin, None),
        ("kelvin, precision='ieee'", kelvin, "ieee"),
        ("degrees Celsius", celsius, None),
    ):
        print(f"relative error of dq, {what}: {error(keys, precision):.1e}")


if __name__ == "__main__":
    main()
