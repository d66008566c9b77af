"""Run one kernel of the tensor-core tier on the machine with clocks, and say who waits for what, and what a warp does.

python tests/ptx_machine/machine/timeline.py forward --d 128 --nk 768 --waits
python tests/ptx_machine/machine/timeline.py backward --svg picture.svg
python tests/ptx_machine/machine/timeline.py forward --warp 4 --lane 0 --lines 2200:2230
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from support import DTYPES, random_inputs

from numba_flash import reference
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.forward.forward_tiles import Tile
from numba_flash.cuda.sm90.rings import MBARRIER_BYTES, Ring
from numba_flash.cuda.sm90.tiles import ADDERS
from numba_flash.plan import tier
from ptx_machine.machine.gantt import Row, gantt
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.timed import COPIES_IN, COPIES_OUT, PRODUCTS, TENSOR_CORE, WAITS, Span, Timed, Watch
from ptx_machine.problems.kernels import Executed, ptx


def roles_of(tile) -> dict[int, str]:
    """What warps of the first warp group are there for; the others are consumers, 4 each."""
    if isinstance(tile, Tile):
        return {0: "producer"}
    adders = {warp: f"adds dQ {warp}" for warp in range(ADDERS if tile.adds_dq else 0)}
    return adders | {ADDERS: "producer", ADDERS + 1: "work items"}


def names_of_mbarriers(tile, head_dim: int, head_dim_v: int, static_bytes: int) -> dict[int, str]:
    """Address to name, as "k ready 1": ring, event, slot."""
    layout = tile.layout(head_dim, head_dim_v)
    base = -(-static_bytes // layout.ALIGNMENT) * layout.ALIGNMENT
    rings = {name: ring for name, ring in layout._asdict().items() if isinstance(ring, Ring)}
    return {
        base + getattr(ring, event) + MBARRIER_BYTES * slot: f"{name} {event} {slot}"
        for name, ring in rings.items()
        for event in ("ready", "free")
        for slot in range(ring.slots)
    }


def names_of_barriers(consumers: int) -> dict[int, str]:
    """Number to name, as "ping pong 1": `pipeline.Barrier`, consumer."""
    names = {int(pipeline.Barrier.BLOCK): "block", int(pipeline.Barrier.CONSUMERS): "consumers"}
    for barrier in (pipeline.Barrier.PING_PONG, pipeline.Barrier.WARP_GROUP):
        names |= {barrier + consumer: f"{barrier.name.lower().replace('_', ' ')} {consumer}" for consumer in range(consumers)}
    return names


class Traced(Executed):
    """A launch on the machine with clocks, which is `timed` from then on."""

    def __init__(self, prepared, watch: Watch | None):
        super().__init__(prepared)
        self.watch, self.timed = watch, None

    def machine(self, text: str) -> Timed:
        (config,) = self.prepared.config
        tile, head_dim, head_dim_v = config.tile, config.d, config.dv
        self.timed = Timed(text, barriers=names_of_barriers(tile.consumers), watch=self.watch)
        self.timed.mbarriers = names_of_mbarriers(tile, head_dim, head_dim_v, self.timed.kernel.shared_bytes)
        return self.timed

    @property
    def text(self) -> str:
        """The kernel, as PTX."""
        return ptx(self.prepared.builder, self.prepared.config, self.prepared.gpu.capability)


def paper(arrays):
    """The layouts of a named tuple of arrays."""
    return type(arrays)(*map(Layout.of, arrays))


class Run(NamedTuple):
    """A pass that is ready to run: its main launch, its results, and ``run()``, which runs that launch and those beside it."""

    main: Traced
    results: ForwardResults | BackwardResults
    run: Callable


def prepare(options: argparse.Namespace) -> Run:
    """A pass on random numbers."""
    hq, _, hk = options.heads.partition(",")
    sizes = {"hq": int(hq), "hk": int(hk or hq), "nq": options.nq, "nk": options.nk, "d": options.d}
    q, k, v, do = random_inputs(batch=(1,), dtype=options.dtype, **sizes)
    problem, gpu = bind(q, k, v, causal=options.causal), Gpu(0, (9, 0), options.blocks)
    empty = lambda x, dtype=None: np.full(x.shape, np.nan, dtype or x.dtype)
    if options.direction == "forward":
        inputs, results = ForwardInputs(q, k, v), ForwardResults(empty(do), empty(do[..., 0], np.float32))
        prepared = tier("sm90").prepare_forward(problem, paper(inputs), paper(results), gpu=gpu)
    else:
        o, lse = reference.forward(q, k, v, causal=options.causal, return_lse=True)
        inputs = BackwardInputs(do, q, k, v, o.astype(DTYPES[options.dtype]), lse.astype(np.float32))
        results = BackwardResults(empty(q), empty(k), empty(v))
        prepared = tier("sm90").prepare_backward(problem, paper(inputs), paper(results), gpu=gpu)
    is_main = lambda launch: launch.builder.startswith(f"sm90.{options.direction}")
    main = next(Traced(launch, options.watch) for launch in prepared.launches if is_main(launch))
    for each in prepared.launches:
        run = main if each is main.prepared else Executed(each)
        each._submit = lambda operands, extras, numbers, run=run: run(*operands, extras=extras, numbers=numbers)
    return Run(main, results, lambda: prepared.run(inputs, results))


class Waited(NamedTuple):
    """By all warps of a role together, for one thing: how often, for how many ticks and which share of their time, how long at most."""

    who: str
    what: str
    times: int
    ticks: int
    share: float
    longest: int
    ended: str
    lines: str


def role_of(row: str, roles: dict[int, str]) -> str:
    """What a warp is there for."""
    warp = int(row.split()[1])
    return f"consumer {warp // 4 - 1}" if warp > 3 else roles.get(warp, "nothing")


def rows_of(spans: list[Span], roles: dict[int, str]) -> list[Row]:
    """Of the picture: warps that move data, one of each warp group that multiplies, tensor core, copies; where something happens."""
    there = {span.row for span in spans}
    groups = {int(span.kind.split()[3]) for span in spans if span.row == TENSOR_CORE}
    warps = sorted(int(name.split()[1]) for name in there if name.startswith("warp "))
    rows = []
    for warp in warps:
        if warp in groups:
            rows.append(Row(role_of(f"warp {warp}", roles), f"warp {warp}"))
        elif warp in roles:
            rows.append(Row(f"warp {warp}, {roles[warp]}", f"warp {warp}"))
    return rows + [Row(name, name) for name in (TENSOR_CORE, COPIES_IN, COPIES_OUT) if name in there]


def waits(spans: list[Span], roles: dict[int, str]) -> list[Waited]:
    """Who waited for what, the longest share first."""
    whole, warps, found = max(span.end for span in spans), {}, {}
    for span in spans:
        if span.row.startswith("warp "):
            role = role_of(span.row, roles)
            warps.setdefault(role, set()).add(span.row)
            if span.kind == WAITS:
                found.setdefault((role, PRODUCTS if span.what.startswith(PRODUCTS) else span.what), []).append(span)
    table = []
    for (role, what), own in found.items():
        ticks = [span.end - span.begin for span in own]
        ended = ", ".join(name for name, _ in Counter(span.by for span in own).most_common(4))
        lines = ", ".join(map(str, sorted({span.line for span in own})))
        table.append(Waited(role, what, len(own), sum(ticks), sum(ticks) / whole / len(warps[role]), max(ticks), ended, lines))
    return sorted(table, key=lambda each: -each.share)


def print_waits(table: list[Waited]) -> None:
    """One line for each."""
    print(f"{'who':<12} {'waits for':<16} {'times':>5} {'ticks':>7} {'share':>6} {'longest':>7}  {'in lines':<18} ended by")
    for each in table:
        numbers = f"{each.times:>5} {each.ticks:>7} {each.share:>6.1%} {each.longest:>7}"
        print(f"{each.who:<12} {each.what:<16} {numbers}  {each.lines:<18} {each.ended}")


def shown(value) -> str:
    """A register's."""
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)


