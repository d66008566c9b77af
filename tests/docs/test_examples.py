"""The examples run as a newcomer runs them; one's attention is non-local means, the other's gradients are those of its loss."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import ROOT

pytest.importorskip("skimage", reason="the examples need numba_flash[examples]")
EXAMPLES = ROOT / "docs" / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *options: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--backend", "cpu", *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def assert_is_a_picture(png: Path, height: int, width: int):
    import matplotlib.image

    picture = matplotlib.image.imread(png)
    assert picture.shape[0] > height
    assert picture.shape[1] > width
    assert np.unique(picture).size > 100


@pytest.mark.full
def test_denoise_photo_improves_the_picture_and_writes_it(tmp_path):
    png = tmp_path / "photo.png"
    printed = run("denoise_photo", "--size", "64", "--output", str(png))
    noisy, ours, _ = (float(x) for x in re.findall(r"PSNR +([\d.]+) dB", printed))
    assert ours > noisy + 4
    assert "attention" in printed
    assert "100%" in printed
    assert_is_a_picture(png, 400, 1500)


def test_kelvin_costs_digits_that_degrees_celsius_keep(tmp_path):
    png = tmp_path / "kelvin.png"
    written = tmp_path / "kelvin.json"
    printed = run("kelvin", "--stations", "200", "--days", "16", "--output", str(png), "--json", str(written))
    assert "IEEE products" in printed
    default, ieee, *_, celsius = (float(x) for x in re.findall(r"relative error of dq, .*: (\S+)", printed))
    assert default == ieee > 1e-5
    assert ieee > 100 * celsius > 1e-6
    results = json.loads(written.read_text())
    assert (results["device"], results["stations"], results["days"]) == ("CPU", 200, 16)
    assert [f"{row['error']:.1e}" for row in results["rows"]] == re.findall(r"relative error of dq, .*: (\S+)", printed)
    assert_is_a_picture(png, 500, 1400)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("denoise_photo", ["--size", "20"]),
        ("kelvin", ["--stations", "50", "--days", "8"]),
        ("triangle_attention", ["--size", "8", "--steps", "2"]),
        ("denoise_recording", ["--samples", "5000", "--window", "500", "--chunk", "1000"]),
    ],
)
def test_without_matplotlib_everything_but_the_picture(monkeypatch, capsys, tmp_path, name, options):
    if name == "denoise_recording":
        pytest.importorskip("dask")
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)  # its import fails
    png = tmp_path / "picture.png"
    load(name).main(["--backend", "cpu", "--output", str(png), *options])
    *results, last = capsys.readouterr().out.splitlines()
    assert last == "no picture: matplotlib is not installed (numba_flash[examples] has it)"
    assert re.search(r"PSNR|Å|error", results[-1])
    assert not png.exists()


def test_its_attention_is_the_non_local_mean_of_patches():
    """Against the formula with its dense weights, w_ii = 0."""
    example = load("denoise_photo")
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


@pytest.mark.full
def test_triangle_attention_learns_and_writes_its_picture(tmp_path):
    png = tmp_path / "triangle.png"
    printed = run("triangle_attention", "--size", "20", "--steps", "50", "--output", str(png))
    losses = [float(x) for x in re.findall(r"loss +([\d.]+) ", printed)]
    assert len(losses) == 11
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
    errors = {name: float(x) for name, x in re.findall(r"^(\w[\w, ]+?) +([\d.]+) Å +[\d.]+ Å", printed, re.MULTILINE)}
    assert errors["triangle attention"] < 0.8 * errors["as given, or typical"]
    assert "100%" in printed
    assert_is_a_picture(png, 300, 1300)


def test_its_gradients_are_those_of_its_loss(monkeypatch):
    """Every weight of a small network, in float64, along a random direction, against central differences."""
    example = load("triangle_attention")
    monkeypatch.setattr(example, "CHANNELS", 8)
    monkeypatch.setattr(example, "HEADS", 2)
    rng, h = np.random.default_rng(5), 1e-5
    p = example.initial_parameters(rng, np.float64)
    for layer in p.values():
        for w in layer.values():
            w += 0.3 * rng.standard_normal(w.shape)
    chains, typical = example.simulate(rng, 2, 7), example.typical_distances(7)
    assert not chains.present.all()
    loss = lambda: example.loss_and_gradients(p, chains, typical, "cpu")[0]
    gradients = example.loss_and_gradients(p, chains, typical, "cpu")[1]
    assert {layer: set(g) for layer, g in gradients.items()} == {layer: set(w) for layer, w in p.items()}
    for layer, weights in p.items():
        for name, w in weights.items():
            before, direction = w.copy(), rng.standard_normal(w.shape)
            w += h * direction
            above = loss()
            w[...] = before - h * direction
            expected = (above - loss()) / (2 * h)
            w[...] = before
            assert (gradients[layer][name] * direction).sum() == pytest.approx(expected, rel=1e-6), (layer, name)


def test_its_bounds_hold_without_noise(monkeypatch):
    """Every true distance lies between the bounds that the given ones imply."""
    example = load("triangle_attention")
    monkeypatch.setattr(example, "NOISE", 0.0)
    chains = example.simulate(np.random.default_rng(0), 4, 12)
    upper, lower = example.triangle_bounds(chains)
    assert (lower - 1e-9 <= chains.true)[chains.used].all()
    assert (chains.true <= upper + 1e-9)[chains.used].all()


@pytest.mark.full
def test_denoise_recording_finds_the_heart_and_writes_its_picture(tmp_path):
    pytest.importorskip("dask")
    png = tmp_path / "recording.png"
    printed = run("denoise_recording", "--samples", "20000", "--window", "3000", "--chunk", "2500", "--output", str(png))
    noisy, ours = (float(x) for x in re.findall(r"error ([\d.]+)", printed))
    assert noisy == pytest.approx(0.2, rel=0.02)
    assert ours < noisy / 2
    assert "100% Completed" in printed
    assert_is_a_picture(png, 400, 1000)


def test_its_blocks_are_the_non_local_mean_of_the_whole_recording():
    """Against the formula with its dense weights, w_ii = 0; the patches at the ends are mirrored."""
    pytest.importorskip("dask")
    import dask.array as da

    example = load("denoise_recording")
    x, h, window = np.random.default_rng(2).random(150).astype(np.float32), 0.8, 40
    patches = np.lib.stride_tricks.sliding_window_view(np.pad(x, example.PATCH // 2, mode="reflect"), example.PATCH).astype(np.float64)
    i = np.arange(len(x))
    w = np.exp(-((patches[:, None] - patches) ** 2).sum(2) / h**2) * (abs(i[:, None] - i) <= window) * (i[:, None] != i)
    expected = w @ x / w.sum(1)
    for chunks in (150, 37):
        got = example.denoise(da.from_array(x, chunks=chunks), h, window, "cpu").compute()
        np.testing.assert_allclose(got, expected, atol=1e-4)
