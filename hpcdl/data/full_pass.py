"""A pass over all training examples beside the batches of the steps: for full gradients, and tables of all examples.

Each rank reads its share of batches that are larger than those of a step, for nothing is updated in between. The order
is that of the epoch under way, which the reader of the data has at hand.
"""

from collections.abc import Iterator
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import scale

ROWS = 1024  # of a rank's share, at least, where there are so many


def batch_of_pass(ranks: int, examples: int, batch: int) -> int:
    """Return the examples of a batch of the pass, on all ranks together; batch: those of a step."""
    return max(batch, min(ROWS * ranks, examples))


def whole_pass(comm: Communicator, data: Any, batch: int, epoch: int) -> Iterator[Batch]:
    """This rank's share of all training examples, each of them once on one of the ranks of `comm`.

    batch: examples of a step.
    """
    yield from data.batches(epoch, batch_of_pass(comm.size, data.examples, batch), (comm.rank, comm.size))


def full_gradient(comm: Communicator, model: Any, data: Any, batch: int, epoch: int, w: Array, mean: Array) -> None:
    """mean <- 1/n sum over all n training examples of grad f_i(w), the same on all ranks of `comm`; collective."""
    mean[:] = 0
    for part in whole_pass(comm, data, batch, epoch):
        model.loss_and_gradient(w, part, mean)
    comm.all_reduce(mean)
    scale(mean, 1 / data.examples)
