"""A pass over all training examples beside the batches of the steps: for full gradients, and tables of all examples.

Each rank reads its share of batches that are larger than those of a step, for nothing is updated in between. The order
is that of the epoch under way, which the reader of the data has at hand.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcdl.comm import Communicator
from hpcdl.data import Batch
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import scale

if TYPE_CHECKING:
    from hpcdl.runs.run import Run

ROWS = 1024  # of a rank's share, at least, where there are so many


def whole_pass(comm: Communicator, data: Any, run: "Run") -> Iterator[Batch]:
    """This rank's share of all training examples, each of them once on one of the ranks of `comm`."""
    size = max(run.batch, min(ROWS * comm.size, data.examples))
    yield from data.batches(run.step // run.per_epoch, size, (comm.rank, comm.size))


def full_gradient(comm: Communicator, model: Any, data: Any, run: "Run", w: Array, mean: Array) -> None:
    """mean <- 1/n sum over all n training examples of grad f_i(w), the same on all ranks of `comm`; collective."""
    mean[:] = 0
    for batch in whole_pass(comm, data, run):
        model.loss_and_gradient(w, batch, mean)
    comm.all_reduce(mean)
    scale(mean, 1 / data.examples)
