"""Products of warp groups: wgmma (PTX ISA 9.7.15)."""

import re
from functools import cache
from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.sums import EXACT, dot
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, reader, readers, spread


class Product(NamedTuple):
    """One wgmma: accumulators, and functions that read the operands when it is executed."""

    accumulators: tuple
    reads: tuple
    add: bool
    a: object
    b: object


@cache
def _locations(low: int, width: int, rows: int, transposed: bool, first: int = 0) -> np.ndarray:
    """Where (rows, 16) elements of an operand in shared memory are, from row `first` on, by the low word of its descriptor, in rows of
    so many elements.
    """
    base, stride = (low & 0x3FFF) << 4, (low >> 16 & 0x3FFF) << 4
    r, k = np.indices((rows, 16))
    r = r + first
    linear = base + r // width * stride + 2 * width * k + 2 * (r % width) if transposed else base + 2 * width * r + 2 * k
    return (linear ^ ((linear >> 7 & width // 8 - 1) << 4)) // 2


# Of a descriptor: swizzled rows of 128 or 64 bytes, in groups of 8 that lie 1024 or 512 bytes apart, from multiples of these on, as its
# base offset is 0; and how many elements have a row.
WIDTHS = {1 << 30 | 64: 64, 2 << 30 | 32: 32}


def _operand(warp, get, rows: int, transposed: bool, first: int = 0):
    """Locations of an operand that a descriptor tells of."""
    descriptor = int(spread(get(warp))[0])
    if descriptor >> 32 not in WIDTHS:
        raise Fault(f"a descriptor of a kind that is not known: {descriptor:#x}")
    width, base = WIDTHS[descriptor >> 32], (descriptor & 0x3FFF) << 4
    if base % (16 * width) >= 2 * width:
        raise Fault(f"a product reads swizzled rows from {base} on, not from the first of eight: a multiple of {16 * width}")
    where = _locations(descriptor & 0xFFFFFFFF, width, rows, transposed, first)
    if 2 * int(where.max()) >= warp.block.shared.data.size:
        raise Fault(f"a product reads beyond shared memory: {2 * int(where.max())}")
    return where


def _products_of(warp) -> int:
    """The agent that reads shared memory for this warp group."""
    block, group = warp.block, warp.number // 4
    if group not in block.product_agents:
        block.product_agents[group] = block.order.agent(f"a product of warp group {group}")
    return block.product_agents[group]


def _wgmma(machine, each):
    import ml_dtypes

    accumulators, a, b, *switches = each.operands
    shape, kind = re.search(r"\.m64n(\d+)k16\.f32\.(\w+)\.", each.opcode).groups()
    columns, dtype = int(shape), {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    in_registers = isinstance(a, tuple)
    get_add = reader(machine, switches[0], bool)
    a_transposed, b_transposed = (False, switches[3] == "1") if in_registers else (switches[3] == "1", switches[4] == "1")
    (get_b,) = readers(machine, [b], np.uint64)
    (get_a,) = (None,) if in_registers else readers(machine, [a], np.uint64)

    def run(warp):
        shared, add = warp.block.shared, bool(np.all(get_add(warp)))
        touched = (*(accumulators if add else ()), *(a if in_registers else ()))
        late = warp.unfenced.intersection(touched)
        if late:
            raise Fault(f"{min(late)} was written after the last wgmma.fence")
        access = warp.block.order.by_async(warp, _products_of(warp), warp.committed + 1)

        def reader_of(where):
            shared.read(where, access)
            return lambda: shared.words[where].view(dtype)

        if in_registers:
            words = np.stack([warp.read(name) for name in a]).view(np.uint32)
            read_a = lambda: _from_fragment(words, dtype)
        else:
            read_a = reader_of(_operand(warp, get_a, 16, a_transposed, 16 * (warp.number % 4)))
        read_b = reader_of(_operand(warp, get_b, columns, b_transposed))
        warp.products.append(Product(accumulators, a if in_registers else (), add, read_a, read_b))

    return run


def _wgmma_fence(machine, each):
    def run(warp):
        warp.unfenced.clear()

    return run


def _from_fragment(words: np.ndarray, dtype) -> np.ndarray:
    """(16, 16) elements that four words of each lane hold."""
    a, lane = np.zeros((16, 16), dtype), np.arange(LANES)
    for word in range(4):
        pair = np.ascontiguousarray(words[word]).view(dtype).reshape(LANES, 2)
        for c in range(2):
            a[lane // 4 + 8 * (word % 2), 2 * (lane % 4) + c + 8 * (word // 2)] = pair[:, c]
    return a


def _wgmma_commit(machine, each):
    def run(warp):
        warp.groups.append(warp.products)
        warp.committed += 1
        for product in warp.products:
            warp.in_flight |= dict.fromkeys((*product.accumulators, *product.reads))
        warp.products = []

    return run


def _wgmma_wait(machine, each):
    allowed = int(each.operands[0])

    def run(warp):
        first = warp.number // 4 * 4
        group, wanted = warp.block.warps[first : first + 4], warp.committed - allowed
        if any(other.committed < wanted for other in group):  # a product is one of the whole warp group
            warp.paths[-1].at -= 1
            warp.wait_for(f"its warp group, line {each.line}", lambda: all(other.committed >= wanted for other in group))
            return
        finish(group, wanted)
        agent = _products_of(warp)
        warp.clocks.seen[agent] = max(warp.clocks.seen[agent], wanted)
        running = (product for products in warp.groups[max(wanted, 0) :] for product in products)
        warp.in_flight = dict.fromkeys(name for product in running for name in (*product.accumulators, *product.reads))

    return run


def finish(group, wanted: int) -> None:
    """Execute what the warps of a warp group have committed, up to that group of products."""
    for warp in group:
        while warp.executed_groups < wanted:
            for product in warp.groups[warp.executed_groups]:
                _execute(warp, product)
            warp.executed_groups += 1


def _execute(warp, product: Product) -> None:
    lane, names, core = np.arange(LANES), product.accumulators, warp.block.machine.core
    a, b = product.a(), product.b().T
    registers = np.arange(len(names))[:, None]
    places = lane // 4 + 8 * (registers // 2 % 2), registers // 4 * 8 + 2 * (lane % 4) + registers % 2
    c = np.zeros((16, 2 * len(names)), np.float32)
    if product.add:
        c[places] = [warp.registers[name] for name in names]
    if core is EXACT:  # all but exact: from float64
        c = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)
    else:
        c = dot(a, b, c, core)
    for name, values in zip(names, c[places], strict=True):
        warp.registers[name] = values


PRODUCTS = {
    "wgmma.fence": _wgmma_fence,
    "wgmma.mma_async": _wgmma,
    "wgmma.commit_group": _wgmma_commit,
    "wgmma.wait_group": _wgmma_wait,
}
