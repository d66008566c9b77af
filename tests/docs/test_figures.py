"""The tables and figures of the docs, from results made up here."""

import json
import sys

import numpy as np
import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import figures
import tables

from numba_flash.bench import peers
from numba_flash.plan import BACKENDS


def entry(tflops: float, ratio: float | None = None) -> dict:
    return {"status": "ok", "tflops": tflops} | ({} if ratio is None else {"ratio": ratio})


def cell(direction: str, length: int, contenders: dict, heads_kv: int = 16) -> dict:
    shape = {"heads": 16, "heads_kv": heads_kv, "length": length, "head_dim": 128}
    return {"direction": direction, "mask": "full", "contenders": contenders} | shape


def step(length: int, contender: str, **others) -> dict:
    return {"length": length, "mask": "full", "contender": contender} | others


def tile(block_n: int, ms: float, chosen: bool, stages: int = 2) -> dict:
    shape = {"block_m": 128, "block_n": block_n, "stages": stages}
    return {"kernel": "sm90 forward", "dtype": "bfloat16", "head_dim": 64, "chosen": chosen, "tile": shape, "ms": ms, "tflops": 1 / ms}


def errors(dtype: str, distribution: str, who: str, error: float) -> dict:
    return {"dtype": dtype, "distribution": distribution, "who": who, "head_dim": 128} | dict.fromkeys(("o", "dq", "dk", "dv"), error)


def situation(what: str, direction: str, ratios: dict, heads: int = 4, causal: bool = False) -> dict:
    peers = {name: {"reason": "cannot"} if ratio is None else {"ms": ratio, "ratio": ratio} for name, ratio in ratios.items()}
    shape = {"batch": 2, "heads": heads, "heads_kv": 4, "length": 64, "length_kv": 64, "head_dim": 32, "causal": causal, "bias": False}
    return {"situation": what, "dtype": "float16", "direction": direction, **shape, "ms": 1.0, "tflops": 2.0, "peers": peers}


def share(direction: str, contender: str, ms: float, visible: float = 0.1) -> dict:
    return {"percent": round(100 * visible), "visible": visible, "direction": direction, "contender": contender, "ms": ms}


def constant(names: list[str], problem: str, values: dict, **others) -> dict:
    record = {"module": "numba_flash.cuda.sm90.dq.prepare_dq_order", "constants": names, "device": "H", "date": "2026-01-02"}
    return record | {"command": "by hand", "problem": problem, "quantity": "ms", "variable": "N", "values": values} | others


