"""Passes over all training examples, in batches larger than a step's: for full gradients, and tables of all examples.
The order is that of the current epoch, which the reader of the data has already drawn."""

from collections.abc import Iterator
from typing import Any

from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import scale

ROWS = 1024  # least rows of a rank's share of a batch, if the data have so many


def batch_of_pass(ranks: int, examples: int, batch: int) -> int:
    """Return the number of examples in a batch of the pass, all ranks together; batch: the number in a step's batch."""
    return max(batch, min(ROWS * ranks, examples))


def whole_pass(comm: Communicator, data: Any, batch: int, epoch: int) -> Iterator[Batch]:
    """Yield this rank's share of all training examples, each once on one rank of `comm`. batch: examples of a step."""
    yield from data.batches(epoch, batch_of_pass(comm.size, data.examples, batch), (comm.rank, comm.size))


def full_gradient(comm: Communicator, model: Any, data: Any, batch: int, epoch: int, w: Array, mean: Array) -> None:
    """Set mean to 1/n sum of grad f_i(w) over all n training examples, the same on all ranks of `comm`; collective."""
    mean[:] = 0
    for part in whole_pass(comm, data, batch, epoch):
        model.loss_and_gradient(w, part, mean)
    comm.all_reduce(mean)
    scale(mean, 1 / data.examples)
