"""How long attention takes that is spread over GPUs, on paper: each step takes as long as what is slower, kernels or transfers.

Causal, in a zigzag, so that all GPUs have the same work. Rates of kernels are measured on one GPU, and given by the number of keys of a
call; all else is stated in `Work` and `Machine`. Left out: launches, the agreement before each call, and what links lose when all are busy.
"""

from typing import NamedTuple

BYTES = 2  # of an element of q, k, v, o and their gradients
FLOAT = 4  # of one of sums
ROOM = 141e9  # bytes of an H200's memory, on its data sheet
BACKWARD = 2.5  # operations of a backward pass over those of a forward pass


class Work(NamedTuple):
    """One layer: so many tokens in all, heads of queries and of keys, and numbers per head; causal, unless it is full."""

    tokens: int
    heads: int = 64
    heads_kv: int = 8
    head_dim: int = 128
    full: bool = False


class Machine(NamedTuple):
    """GPUs alike.

    Attributes
    ----------
    gpus : int
        How many.
    link : float
        Bytes per second that each sends, and that it receives.
    forward, backward : dict
        Operations per second of kernels by the number of keys.
    memory : float
        Bytes per second of each GPU's memory.
    """

    gpus: int
    link: float
    forward: dict
    backward: dict
    memory: float = 4.8e12  # of an H200, on its data sheet


def rate(rates: dict, keys: float) -> float:
    """That of the most keys that were measured, up to these; of the fewest, if these are fewer."""
    known = [n for n in rates if n <= keys]
    return rates[max(known, default=min(rates))]


def operations(work: Work) -> float:
    """Of a forward pass."""
    return (4 if work.full else 2) * work.tokens**2 * work.heads * work.head_dim


def part(work: Work, gpus: int) -> float:
    """Bytes of the part of k that a GPU has, which are those of v."""
    return work.tokens / gpus * work.heads_kv * work.head_dim * BYTES


def fits(work: Work, machine: Machine) -> bool:
    """True if a GPU has room for a backward pass in a ring: q, o, do, dq and its sums; k, v, two more of each, dk, dv, and three sums."""
    per_token = work.head_dim * (work.heads * (4 * BYTES + FLOAT) + 2 * work.heads_kv * (4 * BYTES + 3 * FLOAT))
    return work.tokens / machine.gpus * per_token <= ROOM


def all_fit(work: Work) -> bool:
    """True if a GPU has room for all K and V, their gradients in float32, and what is made of these to be sent."""
    return work.tokens * work.heads_kv * work.head_dim * 2 * (BYTES + 2 * FLOAT) <= ROOM


def ring(work: Work, machine: Machine) -> float:
    """Seconds of both passes."""
    gpus, n = machine.gpus, work.tokens / machine.gpus
    step = operations(work) / gpus**2
    merge = 3 * n * work.heads * work.head_dim * FLOAT / machine.memory if gpus > 1 else 0
    forward = step / rate(machine.forward, n) + merge
    backward = BACKWARD * step / rate(machine.backward, n)
    keys = 2 * part(work, gpus) / machine.link
    sums = keys * FLOAT / BYTES
    if gpus == 1:
        return forward + backward
    # while a step is computed come K and V of the next, and go gradients of the one before; the last go home when all is done
    seconds = forward + (gpus - 1) * max(forward, keys)
    return seconds + max(backward, keys) + (gpus - 2) * max(backward, keys + sums) + max(backward, sums) + sums


def gather(work: Work, machine: Machine) -> float:
    """Seconds of both passes, where K and V come to everybody before, and sums of gradients go home after."""
    gpus = machine.gpus
    keys = (gpus - 1) * 2 * part(work, gpus) / machine.link
    share = operations(work) / gpus
    kernels = share / rate(machine.forward, work.tokens) + BACKWARD * share / rate(machine.backward, work.tokens)
    return kernels + 2 * keys + keys * FLOAT / BYTES


def heads(work: Work, machine: Machine) -> float | None:
    """Seconds of both passes, where each GPU gets all tokens of some heads, and gives results back; None if heads of keys are fewer."""
    if machine.gpus > work.heads_kv:
        return None
    away = (machine.gpus - 1) / machine.gpus
    q = work.tokens / machine.gpus * work.heads * work.head_dim * BYTES * away / machine.link
    keys = 2 * part(work, machine.gpus) * away / machine.link
    share = operations(work) / machine.gpus
    kernels = share / rate(machine.forward, work.tokens) + BACKWARD * share / rate(machine.backward, work.tokens)
    return kernels + (2 * q + keys) + (4 * q + 2 * keys)  # q, k, v, o; and q, k, v, do, dq, dk, dv, o


def efficiency(work: Work, machine: Machine, seconds: float) -> float:
    """Seconds that GPUs would take which only compute, as fast as on a sequence that long, over those that they take."""
    ideal = operations(work) / rate(machine.forward, work.tokens) + BACKWARD * operations(work) / rate(machine.backward, work.tokens)
    return ideal / machine.gpus / seconds
