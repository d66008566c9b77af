"""Shared memory is laid out by a table."""

from numba_flash.cuda.sm80.smem import over, smem


def test_parts_lie_one_behind_the_other():
    layout = smem(q=32, rows=(8, 3), head=0, k=16)
    assert layout._asdict() == {"q": 0, "rows": 32, "head": 56, "k": 56, "bytes": 72}


def test_parts_of_slots_have_their_addresses_in_the_first():
    layout = smem(q=32, slot=(smem(k=16, v=8), 5), bias=4)
    assert layout._asdict() == {"q": 0, "k": 32, "v": 48, "slot": 24, "bias": 152, "bytes": 156}


def test_layouts_may_lie_over_each_other():
    slots = smem(slot=(smem(q=16, do=8), 2))
    assert over(slots, smem(slots.slot, k=8, v=4))._asdict() == {"q": 0, "do": 16, "slot": 24, "k": 24, "v": 32, "bytes": 48}
    assert over(slots, smem(slots.slot, k=40)).bytes == 64


def test_equal_tables_are_equal_keys():
    """Of a builder's cache."""
    assert {smem(q=32, k=16), smem(q=32, k=16)} == {smem(q=32, k=16)}
    assert smem(q=32, k=16) != smem(q=16, k=16)
    assert type(smem(q=32)) is type(smem(q=16))
