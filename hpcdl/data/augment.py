"""Augmentation: the same images, moved a little in every epoch, so that the model does not learn them by heart.

    shift:N   up to N pixels down or up and N right or left; what comes in is 0
    flip      left and right change places in half of the images

The moves are drawn for the whole batch from (seed, "augment", epoch, step), then each rank takes its own slice of them:
an image moves the same way whatever the number of ranks. The moving itself happens while a batch is gathered.
"""

from typing import NamedTuple

import numpy as np

from hpcdl.errors import UsageError, unknown
from hpcdl.random import Random

DIGITS = 19  # of whole numbers of 64 bits, all of them; Python makes none of thousands


class Moves(NamedTuple):
    """How each image of a batch moves, three int64 arrays (rows,): pixels down, pixels right, mirrored (0 or 1)."""

    down: np.ndarray
    right: np.ndarray
    mirrored: np.ndarray


class Augment:
    """Draws the moves of a batch of images of shape (height, width) or (height, width, channels)."""

    def __init__(self, features: tuple, shift: int, flip: bool, seed: int):
        self.image = (*features, 1)[:3]
        self.shift, self.flip, self.random = shift, flip, Random(seed)

    def moves(self, epoch: int, step: int, total: int, offset: int, rows: int) -> Moves:
        """The moves of rows [offset, offset + rows) of a batch of `total`."""
        random = self.random("augment", epoch, step)
        shifts = random.integers(-self.shift, self.shift + 1, (2, total))
        mirrored = random.integers(0, 1 + self.flip, total)
        mine = slice(offset, offset + rows)
        return Moves(shifts[0, mine], shifts[1, mine], mirrored[mine])


def make_augment(spec: str, features: tuple, seed: int) -> Augment | None:
    """Read `shift:2`, `flip` or `shift:2,flip`; None for the empty text. UsageError: unknown word, or not images."""
    shift, flip = 0, False
    for word in filter(None, spec.split(",")):
        name, _, text = word.partition(":")
        if name == "shift" and text.isdecimal() and len(text) < DIGITS and int(text) > 0:
            shift = int(text)
        elif word == "flip":
            flip = True
        elif name == "shift":
            raise UsageError(f"augment {word!r}: write shift:N with a whole number of pixels, as in shift:2")
        else:
            raise unknown("augment", word, ("shift:N", "flip"))
    if not shift and not flip:
        return None
    if len(features) not in (2, 3):
        raise UsageError(
            f"augment {spec!r} needs images of shape (height, width) or (height, width, channels), not {features}"
        )
    if shift >= min(features[:2]):
        raise UsageError(f"augment {spec!r} would move a whole image of {features} out of sight; use a smaller shift")
    return Augment(features, shift, flip, seed)
