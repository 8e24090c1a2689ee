"""SAGA: stochastic gradients whose variance falls to zero, by a table of the last gradient of each example.

    w <- initial values
    for each example i: a_i <- grad f_i(w);      mu <- 1/n * sum of all a_i
    for t = 1, 2, ...
        on each rank, its share B_r of the minibatch B of b examples:
            d_r <- sum over i in B_r of (grad f_i(w) - a_i),   then a_i <- grad f_i(w) for i in B_r
        d <- all-reduce sum of d_1, ..., d_N
        w <- w - lr * (d / b + mu + decay * w)
        mu <- mu + d / n

No full gradient is computed after the first, and each step computes the gradients of its batch once. (Defazio, Bach and
Lacoste-Julien, "SAGA: a fast incremental gradient method", NeurIPS 2014)

The table: of a linear model (hpcdl/models/linear_form.py) grad f_i is x_i times the slope of its loss, so a_i is one
number for each output. Every rank has the table of all n examples, by their numbers, for in the next epoch an example
may be another rank's. An epoch visits each example once, and nobody asks for a_i in the same epoch again: so what is
new in the table is exchanged once in an epoch, by an all-reduce of the n numbers of each output, of which each comes
from one rank and the others add 0. It changes no bits, whatever the number of ranks.
"""

from typing import Any

from hpcdl.checkpoint.state import Same, Summed
from hpcdl.comm import Communicator
from hpcdl.data import Batch, Data
from hpcdl.data.full_pass import whole_pass
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_scaled, scale
from hpcdl.models.layered import FlatWeights
from hpcdl.models.linear_form import linear_form
from hpcdl.models.model import unwrapped
from hpcdl.optim import Optimizer
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run


def train(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> Array:
    """Train on all ranks of `comm`; returns the parameters, the same flat vector on each. The optimizer is sgd.

    UsageError for a model that is not linear.
    """
    outputs = linear_form(unwrapped(model), "--method saga").outputs
    w = run.initial(model)
    d, mu, step = (comm.empty(like=w) for _ in range(3))
    mu[:] = step[:] = 0
    add_scaled(mu, step, 1.0)  # compiled before any clock runs
    scale(mu, 1.0)
    table = GradientTable(comm, unwrapped(model), data.examples, outputs)
    run.track("table", Same(table.slopes))
    run.track("table_new", Summed(table.new))
    run.track("mean_gradient", Same(mu))
    run.report(method="saga")
    run.begin("svrg", Whole(model, w, optimizer), data, ("method",))
    size, per_epoch, _ = run.plan(data)
    for t, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        if t == 0:
            for part in whole_pass(comm, data, size, batch.epoch):
                table.differences(w, part, mu)
            comm.all_reduce(mu)
            scale(mu, 1 / data.examples)
            table.exchange()
        d[:] = 0
        loss = table.differences(w, batch, d)
        comm.all_reduce(d)
        step[:] = mu
        add_scaled(step, d, 1 / batch.total)
        optimizer.update(w, step)
        add_scaled(mu, d, 1 / data.examples)
        if (t + 1) % per_epoch == 0:
            table.exchange()
        run.record(loss, batch.total)
        run.boundary()
    run.report(gradients_per_example=run.examples / data.examples + 1)
    return w


class GradientTable:
    """slopes (examples, outputs): of the losses, as they were when each example was visited last before this epoch.

    new: of those that this rank has visited in this epoch; 0 of all others.
    """

    def __init__(self, comm: Communicator, model: Any, examples: int, outputs: int):
        self.comm, self.model = comm, model
        self.slopes, self.new = (comm.empty(examples * outputs, model.dtype) for _ in range(2))
        self.slopes[:] = self.new[:] = 0
        self.rows, self.new_rows = (each.reshape(examples, outputs) for each in (self.slopes, self.new))

    def differences(self, w: Array, batch: Batch, d: Array) -> float:
        """d <- d + sum over the batch of (grad f_i(w) - a_i); notes the new slopes; returns the sum of losses."""
        self.model.check_arrays(batch.x, batch.y, w, d)
        weights, layers = FlatWeights(self.model, w, d), range(len(self.model.layers))
        (loss, _), kept = self.model.forward(weights, batch.x, layers, batch.y)
        slopes = kept[-1][1]  # of the loss by the outputs, which goes backward from here
        self.new_rows[batch.index] = slopes
        slopes -= self.rows[batch.index]
        self.model.backward(weights, kept, None, layers)
        return loss

    def exchange(self) -> None:
        """An epoch is over, in which one rank has visited each example: the new slopes are the table; collective."""
        self.comm.all_reduce(self.new)
        self.slopes[:] = self.new
        self.new[:] = 0
