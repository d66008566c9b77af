"""What each instruction does to a warp. `compile_instruction` makes a function of one, with its operands looked up beforehand."""

import re

import numpy as np

from ptx_machine.instructions.arithmetic import ELEMENTWISE
from ptx_machine.instructions.matrices import MATRICES
from ptx_machine.instructions.mma import MMA
from ptx_machine.instructions.products import PRODUCTS
from ptx_machine.machine.async_copies import ASYNC_COPIES
from ptx_machine.machine.barriers import BARRIERS
from ptx_machine.machine.copies import COPIES
from ptx_machine.machine.exchange import EXCHANGE, MEETINGS
from ptx_machine.machine.operands import KINDS, LANES, Path, address, reader, readers, spread
from ptx_machine.machine.order import Race

# Architectures from which on there are instructions; the first that fits counts (PTX ISA, "Target ISA Notes").
SINCE = {
    r"cp\.async\.bulk|cp\.reduce|fence\.proxy|mbarrier\.(try_wait|arrive\.expect_tx)|setmaxnreg|stmatrix|wgmma|griddepcontrol": 90,
    r"red\.\S*\.v4\.f32": 90,
    r"cp\.async|createpolicy|mbarrier|mma\.\S*(m16n8k16|bf16)|cvt\.\S*(x2|bf16)|min\.\S*x2": 80,
    r"ldmatrix|mma\.": 75,
}


def compile_instruction(machine, number: int):
    """Function of a warp that executes the instruction of that number."""
    each = machine.kernel.instructions[number]
    least = next((architecture for pattern, architecture in SINCE.items() if re.match(pattern, each.opcode)), 0)
    if machine.kernel.architecture < least:
        raise ValueError(f"line {each.line}: {each.opcode} needs sm_{least}; this is for sm_{machine.kernel.architecture}")
    try:
        action = _action(machine, number, each)
    except (KeyError, ValueError, AttributeError) as error:
        message = f"line {each.line}: {each.opcode} {each.operands}: {error!r}"
        raise NotImplementedError(message) from error
    if machine.early and _reaches_global(each):
        action = _after_kernels(action, ".nc" in each.opcode)
    if each.guard is None or each.opcode.startswith("bra"):
        return action
    predicate, wanted = each.guard

    def guarded(warp):
        lanes = warp.lanes & (warp.decide(predicate) == wanted)
        if lanes.any():
            path = warp.paths[-1]
            warp.paths.append(Path(path.at, lanes, -1))
            action(warp)
            warp.paths.pop()

    return guarded


def computes(each) -> bool:
    """Whether it does nothing but give a register a value, lane by lane."""
    name = each.opcode.split(".")[0]
    return name in ELEMENTWISE and name not in EXCHANGE


def _reaches_global(each) -> bool:
    """Whether it reads or writes global memory; so do loads and stores that name no memory."""
    name, *parts = each.opcode.split(".")
    return "global" in parts or (name in ("ld", "st") and not {"shared", "param"} & set(parts))


def _after_kernels(action, as_constant: bool):
    """The same, by a warp that has to know that the kernels before have ended, and must not read their results `as_constant`: they may
    write while it runs already.
    """

    def run(warp):
        warp.block.order.after_kernels(warp, "global memory is used")
        if as_constant:
            raise Race("global memory is read as if nobody wrote it while this kernel runs, but the kernels before may")
        action(warp)

    return run


def _action(machine, number: int, each):
    parts = each.opcode.split(".")
    for prefix, build in WHOLE.items():
        if each.opcode.startswith(prefix):
            return build(machine, each)
    if parts[0] == "bra":
        return _branch(machine, number, each)
    if parts[0] == "ret":
        return lambda warp: warp.end()
    if parts[0] in ("ld", "st"):
        return _memory(machine, each, parts)
    return ELEMENTWISE[parts[0]](machine, each, parts)


def _branch(machine, number, each):
    target, meet = machine.kernel.targets[each.operands[0]], machine.kernel.meets[number]
    if each.guard is None:

        def always(warp):
            warp.paths[-1].at = target

        return always
    predicate, wanted = each.guard
    return lambda warp: warp.branch(warp.read(predicate) == wanted, target, meet)


