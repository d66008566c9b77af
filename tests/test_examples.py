"""The example runs as a newcomer runs it, and its attention is non-local means."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("skimage", reason="the examples need numba_flash[examples]")
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "denoise_photo.py"


def load():
    spec = importlib.util.spec_from_file_location("denoise_photo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_denoise_photo_improves_the_picture_and_writes_it(tmp_path):
    png = tmp_path / "photo.png"
    command = [sys.executable, str(EXAMPLE), "--size", "64", "--backend", "cpu", "--output", str(png)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    noisy, ours, _ = (float(x) for x in re.findall(r"PSNR +([\d.]+) dB", run.stdout))
    assert ours > noisy + 4
    assert "attention" in run.stdout
    assert "100%" in run.stdout
    import matplotlib.image

    picture = matplotlib.image.imread(png)
    assert picture.shape[0] > 400
    assert picture.shape[1] > 1500
    assert np.unique(picture).size > 100


def test_its_attention_is_the_non_local_mean_of_patches():
    """Against the formula with its dense weights, w_ii = 0."""
    example = load()
    noisy = np.random.default_rng(3).random((13, 17))
    h, r, half = 0.9, 3.0, example.PATCH // 2
    padded = np.pad(noisy, half, mode="reflect")
    where = [(y, x) for y in range(13) for x in range(17)]
    patches = np.array([padded[y : y + example.PATCH, x : x + example.PATCH].ravel() for y, x in where])
    means = np.empty_like(patches)
    for i in range(len(where)):
        distance = ((patches - patches[i]) ** 2).sum(1) / h**2 + ((np.array(where) - where[i]) ** 2).sum(1) / r**2
        w = np.exp(-distance)
        w[i] = 0
        means[i] = w @ patches / w.sum()
    expected = np.empty_like(noisy)
    for y, x in where:
        values = [
            means[where.index((cy, cx))].reshape(example.PATCH, example.PATCH)[y - cy + half, x - cx + half]
            for cy in range(max(0, y - half), min(13, y + half + 1))
            for cx in range(max(0, x - half), min(17, x + half + 1))
        ]
        expected[y, x] = np.mean(values)
    assert np.abs(example.denoise(noisy, h, r, backend="cpu") - expected).max() < 1e-5
