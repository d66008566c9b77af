"""The example that generates text: with its cache and without, it says the same, as the model does that was trained."""

import importlib
import re

import numpy as np
import pytest
from support import ROOT

SMALL = ("--steps=2", "--length=40", "--width=32", "--heads=2", "--sequences=3", "--tokens=12", "--page=5")


@pytest.fixture
def example(monkeypatch):
    """The example, and the one that it imports, with NumPy arrays, whether there is a GPU or not."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    module = importlib.import_module("generate_text")
    for each in (module, module.transformer):
        monkeypatch.setattr(each, "xp", np)
    return module


@pytest.fixture
def training(example):
    options = example.parse(SMALL)
    given = [x for x in SMALL if not x.startswith(("--sequences", "--tokens", "--page"))]
    training = example.transformer.Training(example.transformer.parse(given))
    rng = np.random.default_rng(1)
    for weights in training.parameters.values():  # far from where they begin, so that no two bytes are about as likely
        for w in weights.values():
            w += 0.3 * rng.standard_normal(w.shape).astype(w.dtype)
    return training, options


def test_the_same_text_with_a_cache_and_without(example, training):
    """Of pieces of different lengths, over the ends of pages, which lie in no order."""
    model, options = training
    pieces = [model.text[1000 * n :][:length] for n, length in enumerate((28, 9, 1))]
    made = [example.generate(model.parameters, options, pieces, cached)[0] for cached in (True, False)]
    assert made[0].shape == (3, 12)
    assert np.unique(made[0]).size > 5
    np.testing.assert_array_equal(*made)


def test_its_layers_are_those_that_were_trained(example, training):
    model, options = training
    x, p = np.random.default_rng(2).standard_normal((2, 20, 32)), model.parameters["block0"]
    expected, _ = example.transformer.block(p, x, options.heads, "standard", "float64")
    attend = lambda q, k, v: example.transformer.standard_attention(q, k, v)[0]
    np.testing.assert_allclose(example.block(p, x, options.heads, attend), expected, rtol=1e-3, atol=1e-3)


def test_what_it_prints(example, capsys):
    example.main(SMALL)
    printed = capsys.readouterr().out
    assert re.search(r"with a cache: +[\d,]+ tokens/s\nwithout a cache: +[\d,]+ tokens/s\nthe same text\n", printed)
