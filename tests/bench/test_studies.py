"""The studies of `asv_bench/studies` at tiny sizes on the CPU, and standard attention, which they compare with."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import ROOT, whole

from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind
from numba_flash.bench import peers, standard, timing
from numba_flash.cuda.runtime.launch import Gpu

STUDIES = ROOT / "asv_bench" / "studies"


def run(study: str, *arguments: str, file: Path, **environment: str) -> dict:
    """What a study writes, run as its users do."""
    command = [sys.executable, str(STUDIES / f"{study}.py"), *arguments, "--json", str(file), "--commit", "abc"]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = json.loads(file.read_text())
    assert (results["study"], results["commit"]) == (study, "abc")
    assert {"device", "date", "packages", "rows"} <= set(results)
    return results


@pytest.fixture
def module(monkeypatch):
    """Import of a study."""
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module


# ---- standard attention ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-14), ("float32", 1e-6), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_standard_attention_is_the_oracle(dtype, bound, causal):
    pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((2, 3, 70, 24)).astype(dtype) for _ in range(4))
    o, p = standard.forward(q, k, v, causal)
    results = (o, *standard.backward(do, q, k, v, o, p))
    expected, _, *gradients = whole.everything(do, q, k, v, causal=causal)
    for x, ref in zip(results, (expected, *gradients), strict=True):
        assert x.dtype == q.dtype
        assert np.linalg.norm(x.astype(np.float64) - ref) <= bound * np.linalg.norm(ref)


def test_standard_attention_leaves_its_inputs_alone():
    rng = np.random.default_rng(3)
    q, k, v, do = arrays = [rng.standard_normal((2, 9, 8)) for _ in range(4)]
    before = [x.copy() for x in arrays]
    o, p = standard.forward(q, k, v, True)
    standard.backward(do, q, k, v, o, p)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- the studies -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.unproven("of what the system gives")
@pytest.mark.full
def test_scaling(tmp_path):
    results = run("scaling", "--lengths", "70,2048", "--repeats", "1", file=tmp_path / "scaling.json")
    rows = {(row["length"], row["contender"]): row for row in results["rows"]}
    assert list(rows) == [(n, who) for n in (70, 2048) for who in ("numba_flash", "NumPy")]
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows.values())
    matrix = 2048**2 * 4
    assert rows[2048, "NumPy"]["bytes"] > 1.5 * matrix  # P, and dS, but for pages that the process had already
    assert rows[2048, "numba_flash"]["bytes"] < matrix / 2
    assert results["memory_gb"] == 4


@pytest.mark.full
def test_scaling_says_where_memory_ends(module, monkeypatch, tmp_path):
    """What cannot allocate is not tried again at greater lengths."""
    scaling, peers = module("scaling"), module("numba_flash.bench.peers")

    def forward(q, k, v, causal):
        if q.shape[-2] > 40:
            raise MemoryError("no room")
        return allocating(q, k, v, causal)

    allocating = standard.forward
    monkeypatch.setattr(peers.standard, "forward", forward)
    monkeypatch.setattr(scaling, "limit_memory", lambda gigabytes: None)  # of this process
    file = tmp_path / "scaling.json"
    scaling.main(["--lengths", "32,64,96", "--repeats", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["length"], row["contender"]) for row in rows if row["contender"] == "NumPy"] == [(32, "NumPy"), (64, "NumPy")]
    assert rows[3] == {"length": 64, "mask": "full", "contender": "NumPy", "failed": "forward", "reason": "MemoryError: no room"}
    assert rows[4]["contender"] == "numba_flash"
    assert "failed" not in rows[4]


TINY = ("--batch", "1", "--heads", "2", "--length", "65", "--head-dim", "16", "--dtype", "float32", "--repeats", "1")


def test_traffic_without_a_profiler(tmp_path):
    """Times and formulas are there; what is counted is null, with the reason."""
    results = run("traffic", *TINY, file=tmp_path / "traffic.json", PATH="/nowhere")
    assert [(row["contender"], row["mask"]) for row in results["rows"]] == [
        (who, mask) for mask in ("full", "causal") for who in ("numba_flash", "NumPy")
    ]
    product = 2 * 2 * 65**2 * 16
    assert [row["flop"] / product for row in results["rows"]] == [7, 6, 3.5, 6]
    for row in results["rows"]:
        assert row["forward_ms"] > 0 < row["backward_ms"]
        assert row["dram_bytes"] is row["tensor_flop"] is row["scalar_flop"] is None
        assert row["reason"].startswith("RuntimeError: ncu cannot be started")


NCU = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
if arguments == ["--query-metrics"]:
    print("sm__cycles_elapsed  Counter")
    print("sm__ops_path_tensor_op_hgmma_src_fp16_sparsity_off  Counter  operations")
    print("sm__ops_path_tensor_op_hmma_src_fp16_dst_fp32_sparsity_off  Counter  operations")
    print("sm__ops_path_tensor_op_hmma_src_fp16_dst_fp32_sparsity_on  Counter  operations")
    sys.exit()
start = arguments.index({python!r})
subprocess.run(arguments[start:], check=True)
metrics = arguments[start - 1].split(",")
print("==PROF== Connected")
print(",".join(f'"{{name}}"' for name in ("ID", "Kernel Name", *metrics)))
print(",".join(f'"{{name}}"' for name in ("", "", *("unit" for _ in metrics))))
for kernel in range(2):
    print(",".join(f'"{{value}}"' for value in (kernel, "k<a, b>", *("1,000" for _ in metrics))))
print("==WARNING== that's all")
"""


