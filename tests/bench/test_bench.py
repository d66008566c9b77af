"""`python -m numba_flash bench`: what is measured is right, what is wrong is not measured, and nobody is left out without a reason."""

import json
import math
import sys
import types
import warnings
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
from support import DTYPES, whole

from numba_flash import forward, reference
from numba_flash.__main__ import main
from numba_flash.bench import grid, peers, progress, report, timing
from numba_flash.bench.cases import BOUNDS, Case, Cell, relative_error
from numba_flash.bench.options import OPTIONS
from numba_flash.bench.peers import OURS, Bound, Contender
from numba_flash.bench.timing import Outcome

SMALL = ("bench", "--backend", "cpu", "--lengths", "33,64", "--tokens", "64", "--width", "32", "--head-dims", "16", "--repeats", "3")
free_bytes = peers._free_bytes
ANYWHERE = lambda place, dtype: None


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr(timing, "HOST_TURNS", 2)


def cell(direction="forward", mask="full", dtype="float32", **sizes) -> Cell:
    return Cell(direction, mask, dtype, **({"batch": 2, "heads": 4, "heads_kv": 2, "length": 150, "head_dim": 16} | sizes))


def invite(monkeypatch, *others: Contender):
    """`others` instead of all peers that need something installed."""
    stay = [c for c in peers.contenders("cpu") if c.name in (OURS, "NumPy")]
    monkeypatch.setattr(peers, "contenders", lambda backend: [*stay, *others])