PACKAGES = {"torch": "2", "flash-attn-4": "4"}
RESULTS = {
    "h200/bench": {
        "device": "H",
        "date": "D",
        "packages": PACKAGES,
        "cells": [
            cell("forward", 512, {"numba_flash": entry(400.4), "torch cuDNN": entry(200, 2.0), "flash-attn-4": entry(500, 0.8)}),
            cell("forward", 1024, {"numba_flash": entry(500), "torch cuDNN": entry(1000, 0.5), "flash-attn-4": {"status": "WRONG"}}),
            cell("forward", 512, {"numba_flash": entry(300), "torch cuDNN": entry(200, 1.5)}, heads_kv=2),
            cell("backward", 512, {"numba_flash": entry(100), "torch cuDNN": entry(80, 1.25)}),
        ],
    },
    "h200/scaling": {
        "device": "H",
        "dtype": "float16",
        "heads": 8,
        "head_dim": 64,
        "rows": [
            step(1024, "numba_flash", forward_ms=1.0, backward_ms=2.5, bytes=5e6),
            step(1024, "CuPy", forward_ms=10.0, backward_ms=20.0, bytes=5e9),
            step(2048, "numba_flash", forward_ms=4.0, backward_ms=10.0, bytes=1e7),
            step(2048, "CuPy", failed="backward", reason="OutOfMemoryError: Out of memory"),
        ],
    },
    "h200/traffic": {
        "rows": [
            {"contender": "numba_flash", "mask": "full", "forward_ms": 1.0, "backward_ms": 2.0, "flop": 962e9, "dram_bytes": 4.4e9}
            | {"tensor_flop": 960e9, "scalar_flop": 2e9},
            {"contender": "CuPy", "mask": "full", "forward_ms": 10.0, "backward_ms": 20.0, "flop": 825e9, "dram_bytes": None}
            | {"tensor_flop": None, "scalar_flop": None},
        ]
    },
    "h200/sparsity": {
        **{"device": "H", "dtype": "float16", "heads": 16, "length": 4096, "head_dim": 128, "block": 128},
        "rows": [
            share(direction, name, ms)
            for direction in ("forward", "backward")
            for name, ms in (("numba_flash", 2.0), ("numba_flash, dense", 10.0), ("FlexAttention", 5.0))
        ],
    },
    "h200/tiles": {"rows": [tile(128, 0.5, True), tile(64, 1.0, False), tile(96, 0.8, False, 3)]},
    "h200/accuracy": {
        "device": "H",
        "rows": [errors("float16", d, who, error) for d in ("normal", "outliers") for who, error in (("naive", 2e-4), ("sm90", 1e-4))]
        + [errors("float64", d, who, 1e-16) for d in ("normal", "outliers") for who in ("naive", "simt")],
    },
    "h200/float32": {
        "device": "H",
        "length": 4096,
        "rows": [
            *(errors("float32", d, who, 1e-7) for d in ("normal", "kelvin") for who in ("sm80 float32", "simt")),
            {"distribution": "normal", "head_dim": 128, "who": "torch efficient", "reason": "no"},
        ],
        "times": [
            {"direction": "forward", "head_dim": 128, "who": "sm80 float32", "ms": 1.0, "tflops": 100.0},
            {"direction": "backward", "head_dim": 128, "who": "sm80 float32", "ms": 2.0, "tflops": 90.0},
            {"direction": "forward", "head_dim": 128, "who": "simt", "ms": 4.0, "tflops": 25.0},
        ],
    },
    "h200/ring": {
        "device": "H",
        "dtype": "float16",
        **{"heads": 16, "heads_kv": 2, "head_dim": 128},
        "rows": [
            {"what": "forward", "length": 512, "ms": 0.5, "tflops": 100.0},
            {"what": "backward", "length": 512, "ms": 0.5, "tflops": 100.0},
            {"what": "merge", "length": 512, "ms": 0.5, "gb_per_s": 1000.0},
            {"what": "to the host", "length": 512, "ms": 0.5, "gb_per_s": 20.0},
            {"what": "from the host", "length": 512, "ms": 0.5, "gb_per_s": 40.0},
            {"what": "ring", "processes": 2, "gpus": 1, "carrier": "host", "causal": True, "tokens": 65536, "ms": 700.0}
            | {"of_processes": [{"hidden": x, "transfers_ms": 100.0, "kernels_ms": 200.0} for x in (0.9, 0.8)]}
            | {"spans": {"kernels": [[0.5, 1.0], [1.1, 2.0]], "transfers": [[0.6, 0.9]]}},
            {"what": "gather", "processes": 2, "gpus": 2, "carrier": "nccl", "causal": False, "tokens": 65536, "ms": 800.0},
        ],
    },
    "h200/gpus": {
        "device": "H",
        "dtype": "float16",
        **{"heads": 4, "heads_kv": 2, "head_dim": 8},
        "rows": [
            {"direction": "forward", "tokens": 64, "causal": True, "layout": "zigzag", "gpus": 2, "ms": 5.0, "ms_alone": 8.0}
            | {"ms_at_once": 9.0, "efficiency": 0.8, "least": 0.7, "most": 0.9},
            {"what": "timeline", "tokens": 64, "causal": True, "gpus": 2}
            | {"spans": {"kernels": [[0.5, 1.0], [1.1, 2.0]], "transfers": [[0.6, 0.9]]}},
        ],
    },
    "h200/blocks": {
        "device": "H",
        "dtype": "float16",
        **{"tokens": 64, "heads": 4, "heads_kv": 2, "head_dim": 8},
        "rows": [
            {"chunk": None, "workers": 1, "gpus": 1, "forward_ms": 10.0, "backward_ms": 30.0, "bytes": 5e6},
            {"chunk": 16, "workers": 2, "gpus": 2, "forward_ms": 6.0, "backward_ms": 20.0, "bytes": 3e6}
            | {"forward_tasks": 10, "backward_tasks": 20},
        ],
    },
    "h200/training": {
        "rows": [
            {"length": 1024, "attention": "flash", "seconds": 0.01, "bytes": 1e8},
            {"length": 1024, "attention": "standard", "reason": "no room"},
        ]
    },
    "2-core-cpu/torch": {
        "device": "C",
        "packages": {"torch": "3"},
        "columns": ["", "full"],
        "rows": [["forward", "1.25 to 2.00"], ["both", "0.80"], ["others", "9"]],
    },
    "h200/situations": {
        "device": "H",
        "packages": PACKAGES,
        "rows": [
            situation("slow", "forward", {"P": 0.1, "Q": 0.5}),
            situation("slow", "backward", {"P": 0.25, "Q": None}),
            situation("half", "forward", {"Q": 0.5}, heads=8),
            situation("slow", "forward", {"R": 0.05}, causal=True),
        ],
    },
    "h200/kelvin": {"device": "H", "backend": "sm90", "heads": 4, "stations": 8, "days": 2, "rows": [{"what": "kelvin", "error": 1e-6}]},
    "h200/doubt": {
        "device": "H",
        "rows": [
            {"data": "positive", "length": 64, "instruction": "IEEE", "error": 4e-7},
            *(
                {"data": "positive", "length": 64, "instruction": "wgmma", "split": "float16 x 3", "interval": x, "error": e}
                for x, e in ((64, 1e-7), (128, 2e-7), (None, 1e-5))
            ),
        ],
        "rates": [{"instruction": "wgmma", "kind": "tf32", "products": 3, "interval": 64, "tflops": 99.0}],
    },
    "constants": [
        constant(["SIZE", "LIMIT"], "full", {"1024": 1.5, "512": [1, 2.25]}),
        constant(["SIZE", "LIMIT"], "causal", {"512": 3, "as chosen": 4.5}, date="2026-01-03"),
        constant(["SIZE", "LIMIT"], "full", {"512": 1.25}, quantity="speed over that of others", command="python study.py"),
        constant(["OTHER"], "full", {"512": 9}, module="numba_flash.cpu.kernels"),
    ],
    "h200/facts": {
        "device": "H",
        "rows": [{"table": "examples", "what": "a", "took": "1 s", "result": "b"}, {"table": "once", "what": "c", "result": "d"}],
    },
}
EXPECTED = {
    "speed-forward": ["| D = 128, full | 400 (2.00, 0.80) | 500 (0.50, -) |", "| D = 128, full, 16 heads over 2 | 300 (1.50, -) |  |"],
    "speed-backward": ["| backward | N = 512 |", "| D = 128, full | 100 (1.25) |"],
    "summary": [
        "| forward | cuDNN | 2 | 1.00 | 0.50 | D = 128, N = 1024, full |",
        "| backward | cuDNN | 1 | 1.25 | 1.25 |",
    ],
    "measured": [
        "H, D, bfloat16, N = 512 to 1024",
        "| our speed over | cuDNN | FlashAttention-4 |\n",
        "| forward, D = 128 | 1.00 (0.50\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}2.00) | 0.80 (0.80) |",
        "| backward, D = 128 | 1.25 (1.25) | not compared |",
    ],
    "scaling-h200": ["| 1024 | 3.50 | 5.00 | 30.0 | 5,000 |", "| 2048 | 14.0 | 10.0 | backward: OutOfMemoryError |  |"],
    "scaling-cpu": ["Not measured yet: `python asv_bench/studies/scaling.py --json asv_bench/studies/results/2-core-cpu/scaling.json`."],
    "sparsity": ["| forward | 10.0 % | 2.00 | 0.50 | 10.0 | 5.00 |"],
    "traffic": [
        "| numba_flash, full | 1.00 | 2.00 | 3.00 | 962 | 962 | 4.40 |",
        "| standard (CuPy), full | 10.0 | 20.0 | 30.0 | 825 | not counted |",
    ],
    "tiles": ["| sm90 forward, bfloat16, D = 64 | 128 x 128, stages 2 | 0.500 | 2.00 | 128 x 96, stages 3 | 0.800 | 1.25 |"],
    "accuracy": ["| H | float16 | sm90 | 1.0e-04 / 1.0e-04 |", "| H | float64 | simt |"],
    "float32": [
        "H, N = 4096, D = 128;",
        "|  | sm80 float32 | simt |\n",
        "| kelvin | 1e-07 / 1e-07 / 1e-07 / 1e-07 | 1e-07 /",
        "| TFLOP/s, forward / backward | 100 / 90.0 | 25.0 / none |",
    ],
    "kelvin": ["](figures/kelvin.png)\n", "H, `sm90`, 4 x 8 stations, 2 days:", "| kelvin | 1.0e-06 |"],
    "doubt": [
        "| wgmma, float16 x 3 | 1e-07 / 2e-07 / - / 1e-05 |",
        "| IEEE, one after the other | 4e-07 |",
        "|  | positive |\n",
        "| wgmma, float16 x 3 | 2e-07 |",
    ],
    "doubt-rates": ["| wgmma, tf32, three interleaved | 99.0 | - | - | - |"],
    "ring-measured": [
        "| forward | 512 | 0.500 | 100 TFLOP/s |",
        "| ring, causal | 2 | 1 | host | 65536 | 700.0, 625.7 | 0.80 | 0.40 |",
        "| gather, full | 2 | 2 | nccl | 65536 | 800.0, 615.7 |  |  |",
    ],
    "dask-measured": [
        "H, float16, 64 tokens, 4 heads over 2, D = 8, causal:",
        "| one call | 1 | 1 | 10.0, 30.0 | 1.00, 1.00 |  | 5 |",
        "| 16 | 2 | 2 | 6.0, 20.0 | 0.83, 0.75 | 10, 20 | 3 |",
    ],
    "gpus-measured": ["| forward, causal, zigzag | 64 | 2 | 8.0 | 9.0 | 5.0 | 0.80 (0.70 to 0.90) |"],
    "training": ["| 1024 | 0.0100 | 100 | out of memory |  |"],
    "torch-cpu": ["| forward | 1.25 to 2.00 |"],
    "limits": [
        " (H, torch 2; C, torch 3).\n",
        "| slow | 0.05\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}0.10 | 0.25 | P, R |",
        "| half | 0.50 |  | Q |",
        "| float32 on the CPU | 0.50\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}0.80 | 1.25 with the forward | its CPU kernel |",
    ],
    "situations": [
        "| slow | float16, B = 2, H = 4, N = 64, D = 32 | forward | 1.00 | 2.00 | P 0.10, Q 0.50 |",
        "| backward | 1.00 | 2.00 | P 0.25, Q cannot |",
        "| half | float16, B = 2, H = 8 over 4, N = 64, D = 32 | forward |",
        "| slow | float16, B = 2, H = 4, N = 64, D = 32, causal | forward |",
    ],
    "lab-hopper_dq": [
        "## `numba_flash/cuda/sm90/dq/prepare_dq_order.py`\n\n### `SIZE`, `LIMIT`\n\nTime in ms (2026-01-02 to 2026-01-03, by hand):\n\n",
        "| on | problem | N = 1024 | N = 512 | as chosen |\n",
        "| H | full | 1.5 | 1 to 2.25 |  |\n| H | causal |  | 3 | 4.5 |\n",
        "Speed over that of others (2026-01-02, `python study.py`):\n",
    ],
    "lab-cpu": ["### `OTHER`\n\nTime in ms (2026-01-02, by hand):\n\n| on | problem | N = 512 |\n| --- | --- | --- |\n| H | full | 9 |\n"],
    "examples": ["| a | H | 1 s | b |"],
    "once": ["| c | H | d |"],
}


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The made-up results in place of the committed ones."""
    for name, content in RESULTS.items():
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", EXPECTED)
def test_tables(name):
    text = tables.content(name, {})
    assert [line for line in EXPECTED[name] if line not in text] == []
    assert "| H | float64 | naive |" not in text  # that is the reference


def test_every_block_of_the_docs_is_known_and_used():
    used = {match[2] for page in tables.PAGES for match in tables.BLOCK.finditer(page.read_text())}
    assert used == set(tables.BLOCKS)


def test_every_figure_stands_in_a_block():
    assert {figure.block for figure in figures.ALL.values()} <= set(tables.BLOCKS)


def test_figures_say_what_they_were_drawn_from(results):
    pytest.importorskip("matplotlib", reason="figures need numba_flash[examples]")
    names = list(figures.drawable())
    assert set(figures.ALL) - set(names) == {"scaling-cpu"}
    for name in names:
        figures.draw(name)
    assert not {f"{name}.svg" for name in names} & set(figures.stale())
    changed = json.loads((results / "h200/tiles.json").read_text())
    changed["rows"][0]["ms"] = 0.6
    (results / "h200/tiles.json").write_text(json.dumps(changed))
    (results / "speed.svg").unlink()
    assert {name for name in figures.stale() if name.endswith(".svg")} == {"tiles.svg", "speed.svg"}


def test_everyone_in_a_figure_looks_different():
    """Contenders of the bench and the backends; CuPy and NumPy, and this library and its backend sm90, are in no figure together."""
    everyone = {"naive", *BACKENDS, *(contender.name for contender in peers.contenders(None))}
    assert everyone <= set(figures.STYLES)
    looks = [figures.STYLES[name][:2] for name in everyone - {"NumPy", figures.OURS}]
    assert len(set(looks)) == len(looks)


def test_blocks_are_written_between_their_marks():
    page = "before\n<!-- table: torch-cpu -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    written = figures.with_tables(page, "figures")
    assert written == f"before\n<!-- table: torch-cpu -->\n\n{tables.content('torch-cpu', {})}\n<!-- end -->\nafter <!-- end -->\n"
    assert figures.with_tables(written, "figures") == written
    page = "<!-- table: tiles -->\n<!-- end -->"
    assert "\n![time with each tile](there/tiles.svg)\n\n| " in figures.with_tables(page, "there")


def test_a_ring_is_measured_beside_its_model():
    """3.5 times 2 N^2 H D operations at 100 TFLOP/s; two merges at half of 1000 GB/s, and float32 sums that go home at half of 20 GB/s."""
    operations, part = 3.5 * 2 * 65536**2 * 16 * 128, 32768 * 128
    merges, sums = 2 * 3 * part * 16 * 4 / 500e9, 2 * part * 2 * 4 / 10e9
    expected = 1e3 * (operations / 100e12 + merges + sums)
    ring, gather = (row for row in RESULTS["h200/ring"]["rows"] if "processes" in row)
    assert float(tables.by_model(RESULTS["h200/ring"], ring)) == pytest.approx(expected, abs=0.06)
    assert float(tables.by_model(RESULTS["h200/ring"], gather)) == pytest.approx(1e3 * operations / 100e12, abs=0.06)
    assert tables.by_model(RESULTS["h200/ring"], ring | {"gpus": 0}) == "-"
    came = ring | {"what": "gather", "spans": {"kernels": [], "transfers": [[1.0, 1001.0], [2000.0, 2001.0]]}}
    study = RESULTS["h200/ring"] | {"rows": [*RESULTS["h200/ring"]["rows"], came]}
    first = 1e3 * (
        operations / 100e12 / 7 + merges / 2
    )  # then transfers take longer than kernels: a second for K and V, two for their gradients
    assert float(tables.by_model(study, ring)) == pytest.approx(first + 1000 + 1000 + 2000 + 2000, rel=1e-3)


def test_gpus_are_measured_beside_their_model():
    """Forward at 400 and backward at 100 TFLOP/s; one merge at 4.8 TB/s, and sums that go home at 450 GB/s."""
    n, h, d = 2**20, 4, 128
    rows = [{"direction": direction, "tokens": n, "causal": True, "gpus": 2, "ms": 4000.0} for direction in ("forward", "backward")]
    study = {"heads": h, "heads_kv": 2, "head_dim": d, "rows": [*rows, {"what": "timeline", "tokens": n, "causal": True, "gpus": 2}]}
    rates = [cell(direction, 512, {"numba_flash": entry(rate)}) for direction, rate in (("forward", 400), ("backward", 100))]
    operations, part = 2 * n * n * h * d / 2, n // 2 * d
    ms = 1e3 * (operations / 400e12 + 2.5 * operations / 100e12 + 2 * 3 * part * h * 4 / 4.8e12 + 2 * part * 2 * 4 / 450e9)
    for results in ((study, {"cells": rates}), ({"cells": rates}, study)):
        assert f"| {n}, causal | 2 | {ms:.1f} | 8000.0 | {8000 - ms:.1f} |" in tables.gpus_by_model(*results)


@pytest.mark.parametrize("study", ["ring", "gpus"])
def test_a_timeline_has_a_bar_for_each_span(study):
    canvas = pytest.importorskip("matplotlib.figure", reason="figures need numba_flash[examples]").Figure()
    figures.timelines(canvas, RESULTS[f"h200/{study}"])
    (axis,) = canvas.axes
    bars = {round(bar.get_extents().y0): bar.get_extents() for of_one in axis.collections for bar in of_one.get_paths()}
    spans = sorted((bar.get_extents().x0, bar.get_extents().x1) for of_one in axis.collections for bar in of_one.get_paths())
    np.testing.assert_allclose(spans, [(0.5, 1.0), (0.6, 0.9), (1.1, 2.0)])
    assert sorted(bars) == [0, 1]


def test_a_page_names_its_figures_from_where_it_stands(monkeypatch):
    monkeypatch.setattr(figures, "with_tables", lambda page, folder: folder)
    folders = {path.parent.name: figures.page_with_tables(path) for path in tables.PAGES}
    assert folders == {ROOT.name: "docs/figures", "docs": "figures", "howto": "../figures", "lab": "../figures"}
