"""The study of doubt: splits lose what they should, kernels multiply what they are given, and emptied sums are more accurate."""

import importlib
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support import ROOT, SIMULATED

from numba_flash.cuda.runtime.launch import Gpu

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")


@pytest.fixture
def study(monkeypatch):
    """The study with small matrices, on kernels of the machine."""
    monkeypatch.syspath_prepend(str(ROOT / "asv_bench" / "studies"))
    study = importlib.import_module("doubt")
    monkeypatch.setattr(study, "ROWS", 64)
    return study


def on_machine():
    from ptx_machine.instructions import sums
    from ptx_machine.problems import kernels

    return kernels.machine(core=sums.HOPPER)


def clock_here():
    return SimpleNamespace(place="cpu", xp=np, gpu=Gpu(0, (9, 0), 2))


@pytest.mark.parametrize("name", ["float16 x 3", "bfloat16 x 6", "TF32 x 3", "bfloat16 x 3", "TF32 x 1"])
def test_parts_add_up_to_the_number(study, name):
    split = study.SPLITS[name]
    (x, _), lost = study.matrices("normal", 64), {"bfloat16 x 3": 2.0**-16, "TF32 x 1": 2.0**-11}
    parts, scale = study.parts_of(x, split)
    for part in parts:
        assert np.array_equal(study.rounded(part, split.kind), part)
    total = sum(part.astype(np.float64) * split.weight**i for i, part in enumerate(parts)) / scale
    assert np.abs(total / x - 1).max() <= lost.get(name, 2.0**-21)
    assert np.array_equal(study.as_words(parts[0], "tf32").view(np.float32), parts[0])


@pytest.mark.machine
@pytest.mark.full
@pytest.mark.parametrize(
    ("instruction", "name"),
    [
        ("wgmma", "float16 x 3"),
        ("wgmma", "bfloat16 x 6"),
        ("mma.sync", "float16 x 3"),
        ("mma.sync", "TF32 x 3"),
    ],
)
def test_emptied_sums_of_positive_numbers_are_more_accurate(study, instruction, name):
    """By the kernels, on tensor cores that cut sums off; as long as the sums stay there they lose more with every stretch."""
    a, b = study.matrices("positive", 512)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    with on_machine():
        found = [study.product(instruction, study.SPLITS[name], each, a, b, clock_here()) for each in (64, None)]
    emptied, never = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in found)
    print(f"{instruction}, {name}: {emptied:.1e}, {never:.1e}")
    assert emptied < 1e-6
    assert never > 1.5 * emptied


def test_ieee_sums(study):
    a, b = study.matrices("normal", 256)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    assert 1e-8 < np.linalg.norm(study.ieee(a, b, clock_here()) - exact) / np.linalg.norm(exact) < 1e-6


def test_results_are_written_after_every_kind_of_data(study, tmp_path, monkeypatch):
    clock = SimpleNamespace(place="gpu", xp=np, current=nullcontext)
    clock.cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(study.common, "clock", lambda: clock)
    monkeypatch.setattr(study.launch, "gpu", lambda device: SimpleNamespace(capability=(9, 0)))
    monkeypatch.setattr(study, "timed", lambda instruction, kind, *more: [{"instruction": instruction, "kind": kind}])
    row = lambda data, length, *more: [{"data": data, "length": length, "instruction": "IEEE", "error": 1.0}]
    monkeypatch.setattr(study, "errors", row)
    file = tmp_path / "doubt.json"
    study.main(["--lengths", "64,128", "--json", str(file)])
    results = json.loads(file.read_text())
    assert [(row["length"], row["data"]) for row in results["rows"]] == [(n, data) for n in (64, 128) for data in study.DATA]
    assert len(results["rates"]) == 4


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Everything at one length: three products of two float16 are as good as IEEE sums where they are emptied, and worse where never."""
    from test_studies import run

    results = run("doubt", "--lengths", "4096", "--repeats", "2", file=tmp_path / "doubt.json")
    rows = {(x["data"], x["instruction"], x.get("split"), x.get("interval")): x["error"] for x in results["rows"]}
    for instruction in {x["instruction"] for x in results["rates"]}:
        ours = [rows["positive", instruction, "float16 x 3", interval] for interval in (64, None)]
        assert ours[0] < rows["positive", "IEEE", None, None] < ours[1]
    assert all(x["tflops"] > 1 for x in results["rates"])
