"""The example that looks for paths: its pictures say the truth, its gradients are those of its loss, and it learns more than chance."""

import importlib
import json
import math
import re
import sys

import numpy as np
import pytest
from support import ROOT

import numba_flash

SMALL = ("--tokens=2048", "--test=6", "--steps=2", "--minutes=inf")


def load(monkeypatch):
    """The example and the modules that it imports, all of them new."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    for name in ("train_transformer", "path_pictures", "find_path"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("find_path")


@pytest.fixture
def example(monkeypatch):
    """The example, and the one that it imports, with NumPy arrays, whether there is a GPU or not."""
    module = load(monkeypatch)
    for each in (module, module.transformer):
        monkeypatch.setattr(each, "xp", np)
    return module


@pytest.fixture
def drawn(example):
    return importlib.import_module("path_pictures")


def neighbours(ink, reach):
    """Pixels of ink (S, S) that are at most so far from one of `reach`."""
    padded = np.pad(reach, 3)
    around = [padded[y : y + len(ink), x : x + len(ink)] for y in range(7) for x in range(7)]
    return ink & np.any(around, axis=0)


def joined(ink, reach):
    """All pixels of ink that a path joins with those of `reach`."""
    while True:
        further = neighbours(ink, reach)
        if (further == reach).all():
            return reach
        reach = further


# ---- pictures ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(32, 40), (64, 10), (128, 4), (256, 2)])
def test_pictures_say_what_a_path_joins(drawn, size, count):
    """Against paths of steps of at most three pixels, which all dashes of a curve are joined by, and no two curves."""
    assert drawn.JOINED == 3
    pictures = drawn.draw(np.random.default_rng(size), count, size)
    assert pictures.grey.shape == (count, size, size)
    for grey, *reached, answer in zip(pictures.grey, *pictures.reached, pictures.answer, strict=True):
        starts, goals, ink = grey == drawn.START, grey == drawn.GOAL, grey != drawn.PAPER
        assert starts.sum() == goals.sum() == 9
        np.testing.assert_array_equal(joined(ink, starts), reached[0])
        np.testing.assert_array_equal(joined(ink, goals), reached[1])
        assert (reached[0] & reached[1]).any() == answer


def test_the_answer_is_not_in_the_marks(drawn):
    """The distance of the marks says no more than chance would, and neither does the amount of ink."""
    pictures = drawn.draw(np.random.default_rng(1), 1000, 32)
    centre = lambda which: np.array([np.argwhere(grey == which).mean(0) for grey in pictures.grey])
    distance = np.linalg.norm(centre(drawn.START) - centre(drawn.GOAL), axis=1)
    for x in (distance, (pictures.grey != drawn.PAPER).sum((1, 2))):
        yes, no = x[pictures.answer], x[~pictures.answer]
        error = math.hypot(yes.std() / len(yes) ** 0.5, no.std() / len(no) ** 0.5)
        assert abs(yes.mean() - no.mean()) < 4 * error
    assert abs(pictures.answer.mean() - 0.5) < 4 * 0.5 / 1000**0.5


# ---- sequences ---------------------------------------------------------------------------------------------------------------------------


def test_blocks_are_tiles_that_see_their_neighbours(example):
    size = 64
    grid = example.make_grid(size, 32, "float32")
    y, x = np.divmod(grid.pixels, size)
    assert sorted(grid.pixels) == list(range(size * size))
    dense, (bm, bn) = grid.mask.dense(size * size + 1, size * size + 1), grid.mask.block_size
    assert bm == bn == 128
    assert dense[-1].all()
    assert dense[:, -1].all()
    near = (abs(y[:, None] // 8 - y // 8) <= 1) & (abs(x[:, None] // 16 - x // 16) <= 1)
    np.testing.assert_array_equal(dense[:-1, :-1], near)


def test_scores_depend_on_where_pixels_lie_relative_to_each_other(example):
    grid, rng = example.make_grid(32, 32, "float64"), np.random.default_rng(2)
    q, k = rng.standard_normal((2, 32))
    everywhere = lambda row: example.turn(np.tile(row, (1, 1025, 1, 1)), grid.cos, grid.sin)[0, :, 0]
    scores = everywhere(q) @ everywhere(k).T
    y, x = np.divmod(grid.pixels, 32)
    at = lambda row, column: int(np.flatnonzero((y == row) & (x == column))[0])
    for first in ((3, 4), (17, 9), (20, 24)):
        assert scores[at(*first), at(first[0] + 5, first[1] + 7)] == pytest.approx(scores[at(0, 0), at(5, 7)])
    assert scores[at(0, 0), at(7, 5)] != pytest.approx(scores[at(0, 0), at(5, 7)])
    np.testing.assert_allclose(scores[-1], scores[-1, 0])  # the last token is as far from all


# ---- gradients ---------------------------------------------------------------------------------------------------------------------------


def problem(example, monkeypatch, *options):
    """Parameters that are all far from 0 or 1, two pictures, the grid and the options; few rounds."""
    monkeypatch.setattr(example, "ROUNDS", dict.fromkeys(example.ROUNDS, 2))
    o, rng = example.parse(["--width=48", "--heads=2", *options]), np.random.default_rng(4)
    parameters = example.initial_parameters(rng, o)
    for weights in parameters.values():
        for w in weights.values():
            w += example.xp.asarray(0.1 * rng.standard_normal(w.shape), w.dtype)
    return parameters, example.draw(rng, 2, 32), example.make_grid(32, 24, parameters["head"]["w"].dtype), o


@pytest.mark.full
def test_gradients_are_those_of_the_loss(example, monkeypatch):
    """Of every parameter along a random direction, against central differences."""
    parameters, *others = problem(example, monkeypatch, "--dtype=float64")
    evaluate, rng, h = lambda: example.loss_and_gradients(parameters, *others), np.random.default_rng(5), 1e-5
    gradients = evaluate()[1]
    assert {layer: set(g) for layer, g in gradients.items()} == {layer: set(w) for layer, w in parameters.items()}
    for layer, weights in parameters.items():
        for name, w in weights.items():
            before, direction = w.copy(), rng.standard_normal(w.shape)
            w[...] = before + h * direction
            above = evaluate()[0]
            w[...] = before - h * direction
            expected = (above - evaluate()[0]) / (2 * h)
            w[...] = before
            assert (gradients[layer][name] * direction).sum() == pytest.approx(expected, rel=1e-5, abs=1e-8), (layer, name)


# Relative errors, against float64, of the loss and of the gradient of a parameter (2-norm). On the CPU, with two seeds, those of gradients
# reach 1.8e-6, 1.1e-3 and 1.6e-2, of k0, which is a sum over all pixels; sums on a GPU have other orders.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}


def assert_follows_float64(example, reference, monkeypatch, dtype):
    """Loss and gradients of `example` in `dtype` are those of `reference` in float64, but for rounding."""
    expected_loss, expected = reference.loss_and_gradients(*problem(reference, monkeypatch, "--dtype=float64"))
    loss, gradients = example.loss_and_gradients(*problem(example, monkeypatch, f"--dtype={dtype}"))
    assert float(loss) == pytest.approx(float(expected_loss), rel=TOLERANCES[dtype])
    for layer, weights in expected.items():
        for name, g in weights.items():
            error = np.linalg.norm(example.to_host(gradients[layer][name]) - g)
            assert error <= TOLERANCES[dtype] * np.linalg.norm(g), (layer, name)


@pytest.mark.full
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_lower_precision_follows_float64(example, monkeypatch, dtype):
    assert_follows_float64(example, example, monkeypatch, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gpu_follows_float64_on_the_cpu(example, monkeypatch, dtype):
    on_gpu = load(monkeypatch)
    assert on_gpu.xp.__name__ == "cupy"
    assert_follows_float64(on_gpu, example, monkeypatch, dtype)


def test_gradients_that_are_large_or_no_numbers_do_no_harm(example):
    norm = lambda of: float(np.sqrt(sum((g * g).sum() for each in of.values() for g in each.values())))
    small = {"a": {"w": np.full(4, 0.1)}, "b": {"w": np.full(2, 0.2)}}
    for name in small:
        np.testing.assert_array_equal(example.clipped(small)[name]["w"], small[name]["w"])
    large = {"a": {"w": np.full(4, 30.0)}, "b": {"w": np.full(2, -40.0)}}
    assert norm(example.clipped(large)) == pytest.approx(example.LARGEST_NORM)
    np.testing.assert_allclose(example.clipped(large)["b"]["w"] / example.clipped(large)["a"]["w"][:2], -4 / 3)
    for wrong in (np.nan, np.inf):
        with np.errstate(invalid="ignore"):
            assert norm(example.clipped({"a": {"w": np.array([1.0, wrong])}, "b": {"w": np.ones(1)}})) == 0


# ---- training ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_attention_is_that_of_the_blocks_in_the_dtype_that_was_asked_for(example, monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        function = getattr(numba_flash, name)
        spy = lambda *arrays, function=function, **options: calls.append((arrays[0], options["mask"])) or function(*arrays, **options)
        monkeypatch.setattr(numba_flash, name, spy)
    training = example.Training(example.parse([*SMALL, "--dtype=float16"]))
    training.begin(32)
    training.step(1.0)
    assert [(x.dtype.name, x.shape) for x, _ in calls] == [("float16", (2, 1, 1025, 32))] * (2 * example.ROUNDS[32])
    assert all(mask is training.grid.mask for _, mask in calls)
    assert {w.dtype.name for weights in training.parameters.values() for w in weights.values()} == {"float32"}


def test_larger_pictures_come_later_with_the_same_weights(example, monkeypatch):
    """Half of the time is for the largest ones, and the rate falls to 0 in the end."""
    begun, rates, step = [], [], example.Training.step
    monkeypatch.setattr(example, "train_at", lambda training, size, done, share: begun.append((training, size, done, share)))
    example.train(example.parse(["--size=128"]))
    assert [x[1:] for x in begun] == [(32, 0, 0.25), (64, 0.25, 0.25), (128, 0.5, 0.5)]
    assert len({id(x[0]) for x in begun}) == 1
    monkeypatch.undo()
    monkeypatch.setattr(example.Training, "step", lambda training, rate: rates.append(rate) or step(training, rate))
    monkeypatch.setattr(example, "xp", np)
    example.train(example.parse(["--tokens=1024", "--test=1", "--steps=4", "--minutes=inf"]))
    assert rates == pytest.approx([example.RATE, example.RATE, example.RATE, example.RATE * 0.25 / example.FALL])


def test_training_ends_when_its_time_is_over(example, monkeypatch):
    training = example.Training(example.parse(["--tokens=1024", "--test=1", "--minutes=10"]))
    now = iter(range(0, 10**6, 50))
    monkeypatch.setattr(example.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(example.Training, "step", lambda training, rate: 0.0)
    row = example.train_at(training, 32, 0.0, 0.5)
    assert (row["seconds"], row["steps"]) == (300, 7)


@pytest.mark.full
def test_what_it_prints_and_writes(example, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the examples need numba_flash[examples]")
    png, written = tmp_path / "path.png", tmp_path / "path.json"
    example.main([*SMALL, "--figure", str(png), "--json", str(written)])
    printed, results = capsys.readouterr().out, json.loads(written.read_text())
    (row,) = results["rows"]
    assert re.search(rf"right {row['right']:.3f} \+- {row['error']:.3f} of 6 new pictures", printed)
    assert (row["size"], row["tokens"], row["batch"], row["steps"], row["curves"]) == (32, 1025, 2, 2, 2)
    assert [cost["attention"] for cost in results["costs"]] == ["blocks", "all pairs"]
    assert all(cost["seconds"] > 0 and cost["bytes"] > 1e6 for cost in results["costs"])
    assert f"{4 * 2 * 1025**2 * 4 / 1e9:.1f} GB more" in printed  # rounds, pictures, pairs, bytes
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [("--size", "48"), ("--width", "50", "--heads", "4"), ("--width", "32", "--heads", "2")])
def test_impossible_settings_are_named(example, options, capsys):
    with pytest.raises(SystemExit):
        example.main(list(options))
    assert "--size must be one of 32, 64, 128, 256" in capsys.readouterr().err


def test_the_table_says_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("tables")
    row = {"size": 256, "tokens": 65537, "rounds": 9, "visible": 0.0215, "curves": 14, "length": 96, "batch": 4, "steps": 1001}
    row |= {"seconds": 100.0, "before": 0.75, "right": 0.875, "error": 0.01, "test": 1024, "loss": 0.5}
    cost = {"attention": "blocks", "size": 256, "seconds": 0.1, "bytes": 8.4e9}
    results = {"device": "NVIDIA H200", "dtype": "float16", "heads": 2, "width": 64, "rows": [row], "costs": [cost]}
    said = tables.path(results)
    assert "NVIDIA H200, float16" in said
    assert "| 256 x 256 | 65,537 | 2.1 % | 14 | 96 | 9 | 4 | 1001 | 0.1000 | 0.750 | 0.875 ± 0.010 |" in said
    assert "| blocks | 0.1000 | 8,400 |" in said


@pytest.mark.full
def test_it_learns(example):
    """By chance alone a share that is so far above one half comes once in a million times."""
    _, (row,) = example.train(example.parse(["--steps=400", "--minutes=inf", "--test=512"]))
    assert row["right"] > 0.5 + 4.8 * (0.25 / 512) ** 0.5
