"""Layers on consecutive ranks: steps are those of sequential SGD; two messages a boundary and part of a batch."""

import pytest

from hpcdl.faults.straggler import StragglerModel
from hpcdl.random import Random
from hpcdl.strategies import model_parallel

ADAM = "adam:eps=0.001"  # what is 0 but for rounding makes no large steps
DEEP = "mlp:5,4,6"
GPT = "gpt:layers=1,width=8,heads=2,context=12"  # 5 layers


@pytest.mark.parametrize(
    "model, own, options",
    [
        (DEEP, {}, {"optimizer": "sgd"}),
        (DEEP, {"balance": "measured"}, {"optimizer": ADAM, "accumulate": 3}),
        (DEEP, {}, {"clip_norm": 0.05, "batch_size": 1}),
        ("mlp:5,4,6,activation=tanh", {}, {"batch_size": 8, "accumulate": 8}),  # of the last batch some are empty
        (GPT, {}, {"clip_norm": 0.1, "accumulate": 2}),
        (GPT, {"balance": "measured"}, {"optimizer": ADAM}),
        (f"{GPT},head=own", {}, {"allreduce": "naive"}),
    ],
    ids=str,
)
def test_steps_are_those_of_sequential_sgd(model, own, options, cut, world):
    cut(world, model_parallel.train, own, model, **options)


def test_messages_and_what_a_rank_holds(cut, comm):
    """Activations one way, their gradients the other; a part of a batch is in flight at a time."""
    run = cut(comm, model_parallel.train, {}, DEEP, epochs=1, accumulate=2, optimizer=ADAM)
    pushed, part = run.comm.traffic["push"], run.held.part
    widths = [(6, 5, 4, 6, 3)[each] for each in (part.chunks[0].start, part.chunks[0].stop) if each not in (0, 5)]
    assert len(widths) == (comm.rank > 0) + (comm.rank < comm.size - 1)
    assert pushed.messages == len(cut.micro_batches(2)) * len(widths)
    assert run.comm.traffic.bytes == pushed.bytes == 8 * 29 * sum(widths)
    assert run.reported["in_flight_per_rank"] == [1] * comm.size
    peak = [run.memory.peak[kind] // 8 for kind in ("parameters", "gradients", "optimizer")]
    assert peak == [part.size, part.size, 2 * part.size]
    assert sum(comm.allgather(part.size)) == run.model.layout.size


@pytest.mark.long
@pytest.mark.four
def test_a_straggler_is_slowed_once(cut, world):
    """In forward and in backward of each part of a batch, and of what is tried out before."""
    slow = []

    def train(comm, model, *others):
        slow.append(StragglerModel(model, 1, 0, 0, Random(0), comm.rank))
        return model_parallel.train(comm, slow[0], *others)

    cut(world, train, {}, DEEP, steps=4, accumulate=2)
    assert slow[0].count == 2 * (1 + 4 * 2)


@pytest.mark.four
def test_resumed_is_never_stopped_to_the_bit(resumes):
    resumes(5, model_parallel.train, GPT, optimizer="adam", accumulate=2)
