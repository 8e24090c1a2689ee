"""Data augmentation: images are shifted and mirrored at random in every epoch, against overfitting.

    shift:N   by up to N pixels down or up and N right or left; new pixels are 0
    flip      half of the images are mirrored, left to right

The moves are drawn for the whole batch from (seed, "augment", epoch, step), and each rank takes its slice of them: an
image moves the same way for any number of ranks."""

from typing import NamedTuple

import numpy as np

from hpcdl.errors import UsageError, unknown
from hpcdl.random import Random

DIGITS = 19  # of a 64-bit integer; Python refuses to convert thousands of digits


class Moves(NamedTuple):
    """The move of each image of a batch, int64 arrays (rows,): pixels down, pixels right, mirrored (0 or 1)."""

    down: np.ndarray
    right: np.ndarray
    mirrored: np.ndarray


class Augment:
    """Draws the moves of a batch of images of shape (height, width) or (height, width, channels)."""

    def __init__(self, features: tuple, shift: int, flip: bool, seed: int):
        self.image = (*features, 1)[:3]
        self.shift, self.flip, self.random = shift, flip, Random(seed)

    def moves(self, epoch: int, step: int, total: int, offset: int, rows: int) -> Moves:
        """Return the moves of rows [offset, offset + rows) of a batch of `total` rows."""
        random = self.random("augment", epoch, step)
        shifts = random.integers(-self.shift, self.shift + 1, (2, total))
        mirrored = random.integers(0, 1 + self.flip, total)
        mine = slice(offset, offset + rows)
        return Moves(shifts[0, mine], shifts[1, mine], mirrored[mine])


def make_augment(spec: str, features: tuple, seed: int) -> Augment | None:
    """Return the augmentation of a spec, as "shift:2,flip"; None for "". UsageError: unknown word, or no images."""
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
        shapes = "(height, width) or (height, width, channels)"
        raise UsageError(f"augment {spec!r} needs images of shape {shapes}, not {features}")
    if shift >= min(features[:2]):
        raise UsageError(f"augment {spec!r} would move images of shape {features} out of sight; use a smaller shift")
    return Augment(features, shift, flip, seed)
