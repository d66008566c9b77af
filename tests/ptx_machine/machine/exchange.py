"""What the lanes of a warp tell each other (PTX ISA 9.7.9.6 and 9.7.13)."""

from dataclasses import dataclass

import numpy as np

from ptx_machine.machine.barriers import Meeting
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, reader, spread

LANE = np.arange(LANES)


def predicate(machine, text: str):
    """``get(warp)`` of a predicate that may be negated."""
    get = reader(machine, text.removeprefix("!"), bool)
    return (lambda warp: ~np.asarray(get(warp))) if text.startswith("!") else get


def _members(machine, text: str):
    """``get(warp)`` of the lanes that a mask names: those that are here, or what they exchange is undefined."""
    get = reader(machine, text, np.uint32)

    def members(warp):
        masks = np.unique(spread(get(warp))[warp.lanes])
        named = (masks[0] >> LANE.astype(np.uint32) & np.uint32(1)).astype(bool)
        if masks.size > 1 or (named != warp.lanes).any():
            raise Fault(f"lanes of the mask are not here: {masks[0]:#010x}, and {int(warp.lanes.sum())} lanes are")
        return named

    return members


def _shuffle(machine, each, parts):
    """From another lane of the same segment; the third operand says where a segment ends (bits 0 to 4), and what it is (8 to 12)."""
    if len(each.operands) < 5:
        raise ValueError("a shuffle without a mask")
    names, value, *others = each.operands
    destination, _, inside = names.partition("|")
    get = reader(machine, value, np.uint32)
    get_by, get_ends = (reader(machine, text, np.uint32) for text in others[:2])
    members, mode = _members(machine, others[2]), parts[2]
    source = {
        "up": lambda by, first, last: LANE - by,
        "down": lambda by, first, last: LANE + by,
        "bfly": lambda by, first, last: LANE ^ by,
        "idx": lambda by, first, last: first | by & ~last,
    }[mode]

    def run(warp):
        here = members(warp)
        by, ends = (spread(g(warp)).astype(np.int64) for g in (get_by, get_ends))
        segment = ends >> 8 & 31
        last = LANE & segment | ends & 31 & ~segment
        lane = source(by & 31, LANE & segment, segment)
        found = lane >= last if mode == "up" else lane <= last
        lane = np.where(found, lane, LANE)
        if not here[lane[here]].all():
            raise Fault("a value of a lane that the mask does not name")
        warp.write(destination, spread(get(warp))[lane])
        if inside:
            warp.write(inside.strip(), found)

    return run


def _vote(machine, each, parts):
    destination, text, mask = each.operands
    get, members = predicate(machine, text), _members(machine, mask)
    decide = {"any": np.any, "all": np.all, "uni": lambda said: said.all() or not said.any(), "ballot": None}[parts[2]]

    def run(warp):
        here = members(warp)
        said = spread(get(warp)) & here
        if decide is None:
            warp.write(destination, np.full(LANES, np.packbits(said, bitorder="little").view(np.uint32)[0]))
        else:
            warp.write(destination, np.full(LANES, decide(said[here])))

    return run


def _active_mask(machine, each, parts):
    return lambda warp: warp.write(each.operands[0], np.full(LANES, np.packbits(warp.lanes, bitorder="little").view(np.uint32)[0]))


def _warp_barrier(machine, each):
    """Lanes that the mask names wait for each other."""
    get = reader(machine, each.operands[0], np.uint32)

    def run(warp):
        mask = spread(get(warp))[warp.lanes][0]
        named = (mask >> LANE.astype(np.uint32) & np.uint32(1)).astype(bool)
        if (warp.lanes & ~named).any():
            raise Fault(f"a lane that the mask {mask:#010x} does not name")
        if not (named & ~warp.lanes).any() or warp.gathers():
            warp.block.order.meet(warp)

    return run


@dataclass
class Count:
    """Of the threads at a barrier for which a predicate is true."""

    of: Meeting
    true: int = 0


def _block_reduction(machine, each):
    """A barrier of all threads of a block, or of so many, which tells each of how many, or whether of any or all, a predicate is true."""
    destination, *names, text = each.operands
    number, threads = (reader(machine, name, np.uint32) for name in (names if len(names) > 1 else [*names, "0"]))
    get = predicate(machine, text)
    kind = each.opcode.removeprefix("bar.red.")
    decide = {"popc.u32": lambda n, all_: np.uint32(n), "or.pred": lambda n, all_: n > 0, "and.pred": lambda n, all_: n == all_}[kind]

    def run(warp):
        if not warp.gathers():
            return
        block, lane = warp.block, int(np.flatnonzero(warp.lanes)[0])
        key = int(spread(number(warp))[lane])
        expected = int(spread(threads(warp))[lane]) or block.machine.threads
        count = block.counts.setdefault(key, Count(Meeting(block.order)))
        count.of.arrived += LANES
        if count.of.arrived > expected:
            raise Fault(f"{count.of.arrived} threads at barrier {key}, which waits for {expected}")
        count.true += int((spread(get(warp)) & warp.lanes).sum())
        block.order.meet(warp)
        count.of.known.join(block.order.released(warp))

        def goes_on():
            warp.clocks.join(count.of.known)
            warp.write(destination, np.full(LANES, decide(count.true, expected)))

        if count.of.arrived < expected:
            warp.wait_for(f"barrier {key}, line {each.line}", lambda: count.of.complete, goes_on)
            return
        count.of.complete = True
        del block.counts[key]
        machine.events += 1
        goes_on()

    return run


EXCHANGE = {"shfl": _shuffle, "vote": _vote, "activemask": _active_mask}
MEETINGS = {"bar.warp.sync": _warp_barrier, "bar.red": _block_reduction}
