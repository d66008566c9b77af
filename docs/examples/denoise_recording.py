"""Remove noise from a recording on disk that need not fit into memory, by non-local means in blocks: attention on dask arrays.

An electrocardiogram repeats itself, so a sample is best estimated from the same place of other beats (non-local means: Buades, Coll and
Morel, CVPR 2005; for electrocardiograms Tracey and Miller, IEEE Transactions on Biomedical Engineering 59, 2012). With p_i the samples
around sample i,

    o_i = sum_j w_ij x_j / sum_j w_ij,       w_ij = exp(-|p_i - p_j|^2 / h^2),       |i - j| <= W

which is attention in a window, softmax(q k^T) v with q_i = (2 p_i / h^2, 1), k_j = (p_j, -|p_j|^2 / h^2), v_j = x_j. The lse tells how much
each sample weighs in its own mean, and so it can be taken out again.

The recording is drawn by the model of McSharry et al. ("A dynamical model for generating synthetic electrocardiogram signals", IEEE
Transactions on Biomedical Engineering 50, 2003): five Gaussians along a heart's cycle. It lies in a file; patches are made block by block,
and what comes out goes to another file. Pairs of blocks that the window hides make no task. In one call, which it is with a chunk as long
as the recording, eight days (172,800,000 samples) would need 24 GB.

Needs dask; with matplotlib it also draws the picture.

    python denoise_recording.py [--samples 1000000] [--window 4000] [--chunk 20000] [--output denoise_recording.png]
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from dask.diagnostics import ProgressBar

import numba_flash
import numba_flash.dask

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # everything but the picture

PATCH = 15
PIECE = 1 << 16  # samples that are drawn, or compared, at a time
RATE, PULSE = 250, 1.2  # samples and beats a second
# The waves P, Q, R, S and T: phase, height and width; phases and widths of McSharry et al., table 1.
WAVES = ((-np.pi / 3, 0.12, 0.25), (-np.pi / 12, -0.25, 0.1), (0, 1.0, 0.1), (np.pi / 12, -0.3, 0.1), (np.pi / 2, 0.3, 0.4))


def heart(first: int, last: int) -> np.ndarray:
    """The clean recording from sample `first` to `last`, whose beats come faster and slower as one breathes."""
    t = np.arange(first, last) / RATE
    phase = (2 * np.pi * PULSE * t + 1.5 * np.sin(2 * np.pi * 0.1 * t)) % (2 * np.pi)
    x = np.zeros_like(t)
    for theta, height, width in WAVES:
        distance = (phase - theta + np.pi) % (2 * np.pi) - np.pi
        x += height * np.exp(-(distance**2) / (2 * width**2))
    return x.astype(np.float32)


class Recording:
    """A file of samples, float32. A piece of it is in memory only while it is read or written."""

    dtype, ndim = np.dtype(np.float32), 1

    def __init__(self, path: Path, samples: int):
        self._path, self.shape = path, (samples,)
        np.memmap(path, self.dtype, "w+", shape=self.shape)

    def _piece(self, where) -> np.memmap:
        where = where[0] if isinstance(where, tuple) else where
        first, last, _ = where.indices(*self.shape)
        return np.memmap(self._path, self.dtype, "r+", offset=first * self.dtype.itemsize, shape=(last - first,))

    def __getitem__(self, where) -> np.ndarray:
        return np.array(self._piece(where))

    def __setitem__(self, where, samples) -> None:
        self._piece(where)[...] = samples

    def error(self) -> float:
        """Root mean square of what is not the heart."""
        (n,), squares = self.shape, 0.0
        for first in range(0, n, PIECE):
            last = min(first + PIECE, n)
            squares += float(((self[first:last] - heart(first, last)) ** 2).sum(dtype=np.float64))
        return (squares / n) ** 0.5


def record(file: Recording, sigma: float, seed: int) -> None:
    """Fill a file with the heart and noise."""
    noise, (n,) = np.random.default_rng(seed), file.shape
    for first in range(0, n, PIECE):
        clean = heart(first, min(first + PIECE, n))
        file[first : first + len(clean)] = clean + noise.normal(0, sigma, len(clean))


def attention_inputs(noisy: da.Array, h: float) -> tuple[da.Array, da.Array, da.Array]:
    """Queries and keys (n, PATCH + 1) and values (n, 1), in the chunks of the recording."""
    padded = da.pad(noisy, PATCH // 2, mode="reflect")
    p = da.lib.stride_tricks.sliding_window_view(padded, PATCH).rechunk((noisy.chunks[0], PATCH))
    ones, norm = da.ones((len(noisy), 1), chunks=(noisy.chunks[0], 1), dtype=np.float32), (p**2).sum(1, keepdims=True) / h**2
    return da.concatenate([2 * p / h**2, ones], 1), da.concatenate([p, -norm], 1), noisy[:, None]


def denoise(noisy: da.Array, h: float, window: int, backend: str | None = None) -> da.Array:
    """Non-local means in a window, each sample left out of its own mean."""
    q, k, v = (x.astype(np.float32).rechunk({1: -1}) for x in attention_inputs(noisy, h))
    o, lse = numba_flash.dask.forward(q, k, v, scale=1.0, window=(window, window), return_lse=True, backend=backend)
    own = da.exp((q * k).sum(1) - lse).clip(0, 0.999)[:, None]
    return ((o - own * v) / (1 - own))[:, 0]


def peak_memory_mb() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save_figure(path: Path, noisy: np.ndarray, ours: np.ndarray, memory: dict[str, float]) -> None:
    """Some seconds of the recording above each other, and what memory it took."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    t = np.arange(len(noisy)) / RATE
    for x, shift, name in ((noisy, 4, "recorded"), (ours, 2, "attention"), (heart(0, len(noisy)), 0, "the heart")):
        left.plot(t, x + shift, linewidth=0.8, label=name)
    left.set(xlabel="seconds", yticks=[], title="the first seconds")
    left.legend(loc="upper right", ncols=3)
    bars = right.bar(list(memory), list(memory.values()), color=["#999999", "#D55E00"])
    right.bar_label(bars, fmt="%.0f MB")
    right.set(title="memory", ylabel="MB")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=4000, help="samples before and after; 250 are a second")
    parser.add_argument("--chunk", type=int, default=20_000, help="samples of a block")
    parser.add_argument("--sigma", type=float, default=0.2, help="standard deviation of the noise; a beat is 1 high")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("cpu",), help="of blocks in host memory; default: the fastest that can run")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)

    n, h = options.samples, options.sigma * (PATCH / 2) ** 0.5
    whole = 4 * n * (2 * (PATCH + 1) + 3) / 1e6  # q, k, v, o and lse
    print(f"{n:,} samples, {n / RATE / 3600:.1f} hours; queries, keys, values and results together take {whole:,.0f} MB")
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="threads", num_workers=2):
        noisy, denoised = (Recording(Path(folder, f"{name}.f32"), n) for name in ("noisy", "denoised"))
        record(noisy, options.sigma, options.seed)
        few = da.from_array(noisy[: min(n, 4096)], chunks=1024)
        denoise(few, h, 256, options.backend).compute()  # compile, or load the compiled kernels
        begin, start = peak_memory_mb(), time.perf_counter()
        with ProgressBar(dt=1.0):
            da.store(denoise(da.from_array(noisy, chunks=options.chunk), h, options.window, options.backend), denoised, lock=False)
        seconds, peak = time.perf_counter() - start, peak_memory_mb()
        print(f"recorded   error {noisy.error():.3f}")
        print(f"attention  error {denoised.error():.3f}   {seconds:6.1f} s   {peak:,.0f} MB at most, {begin:,.0f} before it began")
        if Figure is None:
            print("no picture: matplotlib is not installed (numba_flash[examples] has it)")
            return
        shown = min(n, 8 * RATE)
        save_figure(options.output, noisy[:shown], denoised[:shown], {"all at once": begin + whole, "in blocks": peak})
        print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
