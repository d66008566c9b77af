"""A picture of spans over time, as SVG."""

from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

from ptx_machine.machine.timed import COMPUTES, COPY, PRODUCTS, STORE, WAITS, Span

# Okabe and Ito's colours, which the colour-blind tell apart, on a white card that stays light in dark mode.
COLOURS = {COMPUTES: "#009E73", WAITS: "#E4E4E4", COPY: "#0072B2", STORE: "#56B4E9"}
OF_PRODUCTS = ("#D55E00", "#E69F00", "#CC79A7")  # of one warp group after the other
DARK = {COLOURS[COMPUTES], COLOURS[COPY], OF_PRODUCTS[0]}  # with white letters
LEFT, WIDTH, TOP, ROW, BAR = 150, 1000, 44, 26, 18  # in pixels
LETTER = 4.6  # width of one in a bar


class Row(NamedTuple):
    """What it is called in the picture, and in spans."""

    label: str
    name: str


class Run(NamedTuple):
    """Pixels of a row where the same goes on."""

    kind: str
    what: str
    begin: int
    end: int


def runs(spans: list[Span], scale: float) -> list[Run]:
    """Each pixel shows what takes most of it."""
    most = [(0.0, None)] * WIDTH
    for span in spans:
        begin, end = span.begin * scale, span.end * scale
        for pixel in range(int(begin), min(int(end) + 1, WIDTH)):
            covered = min(end, pixel + 1) - max(begin, pixel)
            most[pixel] = max(most[pixel], (covered, (span.kind, span.what)), key=lambda each: each[0])
    found, at = [], 0
    for key, pixels in groupby(what for _, what in most):
        count = len(list(pixels))
        if key is not None:
            found.append(Run(*key, at, at + count))
        at += count
    return found


def colours_of(spans: list[Span]) -> dict[str, str]:
    """Of each kind that there is."""
    kinds = {span.kind for span in spans}
    products = sorted((kind for kind in kinds if kind.startswith(PRODUCTS)), key=lambda kind: int(kind.split()[3]))
    return {kind: colour for kind, colour in COLOURS.items() if kind in kinds} | dict(zip(products, OF_PRODUCTS, strict=False))


def gantt(spans: list[Span], rows: list[Row], title: str) -> str:
    """SVG of the spans of one block: a line for each row."""
    last, colours = max(span.end for span in spans), colours_of(spans)
    height = TOP + ROW * len(rows) + 46
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" font-family="sans-serif" font-size="11">']
    lines += [f"<title>{escape(title)}</title>", f"<desc>{last} ticks</desc>", '<rect width="100%" height="100%" fill="white"/>']
    lines.append(f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>')
    x = LEFT
    for kind, colour in colours.items():
        lines.append(f'<rect x="{x}" y="25" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="35">{kind}</text>')
        x += 40 + 6 * len(kind)
    for i, row in enumerate(rows):
        own = [span for span in spans if span.row == row.name]
        lines += _row(row, TOP + ROW * i, runs(own, WIDTH / last), colours)
    return "\n".join([*lines, *_axis(TOP + ROW * len(rows) + 4, last), "</svg>", ""])


def _row(row: Row, top: int, found: list[Run], colours: dict[str, str]) -> list[str]:
    """Bars, a gap between two of a kind, and what is written in those that are wide enough."""
    lines = [f'<g class="row"><text x="{LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(row.label)}</text>']
    for kind in dict.fromkeys(run.kind for run in found):
        bars = [run for run in found if run.kind == kind]
        path = "".join(f"M{LEFT + run.begin} {top}h{max(run.end - run.begin - 0.5, 0.5):g}v{BAR}H{LEFT + run.begin}z" for run in bars)
        lines.append(f'<path fill="{colours[kind]}" d="{path}"/>')
    for run in found:
        if run.kind != COMPUTES and LETTER * len(run.what) < run.end - run.begin:
            colour = "white" if colours[run.kind] in DARK else "black"
            x = LEFT + (run.begin + run.end) / 2
            lines.append(f'<text x="{x:g}" y="{top + 12}" font-size="8" text-anchor="middle" fill="{colour}">{escape(run.what)}</text>')
    return [*lines, "</g>"]


def _axis(y: int, last: int) -> list[str]:
    """Ticks of the model's time."""
    unit = next(unit for unit in (10**k * m for k in range(9) for m in (1, 2, 5)) if last / unit <= 12)
    lines = [f'<path stroke="black" d="M{LEFT} {y}h{WIDTH}"/>']
    for tick in range(0, last + 1, unit):
        x = LEFT + tick / last * WIDTH
        lines.append(f'<path stroke="black" d="M{x:.1f} {y}v4"/><text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{tick}</text>')
    return [*lines, f'<text x="{LEFT + WIDTH / 2}" y="{y + 32}" text-anchor="middle">ticks of the model, no measurement</text>']
