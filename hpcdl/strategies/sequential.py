"""Sequential minibatch SGD: the algorithm that all other strategies distribute, and are compared with.

    w <- initial values
    for t = 0, 1, 2, ...
        draw a minibatch B of b examples
        g <- 1/b * sum over i in B of grad f(w; x_i, y_i)
        w <- w - lr * g              (or the rule of the optimizer)

With b = all examples it is full gradient descent. (Robbins and Monro, "A stochastic approximation method", 1951)"""

from typing import Any

from hpcdl.kernels.device import Array
from hpcdl.runs.options import Options
from hpcdl.strategies.description import Communicator, Data, Memory, Optimizer, Run, StepCost, Strategy, Workload


def train(comm: Communicator, model: Any, data: Data, optimizer: Optimizer, run: Run) -> Array:
    """Train on one rank; return the parameters, a flat vector."""
    from hpcdl.runs.ownership import Whole

    parameters = model.initialize(run.random)
    gradient = comm.empty(like=parameters)
    run.begin("sequential", Whole(model, parameters, optimizer), data)
    for batch in run.batches(data, share=(0, 1)):
        gradient[:] = 0
        loss = model.loss_and_gradient(parameters, batch, gradient)
        optimizer.update(parameters, gradient, scale=1 / batch.total)
        run.record(loss, batch.total)
        run.boundary()
    return parameters


def held(case: Workload, rank: int, memory: Memory) -> None:
    """Add to `memory` parameters, gradient, the optimizer's vectors, and the activations of a batch."""
    case.hold_step(memory, case.batch)


def step(case: Workload) -> StepCost:
    return StepCost(case.batch, [(case.batch, 1)], drawn=case.batch)


STRATEGY = Strategy("train-sequential", Options, train, held, step, ranks=1, small="--model mlp:32 --batch-size 8")
