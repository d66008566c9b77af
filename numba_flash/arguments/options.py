"""What may be done to scores and probabilities beyond scale and band: the frozen `Options`.

Kernels are built with it, and nothing that they are not made of is imported here: every kernel is compiled anew when that is edited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from numba_flash.arguments.block_mask import BlockSize
    from numba_flash.arguments.pages import Pages
    from numba_flash.scoremod.functions import ScoreMod

AS_NUMBERS = "numbers"  # in the place of a dtype: lengths are numbers among a kernel's arguments
SHARING = 8  # neighbouring keys that share a counter of Philox, which has 128 bits
CHANCES = 2**16  # values of the random bits of a score


# What a tier that lacks an option says that it does not know.
NAMES = {
    "softcap": "a softcap",
    "score_mod": "a score_mod",
    "bias": "a bias",
    "mask": "a mask array",
    "q_lengths": "lengths of sequences",
    "kv_lengths": "lengths of sequences",
    "dropout": "dropout",
    "paged": "keys in pages",
}


class Generator(NamedTuple):
    """State of the dropout's generator.

    Attributes
    ----------
    seed, offset : int
        Key and one word of the counter.
    first_query, first_key : int
        Where query 0 and key 0 stand in the matrix whose bits they are; `first_key` is a multiple of `SHARING`.
    """

    seed: int = 0
    offset: int = 0
    first_query: int = 0
    first_key: int = 0


SEEDLESS = Generator()


@dataclass(frozen=True)
class Options:
    """The rest of a problem's formula; the defaults are plain attention.

    Attributes
    ----------
    softcap : float
        ``s = softcap * tanh(s / softcap)``; 0 is none.
    score_mod : ScoreMod or None
        The user's function of a score, and its derivative.
    bias : str or None
        Dtype of the bias.
    mask : bool
        True if there is a boolean mask.
    blocks : BlockSize or None
        That of its blocks; None if it has an element for each pair.
    relative : ScoreMod or bool
        In the place of `score_mod` where kernels find in an array what it adds to scores, by head and distance
        (`numba_flash.cuda.score.relative`).
    block_sparse : bool
        In the place of `mask` for kernels each of whose tiles lies within one block: they go through lists of tiles, and need no mask.
    q_lengths, kv_lengths : str or None
        Dtype of the arrays of lengths (of offsets, if `packed`), or of those of keys `AS_NUMBERS`.
    packed : bool
        Sequences lie one after the other in arrays without a batch axis.
    follows : bool
        The band is aligned at the end of each sequence, not of the longest possible one (no `q_start` was given).
    dropout : float
        Probability that a probability is dropped, a multiple of ``1 / CHANCES``.
    generator : Generator
        State of the dropout's generator.
    paged : Pages or None
        Keys and values lie in pages, with a table for each batch element.
    """

    softcap: float = 0.0
    score_mod: ScoreMod | None = None
    relative: ScoreMod | bool = False
    bias: str | None = None
    mask: bool = False
    blocks: BlockSize | None = None
    block_sparse: bool = False
    q_lengths: str | None = None
    kv_lengths: str | None = None
    packed: bool = False
    follows: bool = False
    dropout: float = 0.0
    generator: Generator = SEEDLESS
    paged: Pages | None = None

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the options that are on."""
        return tuple(name for name in NAMES if getattr(self, name))

    def nothing_but(self, *names: str) -> bool:
        """True if no option but these names of `NAMES` is on. A kernel that knows some options asks this, so that it refuses an option
        that is added later.
        """
        return set(self.used) <= set(names)

    @property
    def sequences(self) -> bool:
        """True if each batch element has lengths of its own."""
        return self.q_lengths is not None or self.kv_lengths is not None

    @property
    def tiled(self) -> bool:
        """True if a mask says which tiles there are."""
        return self.mask or self.block_sparse

    @property
    def modifies(self) -> bool:
        """True if scores or probabilities change beyond what a band and an end do to them."""
        return bool(self.softcap or self.score_mod or self.bias or self.mask or self.dropout)

    @property
    def takes_registers(self) -> bool:
        """True if kernels need more of them than for plain attention: for that, or for where a key in pages is."""
        return self.modifies or self.paged is not None

    @property
    def modifies_beyond_softcap(self) -> bool:
        """True if anything but a softcap does."""
        return bool(self.score_mod or self.bias or self.mask or self.dropout)

    @property
    def modifies_or_lists(self) -> bool:
        """True if anything but a softcap does, or tiles are listed: kernels of options know both."""
        return self.modifies_beyond_softcap or self.block_sparse

    @property
    def only_lists(self) -> bool:
        """True if tiles are listed, and nothing else is asked for but lengths: kernels without options do that."""
        return self.block_sparse and not self.modifies

    @property
    def changes(self) -> bool:
        """True if a score may be something else than a scaled product, or hidden."""
        return bool(self.softcap or self.score_mod or self.bias)

    @property
    def bends(self) -> bool:
        """True if the derivative of a score with respect to its product is not the scale alone."""
        return bool(self.softcap or self.score_mod)

    @property
    def sloped(self) -> bool:
        """True if that derivative may be another number in each score."""
        return bool(self.softcap or (self.score_mod and not self.score_mod.adds))

    @property
    def structure(self) -> Options:
        """The same with numbers that a kernel receives when it runs reduced to whether they matter: one kernel serves all values."""
        blocks = None if self.block_sparse else self.blocks
        relative, softcap, dropout = bool(self.relative), float(self.softcap > 0), 0.5 if self.dropout else 0.0
        return replace(self, relative=relative, softcap=softcap, dropout=dropout, generator=SEEDLESS, blocks=blocks)

    @property
    def arrays(self) -> Options:
        """What says which optional arrays there are, alone: for kernels that compute no score."""
        return replace(self.structure, softcap=0.0, score_mod=None, relative=False, dropout=0.0)

    @property
    def as_mask(self) -> Options:
        """The same with the mask of which lists are made."""
        return replace(self, mask=self.tiled, block_sparse=False)


PLAIN = Options()


def dropout_threshold(dropout: float) -> int:
    """Random bits (uint16) below it drop: `dropout` in units of ``1 / CHANCES``, to the nearest, but not all of them."""
    return min(round(dropout * CHANCES), CHANCES - 1)
