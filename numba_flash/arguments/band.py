"""Which keys `causal`, `window` and `q_start` show to a query: two diagonals (see `numba_flash.mask`)."""

from typing import NamedTuple

from numba_flash.arguments import checks


class Band(NamedTuple):
    """Query i sees key j iff ``low <= j - i <= high``."""

    low: int
    high: int


def bind(nq: int, nk: int, causal, window, q_start) -> Band:
    """Check the arguments of that name."""
    causal, window = checks.flag("causal", causal), _window(window)
    return diagonals(nq, nk, causal, window, nk - nq if q_start is None else checks.integer("q_start", q_start))


def diagonals(nq: int, nk: int, causal: bool, window: tuple[int, int], q_start: int) -> Band:
    """The diagonals ``low <= j - i <= high`` that are visible, clipped to ``[-nq, nk]`` where they stop mattering."""
    left, right = window
    if causal:
        right = 0
    low = -nq if left == -1 else min(max(q_start - left, -nq), nk)
    high = nk if right == -1 else min(max(q_start + right, -nq), nk)
    return Band(low, high)


def _window(window) -> tuple[int, int]:
    """(left, right) with -1 for no limit."""
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be a tuple (left, right) or None; got {window!r}")
    left, right = (checks.integer(f"window[{side}]", size) for side, size in enumerate(window))
    if left < -1 or right < -1:
        raise ValueError(f"window must hold sizes >= 0, or -1 for no limit; got {window!r}")
    return left, right
