"""Replicas that need not agree: the run scores, saves and reports their average, and each rank goes on with its own."""

import json

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError
from hpcdl.runs import Replicas
from hpcdl.runs.evaluation import evaluate, scores

pytestmark = pytest.mark.four


def apart(comm, model, data, optimizer, run):
    """Train on every rank alone."""
    w = model.initialize(run.random)
    gradient = np.empty_like(w)
    run.begin("apart", Replicas(model, w, optimizer), data)
    for batch in run.batches(data, (comm.rank, comm.size)):
        gradient[:] = 0
        loss = model.loss_and_gradient(w, batch, gradient)
        optimizer.update(w, gradient, scale=comm.size / batch.total)
        run.record(loss, batch.total)
        run.boundary()
    run.own_parameters = w
    return w


def test_what_is_reported_is_the_average(run, data, world, mpi_tmp_path):
    done = run(train=apart, out=str(mpi_tmp_path / "a"))
    world.Barrier()
    every = np.array(world.allgather(done.own_parameters))
    mean = every.mean(axis=0)
    assert np.allclose(done.parameters, mean, rtol=1e-13, atol=1e-15)
    assert len(set(world.allgather(done.parameters.tobytes()))) == 1
    summary = json.loads((mpi_tmp_path / "a" / "summary.json").read_text())
    distance = ((every - mean) ** 2).sum(axis=1).mean()
    assert summary["consensus_distance"] == pytest.approx(distance, rel=1e-10, abs=1e-25)
    assert (distance > 1e-6) == (world.size > 1)
    assert summary["replicas_agree"] is None
    model = done.model
    own = [scores(evaluate(model, each, data.test, data.classes), data.classes).accuracy for each in every]
    assert summary["replica_test_accuracy"] == own
    reported = scores(evaluate(model, mean, data.test, data.classes), data.classes)
    assert summary["test_loss"] == pytest.approx(reported.loss, rel=1e-12)
    found = Checkpoint.read(mpi_tmp_path / "a").vectors
    assert np.array_equal(found["parameters"], done.parameters)
    assert np.array_equal(found["ranks/replica"], every)
    lines = [json.loads(line) for line in (mpi_tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    scored = [line["consensus_distance"] for line in lines if "test_loss" in line]
    assert len(scored) == 5 and scored[-1] == summary["consensus_distance"]


def test_averaging_for_a_score_is_counted_apart(run):
    done = run(train=apart)
    assert done.comm.traffic.bytes == 0
    if done.comm.size > 1:
        assert done.bookkeeping.traffic.bytes > 5 * 8 * done.parameters.size * (done.comm.rank > 0)


@pytest.mark.parametrize("stop", [6, 8])
def test_resumed_is_never_stopped_to_the_bit(run, world, mpi_tmp_path, stop):
    whole = run(train=apart, steps=15)
    run(train=apart, steps=15, out=str(mpi_tmp_path / "parts"), checkpoint_every=stop, keep=9)
    world.Barrier()
    if world.rank == 0:
        (mpi_tmp_path / "parts" / f"checkpoint-{stop:09d}.h5").replace(mpi_tmp_path / "parts" / "checkpoint.h5")
    world.Barrier()
    folder = str(mpi_tmp_path / "parts")
    again = run(train=apart, steps=15, out=folder, resume=folder)
    assert again.step == 15
    assert np.array_equal(again.own_parameters, whole.own_parameters)
    assert np.array_equal(again.optimizer.state["momentum"], whole.optimizer.state["momentum"])
    assert np.array_equal(again.parameters, whole.parameters)


@pytest.mark.mpi(min_size=2)
def test_replicas_cannot_change_the_number_of_ranks(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    run(train=apart, steps=3, out=out)
    world.Barrier()
    part = world.Split(0 if world.rank else MPI.UNDEFINED, world.rank)
    if part != MPI.COMM_NULL:
        with pytest.raises(UsageError, match=f"replica belongs to its {world.size} ranks; start {world.size}, not"):
            run(train=apart, comm=part, steps=6, out=out, resume=out)
    world.Barrier()
