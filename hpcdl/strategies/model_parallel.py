"""Model parallelism by layers (vertical partition): consecutive layers on consecutive ranks.

    rank 0    x -> layers 1 2 3  --- activations --->                                  <- gradients -  layers 3 2 1
    rank 1                          layers 4 5 6  --- activations --->   <- gradients -  layers 6 5 4
    rank 2                                           layers 7 8, loss  layers 8 7

It lets a model fit that fits on no rank, and no more: one rank computes at a time, the others wait, (p-1)/p of the time
of p ranks. hpcdl/strategies/pipeline.py fills that time. Between neighbours travel rows * width values forward and as
many backward; nothing is reduced but the gradient of weights that the first and the last layer share (tied).

balance: the layers are cut so that the most expensive rank has as little as can be, by their parameters or by the time
that they were measured to take (hpcdl/models/balance.py).
"""

from hpcdl.comm.grid import two_ends
from hpcdl.models.part import Part
from hpcdl.runs.straggler import unslowed
from hpcdl.parallel.holding import Holding
from hpcdl.parallel.stage import Stage, place_layers


def train(comm, model, data, optimizer, run, balance="parameters"):
    """Train on all ranks of `comm`; returns the parameters of this rank's layers."""
    part = Part(unslowed(model), place_layers(run, model, data, comm, balance=balance))
    alone, ends = run.until_end(comm.split(comm.rank, name="data")), run.until_end(two_ends(comm))
    held = Holding(run, part, optimizer, alone, [(ends, part.tied())], counts=comm.rank == comm.size - 1)
    stage = Stage(comm, part, held.store(), model)
    held.descend, held.score = stage.descend, stage.score
    run.begin("model_parallel", model, held.parameters, held.optimizer, data, part=held)
    stage.done.clear()  # what was tried out

    for batch in run.batches(data, held.share):
        held.zero()
        loss = sum(map(stage.descend, batch.split(run.options.accumulate)))  # which knows what stragglers take
        held.update(batch.total)
        run.record(loss, batch)
        run.boundary()
    run.extra |= stage.costs(run)
    return held.parameters
