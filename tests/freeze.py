"""What every kernel becomes in machine code, kept in a file or compared with what it was before an edit:

    python tests/freeze.py compare HEAD                          # the last commit, and the files as they are
    python tests/freeze.py compare main topic --only sm90.forward -j 2
    python tests/freeze.py save before.json                      # all kernels
    python tests/freeze.py compare before.json HEAD --renamed table.json

Kernels whose sources are the same on both sides are not compiled; what was compiled once is found in the cache of kernels. A row is
printed for each kernel whose code is another. The exit status is 1 if one of them breaks the gate, or is gone: it has more of something
that `kernel_counts` counts, more registers, more spilled bytes or more of what else the assembler reports, or the number of its
instructions, without NOP, differs by more than 0.3 %. Kernels are paired by their names. A table tells which names, builders and
configurations changed:

    {"names": {"old": "new", "of a kernel that is dropped": null}, "builders": {"old": "new"}, "configs": {"old": "new"}}

Entries of "names" are whole names. The others replace parts of a builder's path and of a configuration's text, and pair kernels whose
names changed with their builders. The values of arrays that a kernel captures are not in its code, and are not compared.
"""

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import compiled
import evidence
import kernel_counts
import simt_kernels
import sm80_kernels
import sm90_kernels
from kernel_counts import ALL, Difference

import numba_flash
from numba_flash.cuda.runtime import compile, compiler

ROOT = Path(__file__).resolve().parents[1]
KERNELS = simt_kernels.KERNELS | sm80_kernels.KERNELS | sm90_kernels.KERNELS
MEASURED = "counts", "resources"  # numbers of a record
WITHIN = 0.003  # of all instructions
TABLES = "names", "builders", "configs"
MADE_BY = compiled, kernel_counts, sys.modules[__name__]
HERE = "."
NOTHING = {"tools": {}, "kernels": {}}


# ---- a freeze


def identity(name: str) -> dict[str, str]:
    """What is known of a kernel without compiling it."""
    kernel = KERNELS[name]
    made_of = evidence.kernel_key(kernel), sys.version_info[:2]
    return {
        "builder": kernel.builder,
        "config": compile.of_config(kernel.config),
        "arch": compiler.architecture(kernel.capability),
        "key": hashlib.sha256(repr(made_of).encode()).hexdigest()[:16],
    }


def machine_code(name: str) -> dict:
    """Counts of classes, instructions without NOP, what the assembler reports, and a hash of the code; from the cache of kernels if this
    version of the tools has made it.
    """
    tools = [Path(module.__file__).read_text() for module in MADE_BY], kernel_counts.tools()
    file = f"{hashlib.sha256(repr((identity(name)['key'], tools)).encode()).hexdigest()}.frozen"
    if (found := compile._load(file)) is None:
        kernel = KERNELS[name]
        try:
            text, resources = compiled.machine_text(kernel), compile.resources(compiled.linked(kernel).log)
        except Exception as error:
            error.add_note(f"This is the kernel {name!r}.")
            raise
        if not resources:
            raise RuntimeError(f"{name}: the linker's log does not tell how many registers it has")
        code = compiled.without_addresses(text)
        instructions = [each for each in compiled.machine_instructions(text) if each != "NOP"]
        counts = kernel_counts.count_machine(text) | {ALL: len(instructions)}
        hashed = hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
        found = json.dumps({"counts": counts, "resources": resources, "code": hashed}).encode()
        compile._store(file, found)
    return json.loads(found)


def chosen(only: str, name: str, builder: str) -> bool:
    """Whether a pattern is found in the builder or the name of a kernel."""
    return re.search(only, f"{builder} {name}") is not None


def machine_codes(names: list[str], jobs: int) -> Iterator[dict]:
    """`machine_code` of each, made by so many processes."""
    if jobs <= 1:
        yield from map(machine_code, names)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(machine_code, names)


def freeze(only: str = "", jobs: int = 1, known: dict = NOTHING) -> dict:
    """Records of kernels of this tree.

    Parameters
    ----------
    only
        A pattern: of which kernels.
    jobs
        Processes that compile. With 0 nothing is compiled, and a record is the `identity` of a kernel.
    known
        Another freeze. A kernel that it has under the same name and key is not compiled: all that it knows of it is taken over.

    Returns
    -------
    dict
        ``{"tools": kernel_counts.tools(), "kernels": {name: record}}``.
    """
    have = known["kernels"]
    kernels = {name: identity(name) for name in sorted(KERNELS) if chosen(only, name, KERNELS[name].builder)}
    same = [name for name, record in kernels.items() if name in have and have[name]["key"] == record["key"]]
    kernels |= {name: have[name] for name in same}
    missing = [name for name in kernels if name not in same] if jobs else []
    if missing and compiled.disassembler() is None:
        raise SystemExit("there is no nvdisasm (nvidia-cuda-nvdisasm)")
    for number, (name, record) in enumerate(zip(missing, machine_codes(missing, jobs), strict=True), 1):
        print(f"{number}/{len(missing)} {name}", file=sys.stderr, flush=True)
        kernels[name] |= record
    return {"tools": kernel_counts.tools(), "kernels": kernels}


