"""Causal gradients in any order beside those in turns, and beside FlashAttention-4 in either way, where that is installed: speeds over
each other.

    python asv_bench/studies/any_order.py --json FILE
"""

import sys
from functools import partial
from statistics import median

import common

from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Cell

OURS, ANY_ORDER, THEIRS, THEIRS_IN_TURNS = peers.OURS, "any order", "flash-attn-4", "flash-attn-4, deterministic"
RATIOS = {
    "ordered_over_this": (ANY_ORDER, OURS),
    "over_flash_attn_4": (THEIRS, ANY_ORDER),
    "ordered_over_flash_attn_4": (THEIRS, OURS),
    "ordered_over_flash_attn_4_deterministic": (THEIRS_IN_TURNS, OURS),
}


def contenders(place: str, dtype: str) -> list[peers.Contender]:
    """All that can run here."""
    always = lambda place, dtype: None
    everyone = [
        peers.Contender(OURS, partial(peers.bind_ours, None), always),
        peers.Contender(ANY_ORDER, partial(peers.bind_ours, None, deterministic=False), always),
        peers.Contender(THEIRS, peers.bind_flash_attn_4, peers.why_not_flash_attn_4),
        peers.Contender(THEIRS_IN_TURNS, partial(peers.bind_flash_attn_4, deterministic=True), peers.why_not_flash_attn_4),
    ]
    return [each for each in everyone if each.why_not(place, dtype) is None]


def measure(cell: Cell, clock: timing.HostClock, repeats: int) -> dict:
    """A row: TFLOP/s in any order, and the ratios of whoever ran."""
    outcomes = timing.compare(cell, contenders(clock.place, cell.dtype), clock, repeats)
    ms = {name: outcome.ms for name, outcome in outcomes.items() if outcome.status == "ok"}
    row = {"head_dim": cell.head_dim, "length": cell.length, "mask": cell.mask}
    row["tflops"] = float(f"{cell.flops / median(ms[ANY_ORDER]) / 1e9:.6g}")
    for name, (other, own) in RATIOS.items():
        if other in ms and own in ms:
            row[name] = float(f"{median(x / y for x, y in zip(ms[other], ms[own], strict=True)):.6g}")
    return row


def main(arguments=None) -> None:
    """Measure, print, and write the file that was asked for."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--lengths", type=common.numbers, default=[2**i for i in range(9, 15)], metavar="N,...", help="default 512 to 16384"
    )
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="default 64,128")
    parser.add_argument("--tokens", type=int, default=16384, metavar="T", help="batch size is T // N; default 16384")
    parser.add_argument("--width", type=int, default=2048, metavar="W", help="W // D heads; default 2048")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    options, rows, clock = parser.parse_args(arguments), [], common.clock()
    with clock.current():
        for d in options.head_dims:
            for n in options.lengths:
                heads = max(1, options.width // d)
                cell = Cell("backward", "causal", options.dtype, max(1, options.tokens // n), heads, heads, n, d)
                rows.append(measure(cell, clock, common.repeats(options, clock.place)))
                print(rows[-1], flush=True)
    common.write(options, "any_order", clock.place, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
