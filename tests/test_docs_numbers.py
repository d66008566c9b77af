"""Every measured number of README and docs is found, at its printed precision, in a committed result file.

Tables and figures are made from results (`docs/figures.py`), and are compared with them here. A number in a sentence must lie within a
piece of text that a result file holds as it was printed (``facts.json``), or within one that is named below as arithmetic or a definition.
"""

import json
import re
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import geometric_mean

import pytest

from numba_flash.bench import cases, timing
from numba_flash.cuda.sm90_backward import FEWEST_BLOCKS, MOST_WORKSPACE, WORKSPACE

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import figures  # noqa: E402  (in docs)
import tables  # noqa: E402

NUMBER = r"(?<![\w.,-])\d[\d,]*(?:\.\d+)*(?:e-?\d+)?(?![\w.]*\d)"
UNIT = r"(?:ms|µs|s|GFLOP|T?FLOP/s|GB/s|[KMG]B|KiB|%|dB|Å|W|times|minutes|seconds|tokens/s)(?![\w/])"
WITH_UNIT = re.compile(rf"{NUMBER}(?:(?:, | to | and | or | / | -> | of ){NUMBER})*(?: ?{UNIT})")
EXACT = re.compile(rf"{NUMBER}")  # of these, those with a decimal point or an exponent
VERSION = re.compile(r"(?:PyTorch|JAX|cuDNN|Python|FlashAttention-4|capability|section|arXiv:)[ ]?$")
CODE, MATHEMATICS, LINK = r"```.*?```|`[^`]*`", r"\$\$.*?\$\$|\$[^$\n]+\$", r"\]\([^)]*\)"
NOT_PROSE = (tables.BLOCK, re.compile(f"{CODE}|{MATHEMATICS}|{LINK}", re.DOTALL))


def prose(text: str) -> str:
    """Sentences alone, with single spaces."""
    for pattern in NOT_PROSE:
        text = pattern.sub(" ... ", text)
    return " ".join(text.split())


def measured(text: str) -> list[tuple[int, int]]:
    """Where in prose numbers stand that somebody must have measured: with a unit, a decimal point or an exponent."""
    spans = [match.span() for found in WITH_UNIT.finditer(text) for match in re.compile(NUMBER).finditer(text, *found.span())]
    spans += [match.span() for match in EXACT.finditer(text) if set(".e") & set(match[0])]
    return sorted({span for span in spans if not VERSION.search(text[: span[0]])})


def facts() -> list[str]:
    """What result files hold as it was printed."""
    return [row["printed"] for file in sorted(tables.RESULTS.glob("*/facts.json")) for row in json.loads(file.read_text())["rows"]]


def unknown(text: str, known) -> list[str]:
    """Measured numbers of a page, with their surroundings, that lie in none of the pieces of text `known`."""
    text = prose(text)
    covered = [match.span() for piece in known for match in re.finditer(rf"(?<![\w.]){re.escape(piece)}(?!\w|\.\d)", text)]
    inside = lambda span: any(start <= span[0] and span[1] <= end for start, end in covered)
    return [text[max(0, a - 60) : b + 40] for a, b in measured(text) if not inside((a, b))]


# ---- numbers that follow from others -------------------------------------------------------------------------------------------------


def ranges(study: str, *columns: int, rows: str = "") -> list[float]:
    """Least and greatest number of each of these columns of a printed table, in the rows whose label matches."""
    lines = [row for row in tables.load(study)["rows"] if re.match(rows, row[0])]
    found = [[float(x) for row in lines for x in re.findall(r"[\d.]+", row[column])] for column in columns]
    return [bound for numbers in found for bound in (min(numbers), max(numbers))]


def over(dtype: str, direction: int, *peers: int) -> list[float]:
    """Least and greatest of PyTorch's TFLOP/s, in these columns, over those of `simt`, for dtypes that begin so."""
    numbers = lambda entry: [float(x) for x in re.findall(r"[\d.]+", entry)]
    ours = {row[0]: [numbers(entry)[direction] for entry in row[1:]] for row in tables.load("h200/simt")["rows"]}  # full, causal
    rows = [row for row in tables.load("h200/simt-torch")["rows"] if row[0].startswith(dtype)]
    found = [x / y for row in rows for peer in peers for x, y in zip(numbers(row[peer]), ours[row[0]], strict=False)]
    return [min(found), max(found)]


