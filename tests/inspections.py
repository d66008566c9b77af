"""Inspections of a kernel, which is compiled once for all of them: functions of its name and of the kernel itself."""

import re
import traceback
from collections.abc import Callable, Iterable

import compiled
import evidence
import kernel_counts
import pytest
from compiled import Kernel

Inspection = Callable[[str, Kernel], None]


def of_machine_code(inspection: Inspection) -> Inspection:
    """Decorator of one that reads machine code, which cannot be made where nothing disassembles that."""
    inspection.of_machine_code = True
    return inspection


def check_entry_point(_, kernel: Kernel) -> None:
    """There is one, and it is called "kernel"."""
    assert re.findall(r"\.entry (\w+)", compiled.ptx(kernel)) == ["kernel"]


def check_counts_of_ptx(name: str, kernel: Kernel) -> None:
    kernel_counts.compare(name, kernel_counts.PTX, kernel)


@of_machine_code
def check_counts_of_machine_code(name: str, kernel: Kernel) -> None:
    kernel_counts.compare(name, kernel_counts.MACHINE, kernel)


def serving(name: str, groups: Iterable[tuple]) -> list[Inspection]:
    """All that a kernel gets, where each group is names of kernels, and the inspections that hold for them."""
    return [each for names, *inspections in groups if name in names for each in inspections]


def inspect(name: str, kernel: Kernel, inspections: list[Inspection], *used) -> None:
    """Make all of them, whichever fail.

    Parameters
    ----------
    name, kernel
        Which kernel.
    inspections
        Of it.
    *used
        What they know of this kernel from tables other than that of its counts; `evidence` is told.

    Raises
    ------
    AssertionError
        Some failed; it says which, and what each found.
    pytest.skip.Exception
        Those of machine code could not be made, and all others passed.
    """
    left_out = [each for each in inspections if hasattr(each, "of_machine_code") and compiled.disassembler() is None]
    made = [each for each in inspections if each not in left_out]
    evidence.uses([each.__name__ for each in made], kernel_counts.kept()["kernels"].get(name), *used)
    compiled.linked(kernel)  # what cannot be compiled fails once, here
    failed = {}
    for each in made:
        try:
            each(name, kernel)
        except Exception as error:
            failed[each.__name__] = "".join(traceback.format_exception(error))
    if failed:
        raise AssertionError("\n".join([f"{len(failed)} of {len(made)} inspections failed: {', '.join(failed)}", *failed.values()]))
    if left_out:
        pytest.skip(f"there is no nvdisasm (nvidia-cuda-nvdisasm): {len(made)} inspections passed, none of machine code was made")
