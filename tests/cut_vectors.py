"""A vector of tensors that are cut over ranks in every way: what a rank has of it."""

import numpy as np

from hpcdl.chunks import chunk
from hpcdl.models.layout import Hyperslab, Layout, Tensor, piece

SHAPES = {"rows": (7, 3), "columns": (6, 7), "blocks": (3, 2, 8), "alike": (4,), "few": (1, 2)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
AXES = {"rows": 0, "columns": 1, "blocks": 2, "few": 0}  # few: ranks beyond the first have nothing of it
CUTS = {"layers": {}, "tensors": AXES, "columns": {"columns": 1, "blocks": 2}, "rows": {"rows": 0, "few": 0}}


def laid_out(shapes):
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(Tensor(name, shape, offset, "layer"))
        offset += int(np.prod(shape))
    return Layout(tensors, "float64")


def cut(how, rank, ranks):
    """What a rank has: pieces with whether it speaks for them, and the numbers of their elements in the whole.
    What is not cut, all ranks have; "chunks": a slice of the vector, whatever tensors are."""
    numbers, whole, axes = np.arange(SIZE), laid_out(SHAPES), CUTS.get(how)
    if axes is None:
        at = chunk(SIZE, ranks, rank)
        length = at.stop - at.start
        return [(Hyperslab(0, at.start, 1, length, length), True)], numbers[at]
    own = {name: whole.view(numbers, name) for name in SHAPES}
    for name, axis in axes.items():
        own[name] = own[name][(slice(None),) * axis + (chunk(SHAPES[name][axis], ranks, rank),)]
    part = laid_out({name: view.shape for name, view in own.items()})
    found = [
        (piece(part.tensors[n], tensor, axes.get(n), rank, ranks), axes.get(n) is not None or rank == i % ranks)
        for i, (n, tensor) in enumerate(whole.tensors.items())
    ]
    return found, np.concatenate([view.ravel() for view in own.values()])