def as_text(frozen: dict) -> str:
    """One line per kernel."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(record)}" for name, record in sorted(frozen["kernels"].items()))
    return f'{{"tools": {json.dumps(frozen["tools"])},\n"kernels": {{\n{lines}\n}}}}\n'


def freeze_revision(revision: str, only: str, jobs: int, known: dict) -> dict:
    """`freeze` of a revision's package and kernels, in a process of its own, by the command of that revision."""
    git = ["git", "-C", str(ROOT), "archive", revision, "numba_flash", "tests"]
    archive = subprocess.run(git, stdout=subprocess.PIPE, check=False)
    if archive.returncode:
        raise SystemExit(f"{revision} is neither a file nor a revision")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        command, file = Path(folder, "tests", Path(__file__).name), Path(folder, "frozen.json")
        if not command.exists():
            raise SystemExit(f"{revision} has no tests/{command.name}")
        file.write_text(as_text(known))
        arguments = ["save", str(file), "--known", str(file), "--only", only, "-j", str(jobs)]
        subprocess.run([sys.executable, str(command), *arguments], check=True, env=os.environ | {"PYTHONPATH": folder})
        return json.loads(file.read_text())


# ---- a comparison


class Renamed(NamedTuple):
    """What is called otherwise in the newer of two versions; tables from old to new, see above."""

    names: dict[str, str | None]
    builders: dict[str, str]
    configs: dict[str, str]

    @classmethod
    def read(cls, file: Path | None) -> "Renamed":
        table = {} if file is None else json.loads(file.read_text())
        if unknown := table.keys() - {*TABLES}:
            raise SystemExit(f"{file} has {sorted(unknown)}; a table of what is renamed has {', '.join(TABLES)}")
        return cls(*(table.get(each, {}) for each in TABLES))

    def made_of(self, record: dict) -> tuple[str, str, str]:
        """Of which builder and configuration an old kernel is made now, and for which architecture."""
        builder, config = record["builder"], record["config"]
        for old, new in self.builders.items():
            builder = builder.replace(old, new)
        for old, new in self.configs.items():
            config = config.replace(old, new)
        return builder, config, record["arch"]


SAME = Renamed({}, {}, {})


def pairs(old: dict[str, dict], new: dict[str, dict], renamed: Renamed) -> dict[str, str | None]:
    """The new name of each old kernel, None if there is none."""
    found = {name: now if (now := renamed.names.get(name, name)) in new else None for name in old}
    made_of = {}
    for name in new.keys() - {*found.values()}:
        made_of.setdefault(SAME.made_of(new[name]), []).append(name)
    for name, now in found.items():
        candidates = made_of.get(renamed.made_of(old[name]), [])
        if now is None and name not in renamed.names and len(candidates) == 1:
            found[name] = candidates[0]
    return found


def differences(name: str, old: dict, new: dict) -> list[Difference]:
    """Of everything that is measured."""
    return [each for where in MEASURED for each in kernel_counts.differences(name, where, old[where], new[where], tolerance=0)]


def breaks(each: Difference) -> bool:
    """A difference that the gate does not let through."""
    return abs(each.found - each.kept) > WITHIN * each.kept if each.instruction == ALL else each.found > each.kept


class Row(NamedTuple):
    """What is said of a kernel."""

    kernel: str
    verdict: str
    instructions: str = ""
    others: str = ""


IDENTICAL, WITHIN_GATE, BREAKS, GONE, DROPPED, NEW = "identical", "within", "BREAKS", "GONE", "dropped", "new"


def judge(name: str, old: dict, new: dict, renamed: Renamed) -> Row:
    """One kernel, before and after."""
    if old["key"] == new["key"]:
        return Row(name, IDENTICAL)
    found = differences(name, old, new)
    if old["code"] == new["code"] and not found:
        return Row(name, IDENTICAL)
    before, after = (each["counts"][ALL] for each in (old, new))
    others = [f"{x.kept} -> {x.found} {x.instruction}{' !' * breaks(x)}" for x in found if x.instruction != ALL]
    made_of = zip(("builder", "configuration", "architecture"), renamed.made_of(old), SAME.made_of(new), strict=True)
    others = others or ["counts, registers, spills equal"]
    others += [f"another {what}" for what, was, now in made_of if was != now]
    verdict = BREAKS if any(map(breaks, found)) else WITHIN_GATE
    change = f"{before} -> {after} ({100 * (after / before - 1):+.2f} %)" if before != after else f"{before}"
    return Row(name, verdict, change + " !" * any(breaks(x) for x in found if x.instruction == ALL), "; ".join(others))


