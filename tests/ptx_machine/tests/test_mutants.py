"""Every mistake of a list is found by the machine that executes PTX, or by the oracle: proof that the tests which use it would notice."""

import ast
import gc
import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from support import ROOT, SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.apart import foresee, run
from ptx_machine.mutants.anchors import Sources
from ptx_machine.mutants.mutants import MUTANTS
from ptx_machine.mutants.mutants_bias import MUTANTS_BIAS
from ptx_machine.mutants.mutants_blocks import MUTANTS_BLOCKS
from ptx_machine.mutants.mutants_dbias import MUTANTS_DBIAS
from ptx_machine.mutants.mutants_dbias_rows import MUTANTS_DBIAS_ROWS
from ptx_machine.mutants.mutants_decode import MUTANTS_DECODE
from ptx_machine.mutants.mutants_pages import MUTANTS_PAGES
from ptx_machine.mutants.mutants_planes import MUTANTS_PLANES
from ptx_machine.mutants.mutants_raised import MUTANTS_RAISED
from ptx_machine.mutants.mutants_relative import MUTANTS_RELATIVE
from ptx_machine.mutants.mutants_resident import MUTANTS_RESIDENT
from ptx_machine.mutants.mutants_round import MUTANTS_ROUND
from ptx_machine.mutants.mutants_short_heads import MUTANTS_SHORT_HEADS
from ptx_machine.mutants.mutants_sm80 import MUTANTS_SM80
from ptx_machine.mutants.mutants_wide import MUTANTS_WIDE
from ptx_machine.problems.problems import CAUGHT, PROBLEMS

from numba_flash.files import fingerprint

PACKAGE = ROOT / "numba_flash"
ALL = (
    *MUTANTS,
    *MUTANTS_PLANES,
    *MUTANTS_SM80,
    *MUTANTS_DECODE,
    *MUTANTS_PAGES,
    *MUTANTS_BLOCKS,
    *MUTANTS_DBIAS,
    *MUTANTS_DBIAS_ROWS,
    *MUTANTS_BIAS,
    *MUTANTS_SHORT_HEADS,
    *MUTANTS_RESIDENT,
    *MUTANTS_RELATIVE,
    *MUTANTS_ROUND,
    *MUTANTS_WIDE,
    *MUTANTS_RAISED,
)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Where the texts of kernels are kept for all processes of a session."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "texts of kernels"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.mark.full
@pytest.mark.machine
@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_right_passes(problem, tmp_path, texts):
    foresee(problem)
    ended = run(problem, ROOT, texts, 1, tmp_path / "output")
    assert ended.code == 0, ended.said


@contextmanager
def nothing_collected():
    """Trees are many objects, and none is garbage: to look for some takes as long as all the rest."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@cache
def sources() -> Sources:
    with nothing_collected():
        return Sources.of(PACKAGE)


def found(sources: Sources) -> list:
    """The place of each mutant, in order; fails with all that have none or several."""
    places, wrong = [], []
    with nothing_collected():
        for mutant in ALL:
            try:
                places.append(sources.find(mutant))
            except (LookupError, ValueError) as error:
                wrong.append(str(error))
    assert wrong == []
    return places


def test_mutants_can_be_made():
    assert [mutant.name for mutant, place in zip(ALL, found(sources()), strict=True) if place.changes_nothing()] == []


@pytest.mark.full
def test_mutants_are_found_wherever_their_functions_move_and_however_these_are_written():
    """All files of a folder are one, without comments, and every line is written anew."""
    folders = defaultdict(list)
    for file, tree in sources().trees.items():
        folders[str(Path(file).parent / "moved.py")] += tree.body
    moved = {file: ast.parse(ast.unparse(ast.Module(body, []))) for file, body in folders.items()}
    for mutant, before, after in zip(ALL, found(sources()), found(Sources(moved)), strict=True):
        assert after.file == str(Path(before.file).parent / "moved.py"), mutant.name
        assert list(map(ast.unparse, after.new)) == list(map(ast.unparse, before.new)), mutant.name


def test_mutants_are_many_and_no_two_the_same_and_every_problem_has_one():
    assert len(ALL) >= 100
    assert {mutant.problem for mutant in ALL} == set(PROBLEMS)
    assert len({mutant.name for mutant in ALL}) == len({mutant[1:] for mutant in ALL}) == len(ALL)


@pytest.mark.full
@pytest.mark.machine
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant, tmp_path, texts):
    place = sources().find(mutant)
    foresee(mutant.problem, mutant, fingerprint.package().closure(place.module.removeprefix("numba_flash.")))
    compiled = shutil.ignore_patterns(f"{Path(place.file).stem}.*.pyc")
    shutil.copytree(PACKAGE, tmp_path / "numba_flash", ignore=compiled)
    (tmp_path / "numba_flash" / place.file).write_text(place.source())
    ended = run(mutant.problem, tmp_path, texts, 2, tmp_path / "output")
    said = "\n".join(ended.said.splitlines()[-15:])
    assert ended.code == CAUGHT, f"{place}:\n{mutant.old}\nbecame\n{mutant.new}\nand {mutant.problem!r} said\n{said}"