def _memory(machine, each, parts):
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
    kind = KINDS[parts[-1]]
    load = parts[0] == "ld"
    where, what = each.operands if not load else each.operands[::-1]
    names = what if isinstance(what, tuple) else (what,)
    if "param" in parts:
        return _load_parameter(machine, where, names[0], kind)
    get, shared, size = address(machine, where), "shared" in parts, count * np.dtype(kind).itemsize
    acquires = "acquire" in parts
    atomic = acquires or "relaxed" in parts
    if shared and size < 2:
        raise ValueError("the order of single bytes of shared memory is not watched")

    def run_load(warp):
        lanes = warp.lanes
        at = get(warp)[lanes]
        never = np.zeros((at.size, count), bool)
        if shared:
            data, never = _load_shared(warp, at, size, count)
        else:
            data = _load_global(warp, at, size, atomic, acquires)
        data = np.ascontiguousarray(data).view(kind)
        for i, name in enumerate(names):
            value, unwritten = np.zeros(LANES, kind), ~lanes & warp.unwritten.get(name, name not in warp.registers)
            value[lanes], unwritten[lanes] = data[:, i], never[:, i]
            warp.write(name, value)
            warp.poison(name, unwritten)
        if atomic:
            warp.asks(each, int(at[0]), int(data[0, 0]))

    values = () if load else [reader(machine, name, kind) for name in names]

    def run_store(warp):
        lanes = warp.lanes
        at = get(warp)[lanes]
        data = np.stack([spread(np.asarray(g(warp), kind))[lanes] for g in values], axis=1)
        if shared:
            block, lane = warp.block, np.flatnonzero(lanes)[:, None]
            words = np.ascontiguousarray(data).view(np.uint16).reshape(at.size, size // 2)
            block.shared.write(block.shared.granules(at, size), block.order.by_warp(warp, lane), words)
        else:
            region = machine.memory.find(int(at[0]))
            machine.streams.by_threads(region, region.offsets(at, size), size, warp, True)
            region.store(at, np.ascontiguousarray(data).view(np.uint8).reshape(at.size, size))

    return run_load if load else run_store


def _load_shared(warp, at: np.ndarray, size: int, count: int):
    """Bytes, and which of the `count` elements of each access were never written: those must not be used."""
    block, lane = warp.block, np.flatnonzero(warp.lanes)[:, None]
    granules = block.shared.granules(at, size)
    never = block.order.read(granules, block.order.by_warp(warp, lane))
    return block.shared.words[granules].view(np.uint8), never.reshape(at.size, count, -1).any(axis=-1)


def _load_global(warp, at: np.ndarray, size: int, atomic: bool, acquires: bool):
    machine = warp.block.machine
    region = machine.memory.find(int(at[0]))
    if acquires:
        machine.streams.acquire(int(at[0]), warp.known_streams)
    elif atomic:
        machine.streams.by_relaxed_load(region, region.offsets(at, size), size, warp)
    else:
        machine.streams.by_threads(region, region.offsets(at, size), size, warp, False)
    return region.load(at, size)


def _load_parameter(machine, where: str, name: str, kind):
    text, _, more = where.strip("[]").partition("+")
    (parameter,) = (each for each in machine.kernel.parameters if each.name == text.strip())
    offset, size = parameter.offset + int(more or 0), np.dtype(kind).itemsize

    def run(warp):
        data = warp.block.machine.parameters[offset : offset + size]
        warp.write(name, np.full(LANES, data.view(kind)[0]))

    return run


def _add_floats(machine, each):
    """Additions of one or four float32, or of a float64, to memory, lane by lane in their order."""
    where, what = each.operands
    names = what if isinstance(what, tuple) else (what,)
    kind = KINDS[each.opcode.rpartition(".")[2]]
    (get_at,), get_values = readers(machine, [where], np.uint64), readers(machine, names, kind)
    size = np.dtype(kind).itemsize * len(names)

    def run(warp):
        at, values = spread(get_at(warp)), np.stack([spread(get(warp)) for get in get_values], axis=1)
        for lane in np.flatnonzero(warp.lanes):
            one = np.array([int(at[lane])])
            region = machine.memory.find(int(one[0]))
            machine.streams.by_threads(region, region.offsets(one, size), size, warp, True, True)
            region.store(one, (region.load(one, size).view(kind) + values[lane]).view(np.uint8))

    return run


def _atomic(machine, each):
    if re.fullmatch(r"red\.relaxed\.gpu\.global\.add((\.v4)?\.f32|\.f64)", each.opcode):
        return _add_floats(machine, each)
    if not re.fullmatch(r"(atom|red)\.(relaxed|release|acq_rel)\.gpu\.global\.(add\.s32|inc\.u32)", each.opcode):
        raise ValueError("only additions of integers to flags and counters")
    returns, wraps = each.opcode.startswith("atom"), ".inc." in each.opcode
    releases, acquires = (any(text in each.opcode for text in (f".{kind}.", ".acq_rel.")) for kind in ("release", "acquire"))
    destination, where, what = each.operands if returns else (None, *each.operands)
    (get_at,) = readers(machine, [where], np.uint64)
    (get_value,) = readers(machine, [what], np.int32)

    def run(warp):
        before = np.zeros(LANES, np.int32)
        for lane in np.flatnonzero(warp.lanes):
            at = np.array([int(spread(get_at(warp))[lane])])
            region = machine.memory.find(int(at[0]))
            machine.streams.by_atomics(region, region.offsets(at, 4), 4)
            if releases:
                machine.streams.release(int(at[0]), warp.known_streams)
            old = region.load(at, 4).view(np.int32)
            before[lane] = old[0, 0]
            given = np.int32(spread(get_value(warp))[lane])  # to add; or the last number before it begins anew
            new = (old + 1 if old[0, 0] < given else 0 * old) if wraps else old + given
            region.store(at, new.astype(np.int32).view(np.uint8))
            if acquires:
                machine.streams.acquire(int(at[0]), warp.known_streams)
        machine.events += 1
        if returns:
            warp.write(destination, before)

    return run


def _nothing(machine, each):
    return lambda warp: None


# By what their names begin with; all others are found by their first word.
WHOLE = {
    **MEETINGS,
    **BARRIERS,
    **COPIES,
    **ASYNC_COPIES,
    **MATRICES,
    **MMA,
    **PRODUCTS,
    **{"atom.": _atomic, "red.": _atomic},
    **dict.fromkeys(["membar.", "fence.acq_rel", "setmaxnreg", "nanosleep"], _nothing),
}
