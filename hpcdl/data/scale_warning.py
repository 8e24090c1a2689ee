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


def scales(data: Any) -> tuple[float, float, float] | None:
    """Smallest deviation and largest root mean square of the features, and of the values to predict (0: of classes).

    None where nothing is to be said: of images and tokens, and where rows are standardized.
    """
    if data.sparse or len(data.features) != 1 or data.vocabulary is not None or data.statistics:
        return None
    x, y = (each.astype(np.float64) for each in data.train.rows(0, min(ROWS, data.train.examples)))
    deviation, square = x.std(axis=0), np.sqrt(np.square(x).mean(axis=0))
    moving = deviation[deviation > 1e-9 * square.max()]
    target = 0.0 if data.classes else float(np.sqrt(np.square(y).mean()))
    return (float(moving.min()) if len(moving) else 1.0), float(square.max()), target


def unlike(found: tuple[float, float, float] | None) -> str | None:
    """What is to be said of such scales, if anything."""
    if found is None:
        return None
    low, high, target = found
    said = [f"the features have scales from {low:.2g} to {high:.2g}"] * (high >= max(LARGE, RATIO * min(low, 1.0)))
    said += [f"the values to predict are of the size {target:.2g}"] * (target >= RATIO)
    return f"{' and '.join(said)}: --standardize gives them one" if said else None
