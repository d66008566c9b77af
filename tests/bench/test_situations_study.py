"""The study of situations: what is chosen, what its file keeps, and on a GPU what it measures."""

import importlib
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support import ROOT
from test_studies import run

from numba_flash import reference
from numba_flash.bench import options as changes

STUDIES = ROOT / "asv_bench" / "studies"


@pytest.fixture
def study(monkeypatch):
    """The study, where a GPU seems to be, and each row takes 2 ms."""
    monkeypatch.syspath_prepend(str(STUDIES))
    study = importlib.import_module("situations")
    monkeypatch.setattr(study.common, "clock", lambda: SimpleNamespace(place="gpu", current=nullcontext))
    monkeypatch.setattr(study, "compile_all", lambda wanted: None)
    monkeypatch.setattr(study.measure, "_gpu", lambda: "H")
    measured = lambda situation, direction, clock, repeats: study.key_of(situation, direction) | {"ms": 2.0}
    monkeypatch.setattr(study, "measure_situation", measured)
    return study


def rows_of(file) -> list[tuple]:
    return [(row["situation"], row["direction"], row["ms"]) for row in json.loads(file.read_text())["rows"]]


def test_rows_are_chosen_by_name_and_others_stay(study, tmp_path, monkeypatch):
    file = tmp_path / "situations.json"
    assert study.main(["--only", "ALiBi, in 16 bits", "a softcap", "--json", str(file), "--commit", "a"]) == 0
    names = ["a softcap, in 16 bits", "ALiBi, in 16 bits", "a softcap, in 16 bits (`sm80`)", "ALiBi, in 16 bits (`sm80`)"]
    first = [(name, direction, 2.0) for name in names for direction in ("forward", "backward")]
    assert rows_of(file) == first
    again = lambda situation, direction, clock, repeats: study.key_of(situation, direction) | {"ms": 1.0}
    monkeypatch.setattr(study, "measure_situation", again)
    assert study.main(["--only", "a softcap, in 16 bits (", "--json", str(file), "--commit", "b"]) == 0
    assert rows_of(file) == [*first[:4], *first[6:], *((name, direction, 1.0) for name, direction, _ in first[4:6])]
    content = json.loads(file.read_text())
    assert content["commit"] == "b"
    assert [row.get("commit") for row in content["rows"]] == 6 * ["a"] + 2 * [None]
    monkeypatch.setattr(study.measure, "_gpu", lambda: "another")
    study.main(["--only", "float64", "--json", str(file)])
    assert {name for name, *_ in rows_of(file)} == {"float64", "one query per head, in float64"}


def test_a_row_that_fails_or_is_cut_off_costs_no_other(study, tmp_path, monkeypatch, capsys):
    file, measured = tmp_path / "situations.json", study.measure_situation

    def sometimes(situation, direction, clock, repeats):
        if situation.option == "alibi":
            raise RuntimeError("wrong")
        if situation.option == "table":
            raise KeyboardInterrupt
        return measured(situation, direction, clock, repeats)

    monkeypatch.setattr(study, "measure_situation", sometimes)
    with pytest.raises(KeyboardInterrupt):
        study.main(["--only", "in 16 bits", "--json", str(file)])
    assert rows_of(file)[-1][:2] == ("a softcap, in 16 bits", "backward")
    assert "not measured: ALiBi, in 16 bits, forward: RuntimeError: wrong" in capsys.readouterr().out
    assert study.main(["--only", "ALiBi", "--json", str(file)]) == 1


def test_every_row_is_about_something_of_its_own(study):
    about = [tuple(study.key_of(s, d).values()) for s in study.SITUATIONS for d in s.directions]
    assert len(about) == len(set(about))


@pytest.mark.parametrize("option", changes.OPTIONS[1:])
def test_what_changes_scores_is_the_same_for_all(option):
    """The bias that stands for it beside other libraries is what this library's function makes of the scores."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 300, 8)) for _ in range(3))
    of_ours = reference.forward(q, k, v, **changes.ours(option, 2))
    rows = np.array([0, 7, 299])
    given = changes.of_oracle(option, 2, rows, 300, "float64")
    np.testing.assert_allclose(reference.forward(q[:, rows], k, v, **given), of_ours[:, rows], atol=1e-12)


@pytest.mark.gpu
def test_situations_beside_pytorch(tmp_path):
    """Every peer of a small problem is checked and timed."""
    pytest.importorskip("torch", reason="the study compares with PyTorch")
    results = run("situations", "--only", "a small problem, in", "--repeats", "2", file=tmp_path / "results.json")
    assert [row["direction"] for row in results["rows"]] == ["forward", "backward"]
    for row in results["rows"]:
        assert row["ms"] > 0
        assert {name: set(peer) for name, peer in row["peers"].items()} == {"cuDNN": {"ms", "ratio"}, "FlashAttention-2": {"ms", "ratio"}}


@pytest.mark.gpu
def test_the_gpus_time_of_small_problems(tmp_path):
    """By graphs of everyone: less than a call takes its host."""
    pytest.importorskip("torch", reason="the study compares with PyTorch")
    results = run("situations", "--only", "the GPU's time", "--repeats", "2", file=tmp_path / "results.json")
    assert len(results["rows"]) == 4
    for row in results["rows"]:
        assert row["ms"] > 0
        assert {name: set(peer) for name, peer in row["peers"].items()} == {"cuDNN": {"ms", "ratio"}, "FlashAttention-2": {"ms", "ratio"}}


@pytest.mark.gpu
@pytest.mark.full
def test_what_changes_scores_beside_flex_attention(tmp_path):
    pytest.importorskip("torch", reason="the study compares with PyTorch")
    results = run("situations", "--only", "a softcap, in 16 bits (", "--repeats", "2", file=tmp_path / "results.json")
    for row in results["rows"]:
        assert set(row["peers"]) == {"FlexAttention"}
        assert row["over_plain"] > 0
