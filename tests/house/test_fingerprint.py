"""Which sources a kernel is made of, and what of them counts."""

import json
import shutil
from pathlib import Path

import pytest

import numba_flash
from numba_flash.files import disk, fingerprint
from numba_flash.files.fingerprint import FILE, Sources

PACKAGE = Path(numba_flash.__file__).parent
SOURCES = {
    "__init__.py": "from numba_flash.unused import x",
    "kernel.py": """
'''Says what it is.'''
from typing import TYPE_CHECKING
import numpy as np
from numba_flash import loads
from numba_flash.folder.values import ONE  # a number
if TYPE_CHECKING:
    from numba_flash import types_alone

def build(x):
    '''Says what it does.'''
    from numba_flash.folder import tables
    return x + ONE, None, ...
""",
    "loads.py": "import numba_flash.stores\nfrom numba_flash.files import notice",
    "stores.py": "try:\n    from numba_flash import deep\nexcept ImportError:\n    pass",
    "deep.py": "",
    "folder/__init__.py": "from numba_flash import unused",
    "folder/values.py": "ONE = 1",
    "folder/tables.py": "from numba_flash.folder.more.rows import ROWS",
    "folder/more/__init__.py": "from numba_flash.folder.more.rows import ROWS",
    "folder/more/rows.py": "ROWS = 2",
    "types_alone.py": "",
    "unused.py": "x = 1",
    "files/__init__.py": "",
    "files/notice.py": "from numba_flash import unused",
}
MADE_OF = {"kernel", "loads", "stores", "deep", "folder.values", "folder.tables", "folder.more.rows"}


@pytest.fixture
def package(tmp_path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "numba_flash" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "numba_flash"


def edit(package: Path, name: str, old: str, new: str) -> None:
    text = (package / name).read_text()
    assert old in text
    (package / name).write_text(text.replace(old, new))


def test_imports_are_followed(package):
    assert Sources(package).modules_of("kernel") == MADE_OF
    assert Sources(package).modules_of("deep", "unused") == {"deep", "unused"}
    assert Sources(package).imported(b"from numba_flash.folder.more import ROWS") == {"folder.more"}
    assert Sources(package).imported(b"import numba_flash") == Sources(package).imported(b"from numba_flash import x") == {"__init__"}
    assert "folder.more" in Sources(package)
    assert "folder.most" not in Sources(package)


@pytest.mark.parametrize("module", sorted(MADE_OF))
def test_an_edit_of_what_a_kernel_is_made_of_counts(package, module):
    before = Sources(package).closure("kernel")
    with (package / f"{module.replace('.', '/')}.py").open("a") as file:
        file.write("\nEDITED = True\n")
    assert Sources(package).closure("kernel") != before


@pytest.mark.parametrize(
    "name", ["__init__.py", "unused.py", "files/notice.py", "folder/__init__.py", "folder/more/__init__.py", "types_alone.py"]
)
def test_an_edit_of_something_else_does_not(package, name):
    before = Sources(package).closure("kernel")
    with (package / name).open("a") as file:
        file.write("\nEDITED = True\n")
    (package / "new.py").write_text("from numba_flash import kernel")
    assert Sources(package).closure("kernel") == before


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("  # a number", "", False),
        ("Says what it is.", "Says nothing.", False),
        ("    '''Says what it does.'''\n", "", False),
        ("\n\ndef", "\n\n\n\n\ndef", False),
        ("x + ONE, None", "(x + ONE), None", False),
        ("x + ONE", "x - ONE", True),
        ("None", "False", True),
        ("None", "0", True),
        ("...", "'...'", True),
        ("x + ONE", "x + 'ONE'", True),
        ("build(x)", "build(x, *y)", True),
        ("build(x)", "build(x, /)", True),
        ("x + ONE", "x + x", True),
    ],
)
def test_only_what_python_sees_counts(package, old, new, counts):
    before = Sources(package).closure("kernel")
    edit(package, "kernel.py", old, new)
    assert (Sources(package).closure("kernel") != before) == counts


