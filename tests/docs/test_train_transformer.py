"""The example that trains a language model: its gradients are those of its loss, with either attention, in every precision."""

import importlib.util
import json
import re
from pydoc_data.topics import topics

import numpy as np
import pytest
from support import ROOT

import numba_flash

EXAMPLE = ROOT / "docs" / "examples" / "train_transformer.py"
SMALL = ("--batch", "2", "--length", "24", "--width", "32", "--heads", "2")
LARGER = ("--batch", "4", "--length", "64", "--width", "32", "--heads", "2")
ATTENTIONS = pytest.mark.parametrize("attention", ["flash", "standard"])


def load():
    spec = importlib.util.spec_from_file_location("train_transformer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch):
    """The example with NumPy arrays, whether there is a GPU or not."""
    module = load()
    monkeypatch.setattr(module, "xp", np)
    return module


def problem(example, *options: str):
    """Parameters that are all far from 0 or 1, tokens, targets, number of heads; in float64."""
    o, rng = example.parse(["--dtype", "float64", *options]), np.random.default_rng(4)
    parameters = example.initial_parameters(rng, o)
    for weights in parameters.values():
        for w in weights.values():
            w += 0.3 * rng.standard_normal(w.shape)
    tokens, targets = rng.integers(example.BYTES, size=(2, o.batch, o.length))
    return parameters, tokens, targets, o.heads


def losses(example, *options: str, steps: int = 20) -> np.ndarray:
    return np.array(example.train(example.parse([*options, "--steps", str(steps)]))[0])


@ATTENTIONS
def test_gradients_are_those_of_the_loss(example, attention):
    """Of every parameter, some entries and along a random direction, against central differences."""
    parameters, *others = problem(example, "--batch", "2", "--length", "5", "--width", "8", "--heads", "2")
    evaluate = lambda: example.loss_and_gradients(parameters, *others, attention, "float64")
    gradients, rng, h = evaluate()[1], np.random.default_rng(5), 1e-5
    assert {layer: list(g) for layer, g in gradients.items()} == {layer: list(w) for layer, w in parameters.items()}
    for layer, weights in parameters.items():
        for name, w in weights.items():
            g, before = gradients[layer][name], w.copy()
            assert g.shape == w.shape
            directions = [rng.standard_normal(w.shape)]
            for i in rng.choice(np.flatnonzero(g), 3):
                directions.append(np.zeros(w.shape))
                directions[-1].flat[i] = 1
            for direction in directions:
                w[...] = before + h * direction
                above = evaluate()[0]
                w[...] = before - h * direction
                expected = (above - evaluate()[0]) / (2 * h)
                w[...] = before
                assert (g * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-9), (layer, name)


def test_both_attentions_give_the_same_loss_and_gradients(example):
    """At a length that is no multiple of a tile."""
    arguments = problem(example, "--batch", "2", "--length", "150", "--width", "48", "--heads", "3")
    loss, gradients = example.loss_and_gradients(*arguments, "flash", "float64")
    expected_loss, expected = example.loss_and_gradients(*arguments, "standard", "float64")
    assert loss == pytest.approx(expected_loss, rel=1e-10)
    for layer, weights in expected.items():
        for name, g in weights.items():
            assert np.abs(gradients[layer][name] - g).max() <= 1e-10 * np.abs(g).max(), (layer, name)


def test_adam_divides_mean_gradients_by_their_size(example):
    """Against weighted means over all steps so far (Kingma and Ba, Algorithm 1, with the recursion written out)."""
    rng = np.random.default_rng(6)
    w, gradients = rng.standard_normal(5), rng.standard_normal((4, 5))
    parameters, moments, expected = {"layer": {"w": w}}, {"layer": {"w": (np.zeros(5), np.zeros(5))}}, w.copy()
    for t in range(1, 5):
        example.adam(parameters, {"layer": {"w": gradients[t - 1]}}, moments, t)
        mean = lambda x, beta: np.average(x, axis=0, weights=beta ** np.arange(t)[::-1])  # noqa: B023
        m, v = mean(gradients[:t], example.BETA1), mean(gradients[:t] ** 2, example.BETA2)
        expected -= example.LEARNING_RATE * t / example.WARM_UP * m / np.sqrt(v)
        np.testing.assert_allclose(w, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_works_on_views_of_one_array(example, monkeypatch, dtype):
    """q, k and v are views of the projected array, and their gradients are written into views of another."""
    calls = {}
    spy = lambda name, function: lambda *arrays, **options: calls.update({name: (arrays, options)}) or function(*arrays, **options)
    for name in ("forward", "backward"):
        monkeypatch.setattr(numba_flash, name, spy(name, getattr(numba_flash, name)))
    losses(example, *SMALL, "--dtype", dtype, steps=2)
    for parts in calls["forward"][0], calls["backward"][0][1:4], calls["backward"][1]["out"]:
        assert [(x.dtype.name, x.shape) for x in parts] == [(dtype, (2, 2, 24, 16))] * 3
        assert all(x.base is parts[0].base for x in parts)
        assert parts[0].base.size == 3 * parts[0].size


def test_targets_are_the_next_bytes_of_the_text(example, monkeypatch):
    batches, function = [], example.loss_and_gradients
    monkeypatch.setattr(example, "loss_and_gradients", lambda *arguments: batches.append(arguments[1:3]) or function(*arguments))
    losses(example, *SMALL, steps=2)
    text = "\n".join(topics.values()).encode()
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (2, 24)
        assert all(bytes([*row, target[-1]]) in text for row, target in zip(tokens.tolist(), targets.tolist(), strict=True))
        np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert not np.array_equal(batches[0][0], batches[1][0])


def test_training_is_deterministic_and_the_loss_falls(example):
    first, second = (losses(example, *SMALL, "--dtype", "float64") for _ in range(2))
    assert first.tolist() == second.tolist()
    assert first[0] == pytest.approx(np.log(example.BYTES), rel=0.02)  # nothing is known at first
    assert first[-1] < first[0] - 0.2


# Relative errors, against float64, of losses and of the gradient of a parameter (2-norm). On the CPU, with three seeds and both sizes, they
# reach (2.4e-7, 6.5e-7), (3.1e-4, 1.2e-3) and (1.1e-3, 3.6e-3), a few roundings each; sums on a GPU have other orders. A mistake shows in
# both: a gradient of v that is 10 % too small changes losses by 1.7e-3 to 7.8e-3, attention that looks ahead by 1e-2 to 7e-2.
TOLERANCES = {"float32": (1e-5, 1e-5), "float16": (2e-3, 5e-3), "bfloat16": (5e-3, 1e-2)}


def first_gradients(example, *options: str) -> dict:
    """After one step, moments are the gradients times 1 - BETA1."""
    training = example.Training(example.parse(options))
    training.step()
    to_host = lambda x: x if isinstance(x, np.ndarray) else x.get()
    return {(layer, name): to_host(m) for layer, weights in training.moments.items() for name, (m, _) in weights.items()}


def assert_follows_float64(example, reference, dtype, *options: str):
    """Losses and gradients of `example` in `dtype` are those of `reference` in float64 with standard attention, but for rounding."""
    of_losses, of_gradients = TOLERANCES[dtype]
    double = (*options, "--dtype", "float64", "--attention", "standard")
    for module in example, reference:
        module.LEARNING_RATE, module.WARM_UP = 5e-3, 1  # so that attention learns something within 20 steps
    expected = first_gradients(reference, *double)
    for name, g in first_gradients(example, *options, "--dtype", dtype).items():
        assert np.linalg.norm(g - expected[name]) <= of_gradients * np.linalg.norm(expected[name]), name
    expected = losses(reference, *double)
    assert expected[-1] < expected[0] - 1.5
    np.testing.assert_allclose(losses(example, *options, "--dtype", dtype), expected, rtol=of_losses)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_lower_precision_follows_float64(example, dtype):
    assert_follows_float64(example, example, dtype, *SMALL)


def test_small_gradients_survive_float16(example):
    """The part of one token in 2,048 is a subnormal number without LOSS_SCALE, and the error 2.5e-3; with it, 5.7e-4."""
    many = ("--batch", "16", "--length", "128", "--layers", "1", "--width", "8", "--heads", "1")
    expected = first_gradients(example, *many, "--dtype", "float64")
    for name, g in first_gradients(example, *many, "--dtype", "float16").items():
        assert np.linalg.norm(g - expected[name]) <= 1e-3 * np.linalg.norm(expected[name]), name


@pytest.mark.gpu
@ATTENTIONS
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gpu_follows_float64_on_the_cpu(example, dtype, attention):
    on_gpu = load()
    assert on_gpu.xp.__name__ == "cupy"
    assert_follows_float64(on_gpu, example, dtype, *LARGER, "--attention", attention)


def test_command_line_prints_losses_and_a_summary(example, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the examples need numba_flash[examples]")
    png = tmp_path / "loss.png"
    example.main([*SMALL, "--steps", "4", "--seed", "3", "--figure", str(png)])
    printed = capsys.readouterr().out
    first, last = (float(x) for x in re.findall(r"^step +[14] +loss +([\d.]+)", printed, re.MULTILINE))
    summary = re.search(r"^loss ([\d.]+) -> ([\d.]+) in 4 steps, [\d,]+ tokens/s$", printed, re.MULTILINE)
    assert summary
    assert (first, last) == tuple(float(x) for x in summary.groups())
    assert png.read_bytes().startswith(b"\x89PNG")


def test_scaling_says_where_memory_ends(example, capsys, monkeypatch, tmp_path):
    def attention(q, k, v):
        if q.shape[2] > 40:
            raise MemoryError("no room")
        return example.standard_attention(q, k, v)

    monkeypatch.setitem(example.ATTENTIONS, "standard", (attention, example.standard_attention_backward))
    written = tmp_path / "scaling.json"
    example.main([*SMALL, "--scaling", "--lengths", "40,50", "--json", str(written)])
    rows = re.findall(r"^ +(40|50) +(flash|standard) +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [row[:2] for row in rows] == [("40", "flash"), ("40", "standard"), ("50", "flash"), ("50", "standard")]
    assert all(re.fullmatch(r"[\d.]+ +[\d,]+ +\d+ MB", row[2]) for row in rows[:3])
    assert rows[3][2] == "out of memory"
    results = json.loads(written.read_text())
    assert (results["study"], results["width"], results["dtype"]) == ("training", 32, "float32")
    assert set(results) == {"study", "arrays", "layers", "heads", "width", "seed", "dtype", "rows"}
    assert [(str(row["length"]), row["attention"]) for row in results["rows"]] == [row[:2] for row in rows]
    assert [f"{row['seconds']:.4f}" for row in results["rows"][:3]] == [row[2].split()[0] for row in rows[:3]]
    assert results["rows"][3] == {"batch": 1, "length": 50, "attention": "standard", "reason": "no room"}


@pytest.mark.parametrize("options", [("--steps", "1"), ("--width", "30", "--heads", "4")])
def test_impossible_settings_are_named(example, options, capsys):
    with pytest.raises(SystemExit):
        example.main(list(options))
    assert "--steps must be at least 2" in capsys.readouterr().err
