"""A model that is cut: its step, its scores, and who agrees with whom."""

import numpy as np
import pytest

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.errors import UsageError
from hpcdl.faults.straggler import StragglerModel
from hpcdl.models.part import ModelPart
from hpcdl.parallel.cut_model import CutModel, check_same_rows
from hpcdl.parallel.zero import Shards
from hpcdl.random import Random
from hpcdl.runs import Options
from hpcdl.runs.accumulated import Accumulated

STAGES = 0, 1, 2, 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"placement": "partitioned"}, "--placement partitioned: .* read the same rows"),
        ({"data_servers": 1}, "--data-"),
    ],
)
def test_ranks_that_share_a_model_read_the_same_rows(options, words):
    check_same_rows(Options(**options), 1)
    with pytest.raises(UsageError, match=words):
        check_same_rows(Options(**options), 2)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_summed_over_the_ranks_once(stage, parts, hold, gpt, world):
    """Each rank a batch of its own; what a rank owns of the gradient is then that of all batches."""
    held = hold(stage, clip_norm=1.0, wrapped=lambda model: Accumulated(model, parts))
    model, gradient = gpt.made(), np.zeros(gpt.made().size)
    w = model.initialize(Random(0))
    losses = [model.loss_and_gradient(w, gpt.rows(2, seed), gradient) for seed in range(world.size)]
    held.zero_gradient()
    assert held.forward_backward(gpt.rows(2, world.rank)) == pytest.approx(losses[world.rank])
    held.reduce_scatter()
    for piece, _ in held.shards.pieces:
        owned = np.concatenate([np.empty(0), *held.shards.owned_gradients])[piece.local : piece.local + piece.size]
        assert np.abs(owned - gradient[gpt.places(piece)]).max(initial=0) < 1e-12
    assert held._norm() == pytest.approx(np.linalg.norm(gradient), rel=1e-12)


def test_a_straggler_is_slowed_once_for_each_part_and_not_when_it_warms_up(hold, gpt):
    held = hold(wrapped=lambda model: Accumulated(StragglerModel(model, 1, 0, 0, Random(0), 0), 2))
    held.warm_up(gpt.rows(0))
    assert held.model.count == 0
    held.forward_backward(gpt.rows(3))
    assert held.model.count == 2


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_of_which_ranks_have_summands(count, hold, world):
    """Their gradients are summed over the group in one message, however many they are; the others' are left alone."""
    comm, alone = Communicator(world, "ring"), world.Split(world.rank)
    itself = Communicator(alone, "ring")
    model = hold().shards.part.model
    part = ModelPart(model)
    tensors = part.replicated()[1 : 1 + 3 * count : 3]
    whole = hold().shards
    run = type("Run", (), {"random": Random(0), "memory": whole.memory})
    shards = Shards(run, part, whole.optimizer, itself)
    held = CutModel(comm, model, shards, summed=[(comm, tensors), (None, [slice(0, 1)]), (comm, [])])
    shards.gradient[:] = 1 + np.arange(part.size)
    calls = comm.traffic["all_reduce"].calls
    held.reduce_scatter()
    assert comm.traffic["all_reduce"].calls == calls + 1
    times = np.ones(part.size)
    for tensor in tensors:
        times[tensor] = world.size
    assert np.array_equal(shards.gradient, times * (1 + np.arange(part.size)))
    for each in (itself, comm):
        each.free()
    alone.Free()


@pytest.mark.parametrize("stage", STAGES)
def test_scores_leave_nothing_behind_and_need_no_gradient(stage, hold, gpt, world):
    """Nor does warming up."""
    held, batch, model = hold(stage), gpt.rows(7), gpt.made()
    split = from_arrays(batch.x.astype(int), batch.y, classes=7, dtype="float64").train
    wanted = model.evaluate(model.initialize(Random(0)), batch)
    held.zero_gradient()
    before = dict(held.shards.memory.now)
    held.warm_up(gpt.rows(2))
    assert held.evaluate(split, 7) == pytest.approx([*wanted, 7])
    assert {kind: count for kind, count in held.shards.memory.now.items() if count} == before
    assert not held.shards.gradient.any()
    held.reports_loss = world.rank > 0  # then what rank 0 has scored does not count
    found, share = held.evaluate(split, 7), -(-7 // world.size)
    assert found[2] == 7 - share and (found[0] < wanted[0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_hold_other_bits_are_found(stage, hold, world):
    held = hold(stage)
    assert held.agree(held.comm) is (True if stage < 3 else None)
    if world.rank == world.size - 1:
        held.parameters[-1] += 1e-15
    assert held.agree(held.comm) is (False if stage < 3 else None)


@pytest.mark.mpi(min_size=2)
def test_copies_of_a_tied_table_are_compared(hold, world):
    """Ranks with other layers, of which the first and the last share a table."""
    chunks = {0: [range(0, 2)], world.size - 1: [range(3, 6)]}.get(world.rank, [range(2, 3)])
    held = hold(0, chunks=chunks)
    assert held.agree(held.comm) is True
    if world.rank == 0:
        held.part.layout.view(held.parameters, "embedding.token")[3, 4] += 1
    assert held.agree(held.comm) is False