def at(study: str, row: str, column: int = 1) -> list[float]:
    """Numbers of one entry of a printed table."""
    (entry,) = (line[column] for line in tables.load(study)["rows"] if line[0] == row)
    return [float(x) for x in re.findall(r"[\d.]+", entry)]


def backward_over_flash_attn_4() -> dict[str, list[float]]:
    """What is said about each head dimension, and about the cells in which it is faster."""
    cells = tables.ratios(tables.cells_of(tables.load("h200/bench"), "backward"), "flash-attn-4")
    of = {d: [ratio for ratio, cell in cells if cell["head_dim"] == d] for d in (64, 128, 256)}
    lost = [ratio for ratio, _ in cells if ratio < 1]
    over_cudnn = tables.ratios(tables.cells_of(tables.load("h200/bench"), "backward"), "torch cuDNN")
    wide = [ratio for ratio, cell in over_cudnn if cell["head_dim"] == 256 and cell["length"] in (1024, 4096, 16_384)]  # as the alternative
    earlier = [ratio for ratio, _ in tables.ratios(tables.cells_of(tables.load("h200/bench-earlier"), "backward"), "flash-attn-4")]
    lost_then = [ratio for ratio in earlier if ratio < 1]
    below = {d: sum(ratio < 1 for ratio in ratios) for d, ratios in of.items()}
    longest = {(cell["head_dim"], cell["length"]) for ratio, cell in cells if ratio < 0.97}
    assert longest == {(128, 8192), (128, 16384)}
    means = [number for d, ratios in of.items() for number in (geometric_mean(ratios), d)]
    every = [ratio for ratio, _ in cells]
    return {
        "1.014 at D = 64, 0.995 at D = 128 and 1.314 at D = 256": means,
        "1.10 over all 36 cells": [geometric_mean(every), len(every)],
        "slower in 14 cells, at 0.946 to 0.999 of its speed": [len(lost), min(lost), max(lost)],
        "in 10 of the 12 at D = 128, by most in the longest, and in 4 at D = 64": [below[128], len(of[128]), 128, below[64], 64],
        "At D = 256 it is 1.19 to 1.65 times as fast": [256, min(of[256]), max(of[256])],
        "the mean was 1.04, and ours slower in 21 cells, at 0.89 to 0.99 of its speed": [
            geometric_mean(earlier), len(lost_then), min(lost_then), max(lost_then)
        ],
        "instead of 1.10 to 1.34": [min(wide), max(wide)],
    }  # fmt: skip


def earlier_runs() -> dict[str, list[float]]:
    """Geometric means of the speeds in the earlier runs over those in this one, forward and backward."""
    key = lambda cell: (cell["direction"], cell["head_dim"], cell["length"], cell["mask"])
    tflops = lambda study, who: {
        key(cell): cell["contenders"][who]["tflops"]
        for each in ("forward", "backward")
        for cell in tables.cells_of(tables.load(study), each)
    }

    def means(who: str) -> list[float]:
        now, then = tflops("h200/bench", who), tflops("h200/bench-earlier", who)
        return [geometric_mean(then[key] / now[key] for key in now if key[0] == each) for each in ("forward", "backward")]

    return {
        "ours had 1.00 and 1.01 times the speed that it has in this one": means("numba_flash"),
        "FlashAttention-4 1.04 and 1.06 times, and cuDNN 1.01 and 1.03 times": [4, *means("flash-attn-4"), *means("torch cuDNN")],
    }


