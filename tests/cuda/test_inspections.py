"""That all inspections of a kernel are made, those that fail are named, and its proof depends on what they compare with."""

import compiled
import evidence
import inspections
import kernel_counts
import pytest
from inspections import inspect, of_machine_code, serving
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)

KERNEL = compiled.Kernel("ring", ())


def check_size(name, kernel):
    assert len(name) == 3, "a name of three letters"


def check_builder(name, kernel):
    assert kernel.builder == "sphere"


def check_nothing(name, kernel):
    print("nothing")


@of_machine_code
def check_instructions(name, kernel):
    next(iter(()))


@pytest.fixture
def linked(monkeypatch) -> list:
    """Kernels that have been linked, of which there is nothing else."""
    made = []
    monkeypatch.setattr(compiled, "linked", evidence.text_of(lambda kernel: kernel)(made.append))
    monkeypatch.setattr(compiled, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(kernel_counts, "kept", lambda: {"kernels": {"ring": {"PTX": {"bar.sync": 1}}, "sphere": {}}})
    return made


def test_all_inspections_are_made_and_those_that_fail_are_named(linked):
    with pytest.raises(AssertionError) as failure:
        inspect("ring", KERNEL, [check_size, check_builder, check_nothing, check_instructions])
    said = str(failure.value).splitlines()
    assert said[0] == "3 of 4 inspections failed: check_size, check_builder, check_instructions"
    assert "AssertionError: a name of three letters" in "\n".join(said)
    for line in ('assert kernel.builder == "sphere"', "next(iter(()))"):
        assert f"    {line}" in said
    assert linked == [KERNEL]


def test_what_holds_passes(linked):
    inspect("ring", KERNEL, [check_nothing])
    assert linked == [KERNEL]


def test_where_nothing_disassembles_the_others_are_made(linked, monkeypatch):
    """And what fails fails; else it is said what was left out."""
    monkeypatch.setattr(compiled, "disassembler", lambda: None)
    with pytest.raises(AssertionError, match="1 of 2 inspections failed: check_builder\n"):
        inspect("ring", KERNEL, [check_builder, check_nothing, check_instructions])
    with pytest.raises(pytest.skip.Exception, match=r"there is no nvdisasm .*: 1 inspections passed, none of machine code was made"):
        inspect("ring", KERNEL, [check_nothing, check_instructions])


def test_kernels_that_cannot_be_compiled_fail_once(linked, monkeypatch):
    def linked_badly(kernel):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiled, "linked", linked_badly)
    with pytest.raises(RuntimeError, match="no such instruction"):
        inspect("ring", KERNEL, [check_size, check_builder])


def test_rows_that_name_a_kernel_serve_it():
    rows = ((["ring", "sphere"], check_size), ({"sphere": 1}, check_builder), (["ring"], check_nothing, check_instructions))
    assert serving("ring", rows) == [check_size, check_nothing, check_instructions]
    assert serving("sphere", rows) == [check_size, check_builder]


def proof(name, made, *used) -> list[str]:
    """What a test of a kernel is a function of, but for the kernel."""
    with evidence.traced(paper=True) as trace, pytest.raises(evidence.Enough):
        inspect(name, KERNEL, made, *used)
    assert [*trace.kernels] == [KERNEL]
    return trace.events


def test_a_proof_depends_on_what_is_compared_with(linked, monkeypatch):
    """Said before the kernel's text ends the test on paper: which inspections there are, counts of this kernel, and other numbers of it."""
    before = proof("ring", [check_size, check_instructions], 40)
    assert proof("ring", [check_size], 40) != before
    assert proof("ring", [check_size, check_instructions], 41) != before
    assert proof("sphere", [check_size, check_instructions], 40) != before
    with monkeypatch.context() as without:
        without.setattr(compiled, "disassembler", lambda: None)
        assert proof("ring", [check_size, check_instructions], 40) != before
    monkeypatch.setattr(kernel_counts, "kept", lambda: {"kernels": {"ring": {"PTX": {"bar.sync": 1}}, "sphere": {"PTX": {}}}})
    assert proof("ring", [check_size, check_instructions], 40) == before
    monkeypatch.setattr(kernel_counts, "kept", lambda: {"kernels": {"ring": {"PTX": {"bar.sync": 2}}}})
    assert proof("ring", [check_size, check_instructions], 40) != before
    assert not linked


def test_counts_are_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(kernel_counts, "compare", lambda *what: compared.append(what))
    for check in (inspections.check_counts_of_ptx, inspections.check_counts_of_machine_code):
        check("ring", KERNEL)
    assert compared == [("ring", kernel_counts.PTX, KERNEL), ("ring", kernel_counts.MACHINE, KERNEL)]
    assert hasattr(inspections.check_counts_of_machine_code, "of_machine_code")
