"""Replicas that need not agree: the run scores, saves and reports their average, and each rank goes on with its own."""

import numpy as np
import pytest
from written_runs import evaluations, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
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
    every = np.array(world.allgather(done.own_parameters))
    mean = every.mean(axis=0)
    assert np.allclose(done.parameters, mean, rtol=1e-13, atol=1e-15)
    assert len(set(world.allgather(done.parameters.tobytes()))) == 1
    found = summary(mpi_tmp_path / "a")
    distance = ((every - mean) ** 2).sum(axis=1).mean()
    assert found["consensus_distance"] == pytest.approx(distance, rel=1e-10, abs=1e-25)
    assert (distance > 1e-6) == (world.size > 1)
    assert found["replicas_agree"] is None
    model = done.model
    own = [scores(evaluate(model, each, data.test, data.classes), data.classes).accuracy for each in every]
    assert found["replica_test_accuracy"] == own
    reported = scores(evaluate(model, mean, data.test, data.classes), data.classes)
    assert found["test_loss"] == pytest.approx(reported.loss, rel=1e-12)
    saved = Checkpoint.read(mpi_tmp_path / "a").vectors
    assert np.array_equal(saved["parameters"], done.parameters)
    assert np.array_equal(saved["ranks/replica"], every)
    scored = [line["consensus_distance"] for line in evaluations(mpi_tmp_path / "a")]
    assert len(scored) == 5 and scored[-1] == found["consensus_distance"]


def test_averaging_for_a_score_is_counted_apart(run):
    done = run(train=apart)
    assert done.comm.traffic.bytes == 0
    if done.comm.size > 1:
        assert done.bookkeeping.traffic.bytes > 5 * 8 * done.parameters.size * (done.comm.rank > 0)
    if done.comm.rank == 0:  # steps call no all-reduce
        assert done.summary["allreduce"] is None and done.summary["allreduce_by_length"] is None


def test_the_largest_consensus_distance_is_kept_over_resumptions(run, world, mpi_tmp_path):
    """Replicas that are far from each other for two epochs, and then the same."""

    def move(running, loss, total):
        running.held.replica[:] = 10 * (world.rank + 1) * (running.step <= 8)

    out = mpi_tmp_path / "a"
    for resumed, steps in (("", 12), (str(out), 16)):
        run(train=apart, out=str(out), resume=resumed, steps=steps, observer=move)
    scored, found = evaluations(out), summary(out)
    distances = [line["consensus_distance"] for line in scored]
    assert len(distances) == 4 and found["consensus_distance"] == distances[-1]
    assert found["consensus_distance_max"] == scored[-1]["consensus_distance_max"] == max(distances)
    assert distances[-1] < 1e-20 and (max(distances) > 1) == (world.size > 1)