def compare(old: dict[str, dict], new: dict[str, dict], renamed: Renamed) -> list[Row]:
    """A row for each kernel of either."""
    rows, paired = [], pairs(old, new, renamed)
    added = new.keys() - {*paired.values()}
    for name, now in sorted(paired.items()):
        if now is not None:
            rows.append(judge(name if name == now else f"{name} -> {now}", old[name], new[now], renamed))
        elif renamed.names.get(name, name) is None:
            rows.append(Row(name, DROPPED))
        else:
            same = sorted(each for each in added if new[each]["code"] == old[name]["code"])
            rows.append(Row(name, GONE, others=f"the same code as the new {', '.join(same)}" if same else ""))
    return rows + [Row(name, NEW) for name in sorted(added)]


def table(rows: list[Row]) -> str:
    """In Markdown, of what is not identical; and how many there are of each verdict."""
    shown = [("kernel", "verdict", "instructions", "what else differs (! breaks the gate)")]
    shown += [row for row in rows if row.verdict != IDENTICAL]
    widths = [max(len(row[column]) for row in shown) for column in range(len(Row._fields))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
    lines = [f"| {line} |" for line in (lines[0], " | ".join("-" * width for width in widths), *lines[1:])] if len(shown) > 1 else []
    verdicts = [row.verdict for row in rows]
    counted = [f"{verdicts.count(each)} {each}" for each in (IDENTICAL, WITHIN_GATE, BREAKS, GONE, DROPPED, NEW)]
    return "\n".join([*lines, f"{len(rows)} kernels: {', '.join(counted)}"])


# ---- the command


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    save, compared = commands.add_parser("save", help="write a freeze"), commands.add_parser("compare", help="print what differs")
    save.add_argument("file", type=Path)
    save.add_argument("--known", type=Path, help="a freeze whose kernels are not compiled again")
    compared.add_argument("old", help=f'a freeze in a file, a revision, or "{HERE}": the files as they are')
    compared.add_argument("new", nargs="?", default=HERE, help="likewise; the files as they are by default")
    compared.add_argument("--renamed", type=Path, metavar="TABLE", help="JSON of what is called otherwise in the new one")
    for each in (save, compared):
        each.add_argument("--only", default="", metavar="PATTERN", help="of kernels in whose builder or name this is found")
        each.add_argument("-j", "--jobs", type=int, default=1, help="processes that compile")
    asked = parser.parse_args(arguments)
    if asked.command == "compare" and asked.jobs < 1:
        parser.error(f"-j is {asked.jobs}; to compare, at least one process compiles")
    return asked


def without(frozen: dict, names) -> dict:
    """A freeze without some kernels."""
    return frozen | {"kernels": {name: record for name, record in frozen["kernels"].items() if name not in names}}


def made(source: str, only: str, jobs: int, known: dict) -> dict:
    """The freeze that a source of the command names."""
    if source == HERE:
        return freeze(only, jobs, known)
    if not Path(source).is_file():
        return freeze_revision(source, only, jobs, known)
    frozen = json.loads(Path(source).read_text())
    return without(frozen, [name for name, record in frozen["kernels"].items() if not chosen(only, name, record["builder"])])


def both(asked: argparse.Namespace, renamed: Renamed) -> tuple[dict, dict]:
    """The two freezes that are compared. What is not compiled of two trees has equal keys on both sides, and nothing else."""
    new = made(asked.new, asked.only, 0, NOTHING)
    old = made(asked.old, asked.only, asked.jobs, without(new, renamed.names))
    return old, made(asked.new, asked.only, asked.jobs, without(old, renamed.names.values()))


def main(arguments: list[str]) -> int:
    """Exit status of the command."""
    asked, imported = parsed(arguments), Path(numba_flash.__file__).resolve().parents[1]
    if imported != ROOT:
        raise SystemExit(f"numba_flash is imported from {imported}, not from here: set PYTHONPATH={ROOT}")
    if asked.command == "save":
        known = NOTHING if asked.known is None else json.loads(asked.known.read_text())
        asked.file.write_text(as_text(freeze(asked.only, asked.jobs, known)))
        return 0
    renamed = Renamed.read(asked.renamed)
    old, new = both(asked, renamed)
    rows = compare(old["kernels"], new["kernels"], renamed)
    print(table(rows))
    if tools := kernel_counts.changed_tools(old["tools"], new["tools"]):
        print(f"other tools, which make other code: {tools}")
    return int(any(row.verdict in (BREAKS, GONE) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
