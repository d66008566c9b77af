"""The tables of README and docs, made from committed results: what stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.

`docs/figures.py` writes them; `tests/docs/test_docs_tables.py` checks that they are what the results give.
"""

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "asv_bench" / "studies" / "results"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "docs" / "howto" / f"{name}.md" for name in ("dask", "distributed")),
    *sorted((ROOT / "docs" / "lab").glob("*.md")),
]
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

sys.path.append(str(RESULTS.parent))

import constants  # noqa: E402  (of docs)
import ring_model  # noqa: E402  (of studies)
from ring_model import Machine, Work  # noqa: E402

OURS = "numba_flash"
PEERS = {"torch cuDNN": "cuDNN", "flash-attn-4": "FlashAttention-4"}  # beside each speed; figures and means show everyone
NAMES = PEERS | {"torch FA2": "FlashAttention-2", "jax cuDNN": "JAX", "torch Flex": "FlexAttention"}
VERSIONS = ("torch", "cuDNN", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn-4", "jax")
SPACE = "\N{NO-BREAK SPACE}"  # columns of numbers stay in one line
DTYPES = ("float16", "bfloat16", "float32", "float64")


def load(name: str) -> dict:
    """The results ``MACHINE/STUDY``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def present(sources: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the results that there are."""
    return tuple(name for name in sources if (RESULTS / f"{name}.json").exists())


def digest(*sources: str) -> str:
    """Hash of the results that something was made from."""
    return hashlib.sha256(b"".join((RESULTS / f"{name}.json").read_bytes() for name in sources)).hexdigest()[:16]


def table(columns, rows) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def printed(results: dict) -> str:
    """A table that was measured before results were kept: as it was printed."""
    return table(results["columns"], results["rows"])


# ---- beside peers ------------------------------------------------------------------------------------------------------------------------


def cells_of(bench: dict, direction: str) -> list[dict]:
    """Cells of ``python -m numba_flash bench`` with as many heads of keys as of queries."""
    return [cell for cell in bench["cells"] if cell["direction"] == direction and not _grouped(cell)]


def _grouped(cell: dict) -> bool:
    return cell["heads"] != cell["heads_kv"]


def ratios(cells: list[dict], peer: str) -> list[tuple[float, dict]]:
    """Our speed over the peer's where both were timed."""
    entries = ((cell["contenders"].get(peer, {}), cell) for cell in cells)
    return [(entry["ratio"], cell) for entry, cell in entries if entry.get("ratio")]


def speed(bench: dict, direction: str) -> str:
    """TFLOP/s by head dimension, mask and length, and in parentheses our speed over that of each of `PEERS` that took part."""
    cells = cells_of(bench, direction)
    peers = [peer for peer in PEERS if ratios(cells, peer)]
    lengths = sorted({cell["length"] for cell in cells})
    rows = []
    for d, mask in sorted({(cell["head_dim"], cell["mask"]) for cell in cells}, key=lambda row: (row[0], row[1] == "causal")):
        row = {cell["length"]: cell["contenders"] for cell in cells if (cell["head_dim"], cell["mask"]) == (d, mask)}
        rows.append([f"D = {d}, {mask}", *(_speed_entry(row.get(n, {}), peers) for n in lengths)])
    for cell in (cell for cell in bench["cells"] if cell["direction"] == direction and _grouped(cell)):
        entries = (_speed_entry(cell["contenders"], peers) if n == cell["length"] else "" for n in lengths)
        rows.append([f"D = {cell['head_dim']}, {cell['mask']}, {cell['heads']} heads over {cell['heads_kv']}", *entries])
    over = " and over ".join(PEERS[peer] for peer in peers)
    note = f"{bench['device']}, bfloat16, TFLOP/s, and in parentheses the speed over {over}:\n\n"
    return note + table([direction, *(f"N = {n}" for n in lengths)], rows)


def _speed_entry(contenders: dict, peers: list[str]) -> str:
    ours = contenders.get(OURS, {})
    if not ours.get("tflops"):
        return ""
    compared = (contenders.get(peer, {}).get("ratio") for peer in peers)
    return f"{ours['tflops']:.0f} ({', '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in compared)})"


def power(*benches: dict) -> str:
    """What each of us and `PEERS` computes per watt, at which clock: over a pass and a head dimension, where power was told."""
    rows = []
    for bench, direction in product(benches, ("forward", "backward")):
        told = [cell for cell in cells_of(bench, direction) if "watts" in cell["contenders"][OURS]]
        for d in sorted({cell["head_dim"] for cell in told}):
            cells = [cell["contenders"] for cell in told if cell["head_dim"] == d]
            entries = [_power_entry([cell[who] for cell in cells]) for who in (OURS, *PEERS)]
            rows.append([bench["device"], f"{direction}, D = {d}", *entries])
    return table(["GPU", "GFLOP per joule, and MHz", *(NAMES.get(who, who) for who in (OURS, *PEERS))], rows)


def _power_entry(cells: list[dict]) -> str:
    per_joule = geometric_mean(cell["tflops_per_watt"] for cell in cells)
    return f"{1e3 * per_joule:.0f}, {median(cell['mhz'] for cell in cells):.0f}"


def summary(bench: dict) -> str:
    """Geometric mean and least cell of our speed over each peer's, by direction."""
    rows = []
    for direction in ("forward", "backward"):
        cells = cells_of(bench, direction)
        peers = {peer: NAMES.get(peer, peer) for cell in cells for peer in cell["contenders"] if peer != OURS}
        for peer, name in peers.items():
            values = ratios(cells, peer)
            least, at = min(values, key=lambda value: value[0])
            where = f"D = {at['head_dim']}, N = {at['length']}, {at['mask']}"
            rows.append([direction, name, len(values), f"{geometric_mean(value for value, _ in values):.2f}", f"{least:.2f}", where])
    return table(["our speed over", "peer", "cells", "geometric mean", "least", "where"], rows)


def measured(bench: dict) -> str:
    """README's: geometric means of our speed over everyone who took part in all cells, and least and greatest cells."""
    rows, lengths = [], sorted({cell["length"] for cell in bench["cells"]})
    everyone = [cell["contenders"] for direction in ("forward", "backward") for cell in cells_of(bench, direction)]
    in_some = lambda peer: any(peer in contenders for contenders in everyone)
    in_all = lambda peer: all(peer in contenders for contenders in everyone)
    peers = {peer: name for peer, name in NAMES.items() if in_all(peer) or (peer in PEERS and in_some(peer))}
    for direction, d in product(("forward", "backward"), sorted({cell["head_dim"] for cell in bench["cells"]})):
        cells = [cell for cell in cells_of(bench, direction) if cell["head_dim"] == d]
        entries = []
        for peer in peers:
            values = [value for value, _ in ratios(cells, peer)]
            entries.append(f"{geometric_mean(values):.2f} ({_range(values)})" if values else "not compared")
        rows.append([f"{direction}, D = {d}", *entries])
    versions = ", ".join(f"{name} {bench['packages'][name]}" for name in VERSIONS if name in bench["packages"])
    note = f"{bench['device']}, {bench['date']}, bfloat16, N = {lengths[0]} to {lengths[-1]}, full and causal, {versions}; geometric mean"
    return f"{note} (least and greatest) over the cells:\n\n" + table(["our speed over", *peers.values()], rows)


# ---- situations --------------------------------------------------------------------------------------------------------------------------


def limits(*results: dict) -> str:
    """Our speed relative to PyTorch's, by situation: from the studies `situations` and `score_mod`, and from the CPU's printed table."""
    rows, where = [], {}
    for each in results:
        if "situation" in each:
            of_all = (_range([row[direction] for row in each["rows"] if direction in row]) for direction in ("forward", "backward"))
            rows.append([each["situation"], *of_all, each["peer"]])
        elif "columns" in each:
            forward, both = (_range([1 / float(time) for time in re.findall(r"[\d.]+", " ".join(row[1:]))]) for row in each["rows"][:2])
            rows.append(["float32 on the CPU", forward, f"{both} with the forward", "its CPU kernel"])
        else:
            rows += [row for row in _situations(each) if row[-1]]  # where there is somebody beside us
        of_torch = f", torch {each['packages']['torch']}" if "packages" in each else ""
        where.setdefault(each["device"], f"{each['device']}{of_torch}")
    note = "Our speed over that of PyTorch's fastest kernel for it: 1 if as fast, 0.1 if a tenth of that"
    return f"{note} ({'; '.join(where.values())}).\n\n" + table(["situation", "forward", "backward", "beside PyTorch's"], rows)


def _situations(results: dict) -> list[list[str]]:
    """A row for each situation, with the range of what was measured in it, beside the fastest peer of each problem."""
    rows = []
    for situation in dict.fromkeys(row["situation"] for row in results["rows"]):
        speeds, names = [], {}
        for direction in ("forward", "backward"):
            of_all = [row for row in results["rows"] if (row["situation"], row["direction"]) == (situation, direction)]
            found = [_fastest(row) for row in of_all if any("ratio" in peer for peer in row["peers"].values())]
            speeds.append(_range([ratio for _, ratio in found]) if found else "")
            names |= dict.fromkeys(name for name, _ in found)
        rows.append([situation, *speeds, ", ".join(names)])
    return rows


def own_functions(results: dict) -> str:
    """Our speed over FlexAttention's with functions of a score."""
    lines = {}
    for row in results["rows"]:
        lines.setdefault(row["function"], {})[row["head_dim"]] = row
    dims = sorted({row["head_dim"] for row in results["rows"]})
    cells = [(d, direction) for d in dims for direction in ("forward", "backward")]
    rows = [[f"`{name}`", *(f"{row[d][direction]:.2f}" if d in row else "" for d, direction in cells)] for name, row in lines.items()]
    size = f"B = {results['batch']}, H = {results['heads']}, N = {results['length']}"
    over = f"our speed over that of {results['peer']} with the same function"
    note = f"{results['device']}, {results['date']}, {results['dtype']}, {size}; {over}:\n\n"
    return note + table(["`score_mod`", *(f"{direction}, D = {d}" for d, direction in cells)], rows)


def by_another_run(results: dict) -> str:
    """Geometric mean and least cell of our speed over each peer's, as they were written down."""
    peers = list(results["packages"])
    digits = lambda x: f"{x:.3f}" if 0.995 <= x < 1 else f"{x:.2f}"  # what is slower is not said to be as fast
    entry = lambda mean, least: f"{digits(mean)} ({digits(least)})"
    of = lambda row: (entry(*row[peer]) if peer in row else "not compared" for peer in peers)
    rows = [[f"{row['direction']}, D = {row['head_dim']}", *of(row)] for row in results["rows"]]
    first, last = results["lengths"]
    size = f"{results['tokens']:,} tokens, {results['width']} / D heads, N = {first} to {last}, full and causal"
    versions = "; ".join(f"{peer}: {version}" for peer, version in results["packages"].items())
    note = f"{results['device']}, {results['date']}, {results['dtype']}, {size} ({versions}); geometric mean (least) over the cells:\n\n"
    return note + table(["our speed over", *peers], rows)


def _fastest(row: dict) -> tuple[str, float]:
    """The fastest peer of a situation, and our speed over its."""
    peers = {name: peer["ratio"] for name, peer in row["peers"].items() if "ratio" in peer}
    return min(peers.items(), key=lambda item: item[1])


def situations(results: dict) -> str:
    """Each problem of each situation: our speed, and that over every peer's."""
    rows = []
    for row in results["rows"]:
        heads = f"{row['heads']}" if row["heads"] == row["heads_kv"] else f"{row['heads']} over {row['heads_kv']}"
        lengths = f"{row['length']}" if row["length"] == row["length_kv"] else f"{row['length']} x {row['length_kv']}"
        remarks = [word for word in ("causal", "bias") if row[word]]
        problem = ", ".join([row["dtype"], f"B = {row['batch']}, H = {heads}, N = {lengths}, D = {row['head_dim']}", *remarks])
        over = [f"{name} {peer['ratio']:.2f}" if "ratio" in peer else f"{name} cannot" for name, peer in row["peers"].items()]
        over = ", ".join([*over, *([f"plain {1 / row['over_plain']:.2f}"] if "over_plain" in row else [])])
        rows.append([row["situation"], problem, row["direction"], _three(row["ms"]), _three(row["tflops"]), over])
    return table(["situation", "problem", "", "ms", "TFLOP/s", "our speed over"], rows)


def _range(values: list[float]) -> str:
    least, greatest = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == greatest else f"{least}{SPACE}to{SPACE}{greatest}"


def examples(*machines: dict) -> str:
    """What the examples gave."""
    rows = [[row["what"], results["device"], row["took"], row["result"]] for results, row in _facts(machines, "examples")]
    return table(["example", "on", "took", "result"], rows)


def once(*machines: dict) -> str:
    """Everything else that was measured once."""
    return table(["", "on", "measured"], [[row["what"], results["device"], row["result"]] for results, row in _facts(machines, "once")])


def _facts(machines: tuple[dict, ...], name: str) -> list[tuple[dict, dict]]:
    return [(results, row) for results in machines for row in results["rows"] if row["table"] == name]


# ---- studies -----------------------------------------------------------------------------------------------------------------------------


def scaling(results: dict) -> str:
    """Time and memory of both by length."""
    names = list(dict.fromkeys(row["contender"] for row in results["rows"]))
    rows = {(row["length"], row["contender"]): row for row in results["rows"]}
    lines = []
    for n in sorted({row["length"] for row in results["rows"]}):
        line = [n]
        for name in names:
            row = rows.get((n, name), {})
            if "bytes" in row:
                line += [_three(row["forward_ms"] + row["backward_ms"]), _three(row["bytes"] / 1e6)]
            else:
                line += [f"{row['failed']}: {row['reason'].split(':')[0]}" if row else "", ""]
        lines.append(line)
    shape = f"{results['heads']} {'head' if results['heads'] == 1 else 'heads'}, D = {results['head_dim']}"
    columns = ["N", *(text for name in names for text in (f"{_standard(name)}, ms", "MB"))]
    given = f", {results['memory_gb']:g} GB of memory" if "memory_gb" in results else ""
    remark = f" ({results['note']})" if "note" in results else ""
    return f"{results['device']}{given}, {results['dtype']}, {shape}, {results['rows'][0]['mask']}{remark}:\n\n" + table(columns, lines)


def _standard(name: str) -> str:
    return name if name == OURS else f"standard ({name})"


def _three(x: float) -> str:
    """Three digits."""
    return f"{x:,.0f}" if x >= 99.95 else f"{x:.{1 if x >= 9.995 else 2 if x >= 0.9995 else 3}f}"


def sparsity(results: dict) -> str:
    """Time by the share of blocks that a mask leaves, and what becomes of the time without a mask."""
    rows = {(row["percent"], row["direction"], row["contender"]): row for row in results["rows"]}
    others = [name for name in dict.fromkeys(row["contender"] for row in results["rows"]) if name != OURS]
    dense, columns, lines = f"{OURS}, dense", ["", "visible", f"{OURS}, ms", "share of what is promised"], []
    for percent, direction in dict.fromkeys((row["percent"], row["direction"]) for row in results["rows"]):
        of = lambda name, at=(percent, direction): rows.get((*at, name), {}).get("ms")
        visible = rows[percent, direction, OURS]["visible"]
        line = [direction, f"{100 * visible:.1f} %", "" if of(OURS) is None else _three(of(OURS))]
        line.append("" if None in (of(OURS), of(dense)) else f"{of(dense) * visible / of(OURS):.2f}")
        lines.append(line + ["" if of(name) is None else _three(of(name)) for name in others])
    size = (
        f"{results['heads']} heads, N = {results['length']}, D = {results['head_dim']}, blocks of {results['block']} x {results['block']}"
    )
    promised = "Promised is a time that is the visible share of that without a mask."
    return f"{results['device']}, {results['dtype']}, {size}. {promised}\n\n" + table([*columns, *(f"{x}, ms" for x in others)], lines)


def traffic(results: dict) -> str:
    """The FlashAttention paper's table for one attention of GPT-2 medium."""
    giga = lambda *counts: "not counted" if None in counts else _three(sum(counts) / 1e9)
    rows = []
    for row in results["rows"]:
        counted = giga(row["tensor_flop"], row["scalar_flop"])
        ms = [_three(row["forward_ms"]), _three(row["backward_ms"]), _three(row["forward_ms"] + row["backward_ms"])]
        rows.append([f"{_standard(row['contender'])}, {row['mask']}", *ms, giga(row["flop"]), counted, giga(row["dram_bytes"])])
    return table(["", "forward, ms", "backward, ms", "both, ms", "GFLOP by formula", "GFLOP counted", "HBM, GB"], rows)


def tile_label(row: dict, rows: list[dict]) -> str:
    """A tile's shape, and whatever else differs among those of its kernel."""
    tile = row["tile"]
    differs = lambda field: len({other["tile"][field] for other in rows}) > 1 and not field.startswith(("block", "threads"))
    return ", ".join([f"{tile['block_m']} x {tile['block_n']}", *(f"{field} {tile[field]}" for field in tile if differs(field))])


def tiles(results: dict) -> str:
    """For each kernel the chosen tile and the fastest of the others."""
    rows = []
    for kernel, d in dict.fromkeys((row["kernel"], row["head_dim"]) for row in results["rows"]):
        timed = [row for row in results["rows"] if (row["kernel"], row["head_dim"]) == (kernel, d) and "ms" in row]
        timed.sort(key=lambda row: row["ms"])
        chosen = next(row for row in timed if row["chosen"])
        other = next(row for row in timed if not row["chosen"])
        entries = [text for row in (chosen, other) for text in (tile_label(row, timed), _three(row["ms"]), _three(row["tflops"]))]
        rows.append([f"{kernel}, {timed[0]['dtype']}, D = {d}", *entries])
    columns = ["", "chosen", "ms", "TFLOP/s", "fastest other", "ms", "TFLOP/s"]
    return table(columns, rows)


def accuracy(*machines: dict) -> str:
    """Root mean square errors at D = 128, normal / with outliers."""
    rows, names = [], ("o", "dq", "dk", "dv")
    for results in machines:
        found = [row for row in results["rows"] if row["head_dim"] == 128 and "o" in row]
        for dtype in DTYPES:
            of = {(row["distribution"], row["who"]): row for row in found if row["dtype"] == dtype}
            for who in dict.fromkeys(who for _, who in of if (dtype, who) != ("float64", "naive")):  # that is the reference
                both = (of["normal", who], of["outliers", who])
                rows.append([results["device"], dtype, who, *(" / ".join(f"{row[x]:.1e}" for row in both) for x in names)])
    return table(["device", "dtype", "", *names], rows)


def float32(results: dict) -> str:
    """Relative errors of o / dq / dk / dv of float32 on each kind of data at the first head dimension, and how fast everyone is."""
    d = results["rows"][0]["head_dim"]
    found = [row for row in results["rows"] if row["head_dim"] == d and "o" in row]
    names = list(dict.fromkeys(row["who"] for row in found))
    of = {(row["distribution"], row["who"]): row for row in found}
    entry = lambda row: " / ".join(f"{row[x]:.0e}" for x in ("o", "dq", "dk", "dv")) if row else ""
    rows = [[kind, *(entry(of.get((kind, who))) for who in names)] for kind in dict.fromkeys(row["distribution"] for row in found)]
    speeds = {(row["who"], row["direction"]): row["tflops"] for row in results["times"] if row["head_dim"] == d}
    speed = lambda who: " / ".join(_three(speeds[who, d]) if (who, d) in speeds else "none" for d in ("forward", "backward"))
    rows.append(["TFLOP/s, forward / backward", *map(speed, names)])
    note = f"{results['device']}, N = {results['length']}, D = {d}; relative errors (root mean square) of o / dq / dk / dv:\n\n"
    return note + table(["", *names], rows)


def kelvin(results: dict) -> str:
    """The picture of the example, and the error of each way to compute the gradient."""
    picture = "![gradient of one query and errors of all, by this library, IEEE float32 and PyTorch](figures/kelvin.png)\n\n"
    about = f"{results['device']}, `{results['backend']}`, {results['heads']} x {results['stations']} stations, {results['days']} days:\n\n"
    return picture + about + table(["", "relative error of dq"], [[row["what"], f"{row['error']:.1e}"] for row in results["rows"]])


def doubt(results: dict) -> str:
    """Relative errors of sums on tensor cores: by interval on the worst data, and by data at one interval."""
    rows = results["rows"]
    of = {(row["data"], row["length"], row["instruction"], row.get("split"), row.get("interval")): row["error"] for row in rows}
    ways = list(dict.fromkeys((row["instruction"], row["split"]) for row in rows if "split" in row))
    intervals, every = (64, 128, 256, None), lambda name: list(dict.fromkeys(row[name] for row in rows))
    errors = lambda keys: " / ".join(f"{of[key]:.0e}" if key in of else "-" for key in keys)
    lengths, kinds = every("length"), every("data")
    columns = [f"N = {n}" for n in lengths]
    text = f"{results['device']}; errors by the keys after which sums are emptied, {' / '.join(str(x or 'never') for x in intervals)}:\n\n"
    for data in (kind for kind in ("normal", "positive") if kind in kinds):
        by_length = lambda way, data=data: [errors([(data, n, *way, interval) for interval in intervals]) for n in lengths]
        lines = [[f"{way[0]}, {way[1]}", *by_length(way)] for way in ways]
        lines.append(["IEEE, one after the other", *(errors([(data, n, "IEEE", None, None)]) for n in lengths)])
        text += table([f"{data} numbers", *columns], lines) + "\n"
    text += f"Every 128 keys, by data, N = {' / '.join(map(str, lengths))}:\n\n"
    lines = [[f"{way[0]}, {way[1]}", *(errors([(data, n, *way, 128) for n in lengths]) for data in kinds)] for way in ways]
    lines.append(["IEEE, one after the other", *(errors([(data, n, "IEEE", None, None) for n in lengths]) for data in kinds)])
    return text + table(["", *kinds], lines)


def doubt_rates(results: dict) -> str:
    """TFLOP/s of one product and of three by instruction, kind of numbers and interval."""
    rates = {(row["instruction"], row["kind"], row["products"], row["interval"]): row["tflops"] for row in results["rates"]}
    intervals = (64, 128, 256, None)
    entry = lambda *key: _three(rates[key]) if key in rates else "-"
    rows = []
    for instruction, kind in dict.fromkeys((row["instruction"], row["kind"]) for row in results["rates"]):
        for products in (1, 3):
            what = f"{instruction}, {kind}, {'one product' if products == 1 else 'three interleaved'}"
            rows.append([what, *(entry(instruction, kind, products, interval) for interval in intervals)])
    return table(["TFLOP/s of a product of matrices; sums emptied after", *(f"{x} keys" if x else "never" for x in intervals)], rows)


def training(results: dict) -> str:
    """A step of training by length, with both kinds of attention."""
    rows = {(row["length"], row["attention"]): row for row in results["rows"]}
    entry = lambda row: [f"{row['seconds']:.4f}", f"{row['bytes'] / 1e6:,.0f}"] if "seconds" in row else ["out of memory", ""]
    lengths = sorted({length for length, _ in rows})
    lines = [[n, *entry(rows[n, "flash"]), *entry(rows[n, "standard"])] for n in lengths]
    return table(["length", "flash, s per step", "MB", "standard, s per step", "MB"], lines)


def path(results: dict) -> str:
    """What the example that finds paths learned from pictures of each size, and what attention among blocks saves it."""
    rows = []
    for row in results["rows"]:
        scene = [f"{row['tokens']:,}", f"{row['visible']:.1%}".replace("%", " %"), row["curves"], row["length"], row["rounds"]]
        speed = [row["batch"], row["steps"], f"{row['seconds'] / (row['steps'] - 1):.4f}"]  # the first step compiles
        learned = [f"{row['before']:.3f}", f"{row['right']:.3f} ± {row['error']:.3f}"]
        rows.append([f"{row['size']} x {row['size']}", *scene, *speed, *learned])
    columns = ["pixels", "tokens", "visible pairs", "curves", "their length", "rounds", "pictures of a step", "steps", "s per step"]
    size = f"{results['heads']} heads, width {results['width']}"
    text = f"{results['device']}, {results['dtype']}, {size}; right answers of {results['rows'][-1]['test']} new pictures:\n\n"
    text += table([*columns, "right before", "right after"], rows)
    if not results["costs"]:
        return text
    costs = [[row["attention"], f"{row['seconds']:.4f}", f"{row['bytes'] / 1e6:,.0f}"] for row in results["costs"]]
    return f"{text}\n{table(['attention, largest pictures', 's for the gradients of a step', 'MB'], costs)}"


# ---- the pages ---------------------------------------------------------------------------------------------------------------------------


# ---- spread over GPUs --------------------------------------------------------------------------------------------------------------------

NVLINK = "450 GB/s"
LINKS = {NVLINK: 450e9, "50 GB/s": 50e9}
GPUS = (8, 64, 256, 1024)
TOKENS = {"128 thousand": 2**17, "1 million": 2**20, "10 million": 10 * 2**20, "100 million": 100 * 2**20}


def rates(bench: dict, direction: str) -> dict[int, float]:
    """Operations per second by length, D = 128, as many heads of keys as of queries, full."""
    cells = [cell for cell in cells_of(bench, direction) if (cell["head_dim"], cell["mask"]) == (128, "full")]
    return {cell["length"]: 1e12 * cell["contenders"][OURS]["tflops"] for cell in cells}


def ring_on_paper(bench: dict) -> str:
    """Efficiency by GPUs, tokens and link, of the model in `ring_model`."""
    measured = {direction: rates(bench, direction) for direction in ("forward", "backward")}
    rows = []
    for link, speed_of_link in LINKS.items():
        for tokens, number in TOKENS.items():
            machines = [Machine(gpus, speed_of_link, **measured) for gpus in GPUS]
            rows.append([link, tokens, *(_ways(Work(number), machine) for machine in machines)])
    return table(["each way", "tokens", *(f"{gpus} GPUs" for gpus in GPUS)], rows)


def _ways(work: Work, machine: Machine) -> str:
    """Efficiencies of a ring, of gathering, and of heads where there are enough."""
    if not ring_model.fits(work, machine):
        return "too large"
    gathered = ring_model.gather(work, machine) if ring_model.all_fit(work) else None
    by_heads = ring_model.heads(work, machine)
    said = lambda seconds: "-" if seconds is None else f"{ring_model.efficiency(work, machine, seconds):.2f}"
    return ", ".join(map(said, (ring_model.ring(work, machine), gathered, by_heads)))


def ring_measured(study: dict) -> str:
    """What a ring is made of, and rings of processes, as they were measured."""
    parts = [row for row in study["rows"] if "length" in row]
    rows = [[row["what"], row["length"], f"{row['ms']:.3f}", _rate(row)] for row in parts]
    text = f"{study['device']}, {study['dtype']}:\n\n" + table(["what", "tokens of a part", "ms", "rate"], rows)
    rings = [row for row in study["rows"] if "processes" in row]
    if not rings:
        return text
    rows = []
    for row in rings:
        name = f"{row['what']}, {'causal' if row['causal'] else 'full'}"
        ms = f"{row['ms']:.1f}, {by_model(study, row)}"
        shares = (_least_beside(row, what) for what in ("transfers_ms", "kernels_ms"))
        rows.append([name, row["processes"], row["gpus"], row["carrier"], row["tokens"], ms, *shares])
    columns = [
        "algorithm",
        "processes",
        "GPUs",
        "by way of",
        "tokens",
        "ms of both passes, and on paper",
        "least share of transfers behind kernels",
        "of kernels beside transfers",
    ]
    return f"{text}\n{table(columns, rows)}"


def _least_beside(row: dict, what: str) -> str:
    """The share of transfers, or of kernels, at whose time there was the other, in the process that has the least of it."""
    seen = [each for each in row.get("of_processes", ()) if each["hidden"] is not None]
    return f"{min(each['hidden'] * each['transfers_ms'] / each[what] for each in seen):.2f}" if seen else ""


def by_model(study: dict, row: dict) -> str:
    """Milliseconds of the model with the rates of the same study; a link that was not measured has no end.

    By way of the host it is as fast as K and V came to processes that gather, or as copies, where there are none.
    """
    if not row["gpus"]:
        return "-"
    share = row["gpus"] / row["processes"]  # of a GPU
    rates = lambda what, unit: {each["length"]: share * each[unit] for each in study["rows"] if each["what"] == what}
    forward, backward = ({n: 1e12 * x for n, x in rates(what, "tflops").items()} for what in ("forward", "backward"))
    copies = [1e9 * x for what in ("to the host", "from the host") for x in rates(what, "gb_per_s").values()]
    memory = 1e9 * ring_model.rate(rates("merge", "gb_per_s"), row["tokens"] / row["processes"])
    work = Work(row["tokens"], study["heads"], study["heads_kv"], study["head_dim"], not row["causal"])
    keys = 2 * ring_model.part(work, row["processes"]) * (row["processes"] - 1)
    alike = lambda each: [each.get(name) for name in ("what", "carrier", "processes", "tokens")]
    gathered = [x for x in study["rows"] if alike(x) == ["gather", *alike(row)[1:]] and "spans" in x]
    came = [1e3 * keys / (stop - start) for (start, stop), *_ in (x["spans"]["transfers"] for x in gathered)]
    link = max(came, default=min(copies)) if row["carrier"] == "host" else float("inf")
    way = {"ring": ring_model.ring, "gather": ring_model.gather}[row["what"]]
    return f"{1e3 * way(work, Machine(row['processes'], link, forward, backward, memory)):.1f}"


def gpus_measured(study: dict) -> str:
    """One sequence on several GPUs beside the same on one: time and efficiency, with the least and the most of all rounds."""
    heads = f"{study['heads']} heads over {study['heads_kv']}"
    rows = []
    for row in study["rows"]:
        if "direction" in row:
            name = f"{row['direction']}, {'causal' if row['causal'] else 'full'}, {row['layout']}"
            efficiency = f"{row['efficiency']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            ms = (f"{row[each]:.1f}" for each in ("ms_alone", "ms_at_once", "ms"))
            rows.append([name, row["tokens"], row["gpus"], *ms, efficiency])
    text = f"{study['device']}, NCCL, {study['dtype']}, {heads}, D = {study['head_dim']}:\n\n"
    return text + table(["what", "tokens", "GPUs", "ms of one", "ms, each all of it", "ms together", "efficiency"], rows)


def gpus_by_model(*results: dict) -> str:
    """Both passes on several GPUs as `ring_model` has them, with rates of kernels by the bench, beside what they took."""
    study, bench = (next(each for each in results if kind in each) for kind in ("rows", "cells"))
    measured = {direction: rates(bench, direction) for direction in ("forward", "backward")}
    passes: dict[tuple, list[dict]] = {}
    for row in study["rows"]:
        if "direction" in row:
            passes.setdefault((row["tokens"], row["causal"], row["gpus"]), []).append(row)
    rows = []
    for (tokens, causal, gpus), both in passes.items():
        work = Work(tokens, study["heads"], study["heads_kv"], study["head_dim"], not causal)
        paper, took = 1e3 * ring_model.ring(work, Machine(gpus, LINKS[NVLINK], **measured)), sum(row["ms"] for row in both)
        rows.append([f"{tokens}, {'causal' if causal else 'full'}", gpus, f"{paper:.1f}", f"{took:.1f}", f"{took - paper:.1f}"])
    return table(["tokens", "GPUs", "ms of both passes on paper", "measured", "more"], rows)


def blocks_measured(study: dict) -> str:
    """Attention on dask arrays by size of chunks, beside one call."""
    heads = f"{study['heads']} heads over {study['heads_kv']}"
    text = f"{study['device']}, {study['dtype']}, {study['tokens']} tokens, {heads}, D = {study['head_dim']}, causal:\n\n"
    rows = []
    for row in sorted(study["rows"], key=lambda row: row["chunk"] or 0):
        chunk = "one call" if row["chunk"] is None else row["chunk"]
        tasks = "" if row["chunk"] is None else f"{row['forward_tasks']}, {row['backward_tasks']}"
        ms = f"{row['forward_ms']:.1f}, {row['backward_ms']:.1f}"
        shares = (study["rows"][0][each] / row["workers"] / row[each] for each in ("forward_ms", "backward_ms"))
        rows.append([chunk, row["workers"], row["gpus"], ms, ", ".join(f"{x:.2f}" for x in shares), tasks, f"{row['bytes'] / 1e6:,.0f}"])
    columns = ["chunks of", "workers", "GPUs", "ms, forward and backward", "efficiency of both", "tasks of both"]
    return text + table([*columns, "MB beside inputs in one worker"], rows)


def _rate(row: dict) -> str:
    return f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['gb_per_s']:.0f} GB/s"


