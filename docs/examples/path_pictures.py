"""Pictures for find_path.py: dashed curves, of which every second is interrupted, and two marks at the ends of one of them.

The question is whether the marked curve is whole. Every picture has as many whole curves as interrupted ones, drawn in the same way, and
the marks are at the ends of one that is chosen at random among those of the wanted kind. So neither the marks (how far apart, where, in
which direction the curve leaves them) nor the picture without them says anything about the answer: one has to follow the curve.

Lengths are in pixels and the same in pictures of all sizes, but for those of the curves.
"""

from typing import NamedTuple

import numpy as np

DASH, GAP = 4, 2
CUT = 8  # missing from an interrupted curve, somewhere about its middle
JOINED, APART = 3, 4  # what is no further away, along an axis, is a step of a path; curves are further than that from each other
ATTEMPTS = 60  # at a place for a curve
PAPER, INK, START, GOAL = range(4)


class Scene(NamedTuple):
    """What is in a picture: how many curves, an even number, of which length."""

    curves: int
    length: int


SCENES = {32: Scene(2, 24), 64: Scene(4, 36), 128: Scene(8, 56), 256: Scene(16, 80)}  # by pixels along a side


class Pictures(NamedTuple):
    """Some pictures (B, S, S) and what is asked of them."""

    grey: np.ndarray  # PAPER, INK, START or GOAL
    reached: np.ndarray  # (2, B, S, S), boolean: ink that a path joins with the start, and with the goal
    answer: np.ndarray  # (B,), boolean: does a path join the two?


def wander(rng, count, length, size):
    """Smooth curves as pixels y and x (count, 2 * length), two for each unit of length; and which fit and meet themselves nowhere."""
    s = np.arange(2 * length) / 2
    uniform = lambda low, high: rng.uniform(low, high, (count, 1))
    wave = np.sin(uniform(0, 2 * np.pi) + 2 * np.pi * s / uniform(24, 48))
    heading = uniform(0, 2 * np.pi) + uniform(-0.03, 0.03) * s + uniform(0.2, 0.8) * wave
    points = np.cumsum([np.sin(heading) / 2, np.cos(heading) / 2], axis=2)
    points -= points.min(2, keepdims=True)
    room = size - 3 - points.max(2, keepdims=True)  # marks reach one pixel beyond the ends
    y, x = np.floor(points + 1 + rng.random(room.shape) * np.maximum(room, 0)).astype(np.int64)
    fits = (room > 0).all((0, 2))
    far = abs(s[::2, None] - s[::2]) > CUT
    some = np.stack([y, x])[:, fits, ::2].astype(np.int16)
    close = abs(some[..., None] - some[..., None, :]) <= JOINED + 1
    fits[fits] = ~(close[0] & close[1] & far).any((1, 2))
    return y, x, fits


def place(rng, count, size, scene):
    """Curves (2, pictures, curves, 2 * length) that are apart from each other; of `count` pictures those in which all found a place."""
    placed = np.zeros((2, count, scene.curves, 2 * scene.length), np.int64)
    blocked = np.zeros((count, size + 2 * APART, size + 2 * APART), bool)
    around, complete, some = np.arange(2 * APART + 1), np.ones(count, bool), np.r_[: 2 * scene.length : 2, -1]
    for curve in range(scene.curves):
        left = np.arange(count)  # pictures that lack this one
        for _ in range(ATTEMPTS):
            y, x, fits = wander(rng, len(left), scene.length, size)
            fits[fits] = ~blocked[left[fits, None], y[fits] + APART, x[fits] + APART].any(1)
            here, y, x = left[fits], y[fits], x[fits]
            placed[:, here, curve] = y, x
            blocked[here[:, None, None, None], y[:, some, None, None] + around[:, None], x[:, some, None, None] + around] = True
            left = left[~fits]
            if not left.size:
                break
        complete[left] = False
    return placed[:, complete]


def draw(rng: np.random.Generator, count: int, size: int) -> Pictures:
    """Random pictures."""
    scene = SCENES[size]
    placed = place(rng, count, size, scene)
    while placed.shape[1] < count:
        placed = np.concatenate([placed, place(rng, count - placed.shape[1] + 2, size, scene)], axis=1)
    y, x = placed[:, :count]

    number = rng.permuted(np.tile(np.arange(scene.curves), (count, 1)), axis=1)
    s, middle = np.arange(2 * scene.length) / 2, rng.uniform(0.35, 0.65, (count, scene.curves, 1)) * scene.length
    missing = (abs(s - middle) < CUT / 2) & (number % 2 == 1)[..., None]
    dashes = (s + rng.uniform(0, DASH + GAP, middle.shape)) % (DASH + GAP) < DASH
    ink = dashes & ~missing
    grey = np.full((count, size, size), PAPER, np.uint8)
    picture, curve, step = np.nonzero(ink)
    grey[picture, y[picture, curve, step], x[picture, curve, step]] = INK

    answer = rng.random(count) < 0.5
    marked = np.nonzero(number == np.where(answer, 0, 1)[:, None])
    backwards = rng.random(count) < 0.5  # the start is at the last point
    return mark(grey, y[marked], x[marked], ink[marked], (s < middle[marked]) ^ backwards[:, None], answer)


def mark(grey, y, x, ink, first, answer):
    """Draws the marks at the ends of one curve (B, 2 * length) for each picture; `first` says which points are in the half at the start."""
    reached = np.zeros((2, *grey.shape), bool)
    everyone, near = np.arange(len(grey)), np.arange(-1, 2)
    for end, half in enumerate((first, ~first)):
        picture, step = np.nonzero(ink & (half | answer[:, None]))
        reached[end, picture, y[picture, step], x[picture, step]] = True
        at = np.where(half[:, 0], 0, -1)
        square = everyone[:, None, None], y[everyone, at][:, None, None] + near[:, None], x[everyone, at][:, None, None] + near
        grey[square] = (START, GOAL)[end]
        reached[(end, *square)] = True
        reached[(1 - end, *square)] |= answer[:, None, None]
    return Pictures(grey, reached, answer)


def show(path, pictures, reached, answer):
    """Saves the pictures, and beside each what a model makes of them: logits (B, S, S) of its ink, (B,) of the answer."""
    from matplotlib.figure import Figure

    figure, sigmoid = Figure(figsize=(10, 5 * len(reached)), layout="constrained"), lambda z: 1 / (1 + np.exp(-z))
    axes = figure.subplots(len(reached), 2, squeeze=False)
    for row, grey, of_ink, z, truth in zip(axes, pictures.grey, reached, answer, pictures.answer, strict=True):
        row[0].imshow(grey, cmap="Greys")
        row[0].set(title=f"{'a path' if truth else 'no path'}; of a path the model says {sigmoid(z):.0%}", xticks=[], yticks=[])
        row[1].imshow(np.where(grey == PAPER, np.nan, sigmoid(of_ink)), vmin=0, vmax=1)
        row[1].set(title="what it thinks is joined with the start", xticks=[], yticks=[])
    figure.savefig(path, dpi=80)
