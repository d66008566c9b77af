"""What stands behind the names of an instruction: constants, registers, special registers, addresses."""

import re
from dataclasses import dataclass
from operator import methodcaller

import ml_dtypes
import numpy as np

from ptx_machine.machine.memory import PARAM, Fault

LANES = 32

KINDS = {
    "s8": np.int8, "u8": np.uint8, "b8": np.uint8, "bf16": ml_dtypes.bfloat16,
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32, "f64": np.float64, "f16": np.float16, "pred": bool,
}  # fmt: skip
SPECIAL = {"%tid.x", "%laneid", "%ctaid.x", "%ntid.x", "%nctaid.x", "%dynamic_smem_size"}


@dataclass(eq=False)
class Path:
    """Lanes that run together: up to where they meet others again."""

    at: int
    lanes: np.ndarray
    meet: int

    def __post_init__(self):
        self.whole = bool(self.lanes.all())


def spread(value: np.ndarray) -> np.ndarray:
    """One for each lane."""
    return value if value.shape else np.full(LANES, value)


def literal(text: str, kind):
    """A constant; None if it is none."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return np.array(int(text[2:], 16), np.uint32).view(np.float32)[()]
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return np.array(int(text[2:], 16), np.uint64).view(np.float64)[()]
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text):
        number = int(text, 0)
        size = np.dtype(kind).itemsize if kind is not bool else 1
        if kind is bool:
            return np.bool_(number)
        return np.array(number % 2 ** (8 * size), f"u{size}").view(kind)[()]
    return None


def reader(machine, text: str, kind):
    """``get(warp)``: values of an operand as that kind, one for each lane, or one for all."""
    constant = literal(text, kind)
    if constant is not None:
        return lambda warp: constant
    if text in SPECIAL:
        return special(text)
    if text in machine.kernel.shared:
        offset = machine.kernel.shared[text]
        value = np.dtype(kind).type(machine.kernel.shared_bytes if offset is None else offset)
        return lambda warp: value
    if text in machine.kernel.constants:
        place = np.uint64(machine.memory.place(text, machine.kernel.constants[text]))
        return lambda warp: place
    for parameter in machine.kernel.parameters:
        if parameter.name == text:
            value = np.uint64(PARAM + parameter.offset)
            return lambda warp: value
    if text not in machine.kernel.kinds:
        raise ValueError(f"what is {text}?")
    dtype = np.dtype(kind)
    if machine.dtype_of[text] == dtype:
        return methodcaller("read", text)
    if machine.dtype_of[text].itemsize == dtype.itemsize:
        return lambda warp: warp.read(text).view(dtype)
    if machine.dtype_of[text].itemsize > dtype.itemsize:  # the lower bits
        low = np.dtype(f"u{dtype.itemsize}")
        return lambda warp: warp.read(text).astype(low).view(dtype)
    raise ValueError(f"{text} has {machine.dtype_of[text]}, wanted {dtype}")


def special(text: str):
    """Special registers."""
    if text == "%ctaid.x":
        return lambda warp: np.uint32(warp.block.number)
    if text == "%nctaid.x":
        return lambda warp: np.uint32(warp.block.machine.grid)
    if text == "%ntid.x":
        return lambda warp: np.uint32(warp.block.machine.threads)
    if text == "%dynamic_smem_size":
        return lambda warp: np.uint32(warp.block.shared.data.size - warp.block.machine.kernel.shared_bytes)
    return lambda warp: warp.special[text]


def address(machine, text: str):
    """``get(warp)`` of ``[register + offset]``, in all lanes."""
    name, _, offset = text.strip("[]").partition("+")
    base = name.strip()
    kind = np.uint64 if machine.kernel.kinds.get(base) in ("b64", "u64") else np.uint32
    get, add = reader(machine, base, kind), int(offset or 0)
    return lambda warp: spread(np.asarray(get(warp)).astype(np.int64) + add)


def readers(machine, texts, kind=np.uint32):
    return [reader(machine, text.strip("[]"), kind) for text in texts]


def one(warp, get) -> int:
    """The value in the only lane that runs."""
    lanes = np.flatnonzero(warp.lanes)
    if lanes.size != 1:
        raise Fault(f"{lanes.size} threads where one is meant to be")
    return int(spread(get(warp))[lanes[0]])
