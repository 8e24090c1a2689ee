"""Replicas without common steps: every example counts once, and what is scored is the average as of a meeting."""

import numpy as np
import pytest
from written_runs import steps, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.progress import activity
from hpcdl.runs import Replicas
from hpcdl.runs.async_coordinator import Follower, Leader

pytestmark = pytest.mark.four


class Nothing:
    """What replicas exchange that exchange nothing: it notes what it is told."""

    def __init__(self):
        self.told = []

    def rest(self, comm):
        self.told.append("rest")
        comm.barrier()

    def go_on(self):
        self.told.append("go on")

    def close(self):
        self.told.append("close")


def apart(comm, model, data, optimizer, run):
    """Train on every rank by itself, on its share of batches, until the ranks together have done the run's steps."""
    w = model.initialize(run.random)
    gradient, nothing = np.empty_like(w), Nothing()
    tally = (Leader if comm.rank == 0 else Follower)(run, Replicas(model, w, optimizer), nothing)
    run.begin("apart", tally, data)
    run.first, run.exchange, run.replica, run.losses = w.copy(), nothing, w, []
    tally.open()
    batches, taken = data.cursor(run.batch, (comm.rank, comm.size)), run.step
    run.start()
    while not tally.over:
        with run.stopwatch.step():
            batch = batches.take(*divmod(taken, run.per_epoch))
            gradient[:] = 0
            loss = model.loss_and_gradient(w, batch, gradient)
            optimizer.update(w, gradient, scale=comm.size / batch.total)
            taken += 1
            run.losses.append((loss, len(batch.y)))
            tally.add(loss, len(batch.y))
        tally.obey()
    batches.close()
    tally.close()
    run.end()
    assert not activity.in_flight


def test_a_step_of_the_run_is_as_many_examples_as_its_batch(run, world, mpi_tmp_path):
    """Whoever has computed them: 28 rows in batches of 9, of which the last has 1; shares of ranks are uneven."""
    done = run(train=apart, batch_size=9, epochs=6, out=str(mpi_tmp_path / "a"), checkpoint_every=5)
    computed = world.allgather(sum(examples for _, examples in done.losses))
    losses = sum(world.allgather(sum(loss for loss, _ in done.losses)))
    if world.rank == 0:
        assert (done.step, done.examples) == (24, 6 * 28)
        assert sum(computed) >= 6 * 28  # what is told after the last step is left out
        found = steps(mpi_tmp_path / "a")
        assert [line["step"] for line in found] == list(range(1, 25))
        total = sum(line["train_loss"] * size for line, size in zip(found, [9, 9, 9, 1] * 6, strict=True))
        assert total <= losses * (1 + 1e-12)
        assert world.size > 1 or total == pytest.approx(losses, rel=1e-12)


def test_all_rest_for_the_average_which_is_scored_and_saved(run, world, mpi_tmp_path):
    done = run(train=apart, out=str(mpi_tmp_path / "a"), epochs=3, checkpoint_every=6, keep=9)
    replicas = np.array(world.allgather(done.replica))
    mean = replicas.mean(axis=0)
    assert np.abs(done.parameters - mean).max() < 1e-14
    meetings = 4  # three epochs of 4 steps, and step 6
    assert done.exchange.told == [*["rest", "go on"] * (meetings - 1), "rest", "close"]
    distance = ((replicas - mean) ** 2).sum(axis=1).mean()
    states = np.array(world.allgather(done.optimizer.state["momentum"]))
    found, before = map(Checkpoint.read, (mpi_tmp_path / "a", mpi_tmp_path / "a" / "checkpoint-000000006.h5"))
    assert np.array_equal(found.vectors["parameters"], done.parameters)
    assert np.abs(found.vectors["optimizer/momentum"] - states.mean(axis=0)).max() < 1e-14
    peak, size = done.memory.peak, done.parameters.nbytes
    assert (peak["parameters"], peak["gradients"], peak["optimizer"]) == (2 * size, size, 2 * size)  # and averages
    assert found.attributes["updates"] == done.optimizer.step == 12
    assert len(before.attributes["legs"][0]["compute_seconds_per_rank"]) == world.size
    assert None not in before.attributes["legs"][0]["compute_seconds_per_rank"]  # all have told at the meeting
    if world.rank == 0:
        told = summary(mpi_tmp_path / "a")
        assert told["consensus_distance"] == pytest.approx(distance, rel=1e-9, abs=1e-25)
        assert (distance > 1e-6) == (world.size > 1) and told["replicas_agree"] is None
        assert len(told["replica_test_accuracy"]) == world.size
        assert done.scores["consensus_distance"] == told["consensus_distance"]


def test_a_run_that_is_gone_on_with_begins_with_the_average_on_all_ranks(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    saved = run(train=apart, steps=6, out=out).parameters
    again = run(train=apart, steps=6, resume=out)  # nothing is left to do
    assert np.array_equal(again.replica, saved) and again.exchange.told == ["close"] and not again.losses
    momentum = Checkpoint.read(mpi_tmp_path / "a").vectors["optimizer/momentum"]
    assert np.array_equal(again.held.optimizer.state["momentum"], momentum)
