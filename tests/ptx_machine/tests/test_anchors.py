"""Places of the syntax tree: found by what they mean, once or not at all."""

import ast

import pytest
from ptx_machine.mutants.anchors import Mutant, Sources

ONE = '''
LIMIT = 2**3

def build(kernel):
    """Text of a kernel."""
    asm = f"add.f32 {kernel}, $1; mul.rn.f32 $2;"

    def consume(rows, head):
        # a comment
        sync()
        if rows > LIMIT:
            store(rows[0],
                  head, last=True)  # wrapped
        sync()
        sync()
        return (rows +
                1)

    def forward_one():
        consume(1, 2)
'''
TWO = """
def build():
    def consume(rows, head):
        load(head)
        store(rows[0], head, last=False)
        for row in rows:
            sync()
            load(row, head)

    def build_pair(rows):
        first, last = rows

    def forward_two():
        consume(3, 4)
"""
TREES = {"cuda/one.py": ast.parse(ONE), "cuda/sm90/two.py": ast.parse(TWO)}
BEFORE = {file: ast.unparse(tree) for file, tree in TREES.items()}
SOURCES = Sources(TREES)


def find(where, old, new="0"):
    return SOURCES.find(Mutant("a mistake", where, old, new, "plain"))


def line(where, old, new) -> tuple[list[str], list[str]]:
    """Lines that a mutant takes away, and that stand in their place."""
    place = find(where, old, new)
    before, after = BEFORE[place.file].splitlines(), place.source().splitlines()
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    return [x.strip() for x in before], [x.strip() for x in after]


def test_an_expression_is_found_however_it_is_written():
    assert line("consume", "(rows)+1", "rows * (1 - 1)") == (["return rows + 1"], ["return rows * (1 - 1)"])
    assert line("consume", "rows > LIMIT", "rows >= LIMIT") == (["if rows > LIMIT:"], ["if rows >= LIMIT:"])
    assert line("cuda", "LIMIT = 2**3", "LIMIT = 2**4") == (["LIMIT = 2 ** 3"], ["LIMIT = 2 ** 4"])


def test_what_is_another_number_is_not_found():
    with pytest.raises(LookupError, match=r"nowhere$"):
        find("consume", "rows + 1.0")
    with pytest.raises(LookupError, match="nowhere"):
        find("consume", "rows + True")


def test_arguments_that_follow_each_other():
    assert line("consume", "head, last=True", "last=True") == (["store(rows[0], head, last=True)"], ["store(rows[0], last=True)"])
    assert line("consume", "rows[0], head, last=False", "head, rows[0]") == (["store(rows[0], head, last=False)"], ["store(head, rows[0])"])
    assert line("consume", "row, head", "row") == (["load(row, head)"], ["load(row)"])
    assert line("forward_one", "consume", "build") == (["consume(1, 2)"], ["build(1, 2)"])
    assert line("consume", "last=True", "") == (["store(rows[0], head, last=True)"], ["store(rows[0], head)"])


def test_statements():
    assert line("consume", "load(head)", "") == (["load(head)"], [])
    assert line("consume", "load(head)", "rows = head; load(rows)") == (["load(head)"], ["rows = head", "load(rows)"])
    assert line("consume", "store(rows[0], head, last=True)", "") == (["store(rows[0], head, last=True)"], ["pass"])
    assert line("build_pair", "first, last = rows", "first = last = rows") == (["first, last = rows"], ["first = last = rows"])
    assert line("build_pair", "last", "first") == (["first, last = rows"], ["first, first = rows"])
    assert line("consume", "sync(); return rows + 1", "return rows + 1") == (["sync()"], [])


def test_arguments_are_no_statements():
    sources = Sources({"one.py": ast.parse("def f():\n    g(a(), b())\n    a()\n    b()")})
    assert sources.find(Mutant("", "f", "a(); b()", "b(); a()", "")).fields == ("body",)
    assert sources.find(Mutant("", "f", "a(), b()", "b(), a()", "")).fields == ("args", "keywords")


def test_dots_are_whatever_stands_there():
    assert line("consume", "store(..., last=True)", "store(..., last=False)") == (
        ["store(rows[0], head, last=True)"],
        ["store(rows[0], head, last=False)"],
    )
    assert line("consume", "if rows > LIMIT: ...", "...") == (
        ["if rows > LIMIT:", "store(rows[0], head, last=True)"],
        ["store(rows[0], head, last=True)"],
    )
    assert line("consume", "sync()\nif ...: ...", "if ...: ...") == (["sync()"], [])
    assert line("consume", "load(head)\n...\nfor row in ...: ...", "load(head)\n...\nfor row in ...: ...; sync()") == ([], ["sync()"])
    nearest = find("consume", "if rows > LIMIT: ...\n...\nsync()")
    assert nearest.stop - nearest.start == 2
    assert find("consume", "return ...").stop == find("consume", "return rows + 1").stop


def test_a_piece_of_a_string():
    assert line("build", "'mul.rn'", "'mul.rz'")[1] == ["asm = f'add.f32 {kernel}, $1; mul.rz.f32 $2;'"]
    assert line("build", "kernel", "0")[1] == ["asm = f'add.f32 {0}, $1; mul.rn.f32 $2;'"]
    with pytest.raises(LookupError, match=r"one\.py:6, cuda/one\.py:6"):
        find("build", "'.f32'", "'.f64'")
    with pytest.raises(LookupError, match="2 times"):
        find("build", "'$'", "'%'")


def test_names_say_which_of_several():
    with pytest.raises(LookupError, match=r"'a mistake'.*'head'.*'consume'.*cuda/one\.py:13.*cuda/sm90/two\.py:4.*two\.py:5.*two\.py:8"):
        find("consume", "head")
    for where in ("sm90 consume", "forward_two consume", "sm90 forward_two consume"):
        assert find(where, "store(...)").module == "numba_flash.cuda.sm90.two"
    for where in ("consume build", "sm80 consume", "two consume", "forward_two sm90 consume", "forward_one forward_two consume", "nobody"):
        with pytest.raises(LookupError, match=r"nowhere there, but elsewhere: cuda/one\.py:12, cuda/sm90/two\.py:5"):
            find(where, "store(...)")


def test_a_module_is_named_in_full():
    sources = Sources({"cuda/__init__.py": ast.parse("def first(): pass"), "mask.py": ast.parse("def second(): pass")})
    modules = [sources.find(Mutant("", where, "pass", "return", "")).module for where in ("first", "second")]
    assert modules == ["numba_flash.cuda", "numba_flash.mask"]


def test_a_source_leaves_the_trees_as_they_are():
    assert find("consume", "rows + 1", "rows").source() != BEFORE["cuda/one.py"]
    assert {file: ast.unparse(tree) for file, tree in TREES.items()} == BEFORE


@pytest.mark.parametrize(
    ("old", "new"), [("row >", "0"), ("rows > LIMIT", "rows >"), ("store(..., last=True)", "f(..., ...)"), ("'a'", "a")]
)
def test_what_cannot_stand_there_is_named(old, new):
    with pytest.raises(ValueError, match="'a mistake'"):
        find("consume", old, new)
