"""Fully sharded data parallelism: data-parallel training in which no rank holds all of the model.

    for each batch, on each rank its share of it
        forward     for layer 1, 2, ..., L     all-gather its parameters; compute; free them
        backward    for layer L, ..., 2, 1     all-gather its parameters; compute; free them
                                               reduce-scatter its gradient; keep 1/N of the sum
        update      1/N of the parameters, by 1/N of the gradient and of the optimizer's state

That is stage 3. At stage 2 parameters stay whole, and are all-gathered after the update; at stage 1 the gradient does,
too. What is held and what is sent stands in hpcdl/parallel/holding.py, which does it. In bytes for each parameter, in
float32 with Adam (parameter 4, gradient 4, moments 8):

    stage     0     1             2              3
    bytes    16     8 + 8 / N     4 + 12 / N     16 / N

gather: "all-gather" cuts every layer into N chunks. "broadcast" gives each layer to one rank, who sends it to the
others when its turn comes, and to whom the gradients are reduced, as a lecture may draw it: simpler, but as uneven as
the layers, and the owner sends while others wait.

The steps are those of all-reduce SGD. (Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023)
"""

from hpcdl.models.part import Part
from hpcdl.runs.straggler import unslowed
from hpcdl.parallel.holding import Holding


def train(comm, model, data, optimizer, run, stage=3, gather="all-gather"):
    """Train on all ranks of `comm`; returns the parameters that this rank holds."""
    held = Holding(run, Part(unslowed(model)), optimizer, comm, stage=stage, owners=gather == "broadcast")
    run.extra |= {"stage": stage, "gather": gather}
    run.begin("fully_sharded", model, held.parameters, held.optimizer, data, part=held)

    for batch in run.batches(data, held.share):
        loss = held.backward(batch)
        held.update(batch.total)
        run.record(loss, batch)
        run.boundary()
    return held.parameters
