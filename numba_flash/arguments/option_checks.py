"""The checks of the arguments behind `Options`, which become that here."""

import numpy as np

from numba_flash.arguments import arrays, checks
from numba_flash.arguments.block_mask import BlockMask, BlockSize
from numba_flash.arguments.options import CHANCES, SEEDLESS, SHARING, Generator, Options, dropout_threshold
from numba_flash.scoremod.functions import ScoreMod

FEW = 64  # values, which are checked faster as Python's numbers
# Of the dropout's state, exclusive: the key has two words, the offset is one of the counter's, positions are below `problem.MAX_LENGTH`.
STATE_ENDS = {"seed": 2**64, "offset": 2**32, "first query": 2**30, "first key": 2**30}
DEFAULTS = {
    "bias": None, "mask": None, "q_lengths": None, "kv_lengths": None, "softcap": None, "dropout": 0.0, "rng": None,
    "score_mod": None, "score_mod_grad": None,
}  # fmt: skip


def bind(q, scores: tuple[int, ...], given: dict) -> Options:
    """Check the arguments `given`, some of `DEFAULTS`, against q and the shape (..., Hq, Nq, Nk) of the `scores`."""
    unknown = sorted(given.keys() - DEFAULTS.keys())
    if unknown:
        raise TypeError(f"{unknown[0]} is not an option; the options are scale, causal, window, q_start, precision, {', '.join(DEFAULTS)}")
    given = DEFAULTS | given
    dtype = {}
    for name, check in (("bias", _check_bias), ("mask", _check_mask), ("q_lengths", _check_lengths), ("kv_lengths", _check_lengths)):
        if given[name] is not None:
            check(name, given[name], q, scores)
            dtype[name] = given[name].dtype.name if name != "mask" else "bool"
    probability, generator = bind_dropout(given["dropout"], given["rng"])
    return Options(
        softcap=_bind_softcap(given["softcap"], q.dtype.name),
        score_mod=ScoreMod.bind(given["score_mod"], given["score_mod_grad"], q.dtype.name, scores[-3] if len(scores) > 2 else 1),
        bias=dtype.get("bias"),
        mask="mask" in dtype,
        blocks=_block_size(given["mask"]),
        q_lengths=dtype.get("q_lengths"),
        kv_lengths=dtype.get("kv_lengths"),
        dropout=probability,
        generator=generator,
    )


def check_offsets(name: str, x, q) -> None:
    """Raise unless `x` may hold the boundaries of packed sequences."""
    checks.layout(name, x)
    _check_integers(name, x, q)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must have shape (sequences + 1,); got {tuple(x.shape)}")


def check_values_of_offsets(name: str, x, total: int, what: str) -> None:
    """Raise unless `x`, where it is a NumPy array, goes from 0 to `total` without decreasing."""
    if not isinstance(x, np.ndarray):
        return
    if x.size <= FEW:  # in a third of the time
        values = x.tolist()
        if values[0] == 0 and values[-1] == total and values == sorted(values):
            return
    if (x[1:] < x[:-1]).any():
        at = int(np.argmax(x[1:] < x[:-1]))
        raise ValueError(f"{name} must not decrease; {name}[{at}] is {x[at]}, {name}[{at + 1}] is {x[at + 1]}")
    if x[0] != 0 or x[-1] != total:
        raise ValueError(f"{name} must go from 0 to {what} ({total}); it goes from {x[0]} to {x[-1]}")


def check_values_of_lengths(name: str, x, limit: int, what: str) -> None:
    """Raise unless `x`, where it is a NumPy array, lies between 0 and `limit`."""
    if not isinstance(x, np.ndarray):
        return
    if 0 < x.size <= FEW:
        values = x.ravel().tolist()
        if min(values) >= 0 and max(values) <= limit:
            return
    if ((x < 0) | (x > limit)).any():
        at = tuple(int(i) for i in np.argwhere((x < 0) | (x > limit))[0])
        where = f"[{', '.join(map(str, at))}]" if at else ""
        raise ValueError(f"{name} must lie between 0 and {what} ({limit}); {name}{where} is {x[at]}")


