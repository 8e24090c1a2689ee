"""Modules whose sequences lie on several ranks: steps are those of one rank; others are refused in one line."""

import cut_nets
import pytest
import torch
from mpi4py import MPI

import hpcdl.torch
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError
from hpcdl.parallel.context import check_context, make_context
from hpcdl.strategies import context_parallel, grid
from hpcdl.torch import TorchModel

pytestmark = pytest.mark.four
READER = "torch:cut_nets:reader,context=24"
ADAM = "adam:eps=0.001"


@pytest.mark.parametrize("attention, stage, accumulate", [("ring", 0, 4), ("ulysses", 3, 1), ("ring", 2, 1)])
def test_steps_are_those_of_one_rank(attention, stage, accumulate, cut, world):
    own = {"attention": attention, "stage": stage}
    run = cut(world, context_parallel.train, own, READER, 1e-9, optimizer=ADAM, accumulate=accumulate)
    assert run.reported["attention"] == attention


@pytest.mark.parametrize("other", ["data", "pipeline"])
def test_on_a_grid(other, cut, world):
    shape = {"context": 2, other: 2} if world.size == 4 else {"context": world.size}
    own = {"grid": shape, "schedule": "1f1b", "microbatches": 3, "recompute": other == "pipeline"}
    cut(world, grid.train, own, READER, 1e-9, optimizer=ADAM, clip_norm=0.1)


def test_attention_of_one_rank_is_that_of_pytorch():
    q, k, v = (torch.randn(2, heads, 5, 3, dtype=torch.float64) for heads in (6, 2, 2))
    repeated = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, *repeated, is_causal=True)
    torch.testing.assert_close(hpcdl.torch.attention(q, k, v), wanted, rtol=1e-12, atol=1e-12)
    assert hpcdl.torch.positions(4).tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match=r"attention wants q, k, v of shape .*, not \(2, 6, 5, 3\), \(2, 4, 5, 3\)"):
        hpcdl.torch.attention(q, torch.cat([k, k], 1), torch.cat([v, v], 1))


def model_of(**settings):
    return TorchModel(cut_nets.reader((24,), 7, **settings), features=(24,), classes=7, dtype="float64")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_tokens_that_meet_elsewhere_are_refused_on_all_ranks(attention, world):
    comm = Communicator(MPI.COMM_WORLD)
    make_context(comm, model_of(), 1, attention)
    with pytest.raises(UsageError, match=f"the module's output is another one if {world.size} ranks share its tokens"):
        make_context(comm, model_of(mixed=True), 1, attention)
    comm.free()


def test_modules_that_cannot_share_tokens():
    def refused(model, ranks=2):
        with pytest.raises(UsageError) as error:
            check_context(model, ranks, "ring")
        return str(error.value)

    unnamed, wrong, normed = model_of(), model_of(), model_of()
    del unnamed.module.sequence_axis
    wrong.module.sequence_axis = 2
    normed.module.append(torch.nn.BatchNorm1d(7).double())
    assert "sequence_axis is the axis of x that is the sequence" in refused(unnamed)
    assert "sequence_axis is 2; take the axis of x" in refused(wrong)
    assert "tokens meet in the batch norm 6" in refused(normed)
    assert "the masks of 2.1 are drawn for whole sequences; take p=0" in refused(model_of(dropout=0.1))
    assert "cannot cut sequences of 24 tokens into two chunks each" in refused(model_of(), 5)
