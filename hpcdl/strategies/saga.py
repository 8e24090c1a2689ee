"""SAGA: stochastic gradients whose variance falls to zero, by a table of the last gradient of each example.

    w <- initial values
    for each example i: a_i <- grad f_i(w);      mu <- 1/n * sum of all a_i
    for t = 1, 2, ...
        on each rank, its share B_r of the minibatch B of b examples:
            d_r <- sum over i in B_r of (grad f_i(w) - a_i),   then a_i <- grad f_i(w) for i in B_r
        d <- all-reduce sum of d_1, ..., d_N
        w <- w - lr * (d / b + mu + decay * w)
        mu <- mu + d / n

The model is linear (hpcdl/models/linear_form.py): grad f_i is x_i times the slope of its loss, so a_i is one number per
output. Every rank has the table of all n examples, because an example may belong to another rank in the next epoch. An
epoch reads each a_i once, so the new entries are exchanged once per epoch, by an all-reduce in which each number comes
from one rank and the others add 0: the bits are the same for any number of ranks.

(Defazio, Bach and Lacoste-Julien, "SAGA: a fast incremental gradient method", NeurIPS 2014)"""

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
    """Train with sgd on all ranks of `comm`; return the same parameters on each. UsageError for a nonlinear model."""
    outputs = linear_form(model, "--method saga").outputs
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
    """The slopes of the losses by the outputs. slopes: at each example's last visit before this epoch. new: at this
    rank's visits in this epoch; elsewhere 0. Both are flat; `rows` and `new_rows` view them as (examples, outputs)."""

    def __init__(self, comm: Communicator, model: Any, examples: int, outputs: int):
        self.comm, self.model = comm, model
        self.slopes, self.new = (comm.empty(examples * outputs, model.dtype) for _ in range(2))
        self.slopes[:] = self.new[:] = 0
        self.rows, self.new_rows = (each.reshape(examples, outputs) for each in (self.slopes, self.new))

    def differences(self, w: Array, batch: Batch, d: Array) -> float:
        """Add to d the sum over the batch of (grad f_i(w) - a_i), and note the new slopes; return the sum of losses."""
        self.model.check_arrays(batch.x, batch.y, w, d)
        weights, layers = FlatWeights(self.model, w, d), range(len(self.model.layers))
        (loss, _), kept = self.model.forward(weights, batch.x, layers, batch.y)
        slopes = kept[-1][1]  # of the loss by the outputs; backward starts from it
        self.new_rows[batch.index] = slopes
        slopes -= self.rows[batch.index]
        self.model.backward(weights, kept, None, layers)
        return loss

    def exchange(self) -> None:
        """End an epoch, in which each example was visited on one rank: the new slopes become the table. Collective."""
        self.comm.all_reduce(self.new)
        self.slopes[:] = self.new
        self.new[:] = 0
