"""What was measured for the tuned constants of the package: `asv_bench/studies/results/constants.json`, and the tables that are made of it.

The file is a list of records, one for each row of numbers:

``module``, ``constants``
    Where the constants stand that these numbers decided, and their names; a function, where the choice is a line of it.
``device``
    Who was timed: ``"H100"``, ``"H200"``, or a CPU in words.
``date``
    The day of the commit that first stated the numbers.
``command``
    What measures this again, ``"by hand"`` (the constant edited, then the bench), or how the numbers were counted.
``problem``
    What was computed, in words: dtype, sizes, mask; after a colon the variant that this row is of.
``quantity``
    What each value is: ``"ms"``, ``"TFLOP/s"``, ``"speed over that of ..."`` (larger is better), ``"time over that of ..."``.
``variable``, ``values``
    Values by what was varied: with the variable ``"N"``, ``{"512": 1.06, "1024": 1.05}``. Keys that are no numbers speak for themselves,
    as do all of them where the variable is ``""``. Where several measurements were written down as a range, the value is
    ``[least, greatest]``.

Numbers keep the digits that they were written down with: `load` returns them as text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

PAGES = {  # what the modules of each page in `docs/lab` begin with, in `numba_flash`
    "hopper_forward": ("cuda.sm90.tier", "cuda.sm90.forward.", "cuda.sm90.resident_bias."),
    "hopper_backward": ("cuda.sm90.backward.", "cuda.sm90.bias_gradient."),
    "hopper_dq": ("cuda.sm90.dq.",),
    "tensor_cores": ("cuda.sm80.",),
    "any_gpu": ("cuda.simt.", "cuda.work.", "cuda.score.", "cuda.passes."),
    "cpu": ("cpu.", "distributed."),
}


@dataclass(frozen=True)
class Record:
    """One row of numbers; its fields are those of the file."""

    module: str
    constants: tuple[str, ...]
    device: str
    date: str
    command: str
    problem: str
    quantity: str
    variable: str
    values: dict[str, str | list[str]]

    @property
    def page(self) -> str:
        """The one that shows it."""
        return next(page for page, modules in PAGES.items() if self.module.removeprefix("numba_flash.").startswith(modules))


def load(path: Path) -> list[Record]:
    """The records of a file."""
    return records(json.loads(path.read_text(), parse_float=str, parse_int=str))


def records(rows: list[dict]) -> list[Record]:
    """Records of what JSON has."""
    return [Record(**row | {"constants": tuple(row["constants"])}) for row in rows]


def page(of: str, everything: list[Record]) -> str:
    """Markdown of all tables of a page: a heading for each module, and for the constants that numbers decided together."""
    found = [record for record in everything if record.page == of]
    text = []
    for module in dict.fromkeys(record.module for record in found):
        text.append(f"## `{module.replace('.', '/')}.py`\n")
        for constants in dict.fromkeys(record.constants for record in found if record.module == module):
            own = [record for record in found if (record.module, record.constants) == (module, constants)]
            text.append(f"### {', '.join(f'`{name}`' for name in constants)}\n")
            text += [_table([record for record in own if _kind(record) == kind]) for kind in dict.fromkeys(map(_kind, own))]
    return "\n".join(text)


def _kind(record: Record) -> tuple[str, ...]:
    """What is the same in all rows of a table."""
    return record.quantity, record.variable, record.command


def _table(rows: list[Record]) -> str:
    quantity, variable, command = _kind(rows[0])
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    if all(key.isdecimal() for key in keys):
        keys.sort(key=int)
    head = [f"{variable} = {key}" if variable and key[0].isdigit() else key for key in keys]
    dates = sorted({row.date for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    how = f"`{command}`" if command.startswith("python ") else command
    lines = [["on", "problem", *head], ["---"] * (2 + len(keys))]
    lines += [[row.device, row.problem, *(_entry(row.values.get(key, "")) for key in keys)] for row in rows]
    what = f"time in {quantity}" if quantity.split()[0] in ("ms", "us") else quantity
    caption = f"{what[0].upper()}{what[1:]} ({when}, {how}):"
    return "\n".join([caption, "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def _entry(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " to ".join(value)
