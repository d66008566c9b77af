"""What was measured for constants are records of a file; the comment beside a constant names their page, and holds few numbers."""

import ast
import io
import re
import sys
import tokenize
from dataclasses import replace

import pytest
from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import constants  # of docs

FILE = ROOT / "asv_bench" / "studies" / "results" / "constants.json"
RECORDS = constants.load(FILE)
PLACES = ("cpu", "cuda", "distributed")
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for place in PLACES for path in (ROOT / "numba_flash" / place).rglob("*.py")}
DECIMAL = re.compile(r"(?<![\w.^:])\d+\.\d+(?![\w.])")  # no power, version, or number of a paper
POINTER = re.compile(r"docs/lab/(\w+)\.md, (`\w+`(?:, `\w+`)*)")
MOST = 6
WORDY = {  # files whose comments are still to become records
    "numba_flash/cuda/sm80/backward/backward_tiles.py",
    "numba_flash/cuda/sm80/operands/float64_tiles.py",
}


def file_of(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def remarks(source: str) -> list[str]:
    """Docstrings, and comments; lines of comments that follow each other are one."""
    found, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.string.startswith('"""'):
            found.append(token.string)
        elif token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            if last == (token.start[0] - 1, token.start[1]):
                found[-1] += f" {text}"
            else:
                found.append(text)
            last = token.start
    return [" ".join(text.split()) for text in found]


def defined(source: str) -> set[str]:
    """Names of a module: constants, functions, classes."""
    body = ast.parse(source).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    named = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return named | {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def unknown(records, sources) -> set[str]:
    """Constants of records that their module has not."""
    names = {name: defined(sources.get(name, "")) for name in {file_of(record.module) for record in records}}
    return {f"{record.module}.{name}" for record in records for name in record.constants if name not in names[file_of(record.module)]}


def pointers(sources) -> set[tuple[str, str, str]]:
    """File, page and constant of all that remarks point to."""
    found = ((name, *match) for name, source in sources.items() for remark in remarks(source) for match in POINTER.findall(remark))
    return {(name, page, constant) for name, page, constants_of in found for constant in re.findall(r"\w+", constants_of)}


def astray(records, sources) -> set[tuple[str, str, str]]:
    """Pointers to what no record of that file is about, or another page shows."""
    return pointers(sources) - {(file_of(record.module), record.page, name) for record in records for name in record.constants}


def unnamed(records, sources) -> set[tuple[str, ...]]:
    """Module and constants of records that no remark points to."""
    found = {(name, constant) for name, _, constant in pointers(sources)}
    named = lambda record: any((file_of(record.module), name) in found for name in record.constants)
    return {(record.module, *record.constants) for record in records if not named(record)}


def wordy(sources) -> set[str]:
    """Files with a remark that holds more numbers than one reads."""
    return {name for name, source in sources.items() if any(len(DECIMAL.findall(remark)) > MOST for remark in remarks(source))}


# ---- the package -----------------------------------------------------------------------------------------------------------------------


def test_constants_of_records_are_those_of_their_modules():
    assert unknown(RECORDS, SOURCES) == set()


def test_pointers_lead_to_records():
    assert astray(RECORDS, SOURCES) == set()


def test_every_record_is_pointed_to():
    assert unnamed(RECORDS, SOURCES) == set()


def test_remarks_hold_few_numbers():
    assert wordy(SOURCES) - WORDY == set()


def test_files_that_may_hold_more_numbers_do():
    assert WORDY - wordy(SOURCES) == set(), "these need no exception any more: take them off the list"


def test_records_are_complete():
    """A day, numbers, and a study that there is."""
    for record in RECORDS:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record.date), record
        assert all((record.device, record.command, record.problem, record.quantity, record.values)), record
        values = [value for each in record.values.values() for value in (each if isinstance(each, list) else [each])]
        assert all(re.fullmatch(r"\d+(\.\d+)?", value) for value in values), record
        assert all(len(each) == 2 for each in record.values.values() if isinstance(each, list)), record
        assert all((ROOT / name).exists() for name in re.findall(r"\S+\.py", record.command)), record


def test_every_row_of_numbers_has_one_record():
    assert len({(record.module, record.device, record.problem, record.quantity, *record.values) for record in RECORDS}) == len(RECORDS)


def test_pages_are_short():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "lab").glob("*.md")}
    assert {name for name, text in pages.items() if len(text.splitlines()) > 350} == set()
    assert set(pages) == {"index", *constants.PAGES}


# ---- what breaks these rules is found ----------------------------------------------------------------------------------------------------

SOURCE = '''"""What it is about."""
# Bytes that are
# at work. Measured: docs/lab/{page}.md,
# `{name}`.
{name}, OTHER = 2**24, 3  # 1.0 2.0 3.0 4.0 5.0 6.0{more}


def build():
    """Is faster. Measured: docs/lab/cpu.md, `build`."""
'''


@pytest.fixture
def record():
    row = {"device": "H", "date": "2026-01-02", "command": "by hand", "problem": "full", "quantity": "ms", "variable": ""}
    return constants.records([{"module": "numba_flash.cpu.this", "constants": ["SIZE", "build"], "values": {"ms": "1.5"}, **row}])[0]


def source(page="cpu", name="SIZE", more="") -> dict[str, str]:
    return {"numba_flash/cpu/this.py": SOURCE.format(page=page, name=name, more=more)}


def test_what_keeps_the_rules(record):
    assert [rule([record], source()) for rule in (unknown, astray, unnamed)] == [set()] * 3
    assert wordy(source()) == set()


def test_a_constant_that_is_gone_is_found(record):
    assert unknown([record], source(name="LENGTH")) == {"numba_flash.cpu.this.SIZE"}
    assert unknown([replace(record, module="numba_flash.cpu.that")], source()) == {
        "numba_flash.cpu.that.SIZE",
        "numba_flash.cpu.that.build",
    }


@pytest.mark.parametrize("changed", [{"page": "any_gpu"}, {"name": "LENGTH"}])
def test_a_pointer_that_leads_nowhere_is_found(record, changed):
    assert astray([record], source(**changed)) == {("numba_flash/cpu/this.py", *({"page": "cpu", "name": "SIZE"} | changed).values())}


def test_a_record_that_nobody_points_to_is_found(record):
    assert unnamed([record, replace(record, constants=("OTHER",))], source()) == {("numba_flash.cpu.this", "OTHER")}


@pytest.mark.parametrize("more", [" 7.0", "\n         # 7.0"])
def test_a_remark_with_many_numbers_is_found(more):
    assert bool(wordy(source(more=more))) == (more == " 7.0")
