"""The documentation names what there is: modules, tests, public names, and the lines of code that it shows."""

import importlib
import re

import pytest
from support import ROOT, TESTS

import numba_flash

DOCS, PACKAGE = ROOT / "docs", ROOT / "numba_flash"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
DESIGN = {page.name: page.read_text() for page in (DOCS / "design").glob("*.md")}
CODE_WORDS = re.findall(r"`([^`\n]+)`", "\n".join([ARCHITECTURE, *DESIGN.values()]))
MODULES = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}


# ---- architecture.md, design -------------------------------------------------------------------------------------------------------------


def test_every_folder_is_on_the_map():
    """And no other; of the first, modules that are not in a folder of their own are named, too."""
    rows = [line.split("|") for line in ARCHITECTURE.splitlines() if line.startswith("| `") and "/`" in line.split("|")[1]]
    folders = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    packages = {name.removesuffix("__init__.py") for name in MODULES if name.endswith("/__init__.py")}
    assert folders == packages | {"numba_flash/", "tests/"}
    (top,) = (row[2] for row in rows if row[1].strip() == "`numba_flash/`")
    modules = {name.removesuffix(".py") for name in MODULES if "/" not in name and not name.startswith("__")}
    assert set(re.findall(r"`(\w+)`", top)) == modules


def test_the_map_is_short():
    """Somebody new reads it in a few minutes."""
    assert len(ARCHITECTURE.splitlines()) <= 150


def test_every_file_that_is_named_exists():
    named = {word.split("::")[0] for word in CODE_WORDS if re.fullmatch(r"[\w/]+\.py(::\w+)?", word)}
    invented = {name for name in named if "sm100" in name}  # of the tier that is added there
    known = {path.name for folder in (PACKAGE, TESTS) for path in folder.rglob("*.py")}  # by their name alone, wherever they are
    missing = {name for name in named - invented - known if not any((folder / name).exists() for folder in (PACKAGE, ROOT))}
    assert "test_house_rules.py" in named
    assert missing == set()


def test_every_test_that_is_named_exists():
    defined = {name for path in TESTS.rglob("*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = {word.split("::")[-1] for word in CODE_WORDS if re.fullmatch(r"(test_\w+\.py::)?test_\w+", word)}
    assert "test_problems_that_are_refused" in named
    assert named - defined == set()


# ---- all pages -------------------------------------------------------------------------------------------------------------------------


def test_every_path_that_is_named_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    paths = re.compile(r"`((?:tests|docs|asv_bench|numba_flash|\.ci)/[\w./-]*)`")
    named = {(name, page.name) for page in pages for name in paths.findall(page.read_text())}
    assert ("docs/figures.py", "CONTRIBUTING.md") in named
    assert {(name, page) for name, page in named if not (ROOT / name).exists()} == set()


# ---- api.md ----------------------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference():
    documented = set(re.findall(r"^\.\. auto(?:function|class|data):: numba_flash\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    public = {name for name in numba_flash.__all__ if name != "reference"} | {"reference.forward", "reference.backward"}
    assert documented >= public


def object_of(name: str):
    """What a dotted name stands for, and the module in front of it."""
    module, _, rest = name.rpartition(".")
    while module:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, left = module.rpartition(".")
            rest = f"{left}.{rest}"
        else:
            for part in rest.split("."):
                found = getattr(found, part)
            return found, module
    raise AssertionError(f"{name} is in no module")


def test_every_name_of_the_package_stands_for_something():
    """In code on any page: modules, and what is in them."""
    name = re.compile(r"\bnumba_flash(?:\.[A-Za-z_]\w*)+")
    modules = {f"numba_flash.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for path in MODULES}
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    named = {found for page in pages for found in name.findall(page.read_text())} - modules
    assert "numba_flash.forward" in named
    for each in named:
        object_of(each)


def test_the_reference_says_where_things_are():
    """In the module that defines them, or in a package that has them in `__all__`."""
    names = re.findall(r"^\.\. auto(?:function|class):: (numba_flash[\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 25
    for name in names:
        found, module = object_of(name)
        public = getattr(importlib.import_module(module), "__all__", ())
        assert found.__name__ in public or found.__module__ == module, name


# ---- code that pages include -----------------------------------------------------------------------------------------------------------

INCLUDES = [
    (page.relative_to(DOCS).as_posix(), source, dict(re.findall(r'^:([\w-]+): *"?(.*?)"?$', options, re.MULTILINE)))
    for page in sorted(DOCS.rglob("*.md"))
    for source, options in re.findall(r"^```\{literalinclude\} (\S+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "source", "options"), INCLUDES, ids=lambda x: x if isinstance(x, str) else next(iter(x.values()), ""))
def test_included_code_is_found(page, source, options):
    """The lines that bound it stand in the source, in this order."""
    lines = (DOCS / page).parent.joinpath(source).read_text().splitlines()
    if "pyobject" in options:
        assert any(re.match(rf"(def|class) {options['pyobject']}\b", line) for line in lines)
    else:
        start = next(number for number, line in enumerate(lines) if options["start-at"] in line)
        assert "end-before" not in options or any(options["end-before"] in line for line in lines[start + 1 :])
    assert options["caption"].split(",")[0] == source.removeprefix("../numba_flash/")
