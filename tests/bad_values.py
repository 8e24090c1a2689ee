"""Arguments of kernels with numbers that are not finite."""

import copy

import numpy as np


def with_bad(args, bad=np.nan):
    """The same, with `bad` somewhere in each array of numbers."""
    random, changed = np.random.default_rng(1), [copy.copy(arg) for arg in args]
    for array in changed:
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            array.flat[random.integers(array.size)] = bad
    return changed
