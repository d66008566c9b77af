"""Products of a warp: mma.sync (PTX ISA 9.7.14.5), whose operands are registers.

One rule places the elements of all shapes here. Lane l belongs to row (or, of B, column) ``l // 4``, and to place ``l % 4`` along K. A
register of A or B holds two elements of 16 bits, or one of TF32 or float64; four places one after the other are a stretch, and further
registers are the next eight rows first (A alone), then the next stretch of K. In C and D a place has two neighbouring columns.
"""

import re
from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.matrices import LANE, together
from ptx_machine.instructions.rounding import BFLOAT16
from ptx_machine.instructions.sums import dot
from ptx_machine.machine.operands import LANES, reader, spread

DTYPES = {"f16": np.float16, "bf16": BFLOAT16, "tf32": np.float32, "f32": np.float32, "f64": np.float64}
SHAPES = {
    ("f16", "f32"): {(16, 8), (16, 16)},
    ("f16", "f16"): {(16, 8), (16, 16)},
    ("bf16", "f32"): {(16, 8), (16, 16)},
    ("tf32", "f32"): {(16, 4), (16, 8)},
    ("f64", "f64"): {(8, 4), (16, 4), (16, 8), (16, 16)},
}  # (rows, K) of what can be multiplied, and what it is added to


class Places(NamedTuple):
    """Of the elements that each lane holds, (lanes, elements): where they lie in their matrix, register by register."""

    rows: np.ndarray
    columns: np.ndarray


