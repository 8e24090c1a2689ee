"""Small legs of a run whose ranks are lost: rows, options, and what is raised in the place of MPI's error."""

import numpy as np

from hpcdl.data import from_arrays
from hpcdl.runs.options import Options


class Failed(Exception):
    """In the place of what MPI raises."""


def rows():
    """29 examples of 3 classes."""
    random = np.random.default_rng(4)
    x, y = random.standard_normal((29, 6)), random.integers(0, 3, 29)
    return from_arrays(x, y, x[:11], y[:11], dtype="float64")


def options_of(**more):
    small = {"epochs": 4, "batch_size": 13, "dtype": "float64", "allreduce": "ring", "progress": "none", "out": "none"}
    return Options(**small | more)