def gpt2_beside_standard() -> dict[str, list[float]]:
    """GPT-2's attention in standard attention over that in numba_flash; and how long its bytes take at an H200's 4.8 TB/s."""
    rows = {(row["contender"], row["mask"]): row for row in tables.load("h200/traffic")["rows"]}
    of = lambda mask: (rows["CuPy", mask], rows["numba_flash", mask])
    ms = lambda row: row["forward_ms"] + row["backward_ms"]
    (full, ours), (causal, ours_causal) = of("full"), of("causal")
    least = full["dram_bytes"] / 4.8e9  # ms
    assert full["tensor_flop"] == causal["tensor_flop"] == 0
    return {
        "40 times as fast as standard attention in CuPy, 63 times if causal": [ms(full) / ms(ours), ms(causal) / ms(ours_causal)],
        "a 47th of the bytes": [full["dram_bytes"] / ours["dram_bytes"]],
        "111 GB alone take 23 ms at an H200's 4.8 TB/s, 10 times as long as all of ours": [
            full["dram_bytes"] / 1e9, least, 200, 4.8, least / ms(ours)
        ],
    }  # fmt: skip


def simt_tiles(head_dim: int, field: str) -> list[float]:
    """D, the chosen tile's time over the fastest one's, and their values of a field."""
    rows = [row for row in tables.load("h200/tiles")["rows"] if (row["kernel"], row["head_dim"]) == ("simt forward", head_dim)]
    chosen, fastest = next(row for row in rows if row["chosen"]), min(rows, key=lambda row: row["ms"])
    return [head_dim, chosen["ms"] / fastest["ms"], fastest["tile"][field], chosen["tile"][field]]


def derived() -> dict[str, list[float]]:
    """Pieces of text, and what their numbers must be."""
    cpu, simt, torch = "2-core-cpu/options", "h200/options", "2-core-cpu/torch"
    costly, usual = "`softcap`|`dropout`", "`score_mod`|`bias`, N|`mask`, |`kv_lengths`, all N$"
    both, forward = "forward and backward", "forward, our time / PyTorch's"
    over_cudnn, ordered = ([row[name] for row in tables.load("h200/any-order")["rows"]] for name in ("over_cudnn", "ordered_over_this"))
    gpt2 = 12 * 64 * 16 * 1024**2 * 64 / 1e9  # 12 B H N^2 D
    paper = {
        "66.6 and 75.2 GFLOP": [66.6, 75.2],
        "41.7 and 7.3 ms": [41.7, 7.3],
        "40.3 and 4.4 GB": [40.3, 4.4],
    }  # arXiv:2205.14135, figure 2
    return paper | {
        **backward_over_flash_attn_4(),
        **earlier_runs(),
        **gpt2_beside_standard(),
        "forward 1.07 to 1.08, causal 0.96 to 1.00": at(torch, forward) + at(torch, forward, 2),
        "with backward 0.95 to 1.04, causal 0.82 to 0.87": at(torch, both) + at(torch, both, 2),
        "float32 26.3 / 17.1, float64 12.1 / 7.8 TFLOP/s": [
            32,
            *at("h200/simt", "float32, D = 128"),
            64,
            *at("h200/simt", "float64, D = 128"),
        ],
        "5 to 7 times slower": over("float16", 0, 1),
        "1.3 to 1.8 times slower": over("float32", 0, 1),
        "the backward 2 to 3 times": over("float32", 1, 2),
        "2 to 9 times slower": over("float", 1, 2, 4),
        "takes 1.2 to 2.1 times as long forward and 1.2 to 1.8 times backward": ranges(simt, 1, 2, rows=f"{costly}|{usual}|.*`bias_grad`"),
        "1.0 to 1.3 times forward and 1.0 to 1.2 backward": ranges(cpu, 1, 2, rows=usual),
        "softcap or dropout 2.5 to 2.7 and 1.7 to 2.1": ranges(cpu, 1, 2, rows=costly),
        "with a bias gradient 1.7 to 1.9": ranges(cpu, 2, rows=".*`bias_grad`"),
        "geometric mean over cuDNN is 1.15 and the least cell 1.06": [geometric_mean(over_cudnn), min(over_cudnn)],
        "the default is 0.98 to 1.07 times as fast": [min(ordered), max(ordered)],
        "0.98 to 1.07 times the speed of adding in any order": [min(ordered), max(ordered)],
        "0.94 to 1.02 of the chosen one's": [1 / max(ordered), 1 / min(ordered)],
        "up to 1.02 times as fast": [1 / min(ordered)],
        "at D = 64 would be 1.05 times as fast if it staged 16 columns of q and k at a time instead of 8": simt_tiles(64, "depth"),
        "17 GB": [65536**2 * 4 / 1e9],  # float32
        "275 GB": [262144**2 * 4 / 1e9],
        "825 by the formula above, 12.4 times as many": [gpt2, gpt2 / 66.6],
        "two numbers, 1.13,": [75.2 / 66.6],
        "2.5 times that backward": [2.5],  # five products instead of two
        "2e-2 in bfloat16, 3e-3 in float16 or 1e-4 in float32": [
            cases.BOUNDS["bfloat16"],
            16,
            cases.BOUNDS["float16"],
            16,
            cases.BOUNDS["float32"],
            32,
        ],
        "about 10 ms of calls": [1e3 * timing.TURN],
        "2.5 to 4.5 tiles of keys": [(512 / 128 + 1) / 2, (1024 / 128 + 1) / 2],  # causal, N = 512 and 1024, tiles of 128
        "Bernoulli(0.001)": [0.001],  # the distribution
        "a tile of dQ has 128 KB, eight times": [128 * 256 * 4 / 1024],
        "once per tile, 16 KB in the layout": [64 * 128 * 2 / 1024],
        "as 1 GiB has room for": [WORKSPACE / 2**30],
        "up to 4 GiB; and at least 8, which take 1 KB per query": [MOST_WORKSPACE / 2**30, FEWEST_BLOCKS, FEWEST_BLOCKS * 64 * 2 / 1024],
        "usually of 1 GiB at most": [WORKSPACE / 2**30],
        "dS of which here up to 1 GiB is kept": [WORKSPACE / 2**30],
        "1 GiB of memory, for long inputs up to 4 GiB or 1 KB per query": [1, MOST_WORKSPACE / 2**30, FEWEST_BLOCKS * 64 * 2 / 1024],
        "48 KiB": [48],  # CUDA's limit of static shared memory
    }


