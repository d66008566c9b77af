"""Work items of the backward pass from the host: of all heads, or of those that another tier
leaves, which it knows when it has run. Numba is not imported here.
"""

from typing import NamedTuple

# Blocks of a multiprocessor that look for heads that are left. A block for each item would have to
# be launched even where no heads are left, which takes three times as long and more. Measured:
# docs/lab/any_gpu.md, `LOOKERS`.
LOOKERS = 2


class Items(NamedTuple):
    """Work items of a kernel of the backward pass: blocks of threads for so many, and how many
    there are, in a tuple, if its blocks look for those of heads that are left.
    """

    grid: int
    number: tuple

    @classmethod
    def of(cls, items: int, gpu, fallback):
        """All of them, or those of heads that the flags `fallback` name."""
        if fallback is None:
            return cls(items, ())
        return cls(min(items, LOOKERS * gpu.multiprocessors), (items,))
