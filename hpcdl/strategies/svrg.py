"""SVRG: stochastic gradients whose variance falls to zero, by a full gradient now and then; a constant rate suffices.

    w <- initial values
    for s = 0, 1, 2, ...
        v <- w                                           the snapshot
        mu <- 1/n * sum over all i of grad f_i(v)        each rank over its share; one all-reduce
        for t = 1, ..., m
            on each rank, its share B_r of the minibatch B of b examples:
                d_r <- sum over i in B_r of (grad f_i(w) - grad f_i(v))
            d <- all-reduce sum of d_1, ..., d_N
            w <- w - lr * (d / b + mu + decay * w)
        where the snapshot is to be random: w <- the w before a step t that was drawn for s

d / b + mu has the mean of the full gradient, and a variance that goes to zero where w and v come near to the optimum:
so SGD at a constant rate stalls at a distance to the optimum, and this does not. On strongly convex problems the
suboptimality of the snapshots falls by a constant factor in each round. The penalty decay/2 |w|^2 is part of the
function, and its gradient is taken as it is. (Johnson and Zhang, "Accelerating stochastic gradient descent using
predictive variance reduction", NeurIPS 2013)

Each step costs one all-reduce of the parameters' length, as with SGD, and two gradients of the batch; each round one
all-reduce more, and a gradient of all examples.
"""

from typing import Any

from hpcdl.checkpoint.state import Same
from hpcdl.comm import Communicator
from hpcdl.data import Data
from hpcdl.kernels.device import Array
from hpcdl.kernels.reduce import add_scaled, scale
from hpcdl.optim import Optimizer
from hpcdl.runs.full_pass import full_gradient
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run


def train(
    comm: Communicator,
    model: Any,
    data: Data,
    optimizer: Optimizer,
    run: Run,
    inner_epochs: float = 2.0,
    snapshot: str = "last",
) -> Array:
    """Train on all ranks of `comm`; returns the parameters, the same flat vector on each.

    inner_epochs: the steps m of a round, in epochs. snapshot: last (the paper's option I) or random (option II). The
    optimizer is sgd.
    """
    w = run.initial(model)
    d, v, mu = (comm.empty(like=w) for _ in range(3))
    d[:] = v[:] = mu[:] = 0
    scale(d, -1.0)  # compiled before any clock runs
    add_scaled(d, mu, 1.0)
    size, per_epoch, _ = run.plan(data)
    m = max(1, round(inner_epochs * per_epoch))
    run.track("snapshot", Same(v))
    run.track("full_gradient", Same(mu))
    drawn = comm.empty(like=w) if snapshot == "random" else None
    if drawn is not None:
        drawn[:] = w
        run.track("drawn", Same(drawn))
    run.report(method="svrg", inner_steps=m, snapshot=snapshot)
    run.begin("svrg", Whole(model, w, optimizer), data, ("method", "inner_steps", "snapshot"))
    for step, batch in enumerate(run.batches(data, share=(comm.rank, comm.size)), run.step):
        s, t = divmod(step, m)
        if t == 0:
            v[:] = w
            full_gradient(comm, model, data, size, batch.epoch, v, mu)
        if drawn is not None and t == run.random("snapshot", s).integers(m):
            drawn[:] = w
        d[:] = 0
        model.loss_and_gradient(v, batch, d)
        scale(d, -1.0)
        loss = model.loss_and_gradient(w, batch, d)
        comm.all_reduce(d)
        scale(d, 1 / batch.total)
        add_scaled(d, mu, 1.0)
        optimizer.update(w, d)
        if drawn is not None and t == m - 1:
            w[:] = drawn
        run.record(loss, batch.total)
        run.boundary()
    end = run.progress
    rounds = -(-end.step // m)
    run.report(snapshots=rounds, gradients_per_example=2 * end.examples / data.examples + rounds)
    return w
