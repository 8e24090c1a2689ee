"""The warning about features of very different scales, which no single learning rate fits, before a run begins.

Gradient descent is stable for rates below 2 / L, and the curvature L grows with the square of the largest feature: the
weight of the smallest one then hardly moves. Scales are measured over some training rows, as the model sees them."""

from typing import Any

import numpy as np

ROWS = 4096  # examined
RATIO = 100.0  # warn if largest root mean square / smallest deviation reaches this
LARGE = 3.0  # root mean square; smaller features never warn (edge pixels hardly vary)


def feature_scales(data: Any) -> tuple[float, float, float] | None:
    """Return (smallest deviation of a feature, largest root mean square of a feature, root mean square of the targets,
    0 for classes). None: data without a warning, as images, tokens, sparse or standardized rows."""
    if data.sparse or len(data.features) != 1 or data.vocabulary is not None or data.statistics:
        return None
    x, y = (each.astype(np.float64) for each in data.train.rows(0, min(ROWS, data.train.examples)))
    deviation, square = x.std(axis=0), np.sqrt(np.square(x).mean(axis=0))
    moving = deviation[deviation > 1e-9 * square.max()]
    target = 0.0 if data.classes else float(np.sqrt(np.square(y).mean()))
    return (float(moving.min()) if len(moving) else 1.0), float(square.max()), target


def scale_warning(scales: tuple[float, float, float] | None) -> str | None:
    """Return the warning about these scales; None: none is needed."""
    if scales is None:
        return None
    low, high, target = scales
    warnings = [f"the features have scales from {low:.2g} to {high:.2g}"] * (high >= max(LARGE, RATIO * min(low, 1.0)))
    warnings += [f"the values to predict are of the size {target:.2g}"] * (target >= RATIO)
    return f"{' and '.join(warnings)}: add --standardize" if warnings else None
