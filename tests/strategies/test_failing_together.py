"""Runs that rank 0 runs for others and that cannot go on: they fail on all ranks, and another one may follow."""

import errno
import os
from functools import partial

import pytest
from written_runs import lines

from hpcdl.checkpoint.checkpoint_file import Checkpoint, rotate
from hpcdl.comm.gossip.topology import topology
from hpcdl.comm.progress import activity
from hpcdl.errors import TrainingError
from hpcdl.parameter_server.consistency import BSP, Consistency
from hpcdl.runs import saving
from hpcdl.strategies import asynchronous_gossip

ASYNC = Consistency("async")
DIVERGES = {"dtype": "float32", "lr": 1e30, "optimizer": "sgd", "schedule": "constant", "epochs": 100}


def places(size):
    """Servers of their own, where the ranks are many enough, and slices on workers."""
    return [{"on_workers": True}] + ([{"servers": size // 2}] if size > 1 else [])


@pytest.fixture
def average_in_pairs(follow, world):
    """A function: train by AD-PSGD on this graph."""

    def run(spec, **options):
        return follow(world, asynchronous_gossip.train, own={"topology": topology(spec, world.size)}, **options)

    return run


@pytest.fixture
def fails(world):
    """A function: train(own, **options), which fails on all ranks alike, and leaves nothing in flight."""

    def run(train, own, words, **options):
        with pytest.raises(TrainingError, match=words) as failed:
            train(own, **options)
        assert len(set(world.allgather(str(failed.value)))) == 1 and not activity.in_flight

    return run


@pytest.fixture
def full_disk(monkeypatch):
    """No checkpoint from step 10 on can be written."""

    def full(folder, keep, found, *more):
        if found.attributes["step"] >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rotate(folder, keep, found, *more)

    monkeypatch.setattr(saving, "rotate", full)


UNWRITTEN = "the checkpoint of step 10, .*, cannot be written: No space left on device; the last good checkpoint is"


def stopped_at(out):
    """Whether the folder is that of a run whose tenth step was its last, and whose fifth was saved."""
    steps = [line["step"] for line in lines(out) if "test_loss" not in line]
    saved = Checkpoint.read(out).attributes["step"]
    return (saved, steps, (out / "summary.json").exists()) == (5, list(range(1, 11)), False)


def diverged(size):
    """What a run says that diverges: it may find out by its evaluation, too, between the steps of workers."""
    loss = rf"loss of step [1-9]\d* is not finite on rank [0-{size - 1}]"
    return rf"the ({loss}|test loss after step \d+ is not finite); there is no checkpoint yet"


@pytest.mark.parametrize(
    "own",
    [
        {"consistency": ASYNC},
        {"consistency": Consistency("ssp", 2)},
        {"consistency": BSP, "delay": 1},
        {"consistency": BSP, "broadcast_every": 1},
        {"consistency": Consistency("ssp", 3), "broadcast_every": 2},
        {"consistency": ASYNC, "broadcast_every": 2},
    ],
    ids=lambda own: "-".join([own["consistency"].name, *list(own)[1:]]),
)
def test_parameter_servers_whose_run_diverges(own, fails, serve, world):
    for place, more in zip(places(world.size), ({}, {"checkpoint_every": 50}), strict=False):
        fails(partial(serve, world), place | own, diverged(world.size), **DIVERGES, **more)
    run = serve(world, places(world.size)[-1] | own, lr=0.01)
    assert run.stopped == "finished" and run.agree is True and (world.rank or run.step == 12)


@pytest.mark.parametrize("own", [{"consistency": ASYNC}, {"consistency": BSP, "broadcast_every": 1}], ids=str)
def test_parameter_servers_whose_checkpoint_cannot_be_written(own, fails, serve, world, full_disk, mpi_tmp_path):
    """What was saved before stays, and nothing more is recorded."""
    train = partial(serve, world, checkpoint_every=5, checkpoint_must=True, keep=9, lr=0.01)
    for place in places(world.size):
        out = mpi_tmp_path / str(place)
        fails(train, place | own, UNWRITTEN, out=str(out))
        assert stopped_at(out)
        world.Barrier()


def test_pairs_whose_run_diverges(fails, average_in_pairs, world):
    for spec in ("ring", "complete"):
        fails(average_in_pairs, spec, diverged(world.size), **DIVERGES)
    assert average_in_pairs("ring").stopped == "finished"


def test_pairs_whose_checkpoint_cannot_be_written(fails, average_in_pairs, world, full_disk, mpi_tmp_path):
    """The ranks have met for it by then."""
    out = mpi_tmp_path / "a"
    fails(average_in_pairs, "ring", UNWRITTEN, checkpoint_every=5, checkpoint_must=True, keep=9, lr=0.01, out=str(out))
    assert stopped_at(out)