PAGES = pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)


# ---- tests -----------------------------------------------------------------------------------------------------------------------------


def known() -> list[str]:
    return [*facts(), *derived()]


@PAGES
def test_every_measured_number_is_in_a_result_file(page):
    assert unknown(page.read_text(), known()) == []


@PAGES
def test_a_changed_number_is_found(page):
    """Every measured number of every page, with its last digit changed."""
    text, pieces = prose(page.read_text()), known()
    for start, end in measured(text):
        last = max(i for i in range(start, end) if text[i].isdigit())
        changed = text[:last] + str((int(text[last]) + 1) % 10) + text[last + 1 :]
        assert unknown(changed, pieces), text[start - 40 : end + 20]


@pytest.mark.parametrize("piece", derived())
def test_numbers_that_follow_from_others_are_what_they_give(piece):
    printed, values = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?", piece), derived()[piece]
    assert len(printed) == len(values), printed
    for text, value in zip(printed, values, strict=True):
        number = Decimal(text.replace(",", ""))
        assert Decimal(str(value)).quantize(number, ROUND_HALF_UP) == number


def test_every_piece_is_printed_somewhere():
    """What is in no page any more must go."""
    pages = [prose(page.read_text()) for page in tables.PAGES]
    assert [piece for piece in known() if not any(piece in page for page in pages)] == []


def test_tables_and_figures_are_what_the_results_give():
    assert figures.stale() == []


def test_a_changed_table_is_found():
    text = (ROOT / "docs" / "performance.md").read_text()
    at = text.index("| D = 128, full | ") + len("| D = 128, full | ")
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    assert figures.with_tables(changed, "figures") == figures.with_tables(text, "figures") == text


def test_figures_are_drawn_again_with_the_same_bytes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="figures need numba_flash[examples]")
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    drawn = []
    for _ in range(2):
        figures.draw("speed")
        drawn.append((tmp_path / "speed.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert figures.data_of(figures.ALL["speed"]).encode() in drawn[0]
