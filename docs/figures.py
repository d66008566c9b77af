"""Draw the figures of README and docs, and write their tables, from committed results.

    python docs/figures.py            # needs matplotlib
    python docs/figures.py --check    # is everything as the results give it? needs nothing

A figure carries the hash of the results that it was drawn from, so that `--check` need not draw it. It is drawn where its results are.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tables
from tables import OURS, ROOT

FIGURES = ROOT / "docs" / "figures"
# Okabe and Ito's colours, which the colour-blind tell apart; a marker and a dash for each as well, for print in grey.
STYLES = {
    OURS: ("#D55E00", "o", "-"),
    "sm90": ("#D55E00", "o", "-"),
    "sm80": ("#D55E00", ">", "-"),
    "simt": ("#D55E00", "<", "-"),
    "cpu": ("#D55E00", "h", "-"),
    "naive": ("#000000", "x", ":"),
    "torch cuDNN": ("#0072B2", "s", "--"),
    "flash-attn-4": ("#009E73", "^", "-."),
    "torch FA2": ("#CC79A7", "v", ":"),
    "torch Flex": ("#E69F00", "D", (0, (4, 1, 1, 1))),
    "jax cuDNN": ("#56B4E9", "P", (0, (6, 2))),
    "CuPy": ("#000000", "X", (0, (1, 1))),
    "NumPy": ("#000000", "X", (0, (1, 1))),
    "torch CPU": ("#0072B2", "p", "--"),
    "torch efficient": ("#666666", "*", (0, (5, 2, 1, 2))),
    "sm90 float32": ("#D55E00", "d", "-"),
    "sm90 tf32": ("#D55E00", "1", "-"),
    "sm80 float32": ("#882255", "d", "-"),
    "sm80 tf32": ("#882255", "1", "-"),
}
RESULTS = ("o", "dq", "dk", "dv")
SETTINGS = {"svg.hashsalt": "numba_flash", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
SETTINGS |= {"grid.color": "#DDDDDD", "grid.linewidth": 0.6, "lines.linewidth": 1.5, "lines.markersize": 5, "legend.frameon": False}


def style(name: str) -> dict:
    """Colour, marker and dashes of someone."""
    color, marker, dashes = STYLES[name]
    return {"color": color, "marker": marker, "linestyle": dashes, "label": name}


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def lengths_axis(axis, lengths) -> None:
    """N, doubling."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, map(_short, lengths))
    axis.minorticks_off()