def of_constants(page: str) -> str:
    """What was measured for the constants of a page in `docs/lab`."""
    return constants.page(page, constants.load(RESULTS / "constants.json"))


def recipes(tier: str, of: str) -> str:
    """Rows of a table of a tier, as `numba_flash.cuda.sm90.recipes`; empty columns are left out."""
    recipes = importlib.import_module(f"numba_flash.cuda.{tier}.recipes")
    code = lambda names: ", ".join(f"`{name}`" for name in names)
    rows = [(each.problems, code(each.loops), each.stage, each.work, each.dq) for each in recipes.PASSES[of]]
    columns = ("problems", "main loops", "scores", "work", "dQ")
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows])


@dataclass(frozen=True)
class Block:
    """What stands between two marks.

    Attributes
    ----------
    make : callable
        Markdown from the results.
    sources : tuple of str
        Names of the results; it is made of those that there are. None where it is made of the code.
    command : str
        What measures them.
    """

    make: Callable[..., str]
    sources: tuple[str, ...]
    command: str = ""


def _study(name: str, machine: str) -> str:
    return f"python asv_bench/studies/{name}.py --json asv_bench/studies/results/{machine}/{name}.json"


BENCH = (
    "python -m numba_flash bench --direction both --watts --repeats 12 --peers 'flash-attn-4,torch cuDNN'"
    " --json asv_bench/studies/results/h200/bench.json"
)
POWER = BENCH.replace("bench.json", "power.json")
BENCH_H100 = BENCH.replace("h200", "h100")
SCALING = "python docs/examples/train_transformer.py --scaling --json asv_bench/studies/results/h200/training.json"
FIND_PATH = "python docs/examples/find_path.py --json asv_bench/studies/results/h200/path.json"
KELVIN = "python docs/examples/kelvin.py --output docs/figures/kelvin.png --json asv_bench/studies/results/h200/kelvin.json"
SM80 = (
    "python -m numba_flash bench --backend sm80 --direction both --peers 'torch FA2' --repeats 6"
    " --json asv_bench/studies/results/h200/sm80.json"
)
BLOCKS = {
    "limits": Block(limits, ("h200/situations", "h100/score_mod", "2-core-cpu/torch")),
    "score-mod": Block(own_functions, ("h100/score_mod",)),
    "peers-h100": Block(by_another_run, ("h100/peers",)),
    "situations": Block(situations, ("h200/situations",), _study("situations", "h200")),
    "measured": Block(measured, ("h200/bench",), BENCH),
    "sm80": Block(measured, ("h200/sm80",), SM80),
    "speed-forward": Block(lambda bench: speed(bench, "forward"), ("h200/bench",), BENCH),
    "speed-backward": Block(lambda bench: speed(bench, "backward"), ("h200/bench",), BENCH),
    "summary": Block(summary, ("h200/bench",), BENCH),
    "summary-h100": Block(summary, ("h100/bench",), BENCH_H100),
    "speed-forward-h100": Block(lambda bench: speed(bench, "forward"), ("h100/bench",), BENCH_H100),
    "speed-backward-h100": Block(lambda bench: speed(bench, "backward"), ("h100/bench",), BENCH_H100),
    "power": Block(power, ("h200/power", "h100/power"), POWER),
    "scaling-h200": Block(scaling, ("h200/scaling",), _study("scaling", "h200")),
    "scaling-cpu": Block(scaling, ("2-core-cpu/scaling",), _study("scaling", "2-core-cpu")),
    "sparsity": Block(sparsity, ("h200/sparsity",), _study("sparsity", "h200")),
    "traffic": Block(traffic, ("h200/traffic",), _study("traffic", "h200")),
    "tiles": Block(tiles, ("h200/tiles",), _study("tiles", "h200")),
    "accuracy": Block(accuracy, ("h200/accuracy", "2-core-cpu/accuracy"), _study("accuracy", "h200")),
    "float32": Block(float32, ("h200/float32",), _study("float32", "h200")),
    "kelvin": Block(kelvin, ("h200/kelvin",), KELVIN),
    "doubt": Block(doubt, ("h200/doubt",), _study("doubt", "h200")),
    "doubt-rates": Block(doubt_rates, ("h200/doubt",), _study("doubt", "h200")),
    "ring-on-paper": Block(ring_on_paper, ("h200/bench",), BENCH),
    "ring-measured": Block(ring_measured, ("h200/ring",), f"{_study('ring', 'h200')} --processes 2"),
    "gpus-measured": Block(gpus_measured, ("h200/gpus",), _study("gpus", "h200")),
    "gpus-by-model": Block(gpus_by_model, ("h200/gpus", "h200/bench"), _study("gpus", "h200")),
    "dask-measured": Block(blocks_measured, ("h200/blocks",), _study("blocks", "h200")),
    "training": Block(training, ("h200/training",), SCALING),
    "path": Block(path, ("h200/path",), FIND_PATH),
    "torch-cpu": Block(printed, ("2-core-cpu/torch",)),
    "options-cpu": Block(printed, ("2-core-cpu/options",)),
    "options-simt": Block(printed, ("h200/options",)),
    "simt": Block(printed, ("h200/simt",)),
    "simt-torch": Block(printed, ("h200/simt-torch",)),
    "accuracy-torch": Block(printed, ("h200/accuracy-torch",)),
    "examples": Block(examples, ("2-core-cpu/facts", "h200/facts")),
    "once": Block(once, ("h200/facts", "h100/facts", "2-core-cpu/facts")),
    **{f"lab-{page}": Block(lambda _, page=page: of_constants(page), ("constants",)) for page in constants.PAGES},
    "kernels-sm90-forward": Block(lambda: recipes("sm90", "forward"), ()),
    "kernels-sm90-backward": Block(lambda: recipes("sm90", "backward"), ()),
    "kernels-sm90-bias-gradient": Block(lambda: recipes("sm90", "gradient of a bias"), ()),
    "kernels-sm80-forward": Block(lambda: recipes("sm80", "forward"), ()),
    "kernels-sm80-backward": Block(lambda: recipes("sm80", "backward"), ()),
    "kernels-sm80-bias-gradient": Block(lambda: recipes("sm80", "gradient of a bias"), ()),
}


def content(name: str, figures: dict[str, str]) -> str:
    """What belongs into the block `name`: its figure, if `figures` has one's Markdown, and its table; or how to measure it.

    Parameters
    ----------
    name : str
        One of `BLOCKS`.
    figures : dict
        Markdown of figures by the name of the block that they stand in.
    """
    block = BLOCKS[name]
    sources = present(block.sources)
    if block.sources and not sources:
        return f"Not measured yet: `{block.command}`.\n"
    text = block.make(*map(load, sources))
    return f"{figures[name]}\n\n{text}" if name in figures else text


def updated(page: str, figures: dict[str, str]) -> str:
    """The text of a page with all of its blocks made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{content(match[2], figures)}\n{match[4]}", page)
