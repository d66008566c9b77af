"""Every mistake of a list is found by the machine that executes PTX, or by the oracle: proof that the tests which use it would notice."""

import os
import shutil
from pathlib import Path

import pytest
from support import ROOT, SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from apart import run
from mutants import MUTANTS
from mutants_bias import MUTANTS_BIAS
from mutants_blocks import MUTANTS_BLOCKS
from mutants_dbias import MUTANTS_DBIAS
from mutants_dbias_rows import MUTANTS_DBIAS_ROWS
from mutants_few import MUTANTS_FEW
from mutants_head import MUTANTS_HEAD
from mutants_kept import MUTANTS_KEPT
from mutants_pages import MUTANTS_PAGES
from mutants_raised import MUTANTS_RAISED
from mutants_relative import MUTANTS_RELATIVE
from mutants_round import MUTANTS_ROUND
from mutants_sm80 import MUTANTS_SM80
from mutants_split import MUTANTS_SPLIT
from mutants_wide import MUTANTS_WIDE
from problems import CAUGHT, PROBLEMS

ALL = (
    *MUTANTS,
    *MUTANTS_SPLIT,
    *MUTANTS_SM80,
    *MUTANTS_FEW,
    *MUTANTS_PAGES,
    *MUTANTS_BLOCKS,
    *MUTANTS_DBIAS,
    *MUTANTS_DBIAS_ROWS,
    *MUTANTS_BIAS,
    *MUTANTS_HEAD,
    *MUTANTS_KEPT,
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
    ended = run(problem, ROOT, texts, 1, tmp_path / "output")
    assert ended.code == 0, ended.said


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutants_can_be_made(mutant):
    assert (ROOT / "numba_flash" / mutant.file).read_text().count(mutant.old) == 1


def test_mutants_are_many_and_no_two_the_same_and_every_problem_has_one():
    assert len(ALL) >= 100
    assert {mutant.problem for mutant in ALL} == set(PROBLEMS)
    assert len({mutant.name for mutant in ALL}) == len({mutant[1:4] for mutant in ALL}) == len(ALL)


@pytest.mark.full
@pytest.mark.machine
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant, tmp_path, texts):
    compiled = shutil.ignore_patterns(f"{Path(mutant.file).stem}.*.pyc")
    shutil.copytree(ROOT / "numba_flash", tmp_path / "numba_flash", ignore=compiled)
    changed = tmp_path / "numba_flash" / mutant.file
    changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
    ended = run(mutant.problem, tmp_path, texts, 2, tmp_path / "output")
    said = "\n".join(ended.said.splitlines()[-15:])
    assert ended.code == CAUGHT, f"{mutant.file}:\n{mutant.old}\nbecame\n{mutant.new}\nand {mutant.problem!r} said\n{said}"