@pytest.mark.full
def test_traffic_adds_up_what_a_profiler_counts(tmp_path):
    """A stand-in for ncu, which runs what it is given and finds two kernels with 1,000 of everything."""
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    results = run("traffic", *TINY, "--mask", "full", file=tmp_path / "traffic.json", PATH=path)
    for row in results["rows"]:
        assert row["kernels"] == 2
        assert row["dram_bytes"] == 2 * 2 * 1000  # read and written
        assert row["tensor_flop"] == 2 * 2 * 1000  # of two instructions
        assert row["scalar_flop"] == 2 * 1000 * 2 * (1 + 1 + 2)  # additions, products and both at once, of two dtypes


@pytest.mark.parametrize("name", ["numba_flash", "NumPy"])
def test_traffic_once_of_a_batch(module, monkeypatch, name):
    """What the profiler sees, and before it what it does not see, is a forward and a backward call on the whole batch."""
    traffic, seen = module("traffic"), []
    contender = next(c for c in traffic.peers.contenders(None) if c.name == name)

    def bind(case):
        bound = contender.bind(case)
        return traffic.peers.Bound(lambda count: seen.append((count, [x.shape for x in bound.repeat(count)])), bound.results)

    monkeypatch.setattr(traffic.peers, "contenders", lambda backend: [traffic.replace(contender, bind=bind)])
    traffic.main(["--batch", "2", *TINY[2:], "--once", name])
    assert seen == [(1, [(2, 2, 65, 16)] * 3)] * 2