def legend(figure, axes) -> None:
    """One below everything, of whoever is in some panel."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 5))


# ---- figures -----------------------------------------------------------------------------------------------------------------------------


def speed(figure, bench: dict, head_dims=None) -> None:
    """TFLOP/s by length: a row of panels for each direction and head dimension, a column for each mask."""
    panels = {}
    for direction in ("forward", "backward"):
        for cell in tables.cells_of(bench, direction):
            if head_dims is None or cell["head_dim"] in head_dims:
                panels.setdefault((cell["head_dim"], direction, cell["mask"]), []).append(cell)
    columns = [(direction, mask) for direction in ("forward", "backward") for mask in ("full", "causal")]
    dims = sorted({d for d, *_ in panels})
    figure.set_size_inches(11, 0.9 + 2.3 * len(dims))
    axes = figure.subplots(len(dims), len(columns), squeeze=False, sharey="row")
    for row, d in zip(axes, dims, strict=True):
        for axis, (direction, mask) in zip(row, columns, strict=True):
            _speed_panel(axis, panels.get((d, direction, mask), []))
            axis.set_title(f"{direction}, {mask}, D = {d}", fontsize=9)
        row[0].set_ylabel("TFLOP/s")
        row[0].set_ylim(0, None)
    for axis in axes[-1]:
        axis.set_xlabel("N")
    legend(figure, axes.flat)


def _speed_panel(axis, cells: list[dict]) -> None:
    if not cells:
        axis.text(0.5, 0.5, "not compared", transform=axis.transAxes, ha="center")
        return
    for name in dict.fromkeys(name for cell in cells for name in cell["contenders"]):
        entries = [(cell["length"], cell["contenders"].get(name, {}).get("tflops")) for cell in cells]
        points = [(n, tflops) for n, tflops in entries if tflops]
        if points:
            axis.plot(*zip(*points, strict=True), **style(name), zorder=3 if name == OURS else 2)
    lengths_axis(axis, [cell["length"] for cell in cells])


def scaling(figure, results: dict) -> None:
    """Time and memory by length, and where memory ended."""
    figure.set_size_inches(8, 3.4)
    axes = figure.subplots(1, 2)
    quantities = (
        ("forward and backward, ms", lambda row: row["forward_ms"] + row["backward_ms"]),
        ("memory, MB", lambda row: row["bytes"] / 1e6),
    )
    lengths = sorted({row["length"] for row in results["rows"]})
    for axis, (label, value) in zip(axes, quantities, strict=True):
        for name in dict.fromkeys(row["contender"] for row in results["rows"]):
            rows = [row for row in results["rows"] if row["contender"] == name]
            points = [(row["length"], value(row)) for row in rows if row.get("bytes")]
            axis.plot(*zip(*points, strict=True), **style(name))
            for row in rows:
                if "failed" in row:
                    text = f"out of memory at {_short(row['length'])}"
                    axis.annotate(text, points[-1], (-8, 0), textcoords="offset points", ha="right", va="center")
        axis.set_yscale("log")
        lengths_axis(axis, lengths)
        axis.set(xlabel="N", ylabel=label)
    legend(figure, axes)


def sparsity(figure, results: dict) -> None:
    """Time against the share of blocks that a mask leaves, with what is promised: that share of the time without a mask."""
    figure.set_size_inches(10, 3.4)
    axes = figure.subplots(1, 2)
    styles = {OURS: OURS, f"{OURS}, a mask of pairs": "naive", f"{OURS}, dense": "torch cuDNN", "FlexAttention": "torch Flex"}
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        rows = [row for row in results["rows"] if row["direction"] == direction and "ms" in row]
        for name, like in styles.items():
            points = sorted((100 * row["visible"], row["ms"]) for row in rows if row["contender"] == name)
            if points:
                axis.plot(*zip(*points, strict=True), **style(like) | {"label": name})
        promised = sorted((100 * row["visible"], row["visible"] * row["ms"]) for row in rows if row["contender"] == f"{OURS}, dense")
        axis.plot(*zip(*promised, strict=True), color="#999999", linewidth=0.8, label="the visible share of dense")
        axis.set(xscale="log", yscale="log", xlabel="visible, %", ylabel=f"{direction}, ms")
        axis.set_xticks([2, 5, 10, 20, 50], [2, 5, 10, 20, 50])
        axis.minorticks_off()
    legend(figure, axes)


def tiles(figure, results: dict) -> None:
    """Time with each tile, fastest first; the chosen one has another colour, and says so."""
    kernels = {}
    for row in results["rows"]:
        kernels.setdefault((row["kernel"], row["head_dim"]), []).append(row)
    figure.set_size_inches(10, 0.6 + 2.6 * -(-len(kernels) // 2))
    axes = figure.subplots(-(-len(kernels) // 2), 2, squeeze=False)
    for axis, ((kernel, d), rows) in zip(axes.flat, kernels.items(), strict=False):
        rows = sorted((row for row in rows if "ms" in row), key=lambda row: row["ms"], reverse=True)
        for i, row in enumerate(rows):
            label = tables.tile_label(row, rows)
            axis.barh(i, row["ms"], color=STYLES[OURS if row["chosen"] else "torch cuDNN"][0], zorder=2)
            axis.text(0, i, f" {label}{' (chosen)' if row['chosen'] else ''}", color="white", va="center", fontsize=7, zorder=3)
        axis.set_yticks([])
        axis.set_title(f"{kernel}, {rows[0]['dtype']}, D = {d}", fontsize=9)
        axis.set_xlabel("ms")
    for axis in list(axes.flat)[len(kernels) :]:
        axis.set_visible(False)


def accuracy(figure, *machines: dict) -> None:
    """Root mean square error of o and of dq by dtype, without and with outliers, at D = 128."""
    figure.set_size_inches(10, 6)
    axes = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
    panels = [(result, distribution) for result in ("o", "dq") for distribution in ("normal", "outliers")]
    rows = [row for results in machines for row in results["rows"] if row["head_dim"] == 128 and "o" in row]
    rows = [row for row in rows if (row["dtype"], row["who"]) != ("float64", "naive")]  # that is the reference
    rows = {(row["who"], row["dtype"], row["distribution"]): row for row in reversed(rows)}
    names = [name for name in STYLES if name in {who for who, *_ in rows}]
    for axis, (result, distribution) in zip(axes, panels, strict=True):
        for number, who in enumerate(names):
            found = [(i, rows.get((who, dtype, distribution))) for i, dtype in enumerate(tables.DTYPES)]
            points = [(i + 0.8 * ((number + 0.5) / len(names) - 0.5), row[result]) for i, row in found if row]
            axis.plot(*zip(*points, strict=True), **style(who) | {"linestyle": "none"})
        axis.set_yscale("log")
        axis.set_xticks(range(len(tables.DTYPES)), tables.DTYPES)
        axis.set_title(f"{result}, {distribution}", fontsize=9)
    figure.supylabel("root mean square error", fontsize=9)
    legend(figure, axes)


def float32(figure, results: dict) -> None:
    """Error against time of float32, on normal data; and errors of everything on data in kelvin."""
    figure.set_size_inches(10, 3.6)
    axes = figure.subplots(1, 3)
    d = results["rows"][0]["head_dim"]
    rows = {(row["who"], row["distribution"]): row for row in results["rows"] if row["head_dim"] == d and "o" in row}
    times = {(row["who"], row["direction"]): row["ms"] for row in results["times"] if row["head_dim"] == d}
    names = [name for name in STYLES if (name, "normal") in rows]
    for axis, (direction, result) in zip(axes, (("forward", "o"), ("backward", "dq")), strict=False):
        for who in (name for name in names if (name, direction) in times):
            axis.plot(times[who, direction], rows[who, "normal"][result], **style(who) | {"linestyle": "none"})
        axis.set(yscale="log", xlabel="ms", title=f"{direction}: error of {result}")
        axis.set_xlim(left=0)
    for number, who in enumerate(names):
        places = [i + 0.6 * ((number + 0.5) / len(names) - 0.5) for i in range(len(RESULTS))]
        axes[-1].plot(places, [rows[who, "kelvin"][x] for x in RESULTS], **style(who) | {"linestyle": "none"})
    axes[-1].set_yscale("log")
    axes[-1].set_xticks(range(len(RESULTS)), RESULTS)
    axes[-1].set_title("keys and values of 300 K, 10 K wide")
    legend(figure, axes)


def timelines(figure, study: dict) -> None:
    """When kernels ran in one of the processes, and when transfers were on their way, or waited for."""
    rows = [row for row in study["rows"] if row.get("spans")]
    figure.set_size_inches(10, 0.8 + 1.2 * max(1, len(rows)))
    axes = figure.subplots(max(1, len(rows)), 1, squeeze=False).ravel()
    if not rows:
        axes[0].text(0.5, 0.5, "no timeline was measured", transform=axes[0].transAxes, ha="center")
    for axis, row in zip(axes, rows, strict=False):
        for height, (what, who) in enumerate((("transfers", "torch cuDNN"), ("kernels", OURS))):
            spans = [(start, stop - start) for start, stop in row["spans"][what]]
            axis.broken_barh(spans, (height - 0.4, 0.8), color=STYLES[who][0], edgecolor="white", linewidth=0.3, zorder=2)
        axis.set_yticks((0, 1), ("transfers", "kernels"))
        mask, processes = "causal" if row["causal"] else "full", row.get("processes", row["gpus"])
        axis.set_title(f"{row['what']}, {_short(row['tokens'])} tokens, {mask}, {processes} processes", fontsize=9)
    axes[-1].set_xlabel("ms")


@dataclass(frozen=True)
class Figure:
    """A file in docs/figures.

    Attributes
    ----------
    draw : callable
        ``draw(figure, *results)``.
    sources : tuple of str
        Names of the results; it is made of those that there are.
    block : str
        Of the docs, where it stands.
    text : str
        In its place where it cannot be seen.
    """

    draw: Callable[..., None]
    sources: tuple[str, ...]
    block: str
    text: str


ALL = {
    "speed": Figure(
        lambda figure, bench: speed(figure, bench, (128,)), ("h200/bench",), "measured", "TFLOP/s against N, D = 128, beside peers"
    ),
    "speed-all": Figure(speed, ("h200/bench",), "summary", "TFLOP/s against N for each head dimension, beside peers"),
    "scaling-h200": Figure(scaling, ("h200/scaling",), "scaling-h200", "time and memory against N on an H200"),
    "scaling-cpu": Figure(scaling, ("2-core-cpu/scaling",), "scaling-cpu", "time and memory against N on a CPU"),
    "sparsity": Figure(sparsity, ("h200/sparsity",), "sparsity", "time against the share of blocks that a mask leaves"),
    "tiles": Figure(tiles, ("h200/tiles",), "tiles", "time with each tile"),
    "float32": Figure(float32, ("h200/float32",), "float32", "errors of float32 against time, and on data in kelvin"),
    "ring": Figure(timelines, ("h200/ring",), "ring-measured", "kernels and transfers of one process over time"),
    "gpus": Figure(timelines, ("h200/gpus",), "gpus-measured", "kernels and transfers of process 0 over time"),
    "accuracy": Figure(accuracy, tables.BLOCKS["accuracy"].sources, "accuracy", "root mean square errors by dtype"),
}


# ---- files -------------------------------------------------------------------------------------------------------------------------------


def drawable() -> dict[str, Figure]:
    """Figures whose results there are."""
    return {name: figure for name, figure in ALL.items() if tables.present(figure.sources)}


def data_of(figure: Figure) -> str:
    """What its file says about the results that it was drawn from."""
    return f"data {tables.digest(*tables.present(figure.sources))}"


def draw(name: str) -> None:
    """Write one figure; the same results give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    kind = ALL[name]
    with matplotlib.rc_context(SETTINGS):
        canvas = Canvas(layout="constrained", facecolor="white")  # a light card in dark mode
        kind.draw(canvas, *map(tables.load, tables.present(kind.sources)))
        canvas.savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Description": data_of(kind)})


