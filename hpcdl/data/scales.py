"""Features of very different scale, which one learning rate cannot fit: said before a run begins, not when it is over.

Gradient descent is stable for rates below 2 / L, and L grows with the square of the largest feature; the smallest one
then hardly moves. Measured is the root mean square of each feature over some of the training rows, as the model sees
them, and the deviation of those that change.
"""

from typing import Any

import numpy as np

ROWS = 4096  # that are looked at
RATIO = 100.0  # of the largest root mean square to the smallest deviation, from which on it is said
LARGE = 3.0  # no model minds features below: such as the pixels of an edge, which hardly ever change


def scales(data: Any) -> tuple[float, float] | None:
    """(smallest deviation, largest root mean square) of the features, where they are columns of a table, else None.

    Images and tokens are none; nor are features that are standardized.
    """
    if len(data.features) != 1 or data.vocabulary is not None or data.statistics:
        return None
    x = data.train.rows(0, min(ROWS, data.train.examples))[0].astype(np.float64)
    deviation, square = x.std(axis=0), np.sqrt(np.square(x).mean(axis=0))
    moving = deviation[deviation > 1e-9 * square.max()]
    return (float(moving.min()), float(square.max())) if len(moving) else None


def unlike(found: tuple[float, float] | None) -> str | None:
    """What is to be said of such scales, if anything."""
    if found is None or found[1] < max(LARGE, RATIO * min(found[0], 1.0)):
        return None
    return f"the features have scales from {found[0]:.2g} to {found[1]:.2g}: --standardize gives them one"