@pytest.mark.full
def test_tiles_in_the_simulator(tmp_path):
    """A tile that is not the chosen one computes the same."""
    code = """
import sys
import tiles
from numba_flash.cuda.simt import tier
tiles.STUDIES = {"simt forward": ("float32", (tier, "tile_for"), {8: [tier.Tile(2, 2, 2, 4, 4, 2, 1)]})}
tiles.main(["--length", "6", "--tokens", "6", "--width", "8", "--head-dims", "8", "--kernels", "simt forward", "--repeats", "1",
            "--json", sys.argv[1]])
"""
    file = tmp_path / "tiles.json"
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join([str(STUDIES), str(STUDIES.parents[1])])}
    process = subprocess.run([sys.executable, "-c", code, str(file)], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [(row["chosen"], row["tile"]["block_m"], row["tile"]["block_n"]) for row in rows] == [(True, 4, 4), (False, 4, 8)]
    assert all(row["error"] < 1e-6 and row["ms"] > 0 for row in rows)


def test_tiles_fit_into_shared_memory(module):
    """Of each kernel there is something to compare, and nothing that cannot be launched."""
    tiles = module("tiles")
    for name, (_, _, candidates) in tiles.STUDIES.items():
        for d, found in candidates.items():
            assert len([tile for tile in found if tiles._fits(tile, d)]) >= 2, (name, d)


def test_tiles_are_those_that_are_asked_for(module):
    """Backends prepare kernels with the study's tile, not with their own."""
    tiles = module("tiles")
    for name, (dtype, choice, candidates) in tiles.STUDIES.items():
        backend, direction = name.split()
        for d, found in candidates.items():
            x, lse = np.zeros((2, 300, d), dtype), np.zeros((2, 300), np.float32)
            arrays = ForwardInputs(x, x, x) if direction == "forward" else BackwardInputs(x, x, x, x, x, lse)
            results = ForwardResults(x, None) if direction == "forward" else BackwardResults(x, x, x)
            for tile in found:
                done = tiles.prepare(tile, choice, backend, direction, bind(x, x, x), arrays, results)
                configs = [getattr(value, "tile", value) for launch in done.launches for value in launch.config]
                used = {value for value in configs if type(value) is type(tile)}
                assert used == {tile}, (name, d)


def test_orders_are_those_that_are_asked_for(module):
    """Not the backend's own: of two heads of three blocks of keys on one multiprocessor."""
    orders, tiles = module("orders"), module("tiles")
    q, k, lse = np.zeros((4, 300, 128), "float16"), np.zeros((2, 300, 128), "float16"), np.zeros((4, 300), np.float32)
    inputs, results = BackwardInputs(q, q, k, k, q, lse), BackwardResults(q, k, k)
    ways = {}
    for order in orders.Order:
        done = tiles.prepare(order, orders.CHOICE, "sm90", "backward", bind(q, k, k, causal=True), inputs, results)
        sizes = [x for launch in done.launches for x in launch.numbers if getattr(x, "section", 0)]
        (ways[order.name],) = {(x.upward, x.serpentine) for x in sizes}
    assert ways == {"DOWNWARD": (0, 0), "UPWARD": (3, 0), "SERPENTINE": (0, 1)}


@pytest.mark.parametrize("missing", ["DOWNWARD", "UPWARD"])
def test_orders_are_compared_with_the_first(module, monkeypatch, missing):
    """On kernels of the CPU, which have none. Where the first is missing, others are timed all the same."""
    orders = module("orders")

    def prepared(order, choice, name, direction, case):
        if order.name == missing:
            raise RuntimeError("no way")
        return peers.bind_ours("cpu", case)

    monkeypatch.setattr(orders.tiles, "prepared", prepared)
    monkeypatch.setattr(orders.launch, "gpu_of", lambda x: Gpu(0, (9, 0), 132))
    options = SimpleNamespace(tokens=96, width=256, repeats=3)
    rows = orders.study(8, 16, 48, options, timing.HostClock())
    assert [(row["order"], row["chosen"]) for row in rows] == [("DOWNWARD", False), ("UPWARD", True), ("SERPENTINE", False)]
    for row in rows:
        if row["order"] == missing:
            assert row["reason"] == "RuntimeError: no way"
        else:
            assert row["error"] < 2e-2
            assert min(row["ms"], row["tflops"]) > 0
            assert row["speed"] is None if missing == "DOWNWARD" else row["speed"] > 0


@pytest.mark.parametrize(
    ("study", "arguments", "complaint"),
    [
        ("tiles", (), "tiles of CUDA kernels need a GPU"),
        ("orders", (), "no NVIDIA GPU found"),
        ("orders", ("--groups", "3"), "4096 columns must be heads of D <= 128, of which 3 share keys each; got D = 64"),
        ("orders", ("--head-dims", "256"), "4096 columns must be heads of D <= 128, of which 2 share keys each; got D = 256"),
    ],
)
def test_studies_of_kernels_say_what_they_need(study, arguments, complaint):
    process = subprocess.run([sys.executable, str(STUDIES / f"{study}.py"), *arguments], capture_output=True, text=True)
    if process.returncode == 0:
        pytest.skip("there is a GPU")
    assert complaint in process.stderr


def test_accuracy(tmp_path):
    results = run("accuracy", "--length", "65", "--head-dims", "16", "--dtypes", "float16", file=tmp_path / "accuracy.json")
    rows = {(row["dtype"], row["distribution"], row["who"]): row for row in results["rows"]}
    for distribution in ("normal", "outliers"):
        naive, ours = (rows["float16", distribution, who] for who in ("naive", "cpu"))
        assert all(0 < ours[name] < naive[name] < 1e-3 for name in ("o", "dq", "dk", "dv"))
        assert all(name in row or row["reason"] for row in rows.values() for name in ("o", "dq", "dk", "dv"))


def test_float32(module, monkeypatch, tmp_path):
    """Numbers of N(0, 1) lose little, those far from the origin much; who cannot run says why. Everyone is timed."""
    sizes = ("--length", "96", "--head-dims", "16", "--tokens", "96", "--width", "32", "--repeats", "1")
    results = run("float32", *sizes, file=tmp_path / "float32.json")
    rows = {(row["distribution"], row["who"]): row for row in results["rows"]}
    assert all(0 < rows["normal", who][name] < 1e-6 for who in ("NumPy", "cpu") for name in ("o", "dq", "dk", "dv"))
    assert all(rows["kelvin", who]["dq"] > 1e-5 > rows["units", who]["dq"] for who in ("NumPy", "cpu"))
    timed = {(row["direction"], row["who"]) for row in results["times"]}
    assert timed >= {(direction, who) for direction in ("forward", "backward") for who in ("NumPy", "cpu")}
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in results["times"])
    study = module("float32")
    clock = SimpleNamespace(place="gpu", xp=np)
    assert list(study.everyone(clock))[:5] == ["sm90 float32", "sm90 tf32", "sm80 float32", "sm80 tf32", "simt"]
    row = study.rows_of("normal", 8, 4, clock)[0]
    assert row["reason"].startswith("NotImplementedError: backend sm90: ")


