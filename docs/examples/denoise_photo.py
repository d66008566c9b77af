"""Remove noise from a photograph by non-local means, which is attention.

Non-local means (Buades, Coll and Morel, "A non-local algorithm for image denoising", CVPR 2005) replaces the patch p_i around each pixel
by a mean over all patches that look alike; a pixel is then the mean of its values in the patches that contain it:

    o_i = sum_j w_ij p_j / sum_j w_ij,       w_ij = exp(-|p_i - p_j|^2 / h^2 - |x_i - x_j|^2 / r^2)

with x_i the position of pixel i. Expand the squares: what depends on i alone cancels in the quotient, and the rest is a scalar product, so
this is softmax(q k^T) v with

    q_i = (2 p_i / h^2, 2 x_i / r^2, 1),     k_j = (p_j, x_j, -|p_j|^2 / h^2 - |x_j|^2 / r^2),     v_j = p_j.

Here the softmax runs over *all* pixels: for 256 x 256 of them the matrix would have 65,536^2 entries, 17 GB in float32. A patch is its own
best match, noise included; the log-sum-exp tells its weight, exp(q_i.k_i - lse_i), so that it can be taken out of the mean again.

Needs scikit-image and rich; with matplotlib it also draws the picture.

    python denoise_photo.py [--size 256] [--sigma 0.1] [--backend cpu] [--output denoise_photo.png]
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np
from rich.progress import track
from skimage import data, transform
from skimage.metrics import peak_signal_noise_ratio
from skimage.restoration import denoise_nl_means

import numba_flash

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # everything but the picture

PATCH = 5
CHUNK = 4096  # queries per call: one step of the progress bar


def photograph(size: int) -> np.ndarray:
    """The camera picture that comes with scikit-image, (size, size), values in [0, 1]."""
    picture = data.camera() / 255.0
    return picture if size == picture.shape[0] else transform.resize(picture, (size, size), anti_aliasing=True)


def attention_inputs(noisy: np.ndarray, h: float, r: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys (n, PATCH^2 + 3) and values (n, PATCH^2) in float32, for the pixels in reading order."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(noisy, PATCH // 2, mode="reflect"), (PATCH, PATCH))
    p = windows.reshape(-1, PATCH * PATCH)
    x = np.indices(noisy.shape).reshape(2, -1).T - np.array(noisy.shape) / 2
    norm = (p**2).sum(1, keepdims=True) / h**2 + (x**2).sum(1, keepdims=True) / r**2
    q = np.hstack([2 * p / h**2, 2 * x / r**2, np.ones_like(norm)])
    k = np.hstack([p, x, -norm])
    return q.astype(np.float32), k.astype(np.float32), p.astype(np.float32)


def mean_over_patches(patches: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Each pixel's mean over the patches that contain it."""
    total, count = (np.zeros([n + PATCH - 1 for n in shape]) for _ in range(2))
    for index, (dy, dx) in enumerate(np.ndindex(PATCH, PATCH)):
        part = np.s_[dy : dy + shape[0], dx : dx + shape[1]]
        total[part] += patches[:, index].reshape(shape)
        count[part] += 1
    inside = np.s_[PATCH // 2 : PATCH // 2 + shape[0], PATCH // 2 : PATCH // 2 + shape[1]]
    return total[inside] / count[inside]


def denoise(noisy: np.ndarray, h: float, r: float, backend: str | None = None, progress=lambda steps: steps) -> np.ndarray:
    """Non-local means of the whole image, each patch left out of its own mean."""
    offset = noisy.mean()  # small norms keep float32 scores exact
    q, k, v = attention_inputs(noisy - offset, h, r)
    if numba_flash.plan(q, k, v, backend=backend).backend != "cpu":
        import cupy

        q, k, v = map(cupy.asarray, (q, k, v))
    result = v.copy()
    for start in progress(range(0, len(q), CHUNK)):
        i = slice(start, start + CHUNK)
        o, lse = numba_flash.forward(q[i], k, v, scale=1.0, return_lse=True, backend=backend)
        own = np.exp((q[i] * k[i]).sum(1) - lse)[:, None].clip(0, 0.999)  # the weight of the patch itself
        result[i] = (o - own * v[i]) / (1 - own)
    patches = result if isinstance(result, np.ndarray) else result.get()
    return mean_over_patches(patches, noisy.shape) + offset


def peak_memory_mb() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def save_figure(path: Path, panels: list[tuple[str, np.ndarray]]) -> None:
    """The pictures side by side, each under its title."""
    figure = Figure(figsize=(4 * len(panels), 4.5), layout="constrained")
    for axis, (title, picture) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=13)
        axis.axis("off")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, help="pixels per side; default 256, or 512 on a GPU")
    parser.add_argument("--sigma", type=float, default=0.1, help="standard deviation of the noise; the picture is in [0, 1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("simt", "cpu"), help="default: the fastest that can run")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)

    some = np.zeros((1, 1), np.float32)
    backend = numba_flash.plan(some, some, some, backend=options.backend).backend
    size = options.size or (256 if backend == "cpu" else 512)
    clean = photograph(size)
    noisy = clean + np.random.default_rng(options.seed).normal(0, options.sigma, clean.shape)
    psnr = lambda picture: peak_signal_noise_ratio(clean, picture.clip(0, 1), data_range=1)
    n = size * size
    print(f"{size} x {size} pixels: attention over {n:,} keys on {backend}; its matrix would take {4 * n * n / 1e9:,.1f} GB in float32")

    denoise(noisy[:16, :16], 1.0, 1.0, options.backend)  # compile, or load the compiled kernels
    memory, start = peak_memory_mb(), time.perf_counter()
    h = options.sigma * PATCH / 2**0.5  # two noisy copies of one patch lie at |p_i - p_j|^2 = 2 sigma^2 PATCH^2 = 4 h^2, give or take
    ours = denoise(noisy, h, 6.0, options.backend, lambda steps: track(steps, description="attention"))
    seconds, memory = time.perf_counter() - start, peak_memory_mb() - memory

    start = time.perf_counter()
    window = denoise_nl_means(noisy, patch_size=7, patch_distance=11, h=0.9 * options.sigma, sigma=options.sigma, fast_mode=False)
    window_seconds = time.perf_counter() - start

    print(f"noisy                             PSNR {psnr(noisy):5.2f} dB")
    print(f"numba_flash, all pixels           PSNR {psnr(ours):5.2f} dB   {seconds:6.1f} s   {memory:,.0f} MB of host memory more")
    print(f"scikit-image, 23 x 23 neighbours  PSNR {psnr(window):5.2f} dB   {window_seconds:6.1f} s")
    if Figure is None:
        print("no picture: matplotlib is not installed (numba_flash[examples] has it)")
        return
    panels = [("clean", clean), ("noisy", noisy), ("attention over all pixels", ours), ("denoise_nl_means", window)]
    save_figure(options.output, [(f"{title}, {psnr(x):.1f} dB" if x is not clean else title, x) for title, x in panels])
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
