"""Parameter servers take the very steps of all-reduce SGD where they must, and stay within their bounds elsewhere."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.chunks import chunks
from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.models import make_model
from hpcdl.optim import make_optimizer
from hpcdl.runs import Options, Run
from hpcdl.services.consistency import BSP, Consistency
from hpcdl.services.slice_server import ANSWER, REQUEST
from hpcdl.strategies import parameter_server, sequential

ASYNC, SSP0 = Consistency("async"), Consistency("ssp", 0)
STEPS = 4 * 3


def agree(path, reference, tolerance=1e-10):
    assert len(path) == len(reference) > 0
    for step, (mine, wanted) in enumerate(zip(path, reference, strict=True)):
        scale = max(1, np.abs(wanted).max())
        assert np.abs(mine - wanted).max() <= tolerance * scale, f"step {step}"


def same_bits(path, reference):
    assert len(path) == len(reference)
    assert all(np.array_equal(mine, wanted) for mine, wanted in zip(path, reference, strict=True))


def placements(size):
    """How so many ranks may be divided: with 1, 2 and 3 servers, and with every rank a worker and a server."""
    return [{"servers": servers} for servers in (1, 2, 3) if servers < size] + [{"on_workers": True}]


@pytest.fixture
def serve(follow):
    """A function: train with parameter servers; `own`: arguments of the strategy, the others are options."""

    def run(comm, own, **options):
        workers = comm.size if own.get("on_workers") else comm.size - own.get("servers", 1)
        return follow(comm, parameter_server.train, own=own, workers=workers, **{"allreduce": "ring"} | options)

    return run


@pytest.fixture
def alone(follow):
    """A function: the same run on one rank, sequentially."""

    def run(**options):
        return follow(MPI.COMM_SELF, sequential.train, **{"allreduce": "ring"} | options)

    return run


# -- what is the same as without servers ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_bsp_is_sequential_step_by_step_for_any_number_of_servers(optimizer, serve, alone, each_group):
    reference = alone(optimizer=optimizer)

    def body(comm):
        for own in placements(comm.size):
            run = serve(comm, own, optimizer=optimizer)
            if comm.rank == 0:
                agree(run.path, reference.path)
                assert run.extra["staleness_histogram"] == [STEPS * run.workers]
                assert run.summary["train_loss"] == pytest.approx(reference.summary["train_loss"], rel=1e-12)

    each_group(body)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.05},
        {"clip_norm": 0.05, "optimizer": "adamw", "weight_decay": 0.1},
        {"weight_decay": 0.1},
        {"accumulate": 3},
        {"schedule": "step:every=1,factor=0.5,warmup=1"},
        {"batch_size": "full", "epochs": 6},
        {"batch_size": 2},  # fewer examples than workers in every batch
        {"steps": 5},
        {"checkpoint_every": 5},
        {"model": "softmax"},
    ],
    ids=str,
)
def test_bsp_with_other_options(options, serve, alone, world):
    reference = alone(**options)
    for own in placements(world.size)[-2:]:
        run = serve(world, own, **options)
        if world.rank == 0:
            agree(run.path, reference.path)


def test_bsp_whose_servers_send_without_being_asked(serve, world):
    for own in placements(world.size):
        asked, unasked = (serve(world, own | {"broadcast_every": every}) for every in (0, 1))
        if world.rank == 0:
            same_bits(unasked.path, asked.path)


def test_bsp_on_float32_is_the_same_on_all_who_hold_the_whole(serve, alone, world):
    run, reference = serve(world, {"servers": 1} if world.size > 1 else {"on_workers": True}, dtype="float32"), None
    assert run.agree is True
    assert all(np.array_equal(run.parameters, other) for other in world.allgather(run.parameters))
    reference = alone(dtype="float32")
    if world.rank == 0:
        agree(run.path, reference.path, 2e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ssp_with_staleness_0_is_bsp_to_the_bit(optimizer, serve, world):
    for own in placements(world.size):
        wanted = serve(world, own, optimizer=optimizer)
        run = serve(world, own | {"consistency": SSP0}, optimizer=optimizer)
        if world.rank == 0:
            same_bits(run.path, wanted.path)
            assert run.extra["staleness_histogram"] == wanted.extra["staleness_histogram"]


@pytest.mark.parametrize("consistency", [ASYNC, Consistency("ssp", 3), BSP], ids=lambda each: each.name)
@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "clip_norm": 0.05, "checkpoint_every": 5}], ids=str)
def test_one_worker_is_sequential_to_the_bit_where_nothing_is_cut(consistency, options, serve, alone, each_group):
    reference = alone(**options)

    def body(comm):
        for servers in {min(comm.size - 1, most) for most in (1, 3)}:
            own = {"servers": servers} if servers else {"on_workers": True}
            run = serve(comm, own | {"consistency": consistency}, **options)
            assert run.workers == 1
            if comm.rank == 0:
                same_bits(run.path, reference.path)
                assert run.extra["staleness_histogram"] == [STEPS]

    each_group(body)