class OfAGpu(np.ndarray):
    """What CuPy's arrays have besides."""

    def get(self):
        return np.asarray(self)


def test_what_float32_is_compared_with_on_a_gpu_is_the_oracle(module):
    study, arrays = module("float32"), [x.view(OfAGpu) for x in module("float32").inputs("normal", 40, 8)]
    gpu = SimpleNamespace(asarray=np.asanyarray, exp=np.exp)
    for x, ref in zip(study.expected_of(*arrays, gpu), study.expected_of(*arrays, np), strict=True):
        np.testing.assert_allclose(x, ref, rtol=0, atol=1e-14)


def test_sparsity(tmp_path):
    """Who goes by a mask, of blocks or of pairs, and who sees everything, are checked and timed at each density."""
    results = run("sparsity", "--length", "300", "--head-dim", "16", "--percent", "50,1", "--repeats", "1", file=tmp_path / "sparsity.json")
    rows = results["rows"]
    everybody = {"numba_flash", "numba_flash, a mask of pairs", "numba_flash, dense"}
    assert {row["contender"] for row in rows} >= everybody
    assert {(row["percent"], row["direction"]) for row in rows} == {(p, d) for p in (50, 1) for d in ("forward", "backward")}
    assert all(row["ms"] > 0 for row in rows if row["contender"] in everybody)
    assert all(row["percent"] / 100 < row["visible"] <= 1 for row in rows)


