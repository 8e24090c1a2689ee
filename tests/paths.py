"""Parameters after each step of two runs, compared; and where parts of a vector lie."""

import numpy as np


def agree(run, reference, tolerance=1e-10):
    """Two runs, or their paths, take the same steps; tolerance 0: to the bit."""
    path, wanted = (getattr(each, "path", each) for each in (run, reference))
    assert len(path) == len(wanted) > 0
    for step, (mine, other) in enumerate(zip(path, wanted, strict=True)):
        bound = tolerance * max(1, np.abs(other).max(initial=0))
        assert np.array_equal(mine, other) or np.abs(mine - other).max(initial=0) <= bound, f"step {step}"


def places(piece):
    """The numbers of the elements of a piece in the whole vector."""
    return np.add.outer(piece.start + piece.stride * np.arange(piece.blocks), np.arange(piece.length)).reshape(-1)
