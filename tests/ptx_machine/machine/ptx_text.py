"""PTX as a list of instructions: parameters, shared memory, labels, and where paths that part meet again."""

import re
from functools import cache
from typing import NamedTuple

import numpy as np

REGISTER_TYPES = {"pred", "b16", "b32", "b64", "f32", "f64", "u16", "u32", "u64", "s32", "s64"}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


class Instruction(NamedTuple):
    """One instruction.

    Attributes
    ----------
    opcode : str
        With its modifiers, as ``"add.s32"``.
    operands : tuple of str, or of tuples of str
        Vectors are tuples; brackets are part of an address.
    guard : tuple of (str, bool) or None
        The predicate that it depends on, and whether that has to be true.
    line : int
        Where it stands in the text.
    """

    opcode: str
    operands: tuple
    guard: tuple[str, bool] | None
    line: int


class Parameter(NamedTuple):
    """Of the kernel: its name, the type of its bits, its offset and its bytes."""

    name: str
    kind: str
    offset: int
    size: int


class Kernel(NamedTuple):
    """What a PTX text holds.

    Attributes
    ----------
    parameters : tuple of Parameter
        In their order.
    instructions : tuple of Instruction
        In their order.
    targets : dict
        Index of the instruction that a label stands before.
    meets : list of int
        For each instruction the index at which all paths from it have met again.
    kinds : dict
        Type of each register.
    shared : dict
        Offset of each array in shared memory.
    shared_bytes : int
        How much of it is static; dynamic shared memory follows.
    constants : dict
        Bytes of each array that comes with the kernel.
    architecture : int
        What it is for, 90 for ``sm_90a``.
    """

    parameters: tuple
    instructions: tuple
    targets: dict
    meets: list
    kinds: dict
    shared: dict
    shared_bytes: int
    constants: dict
    architecture: int


def split(text: str) -> list[str]:
    """Operands, at commas that are neither in braces nor in brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def operand(text: str):
    """A name, number or address, or a tuple of them."""
    if text.startswith("{"):
        return tuple(split(text[1:-1]))
    return text


def statements(text: str):
    """(line, statement) of a body: what ends with a semicolon, and labels; braces that open a scope are left out."""
    line, current, started, depth = 1, "", 1, 0
    for c in text:
        if c == "\n":
            line += 1
        if not current.strip():
            started, current = line, ""
            if c in "{}":
                continue
        depth += (c in "{[(") - (c in "}])")
        if c == ";":
            yield started, current.strip()
            current = ""
        elif c == ":" and re.fullmatch(r"\s*[$\w]+", current):
            yield started, current.strip() + ":"
            current = ""
        else:
            current += c


@cache
def parse(text: str) -> Kernel:
    """The only kernel of a PTX text.

    Raises
    ------
    ValueError
        It holds something else than what kernels of this package do.
    """
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.visible \.entry [^(]*\((.*?)\)(.*?)\{", text, re.DOTALL)
    body = text[entry.end() :]
    offset = text[: entry.end()].count("\n")
    kinds, instructions, targets, shared = {}, [], {}, {}
    shared_bytes = _declare_shared(text[: entry.start()], shared, 0)
    for line, statement in statements(body):
        if statement.startswith(".reg"):
            _declare_registers(statement, kinds)
        elif statement.startswith(".shared"):
            shared_bytes = _declare_shared(statement + ";", shared, shared_bytes)
        elif statement.endswith(":"):
            targets[statement[:-1]] = len(instructions)
        elif statement.startswith(".pragma"):
            continue
        elif statement.startswith("."):
            raise ValueError(f"line {line + offset}: {statement}")
        else:
            instructions.append(_instruction(statement, line + offset))
    instructions.append(Instruction("ret", (), None, 0))
    instructions = tuple(instructions)
    parameters = _parameters(entry[1])
    meets, constants = _meets(instructions, targets), _constants(text[: entry.start()])
    architecture = int(re.search(r"\.target sm_(\d+)", text)[1])
    return Kernel(parameters, instructions, targets, meets, kinds, shared, shared_bytes, constants, architecture)


def _instruction(statement: str, line: int) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?(\S+)\s*(.*)", statement, re.DOTALL)
    negated, predicate, opcode, rest = found.groups()
    guard = None if predicate is None else (predicate, not negated)
    return Instruction(opcode, tuple(map(operand, split(rest))), guard, line)


def _declare_registers(statement: str, kinds: dict) -> None:
    _, kind, names = statement.split(None, 2)
    assert kind[1:] in REGISTER_TYPES, statement
    for name in split(names):
        many = re.fullmatch(r"(%\w+?)<(\d+)>", name)
        for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            kinds[each] = kind[1:]


def _declare_shared(text: str, shared: dict, end: int) -> int:
    """Static arrays get their places; an extern one, dynamic shared memory, lies behind all of them."""
    for extern, alignment, name, size in re.findall(r"(\.extern )?\.shared \.align (\d+) \.b8 ([$\w]+)\[(\d*)\];", text):
        if extern:
            shared[name] = None
        else:
            shared[name] = -(-end // int(alignment)) * int(alignment)
            end = shared[name] + int(size)
    return end


def _constants(text: str) -> dict[str, np.ndarray]:
    found = re.findall(r"\.global \.align \d+ \.b8 ([$\w]+)\[(\d+)\](?: = \{([^}]*)\})?;", text)
    arrays = {name: np.zeros(int(size), np.uint8) for name, size, _ in found}
    for name, _, values in found:
        values = [int(value) for value in values.split(",") if value.strip()]
        arrays[name][: len(values)] = values
    return arrays


def _parameters(text: str) -> tuple[Parameter, ...]:
    parameters, offset = [], 0
    for alignment, kind, name, count in re.findall(r"\.param (?:\.align (\d+) )?\.(\w+) ([$\w]+)(?:\[(\d+)\])?", text):
        size = SIZES[re.sub(r"\D", "", kind)] * int(count or 1)
        unit = int(alignment or size)
        offset = -(-offset // unit) * unit
        parameters.append(Parameter(name, kind, offset, size))
        offset += size
    return tuple(parameters)


def _meets(instructions, targets) -> list[int]:
    """Immediate post-dominator of each instruction, by basic blocks."""
    count = len(instructions)
    leaders = {0, *targets.values()} | {i + 1 for i, each in enumerate(instructions) if each.opcode.startswith(("bra", "ret"))}
    leaders = sorted(x for x in leaders if x < count)
    block_of = {leader: n for n, leader in enumerate(leaders)}
    ends = [*leaders[1:], count]
    exit_ = len(leaders)
    follow = []
    for n in range(exit_):
        last = instructions[ends[n] - 1]
        following = set()
        if last.opcode.startswith("bra"):
            following.add(block_of[targets[last.operands[0]]])
        if last.opcode == "ret":
            following.add(exit_)
        if (not last.opcode.startswith("bra") and last.opcode != "ret") or last.guard is not None:
            following.add(n + 1)
        follow.append(following)
    everything = set(range(exit_ + 1))
    after = [set(everything) for _ in range(exit_)] + [{exit_}]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(exit_)):
            now = set.intersection(*(after[x] for x in follow[n])) | {n}
            if now != after[n]:
                after[n], changed = now, True
    first = []
    for n in range(exit_):
        proper = after[n] - {n}
        nearest = max(proper, key=lambda x: len(after[x]))
        first.append(count if nearest == exit_ else leaders[nearest])
    meets = []
    for n in range(exit_):
        meets += [first[n]] * (ends[n] - leaders[n])
    return meets