@pytest.mark.parametrize(("old", "new"), [("0", "0.0"), ("0", "-0"), ("0", "False"), ("0", "'0'"), ("0", "b'0'"), ("0", "[]"), ("0", "()")])
def test_constants_of_other_types_are_others(package, old, new):
    (package / "deep.py").write_text("X = 0")
    before = Sources(package).closure("deep")
    edit(package, "deep.py", old, new)
    assert Sources(package).closure("deep") != before


def test_names_of_modules_count(package):
    """What a function is called with all that it is in stands in the code."""
    before = Sources(package).closure("deep")
    (package / "deep.py").rename(package / "deeper.py")
    assert Sources(package).closure("deeper") != before
    assert Sources(package).closure("kernel") == Sources(package).closure("kernel")


def test_a_program_without_sources_knows_modules_by_their_names(tmp_path):
    assert Sources(tmp_path).closure("kernel") == Sources(tmp_path / "missing").closure("kernel") != Sources(tmp_path).closure("loads")


def test_what_is_edited_after_the_first_look_is_not_seen(package):
    """The process has imported what there was."""
    sources = Sources(package)
    before = Sources(package).closure("kernel")
    edit(package, "deep.py", "", "x = 1")
    assert sources.closure("kernel") == before
    assert fingerprint.package() is fingerprint.package()


# ---- what is kept for the next process --------------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch) -> list:
    """Every source that is read, not found in a table."""
    parsed, parse = [], fingerprint._parsed
    monkeypatch.setattr(fingerprint, "_parsed", lambda data: parsed.append(data) or parse(data))
    return parsed


def test_a_source_is_read_once(package, tmp_path, parsed):
    sources, kept = Sources(package), tmp_path / "kept"
    first = sources.closure("kernel", kept_in=kept)
    assert len(parsed) == len(MADE_OF)
    assert sources.closure("kernel") == sources.closure("kernel", kept_in=tmp_path / "other") == first
    assert Sources(package).closure("kernel", kept_in=kept) == Sources(package).closure("kernel", kept_in=tmp_path / "other") == first
    assert len(parsed) == len(MADE_OF)
    edit(package, "deep.py", "", "x = 1")
    second = Sources(package).closure("kernel", kept_in=kept)
    assert second == Sources(package).closure("kernel", kept_in=kept) != first
    assert parsed[len(MADE_OF) :] == [b"x = 1"]


@pytest.mark.parametrize("damage", ["gone", "damaged", "by another reader"])
def test_what_was_kept_is_read_again_where_it_cannot_be_believed(package, tmp_path, parsed, damage):
    sources, kept = Sources(package), tmp_path / "kept"
    first, file = sources.closure("kernel", kept_in=kept), kept / FILE
    if damage == "gone":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes().replace(b"folder", b"holder", 1))
    else:
        reader, table = json.loads(disk.load(file))
        wrong = {key: ["0" * 64, []] for key in table}
        disk.store(file, json.dumps([f"{reader}2", wrong]).encode())
    assert Sources(package).closure("kernel", kept_in=kept) == first
    assert len(parsed) == 2 * len(MADE_OF)
    assert Sources(package).closure("kernel", kept_in=kept) == first
    assert len(parsed) == 2 * len(MADE_OF)


def test_the_latest_are_kept(package, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MOST", len(MADE_OF))
    kept = tmp_path / "kept"
    Sources(package).closure("kernel", kept_in=kept)
    edit(package, "deep.py", "", "x = 1")
    Sources(package).closure("kernel", kept_in=kept)
    _, table = json.loads(disk.load(kept / FILE))
    assert len(table) == len(MADE_OF)
    assert Sources(package)._key("deep") in table


def test_the_package_is_read_alike_wherever_it_lies(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "numba_flash", ignore=shutil.ignore_patterns("__pycache__"))
    copy = Sources(tmp_path / "numba_flash")
    for module in ("cuda.sm90.forward.forward", "cpu.kernels"):
        assert copy.closure(module) == fingerprint.package().closure(module)
        assert copy.modules_of(module) == fingerprint.package().modules_of(module)
