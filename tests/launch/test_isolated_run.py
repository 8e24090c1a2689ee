"""hpcdl/launch/isolated_run.py: a training that cannot go on leaves the job, and its ranks, as they were."""

import json
import sys

import numpy as np
import pytest

from hpcdl.errors import TrainingError, UsageError
from hpcdl.launch import isolated_run
from hpcdl.launch.isolated_run import Outcome, attempt, failure, packed, side_by_side
from hpcdl.launch.training import Training
from hpcdl.runs.options import Options
from hpcdl.strategies import all_reduce
from hpcdl.strategies.description import Strategy

SMALL = {"steps": 6, "batch_size": 16, "model": "softmax", "progress": "none", "optimizer": "sgd"}


def training(train, **settings):
    return Training(Strategy("train-try", Options, train, held=all_reduce.held, step=all_reduce.step, **settings))


def trained(comm, folder, **options):
    """The parameters that all-reduce SGD ends with."""
    kept = []

    def train(*arguments):
        kept.append(all_reduce.train(*arguments).copy())

    assert attempt(comm, training(train), Options(**SMALL | options), folder) == Outcome("finished")
    return kept[0]


def fails(comm, folder, train=all_reduce.train, check=None, **options):
    """Why it fails, the same on all ranks."""
    out = {"out": str(folder), "force": True} if options.pop("writes", False) else {}
    end = attempt(comm, training(train, check=check), Options(**SMALL | options | out), folder)
    assert end.stopped is None and len(set(comm.allgather(end.failed))) == 1
    comm.Barrier()
    assert failure(folder) == end.failed
    return end.failed


@pytest.mark.least(1)
def test_after_a_failure_the_ranks_train_as_before(comm, mpi_tmp_path):
    first = trained(comm, mpi_tmp_path)
    assert "the loss of step" in fails(comm, mpi_tmp_path, lr=1e30, model="mlp:8,8", writes=True)
    assert "--lr" in fails(comm, mpi_tmp_path, lr=1e30, model="mlp:8,8", placement="partitioned")
    assert "no such" in fails(comm, mpi_tmp_path, check=refuse)
    assert "a mistake" in fails(comm, mpi_tmp_path, train=mistaken)
    assert "a mistake" in fails(comm, mpi_tmp_path, train=mistaken_in_a_step)
    assert "may not" in fails(comm, mpi_tmp_path, train=refused)
    assert "leaves the program, with status 0 (test_isolated_run.py, line " in fails(comm, mpi_tmp_path, train=left)
    np.testing.assert_array_equal(trained(comm, mpi_tmp_path), first)


def refuse(options, ranks, model):
    raise UsageError("no such model")


def mistaken(comm, model, data, optimizer, run):
    raise ZeroDivisionError("a mistake of one's own")


def mistaken_in_a_step(comm, model, data, optimizer, run):
    """It raises while collective operations are in flight."""

    def observe(run, loss, total):
        if run.step == 3:
            comm.iall_reduce(np.ones(1000))
            raise ZeroDivisionError("a mistake of one's own")

    run.observe(observe)
    all_reduce.train(comm, model, data, optimizer, run)


def left(comm, model, data, optimizer, run):
    sys.exit(0)


def refused(comm, model, data, optimizer, run):
    raise UsageError("this may not be")


@pytest.mark.least(1)
def test_why_is_left_in_the_folder(comm, mpi_tmp_path):
    fails(comm, mpi_tmp_path, train=mistaken)
    found = json.loads((mpi_tmp_path / isolated_run.FAILED).read_text())
    assert found["why"].startswith("ZeroDivisionError: a mistake of one's own (test_isolated_run.py, line ")
    assert "in mistaken" in found["traceback"] and failure(mpi_tmp_path / "nowhere") is None
    comm.Barrier()
    fails(comm, mpi_tmp_path, check=refuse)
    assert json.loads((mpi_tmp_path / isolated_run.FAILED).read_text())["traceback"] is None


@pytest.mark.mpi(min_size=2)
def test_where_some_ranks_fail_later_than_others_all_meet(comm, mpi_tmp_path):
    def late(comm, model, data, optimizer, run):
        if comm.rank == 0:
            raise TrainingError("as all ranks know")
        raise ZeroDivisionError("each by itself")

    assert fails(comm, mpi_tmp_path, train=late) == "as all ranks know"


@pytest.mark.mpi(min_size=2)
def test_trainings_run_beside_each_other(comm, mpi_tmp_path):
    parts = [1, comm.size - 1]
    seen = []

    def start(part, ours):
        seen.append((part, ours.size))
        train = mistaken if part == 1 else all_reduce.train
        return attempt(ours, training(train), Options(**SMALL), mpi_tmp_path / f"{part}")

    ends = side_by_side(comm, parts, start)
    assert ends[0] == Outcome("finished") and "a mistake" in ends[1].failed
    assert seen == [(int(comm.rank > 0), parts[int(comm.rank > 0)])]
    assert side_by_side(comm, [1], lambda part, ours: Outcome("alone")) == [Outcome("alone")]  # others nap


@pytest.mark.parametrize(
    "ranks, size, groups",
    [
        ([4, 2, 2], 4, [[0], [1, 2]]),
        ([2, 4, 2], 4, [[0, 2], [1]]),
        ([1, 1, 1], 4, [[0, 1, 2]]),
        ([3, 3], 4, [[0], [1]]),
        ([3, 2, 1], 4, [[0, 2], [1]]),  # one rank too many for two of them
        ([], 4, []),
    ],
)
def test_packed(ranks, size, groups):
    assert packed(ranks, size) == groups