def _check_bias(name: str, bias, q, scores) -> None:
    checks.layout(name, bias)
    checks.library(name, bias, "q", q)
    if bias.dtype.name not in (q.dtype.name, "float32"):
        raise TypeError(f"{name}.dtype ({bias.dtype.name}) must be q.dtype ({q.dtype.name}) or float32")
    checks.broadcastable(name, bias, "(..., Hq, Nq, Nk)", scores)


def _check_mask(name: str, mask, q, scores) -> None:
    if isinstance(mask, BlockMask):
        checks.library(f"{name}.blocks", mask.blocks, "q", q)
        blocks = (*scores[:-2], *mask.block_size.counts(*scores[-2:]))
        bm, bn = mask.block_size
        checks.broadcastable(f"{name}.blocks", mask.blocks, f"(..., Hq, ceil(Nq / {bm}), ceil(Nk / {bn}))", blocks)
        return
    checks.layout(name, mask)
    checks.library(name, mask, "q", q)
    if mask.dtype.name != "bool":
        raise TypeError(f"{name}.dtype ({mask.dtype.name}) must be bool; what is added to scores is a bias")
    checks.broadcastable(name, mask, "(..., Hq, Nq, Nk)", scores)


def _block_size(mask) -> BlockSize | None:
    """That of a mask whose blocks are more than pairs."""
    return mask.block_size if isinstance(mask, BlockMask) and mask.block_size != (1, 1) else None


def _check_lengths(name: str, x, q, scores) -> None:
    checks.layout(name, x)
    _check_integers(name, x, q)
    if tuple(x.shape) != scores[:-3]:
        raise ValueError(f"{name}.shape {tuple(x.shape)} must equal q.shape[:-3] {scores[:-3]}")


def _check_integers(name: str, x, q) -> None:
    """NumPy integers go with any q; those on a GPU need q there too."""
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must be an integer dtype")
    if arrays.library(x) == "cupy":
        checks.library(name, x, "q", q)


def _bind_softcap(softcap, dtype: str) -> float:
    """A cap that is a normal number in the accumulation dtype, as its inverse is; 0 if there is none."""
    if softcap is None:
        return 0.0
    number = checks.real("softcap", softcap)
    if number <= 0:
        raise ValueError(f"softcap must be positive, or None; got {softcap!r}")
    accumulator = np.finfo("float64" if dtype == "float64" else "float32")
    least = float(accumulator.tiny)
    if not least <= number <= 1 / least:
        raise ValueError(f"softcap must lie between {least:.3g} and {1 / least:.3g}, computed in {accumulator.dtype}; got {softcap!r}")
    return number


def is_state(rng) -> bool:
    """True for what `bind_dropout` accepts as a tuple of Python's integers."""
    if type(rng) is not tuple or len(rng) not in (2, 4) or {*map(type, rng)} != {int}:
        return False
    return all(0 <= x < end for x, end in zip(rng, STATE_ENDS.values(), strict=False)) and (len(rng) == 2 or rng[3] % SHARING == 0)


def bind_dropout(dropout, rng) -> tuple[float, Generator]:
    """Probability as the random bits have it, and state; without dropout the generator's state is irrelevant, but still checked."""
    probability = checks.real("dropout", dropout)
    if not 0 <= probability < 1:
        raise ValueError(f"dropout must be in [0, 1); got {dropout!r}")
    if rng is None:
        if probability > 0:
            raise ValueError(f"rng must be a tuple (seed, offset) when dropout > 0; got rng=None with dropout={dropout!r}")
        return 0.0, SEEDLESS
    if not isinstance(rng, tuple | list) or len(rng) not in (2, 4):
        raise TypeError(f"rng must be a tuple (seed, offset) or (seed, offset, first query, first key); got {rng!r}")
    state = Generator(*(checks.integer(f"rng[{i}]", x) for i, x in enumerate(rng)))
    for i, (name, x, end) in enumerate(zip(STATE_ENDS, state, STATE_ENDS.values(), strict=True)):
        if not 0 <= x < end:
            raise ValueError(f"rng[{i}] (the {name}) must be in [0, 2**{end.bit_length() - 1}); got {x}")
    if state.first_key % SHARING:
        raise ValueError(f"rng[3] (the first key) must be a multiple of {SHARING}, as many keys share a counter; got {state.first_key}")
    threshold = dropout_threshold(probability)
    return (threshold / CHANCES, state) if threshold else (0.0, SEEDLESS)
