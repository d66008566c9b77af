"""What was measured, as text with bars, as a table, as JSON and as a figure."""

from statistics import median

from numba_flash.bench.cases import BOUNDS, Cell
from numba_flash.bench.peers import OURS
from numba_flash.bench.timing import HOST_CELL, Outcome, ratio, summary

Results = list[tuple[Cell, dict[str, Outcome]]]

BAR = 30  # characters of the fastest contender of a cell
EIGHTHS = " ▏▎▍▌▋▊▉█"


def bar(share: float) -> str:
    """A bar of `BAR` characters at share 1, to an eighth of a character."""
    eighths = round(8 * BAR * share)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def block(cell: Cell, outcomes: dict[str, Outcome]) -> str:
    """One cell: for each contender a bar, TFLOP/s, time, error, and our speed over its; or what is wrong with it."""
    speeds = {name: outcome.tflops(cell) for name, outcome in outcomes.items() if outcome.ms}
    lines = [f"{cell}  (B {cell.batch}, Hq {cell.heads}, Hk {cell.heads_kv}, {cell.dtype})"]
    for name, outcome in outcomes.items():
        if outcome.status == "ok":
            picture = bar(speeds[name] / max(speeds.values()))
            numbers = f"{_short(speeds[name]):>6} TFLOP/s {median(outcome.ms):>9.3f} ms  error {outcome.error:.1e}"
            compared = None if name == OURS else ratio(outcomes.get(OURS), outcome)
            drawn = "" if outcome.power is None else _drawn(cell, outcome)
            lines.append(f"  {name:<15} {picture:<{BAR}} {numbers}" + ("" if compared is None else f"  {compared:.2f}x") + drawn)
        elif outcome.status == "WRONG":
            lines.append(f"  {name:<15} WRONG, not timed: error {outcome.error:.1e} exceeds {BOUNDS[cell.dtype]:.0e}")
        else:
            lines.append(f"  {name:<15} cannot: {outcome.reason}")
    return "\n".join(lines)


def _drawn(cell: Cell, outcome: Outcome) -> str:
    power = outcome.power
    return f"  {power.watts:.0f} W at {power.mhz:.0f} MHz: {outcome.tflops(cell) / power.watts:.2f} TFLOP/s per watt"


def table(results: Results) -> str:
    """One row per cell, one column per contender: TFLOP/s, and our speed over the peer's."""
    names = list(dict.fromkeys(name for _, outcomes in results for name in outcomes))
    width = max(12, *map(len, names)) + 2
    where = len(str(results[0][0])) if results else 0
    lines = [" " * where + "".join(f"{name:>{width}}" for name in names)]
    for cell, outcomes in results:
        lines.append(str(cell) + "".join(f"{_entry(cell, outcomes, name):>{width}}" for name in names))
    return "\n".join(lines)


def _entry(cell: Cell, outcomes: dict[str, Outcome], name: str) -> str:
    outcome = outcomes[name]
    if outcome.status != "ok":
        return outcome.status
    compared = None if name == OURS else ratio(outcomes.get(OURS), outcome)
    return _short(outcome.tflops(cell)) + ("" if compared is None else f" {compared:>5.2f}x")


def _short(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 99.95 else f"{x:.{1 if x >= 9.995 else 2 if x >= 0.9995 else 3}f}"


def closing(results: Results, host: dict[str, float], place: str) -> str:
    """Geometric mean and minimum of our speed over each peer's, and the time of a call on the host."""
    lines = []
    for name, of in summary(results).items():
        mean, least = f"geometric mean {of['geometric_mean']:.2f}x", f"minimum {of['minimum']:.2f}x ({of['minimum_at']})"
        left_out = "" if of["cells"] == len(results) else f" of {len(results)}"
        lines.append(f"our speed / {name}: {mean}, {least}, {of['cells']}{left_out} cells")
    if host:
        shape = "({batch}, {heads}, {length}, {head_dim})".format(**HOST_CELL)
        times = ", ".join(f"{name} {us:.1f} µs" for name, us in host.items())
        lines.append(f"{'host time' if place == 'gpu' else 'time'} per forward call at {shape}: {times}")
    return "\n".join(lines)


def as_json(results: Results, host: dict[str, float], header: dict) -> dict:
    """All of it; `header` says what ran where.

    Parameters
    ----------
    results : list of (Cell, dict of Outcome)
        What was measured.
    host : dict
        Microseconds per call by name.
    header : dict
        Placed before.
    """
    cells = []
    for cell, outcomes in results:
        entries = {name: _json_outcome(cell, outcome, outcomes.get(OURS)) for name, outcome in outcomes.items()}
        cells.append(vars(cell) | {"flops": cell.flops, "bound": BOUNDS[cell.dtype], "contenders": entries})
    return header | {"cells": cells, "summary": summary(results), "host_microseconds": host}


def _json_outcome(cell: Cell, outcome: Outcome, ours: Outcome | None) -> dict:
    if outcome.status == "cannot":
        return {"status": "cannot", "reason": outcome.reason}
    entry = {"status": outcome.status, "error": outcome.error}
    if not outcome.ms:
        return entry
    entry |= {"ms": median(outcome.ms), "tflops": outcome.tflops(cell), "rounds_ms": outcome.ms}
    if outcome.power is not None:
        entry |= outcome.power._asdict() | {"tflops_per_watt": entry["tflops"] / outcome.power.watts}
    return entry if outcome is ours else entry | {"ratio": ratio(ours, outcome)}


def plot(results: Results, path, title: str) -> None:
    """Write a figure: TFLOP/s by length, a panel for each direction, mask and head dimension.

    Parameters
    ----------
    results : list of (Cell, dict of Outcome)
        What was measured.
    path : path
        Of the file; its suffix says which format.
    title : str
        Above the figure.
    """
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((cell.direction, cell.mask) for cell, _ in results))
    columns = list(dict.fromkeys(cell.head_dim for cell, _ in results))
    names = [n for n in dict.fromkeys(name for _, o in results for name in o) if any(o[n].ms for _, o in results)]
    figure = Figure(figsize=(1.5 + 4.5 * len(columns), 1.2 + 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for (r, (direction, mask)), (c, d) in ((row, column) for row in enumerate(rows) for column in enumerate(columns)):
        panel = [(x, o) for x, o in results if (x.direction, x.mask, x.head_dim) == (direction, mask, d)]
        for i, name in enumerate(names):
            at = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(panel))]
            speeds = [o[name].tflops(cell) if o[name].ms else 0.0 for cell, o in panel]
            axes[r, c].bar(
                at, speeds, 0.8 / len(names), label=name, color="C3" if name == OURS else f"C{(0, 1, 2, 4, 5, 6, 7, 8, 9)[i % 9]}"
            )
        axes[r, c].set_xticks(range(len(panel)), [str(cell.length) for cell, _ in panel])
        axes[r, c].set_title(f"{direction}, {mask}, D = {d}", fontsize=10)
        axes[r, c].spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("length N")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    figure.suptitle(title, fontsize=11)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(names), 7), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