def spoilt(name: str, spoil) -> Contender:
    """NumPy, with its results put through `spoil` before they are checked."""

    def bind(case):
        bound = peers._bind_standard(case)
        return Bound(bound.repeat, lambda: spoil(bound.results()))

    return Contender(name, bind, ANYWHERE)


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def test_command_measures_prints_and_writes(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the figure needs numba_flash[examples]")
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    written, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    assert main([*SMALL, "--direction", "both", "--heads-kv", "2", "--json", str(written), "--plot", str(figure)]) == 0
    results, printed = json.loads(written.read_text()), capsys.readouterr().out
    grid = [(c["direction"], c["mask"], c["length"]) for c in results["cells"]]
    assert grid == [(d, m, n) for d in ("forward", "backward") for m in ("full", "causal") for n in (33, 64)]
    for entry in results["cells"]:
        assert (entry["batch"], entry["heads"], entry["heads_kv"], entry["head_dim"]) == (64 // entry["length"], 2, 1, 16)
        ours, numpy = entry["contenders"][OURS], entry["contenders"]["NumPy"]
        for measured in (ours, numpy):
            assert measured["status"] == "ok"
            assert 0 < measured["error"] < entry["bound"] == 1e-4
            assert len(measured["rounds_ms"]) == 3
            assert min(measured["rounds_ms"]) > 0
            assert measured["ms"] == median(measured["rounds_ms"])
            assert measured["tflops"] == pytest.approx(entry["flops"] / measured["ms"] / 1e9)
        assert numpy["ratio"] == median(t / o for t, o in zip(numpy["rounds_ms"], ours["rounds_ms"], strict=True)) > 0
        assert "ratio" not in ours
    ratios = [entry["contenders"]["NumPy"]["ratio"] for entry in results["cells"]]
    assert results["summary"]["NumPy"]["cells"] == 8
    assert results["summary"]["NumPy"]["minimum"] == min(ratios)
    assert results["summary"]["NumPy"]["geometric_mean"] == pytest.approx(math.prod(ratios) ** (1 / 8))
    assert results["host_microseconds"][OURS] > 0
    assert results["packages"]["numpy"] == np.__version__
    assert figure.stat().st_size > 10_000
    assert printed.count("█") > 8
    assert "our speed / NumPy: geometric mean " in printed
    assert "time per forward call at (1, 2, 64, 64): numba_flash " in printed


def test_options_change_what_is_measured(tmp_path, capsys):
    """Each is checked against the oracle and has a row of its own; standard attention has none."""
    written = tmp_path / "bench.json"
    arguments = (*SMALL, "--lengths", "64", "--mask", "full", "--direction", "both", "--option", ",".join(OPTIONS))
    assert main([*arguments, "--heads-kv", "2", "--json", str(written)]) == 0
    cells, printed = json.loads(written.read_text())["cells"], capsys.readouterr().out
    assert [(entry["direction"], entry["option"]) for entry in cells] == [(d, o) for d in ("forward", "backward") for o in OPTIONS]
    for entry in cells:
        assert entry["contenders"][OURS]["status"] == "ok"
        assert entry["contenders"]["NumPy"]["status"] == ("ok" if entry["option"] == "none" else "cannot")
        assert ("  softcap" in printed) == any(entry["option"] == "softcap" for entry in cells)
    with pytest.raises(SystemExit):
        main([*SMALL, "--option", "bias"])
    assert "options are none, softcap, alibi, table, not bias" in capsys.readouterr().err


@pytest.mark.parametrize("option", OPTIONS[1:])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_option_that_is_left_out_is_wrong(option, dtype):
    """In every dtype: the check is not blind to it."""
    pytest.importorskip("ml_dtypes")
    with_option, without = (Case(cell(dtype=dtype, length=64, option=each), np).expected() for each in (option, "none"))
    assert relative_error(with_option, without) > 2 * BOUNDS[dtype]


def test_peers_that_cannot_run_are_listed_with_their_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    written = tmp_path / "bench.json"
    assert main([*SMALL, "--mask", "full", "--lengths", "33", "--json", str(written)]) == 0
    absent, printed = json.loads(written.read_text())["not_compared"], capsys.readouterr().out
    assert set(absent) == {c.name for c in peers.contenders(None)} - {OURS, "NumPy"}
    assert absent["torch CPU"].startswith("cannot import torch: ModuleNotFoundError")
    assert {reason for name, reason in absent.items() if name != "torch CPU"} == {"needs a GPU"}
    for name, reason in absent.items():
        assert f"not compared: {name}: {reason}" in printed
    assert "no GPU is used: the CPU is demanded" in printed


def test_wrong_peers_are_reported_and_not_timed(monkeypatch, tmp_path, capsys):
    twice = lambda results: tuple(2 * x for x in results)
    last = lambda results: (
        *results[:-1],
        results[-1] + np.where(np.arange(len(results[-1])) == len(results[-1]) - 1, 0.1, 0)[:, None, None],
    )
    invite(monkeypatch, spoilt("twice", twice), spoilt("last", last), spoilt("NaN", lambda results: (results[0] * np.nan, *results[1:])))
    written = tmp_path / "bench.json"
    assert main([*SMALL, "--direction", "both", "--json", str(written)]) == 0
    results, printed = json.loads(written.read_text()), capsys.readouterr().out
    for entry in results["cells"]:
        for name in ("twice", "last", "NaN"):
            assert set(entry["contenders"][name]) == {"status", "error"}
            assert entry["contenders"][name]["status"] == "WRONG"
        assert entry["contenders"]["twice"]["error"] == pytest.approx(1, rel=1e-3)
    assert set(results["summary"]) == {"NumPy"}
    assert printed.count("WRONG, not timed: error") == 3 * 8
    rows = printed.split("our speed over the peer's\n")[1].splitlines()[1:9]
    assert {tuple(row.split()[-3:]) for row in rows} == {("WRONG",) * 3}


def test_the_hosts_time_is_told_of_nobody_who_is_wrong(monkeypatch, tmp_path, capsys):
    """Nor is the run a success if that is this library."""
    zeros = spoilt("zeros", lambda results: tuple(0 * x for x in results))
    invite(monkeypatch, replace(zeros, host_time=True))
    monkeypatch.setattr(peers, "forward", lambda q, *others, **options: (np.zeros_like if q.shape[2] == 64 else forward)(q, *others))
    written = tmp_path / "bench.json"
    assert main([*SMALL, "--mask", "full", "--lengths", "33", "--json", str(written)]) == 1
    results = json.loads(written.read_text())
    assert results["cells"][0]["contenders"][OURS]["status"] == "ok"
    assert results["host_microseconds"] == {}
    assert "time per forward call" not in capsys.readouterr().out


def test_the_figure_shows_nobody_who_is_wrong(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="the figure needs numba_flash[examples]")
    outcomes = {OURS: Outcome("ok", ms=[1.0]), "spoilt": Outcome("WRONG", error=1.0), "absent": Outcome("cannot", "no kernel")}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        report.plot([(cell(), outcomes)], tmp_path / "figure.svg", "title")
    drawn = (tmp_path / "figure.svg").read_text()
    assert f">{OURS}<" in drawn
    assert ">spoilt<" not in drawn
    assert ">absent<" not in drawn


@pytest.mark.parametrize(("direction", "gigabytes"), [("forward", "1.0"), ("backward", "2.0")])
def test_matrices_that_do_not_fit_are_refused(direction, gigabytes, monkeypatch):
    monkeypatch.setattr(peers, "_free_bytes", lambda x: 10**9)
    small = SimpleNamespace(cell=cell(direction), arrays=(np.zeros(1, np.float32),))
    large = SimpleNamespace(cell=cell(direction, batch=1, heads=1, heads_kv=1, length=15_900), arrays=small.arrays)
    assert peers._bytes_of_matrices(small) == (1 if direction == "forward" else 2) * 2 * 4 * 150**2 * 4
    with pytest.raises(MemoryError, match=f"^its N x N matrices take {gigabytes} GB, and 1.0 GB are free$"):
        peers._bind_standard(large)
    assert peers._free_bytes is not free_bytes
    assert 2**20 < free_bytes(small.arrays[0]) < 2**50


def test_progress_goes_to_standard_error(capsys):
    assert list(progress.track(iter("ab"), 2, lambda item: f"item {item}")) == ["a", "b"]
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "[1/2] item a\n[2/2] item b\n")


@pytest.mark.parametrize("installed", [True, False])
def test_a_terminal_gets_a_bar_if_there_is_rich(installed, monkeypatch, capsys):
    pytest.importorskip("rich", reason="the bar needs numba_flash[cli]")
    if not installed:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in progress.track("ab", 2, lambda item: f"[bold] item {item}"):  # no markup to rich
        print("a result")
    said = capsys.readouterr()
    assert said.out == "a result\n" * 2
    assert "[bold] item b" in said.err
    assert ("[2/2]" in said.err) is not installed


def test_exit_status_says_whether_numba_flash_was_right(monkeypatch, capsys):
    arguments = [*SMALL, "--mask", "full", "--lengths", "33"]
    monkeypatch.setattr(peers, "forward", lambda q, *others, **options: np.zeros_like(q))
    assert main(arguments) == 1
    assert "numba_flash     WRONG, not timed: error 1.0e+00 exceeds 1e-04" in capsys.readouterr().out


def test_a_peer_that_fails_is_reported_with_what_it_warned_of(monkeypatch, capsys):
    def bind(case):
        warnings.warn("head dimension 16 is too small for it", UserWarning, stacklevel=1)
        raise RuntimeError("no kernel\nmore lines")

    invite(monkeypatch, Contender("picky", bind, ANYWHERE, host_time=True))
    assert main([*SMALL, "--mask", "full", "--lengths", "33"]) == 0
    printed = capsys.readouterr().out
    assert "picky           cannot: RuntimeError: no kernel; head dimension 16 is too small for it\n" in printed
    assert "more lines" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "64,0"], "argument --lengths: '0' is not a positive integer"),
        (["--lengths", "4096"], "--lengths: 4096 is more than --tokens 2048"),
        (["--head-dims", "512"], "--head-dims: 512 is more than 256"),
        (["--width", "32"], "--head-dims: 64 is more than --width 32"),
        (["--heads-kv", "3"], "--heads-kv: 8 heads (--width 512 // 64) cannot be shared by 3"),
        (["--mask", "full,half"], "argument --mask: masks are full and causal, not half"),
        (["--peers", "nobody"], "--peers: nobody is none of torch cuDNN, "),
        (["--backend", "tpu"], "argument --backend: invalid choice: 'tpu'"),
        (["--json", "no/such/file"], "argument --json: there is no directory"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--backend", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_only_peers_that_are_asked_for_take_part(tmp_path):
    written = tmp_path / "bench.json"
    assert main([*SMALL, "--mask", "full", "--lengths", "33", "--peers", "torch CPU", "--json", str(written)]) == 0
    results = json.loads(written.read_text())
    assert results["not_compared"]["NumPy"] == "not asked for"
    assert "NumPy" not in results["cells"][0]["contenders"]


# ---- formulas ----------------------------------------------------------------------------------------------------------------------------


def test_work_and_speed():
    sizes = {"batch": 4, "heads": 16, "heads_kv": 2, "length": 4096, "head_dim": 128}
    forward = 2 * (2 * 4 * 16 * 4096 * 4096 * 128)  # two products of 2 m n k
    assert cell(**sizes).flops == forward
    assert cell(mask="causal", **sizes).flops == forward / 2
    assert cell("backward", **sizes).flops == 5 * forward / 2
    assert cell("backward", "causal", **sizes).flops == 5 * forward / 4
    assert Outcome("ok", ms=[3.0, 1.0, 2.0]).tflops(cell(**sizes)) == pytest.approx(forward / 2e-3 / 1e12)


def test_ratio_is_the_median_of_the_ratios_of_the_rounds():
    ours, peer = Outcome("ok", ms=[1.0, 2.0, 10.0]), Outcome("ok", ms=[3.0, 3.0, 11.0])
    assert timing.ratio(ours, peer) == 1.5
    assert timing.ratio(ours, Outcome("WRONG")) is None
    assert timing.ratio(None, peer) is None


def test_summary_is_geometric_mean_and_minimum():
    results = [
        (cell(length=n), {OURS: Outcome("ok", ms=[1.0]), "peer": Outcome("ok", ms=[t])}) for n, t in ((8, 0.5), (16, 4.0), (32, 4.0))
    ]
    results.append((cell(length=64), {OURS: Outcome("ok", ms=[1.0]), "peer": Outcome("cannot", "too long")}))
    (name, of), *others = timing.summary(results).items()
    assert (name, others) == ("peer", [])
    assert of == {"geometric_mean": pytest.approx(2.0), "minimum": 0.5, "minimum_at": "forward full D 16 N 8", "cells": 3}
    assert "our speed / peer: geometric mean 2.00x, minimum 0.50x (forward full D 16 N 8), 3 of 4 cells" in report.closing(
        results, {}, "cpu"
    )


def test_bars_are_proportional():
    assert report.bar(1.0) == "█" * 30
    assert report.bar(0.5) == "█" * 15
    assert report.bar(1 / 240) == "▏"
    assert report.bar(0.0) == ""


# ---- the check and the clock -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_part_that_is_checked_is_that_of_the_whole(direction, mask):
    case = Case(cell(direction, mask), np)
    causal = mask == "causal"
    if direction == "forward":
        results = (reference.forward(*case.arrays, causal=causal),)
    else:
        assert np.count_nonzero(case.do) == case.do.size
        assert np.count_nonzero(case.sparse_do) == 2 * len(case.rows) * 16
        results = whole.gradients(case.sparse_do, *case.arrays, causal=causal)
    assert {0, 149} < set(case.rows.tolist())
    assert relative_error(case.part(tuple(x[-1] for x in results)), case.expected()) < 1e-14
    assert [x.shape for x in case.expected()] == [(2, 128, 16), (1, 150, 16), (1, 150, 16)][: len(results)]


def test_results_of_another_shape_are_wrong():
    assert relative_error((np.ones((1, 4, 2)),), (np.ones((4, 1, 2)),)) == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_contenders_on_the_cpu_are_right(direction, mask, dtype):
    case = Case(cell(direction, mask, dtype), np)
    expected = case.expected()
    for contender in peers.contenders("cpu"):
        if contender.why_not("cpu", dtype) is None:
            bound = contender.bind(case)
            assert relative_error(case.part(bound.results()), expected) < BOUNDS[dtype], contender.name
            bound.repeat(2)


def test_contenders_take_turns_in_random_order():
    """Nobody always follows the same neighbour: with three of them, each order of a round comes up, and everyone has one turn in each."""
    turns = []

    def contender(name):
        def bind(case):
            bound = peers._bind_standard(case)
            return Bound(lambda count: turns.append((name, count)), bound.results)

        return Contender(name, bind, ANYWHERE)

    class Clock(timing.HostClock):
        def seconds(self, bound, count, own_stream=False):
            bound.repeat(count)
            return 0.004 * count

    rounds = 60
    outcomes = timing.compare(cell(), [contender(name) for name in "abc"], Clock(), rounds)
    timed = turns[-3 * (rounds + 1) :]  # the first round is to warm up
    assert {count for _, count in timed} == {2}  # 10 ms are two calls of 4 ms
    orders = ["".join(name for name, _ in timed[at : at + 3]) for at in range(0, len(timed), 3)]
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {name: outcome.ms for name, outcome in outcomes.items()} == {name: [pytest.approx(4.0)] * rounds for name in "abc"}


# ---- other libraries, where they are installed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_peer_that_wants_heads_last_gets_them(direction, dtype, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch")

    def flash_attn_func(q, k, v, causal):
        assert q.shape[1:] == (150, 4, 16)
        assert q.is_contiguous()
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    (contender,) = (c for c in peers.contenders(None) if c.name == "flash-attn-4")
    case = Case(cell(direction, "causal", dtype), np)
    assert relative_error(case.part(contender.bind(case).results()), case.expected()) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_jax_gets_its_arrays(direction, dtype):
    pytest.importorskip("jax", reason="needs jax")
    case = Case(cell(direction, "causal", dtype), np)
    bound = peers._bind_jax(case, implementation="xla")
    assert relative_error(case.part(bound.results()), case.expected()) < BOUNDS[dtype]
    bound.repeat(2)


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path):
    """Small, with every peer that is installed: none may be wrong, and each must have a time."""
    written = tmp_path / "bench.json"
    sizes = ("--lengths", "128,300", "--tokens", "600", "--width", "128", "--head-dims", "64", "--repeats", "2")
    assert main(["bench", "--dtype", "float16", "--direction", "both", *sizes, "--json", str(written)]) == 0
    results = json.loads(written.read_text())
    assert set(results["cells"][0]["contenders"]) | set(results["not_compared"]) == {c.name for c in peers.contenders(None)}
    for entry in results["cells"]:
        assert "WRONG" not in {outcome["status"] for outcome in entry["contenders"].values()}
        assert entry["contenders"][OURS]["ms"] > 0
    assert results["host_microseconds"][OURS] > 0


def test_defaults_of_the_grid_depend_on_the_place():
    assert set(grid.DEFAULTS["gpu"]) == set(grid.DEFAULTS["cpu"]) == {"dtype", "lengths", "head_dims", "tokens", "width"}
    assert grid.DEFAULTS["gpu"]["lengths"] == [512, 1024, 2048, 4096, 8192, 16384]