def places_of_a(rows: int, k: int, width: int) -> Places:
    """Of a (rows, k) left operand; `width` elements share a register."""
    element = np.arange(rows * k // LANES)
    register, part = element // width, element % width
    tall = rows // 8
    lane = LANE[:, None]
    return Places(lane // 4 + 8 * (register % tall), width * (lane % 4) + part + 4 * width * (register // tall))


def places_of_b(k: int, width: int) -> Places:
    """Of a (k, 8) right operand: those of its transpose, as a left one of 8 rows."""
    return Places(*places_of_a(8, k, width)[::-1])


def places_of_c(rows: int) -> Places:
    """Of an accumulator of 8 columns."""
    element, lane = np.arange(rows // 4), LANE[:, None]
    return Places(lane // 4 + 8 * (element // 2) + 0 * element, 2 * (lane % 4) + element % 2)


class Form(NamedTuple):
    """What products have in common: rows and K of A, the dtype of the operands, and that of what is added."""

    rows: int
    k: int
    dtype: type
    accumulator: type

    @property
    def width(self) -> int:
        """Elements of an operand that share a register."""
        return 2 if np.dtype(self.dtype).itemsize == 2 else 1

    def a(self, words) -> np.ndarray:
        return _matrices(words, self.dtype, (self.rows, self.k), places_of_a(self.rows, self.k, self.width))

    def b(self, words) -> np.ndarray:
        return _matrices(words, self.dtype, (self.k, 8), places_of_b(self.k, self.width))

    def c(self, words) -> np.ndarray:
        return _matrices(words, self.accumulator, (self.rows, 8), places_of_c(self.rows))

    def words(self, c) -> np.ndarray:
        """(products, registers, lanes) of results."""
        places = places_of_c(self.rows)
        values = np.ascontiguousarray(c[:, places.rows, places.columns]).view(_word(self.accumulator))
        return np.ascontiguousarray(values.swapaxes(1, 2))


def _word(dtype) -> type:
    """What a register holds."""
    return dtype if np.dtype(dtype).itemsize >= 4 else np.uint32


def _matrices(words, dtype, shape, places: Places) -> np.ndarray:
    """(products, *shape) from the registers of each."""
    words = np.ascontiguousarray(np.array(words).swapaxes(1, 2))
    matrices = np.empty((len(words), *shape), dtype)
    matrices[:, places.rows, places.columns] = words.view(dtype)
    return matrices


class Late(NamedTuple):
    """A product that is computed when somebody reads its result, together with others like it.

    Attributes
    ----------
    form : Form
        Of the product.
    a, b, c : list
        Values of registers; c is None where it is the result of another late product.
    before : int
        The number of that one.
    level : int
        How many there are one before the other.
    """

    form: Form
    a: list
    b: list
    c: list | None
    before: int
    level: int


class LateProducts:
    """Those of a warp, and which of their registers each name stands for."""

    MOST = 512

    def __init__(self):
        self.products, self.of = [], {}

    def result_in(self, names) -> int | None:
        """The number of the product whose result these registers will hold, all of it."""
        found = [self.of.get(name) for name in names]
        if None in found or found != [(found[0][0], i) for i in range(len(names))]:
            return None
        return found[0][0]

    def settle(self, warp) -> None:
        """Compute all, and put down what nobody has overwritten."""
        alike, results, words = {}, {}, {}
        for number, product in enumerate(self.products):
            alike.setdefault((product.level, product.form), []).append(number)
        for (_, form), numbers in sorted(alike.items(), key=lambda item: item[0][0]):
            chosen = [self.products[number] for number in numbers]
            c = np.empty((len(chosen), form.rows, 8), form.accumulator)
            new = [i for i, product in enumerate(chosen) if product.c is not None]
            if new:
                c[new] = form.c([chosen[i].c for i in new])
            for i, product in enumerate(chosen):
                if product.c is None:
                    c[i] = results[product.before]
            c = dot(form.a([product.a for product in chosen]), form.b([product.b for product in chosen]), c, warp.block.machine.core)
            results.update(zip(numbers, c, strict=True))
            words.update(zip(numbers, form.words(c), strict=True))
        for name, (number, register) in self.of.items():
            warp.registers[name] = words[number][register].view(warp.dtype_of[name])
        self.products.clear()
        self.of.clear()


def _mma(machine, each):
    pattern = r"mma\.sync\.aligned\.m(\d+)n8k(\d+)\.row\.col\.(f16|f32|f64)\.(\w+)\.(\w+)\.(\w+)"
    rows, k, result, kind, other, added = re.fullmatch(pattern, each.opcode.replace(".rn", "")).groups()
    rows, k = int(rows), int(k)
    if kind != other or result != added or (rows, k) not in SHAPES[kind, result]:
        raise ValueError("there is no such product")
    form = Form(rows, k, DTYPES[kind], DTYPES[result])
    d, a, b, c = (names if isinstance(names, tuple) else (names,) for names in each.operands)
    elements = {"a": rows * k // LANES // form.width, "b": k * 8 // LANES // form.width}
    elements |= dict.fromkeys("cd", rows * 8 // LANES * np.dtype(form.accumulator).itemsize // max(4, np.dtype(form.accumulator).itemsize))
    for name, registers in {"a": a, "b": b, "c": c, "d": d}.items():
        if len(registers) != elements[name]:
            raise ValueError(f"{len(registers)} registers for {name}, which takes {elements[name]}")
    get_a, get_b = ([reader(machine, name, _word(form.dtype)) for name in names] for names in (a, b))
    get_c = [reader(machine, name, _word(form.accumulator)) for name in c]
    empty = np.zeros(LANES, machine.dtype_of[d[0]])

    def run(warp):
        together(warp)
        late = warp.late
        of_a, of_b = [spread(get(warp)) for get in get_a], [spread(get(warp)) for get in get_b]
        before = late.result_in(c)
        if before is not None and late.products[before].form == form:
            product = Late(form, of_a, of_b, None, before, late.products[before].level + 1)
        else:
            product = Late(form, of_a, of_b, [spread(get(warp)) for get in get_c], -1, 0)
        for i, name in enumerate(d):
            late.of.pop(name, None)
            warp.write(name, empty)
            late.of[name] = (len(late.products), i)
        late.products.append(product)
        if len(late.products) == late.MOST:
            late.settle(warp)

    return run


MMA = {"mma.sync.aligned": _mma}