def with_tables(page: str, folder: str) -> str:
    """The text of a page as the results give it; figures are in `folder`, seen from there."""
    return tables.updated(page, {f.block: f"![{f.text}]({folder}/{name}.svg)" for name, f in drawable().items()})


def page_with_tables(path: Path) -> str:
    """A page as the results give it."""
    return with_tables(path.read_text(), Path(os.path.relpath(ROOT / "docs" / "figures", path.parent)).as_posix())


def stale() -> list[str]:
    """Pages and figures that are not what the results give."""
    pages = [path.name for path in tables.PAGES if path.read_text() != page_with_tables(path)]
    said = lambda name: (
        re.search(r"data [0-9a-f]{16}", (FIGURES / f"{name}.svg").read_text()) if (FIGURES / f"{name}.svg").exists() else None
    )
    return pages + [f"{name}.svg" for name, kind in drawable().items() if (found := said(name)) is None or found[0] != data_of(kind)]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if `--check` found something stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if something is not as the results give it")
    if parser.parse_args(arguments).check:
        found = stale()
        print("\n".join(f"{name} is not what the results give: run docs/figures.py" for name in found), end="\n" if found else "")
        return 1 if found else 0
    for name in drawable():
        draw(name)
    for path in tables.PAGES:
        if (page := page_with_tables(path)) != path.read_text():
            path.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