def test_sparsity_finds_what_is_wrong(module, monkeypatch):
    """Results of another mask are not timed."""
    sparsity, common = module("sparsity"), module("common")
    size = sparsity.DEFAULTS["cpu"] | {"length": 300, "head_dim": 16}
    forward = sparsity.numba_flash.forward
    monkeypatch.setattr(sparsity.numba_flash, "forward", lambda q, k, v, mask=None, **more: forward(q, k, v, **more))
    ours, *_ = sparsity.rows_of(20, "forward", size, common.clock("cpu"), 1)
    assert ours["contender"] == "numba_flash"
    assert ours["reason"].startswith("wrong: error ")
    assert "ms" not in ours


def test_efficiency_on_several_gpus(module):
    """A round together takes as long as its slowest process; what is wrong, or has other bits, is no result."""
    gpus = module("gpus")
    spread = gpus.Spread(gpus.SHAPE, 1000, True, 3)
    of = lambda *ms: {"error": 1e-3, "same_bits": True} | dict(zip(gpus.WAYS, ms, strict=True))
    said = [
        dict.fromkeys(gpus.DIRECTIONS, of([8.0, 8.0, 6.0], [8.0, 9.0, 9.0], [4.0, 4.0, 4.0])),
        dict.fromkeys(gpus.DIRECTIONS, of([0.0] * 3, [9.0, 8.0, 10.0], [3.0, 5.0, 3.0])),
    ]
    for row in gpus.rows_of(said, spread):
        assert (row["ms"], row["ms_alone"], row["ms_at_once"], row["gpus"], row["layout"]) == (4.0, 8.0, 9.0, 2, "zigzag")
        assert (row["efficiency"], row["least"], row["most"]) == (0.8, 0.75, 1.0)
    for wrong in ({"error": 0.1}, {"error": math.nan}, {"same_bits": False}):
        with pytest.raises(RuntimeError, match="forward"):
            gpus.rows_of([{"forward": said[0]["forward"] | wrong, "backward": said[0]["backward"]}, said[1]], spread)


def test_long_calls_need_no_round_to_warm_up(module, monkeypatch):
    gpus = module("gpus")
    monkeypatch.setattr(gpus, "share", lambda *x: None)
    alone = SimpleNamespace(size=1, synchronize=lambda: None)
    for tokens, rounds in ((2**16, 4), (2**22, 3)):
        made = []
        spread = gpus.Spread(gpus.SHAPE, tokens, True, 3)
        times = gpus.in_turns({"alone": lambda made=made: made.append(1)}, "forward", spread, alone, alone)
        assert [*map(len, times.values())] == [3, 3, 3]
        assert len(made) % rounds == 0
        assert (len(made) == rounds) == (tokens == 2**22)


def test_sizes_measured_one_at_a_time(module, tmp_path):
    """Later rows take the place of earlier ones, and say when they were made; another device is refused."""
    gpus, common = module("gpus"), module("common")
    about = {"study": "gpus", "device": "H", "date": "1", "commit": "a", "packages": {"numpy": "2"}} | gpus.SHAPE
    row = lambda tokens, causal, ms: {"direction": "forward", "tokens": tokens, "causal": causal, "ms": ms}
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    common.write_file(old, [row(1, True, 5.0), row(1, False, 6.0), row(2, True, 7.0)], about)
    common.write_file(new, [row(2, False, 8.0), row(1, False, 9.0)], about | {"date": "2", "commit": "b"})
    gpus.main(["--json", str(old), "--join", str(new)])
    made = {"date": "2", "commit": "b"}
    both = json.loads(old.read_text())
    assert both["rows"] == [row(1, True, 5.0), row(1, False, 9.0) | made, row(2, True, 7.0), row(2, False, 8.0) | made]
    assert {name: both[name] for name in about} == about
    common.write_file(new, [], about | {"device": "another"})
    with pytest.raises(ValueError, match=r"^device must be the same: H and another$"):
        gpus.main(["--json", str(old), "--join", str(new)])
