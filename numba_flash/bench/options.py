"""What changes scores in a problem of the bench: for this library, for the oracle, and for FlexAttention.

Numbers are such that a result without the option is wrong in 16 bits, too.
"""

from functools import lru_cache

import numpy as np

from numba_flash.scoremod.functions import alibi, relative_position

OPTIONS = ("none", "softcap", "alibi", "table")
"""Nothing, capped scores, a slope for each head, and a table of relative positions for each head."""

CAP = 2.0
REACH = 128  # of the table: farther keys have its first or its last column


@lru_cache(maxsize=8)
def slopes(heads: int) -> np.ndarray:
    """Of ALiBi's paper."""
    return (2.0 ** (-8 * np.arange(1, heads + 1) / heads)).astype(np.float32)


@lru_cache(maxsize=8)
def table(heads: int) -> np.ndarray:
    """A row for each head, a column for each distance from ``-REACH`` on."""
    return np.random.default_rng(0).standard_normal((heads, 2 * REACH + 1), dtype=np.float32)


def ours(option: str, heads: int) -> dict:
    """Arguments of this library."""
    made = {
        "none": dict,
        "softcap": lambda: {"softcap": CAP},
        "alibi": lambda: {"score_mod": alibi(slopes(heads))},
        "table": lambda: {"score_mod": relative_position(table(heads))},
    }
    return made[option]()


def bias(option: str, heads: int, rows: np.ndarray, length: int) -> np.ndarray:
    """What ALiBi or the table adds to the scores of some queries, float64 (heads, rows, length)."""
    distance = np.arange(length) - np.asarray(rows)[:, None]
    if option == "alibi":
        return -slopes(heads)[:, None, None].astype(np.float64) * np.abs(distance)
    return table(heads)[:, distance.clip(-REACH, REACH) + REACH]


def of_oracle(option: str, heads: int, rows: np.ndarray, length: int, dtype: str) -> dict:
    """Arguments of the oracle, for some queries of all heads; a bias has the heads first."""
    if option in ("none", "softcap"):
        return ours(option, heads)
    return {"bias": bias(option, heads, rows, length).astype(np.float64 if dtype == "float64" else np.float32)}


def of_flex(option: str, heads: int):
    """FlexAttention's score_mod; None if nothing changes scores."""
    import torch

    if option == "none":
        return None
    if option == "softcap":
        return lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)
    numbers = torch.from_numpy(slopes(heads) if option == "alibi" else table(heads)).to("cuda")
    if option == "alibi":
        return lambda score, b, h, i, j: score - numbers[h] * torch.abs(i - j)
    return lambda score, b, h, i, j: score + numbers[h, torch.clamp(j - i, -REACH, REACH) + REACH]