def print_steps(machine: Timed) -> None:
    """Time, line, instruction, and its registers in the watched lane after it; nothing of them where the lane takes no part."""
    for step in machine.steps:
        each = machine.kernel.instructions[step.number]
        guard = "" if each.guard is None else f"@{'' if each.guard[1] else '!'}{each.guard[0]} "
        operands = ", ".join("{" + ", ".join(x) + "}" if isinstance(x, tuple) else x for x in each.operands)
        values = [f"{name}={shown(value)}" for name, value in step.values.items()] if step.runs else ["(not this lane)"]
        if "mbarrier" in each.opcode and step.runs:
            values += [f"({machine.mbarriers[value]})" for value in step.values.values() if value in machine.mbarriers]
        print(f"{step.time:>7} {each.line:>5}  {f'{guard}{each.opcode} {operands}'[:80]:<80} {' '.join(values)[:120]}".rstrip())


def title_of(options: argparse.Namespace) -> str:
    """What the picture shows."""
    mask = ", causal" if options.causal else ""
    return f"{options.direction}, {options.dtype}, D = {options.d}, {options.nq} queries, {options.nk} keys{mask}: one block"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options, the instructions to `watch` among them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    for name, default, text in (
        ("d", 128, "head dimension"),
        ("nq", 128, "queries"),
        ("nk", 256, "keys"),
        ("blocks", 1, "multiprocessors"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--heads", default="1", help="of q, or of q and of k: 4,2")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--waits", action="store_true", help="print who waited for what, how long, who ended it, and in which lines")
    parser.add_argument("--warp", type=int, help="print the instructions of this warp of block 0")
    parser.add_argument("--lane", type=int, default=0, help="and what this lane has in registers after each")
    parser.add_argument("--lines", default="1:", help="in these lines of the PTX alone: first:last")
    parser.add_argument("--svg", type=Path, help="draw the first block over time into this file")
    parser.add_argument("--ptx", type=Path, help="write the text of the kernel into this file")
    options = parser.parse_args(arguments)
    first, _, last = options.lines.partition(":")
    lines = range(int(first), int(last or 2**31 - 1) + 1)
    options.watch = None if options.warp is None else Watch(options.warp, options.lane, lines)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run, print, draw; up to an error, if there is one."""
    options = parsed(arguments)
    this, error = prepare(options), None
    roles = roles_of(this.main.prepared.config[0].tile)
    if options.ptx:
        options.ptx.write_text(this.main.text)
    try:
        this.run()
    except Fault as fault:
        error = fault
    machine = this.main.timed
    if machine is None:
        raise error
    machine.stop()
    spans = [span for span in machine.spans if span.block == 0]
    if spans:
        whole = max(span.end for span in spans)
        busy = sum(span.end - span.begin for span in spans if span.row == TENSOR_CORE)
        print(f"{title_of(options)}: {whole} ticks, the tensor core busy for {busy / whole:.0%} of them")
    if options.waits:
        print_waits(waits(spans, roles))
    print_steps(machine)
    if options.svg:
        options.svg.write_text(gantt(spans, rows_of(spans, roles), title_of(options)))
    if error is not None:
        sys.exit(re.sub(r"mbarrier at (\d+)", lambda found: f"{found[0]} ({machine.name(int(found[1]))})", str(error)))


if __name__ == "__main__":
    main()
