"""Which kernels serve a problem: what a row of a tier's table says, and how a row is found.
Numba is not imported here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.runtime import tensor_maps

PLAIN_OR_OPTIONS = "plain, or options"  # what happens to scores, beside what `config` has
# Work lists, and where dQ goes, in words.
ROW_BLOCKS = "blocks of queries (dense, band, packed)"
KEY_BLOCKS = "blocks of keys (dense, band, packed)"
BLOCK_SPARSE = "block sparse"
ROWS_OR_SPARSE = "blocks of queries (dense, band, packed), or block sparse"
KEYS_OR_SPARSE = "blocks of keys (dense, band, packed), or block sparse"
OF_GRADIENT = "tiles of the gradient, and what it is summed over"
SUMS = "summed in memory, then rounded"


class Call(NamedTuple):
    """What is asked for: a problem, layouts of its arrays, and where it runs; `deterministic` as in
    `numba_flash.backward`.
    """

    problem: Any
    inputs: Any
    results: Any
    gpu: Any
    deterministic: bool = True


class Recipe(NamedTuple):
    """A row of a table.

    Attributes
    ----------
    problems : str
        Which it serves, of those that no row above it does, in words.
    serves : callable
        ``serves(call)``: the problem as its kernels see it, or None if it serves another's.
    loops : tuple of str
        The main loop, and those that make other gradients of what it leaves.
    tile : callable
        ``tile(p, call)``: shape of a block's work in the main loop.
    work : str
        How work is listed, in words.
    stage : str
        What happens to scores, one of those above.
    prepare : callable
        ``prepare(chosen)``: the launches, on results that they can store.
    kv_split_tile : callable or None
        ``kv_split_tile(p)``: that over parts of the keys, if it is another one.
    dq : str
        Where dQ goes, in words; none in the forward pass.
    beside : tuple of Recipe
        A table of what makes the gradient of a bias, where that is another's.
    """

    problems: str
    serves: Callable
    loops: tuple[str, ...]
    tile: Callable
    work: str
    stage: str
    prepare: Callable
    kv_split_tile: Any = None
    dq: str = ""
    beside: tuple = ()

    @property
    def about(self) -> str:
        """The row in a line."""
        parts = (self.stage, self.work, self.dq and f"dQ {self.dq}")
        return f"{', '.join(self.loops)}: scores {'; '.join(filter(None, parts))}"


class Chosen(NamedTuple):
    """A row for a call.

    Attributes
    ----------
    recipe : Recipe
        The row.
    call : Call
        What is asked for.
    p : Problem
        As the kernels see it.
    tile
        Of the main loop.
    beside : Chosen or None
        What makes the gradient of a bias, if it is wanted of another.
    again : callable
        ``again(call)``: what serves another call in the place of this one, prepared.
    """

    recipe: Recipe
    call: Call
    p: Any
    tile: Any
    beside: Any
    again: Callable

    @property
    def builder(self) -> str:
        """Of the main loop."""
        return f"{self.recipe.loops[0]}.build"

    @property
    def kv_split_tile(self):
        """Of the main loop over parts of the keys."""
        return self.recipe.kv_split_tile(self.p) if self.recipe.kv_split_tile else self.tile


def choose(table: tuple[Recipe, ...], call: Call, again: Callable) -> Chosen:
    """The first row that serves a call."""
    for recipe in table:
        p = recipe.serves(call)
        if p is not None:
            wanted = recipe.beside and call.results.dbias is not None
            beside = choose(recipe.beside, call, again) if wanted else None
            return Chosen(recipe, call, p, recipe.tile(p, call), beside, again)
    raise LookupError(f"no row serves {call.problem}")


def prepare(table: tuple[Recipe, ...], call: Call, stored: tuple[str, ...] = ()) -> Prepared:
    """What the first row that serves a call makes of it, by way of compact arrays where its kernels
    cannot store those results that are named `stored`, as they do through tensor maps or in
    vectors; only arrays of the user's are like that.
    """
    again = lambda call: prepare(table, call, stored)
    named = (getattr(call.results, name, None) for name in stored)
    if any(tensor_maps.why_not("", x) for x in named if x is not None):
        into = lambda results: again(call._replace(results=results))
        return tensor_maps.through_compact(into, call.results)
    chosen = choose(table, call, again)
    others = () if chosen.beside is None else (chosen.beside.recipe.about,)
    return chosen.recipe.prepare(chosen)._replace(recipes=(chosen.recipe.about, *others))
