"""Ranks with vectors of their own outlive others: from the last step after which all had met, as a smaller world."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from small_legs import Failed, options_of, rows
from smaller_world import Gossip, LocalSGD

from hpcdl.checkpoint.state import Summed
from hpcdl.comm import Communicator
from hpcdl.comm.gossip.topology import topology
from hpcdl.errors import AgreedError, TrainingError
from hpcdl.models import for_data
from hpcdl.optim import make_optimizer
from hpcdl.recovery.recovery_points import Anchor
from hpcdl.recovery.survivor import Survivor
from hpcdl.runs.context import RunContext
from hpcdl.runs.replicas import Replicas
from hpcdl.runs.run import Run
from hpcdl.strategies import gossip, local_sgd

pytestmark = [pytest.mark.four, pytest.mark.mpi(min_size=3)]
STEPS = 12  # 3 in an epoch


def leg(bare, survivor, strategy, how, fails=(), **more):
    """A leg on the ranks of `bare`; fails: the step in which this rank fails, and whether before or after its anchor.
    Returns the run, and this rank's replica."""
    options = options_of(**more)
    data = rows()
    comm = Communicator(bare, "ring", ends_job=False)
    model, run = for_data("mlp:5", data, "float64"), Run(comm, options, RunContext(survivor=survivor))
    passed = survivor.passed

    def fail(run):
        step, where = fails
        if run.step == step and where == "before":
            raise Failed
        passed(run)
        if run.step == step:
            raise Failed

    survivor.passed = fail if fails else passed
    with run, contextlib.ExitStack() as back:
        back.callback(setattr, survivor, "passed", passed)
        if strategy is gossip:
            how = how | {"topology": topology(how["topology"], comm.size)}
        replica = strategy.train(comm, model, data, run.make_optimizer(model, data), run, **how)
    return run, replica


def reference(world, lost, at, strategy, how, **more):
    """The replicas after all steps, where the ranks `lost` are gone after the step `at`."""
    options, data = options_of(**more), rows()
    model = for_data("mlp:5", data, "float64")
    about = world, model, data, lambda: options.make_optimizer(model, 1, data), 13
    if strategy is gossip:
        found = Gossip(*about, spec=how["topology"], method=how["method"])
    else:
        size = model.layout.size
        outer = how.get("outer") and make_optimizer(how["outer"], size, "float64", lambda _: how["outer_lr"])
        settings = {"first": 3 * how.get("local_from", 0), "momentum": how.get("local_momentum", "keep")}
        found = LocalSGD(*about, sync_every=how["sync_every"], outer=outer, **settings)
    found.until(at).lose(lost)
    return found.until(STEPS)


def outlive(world, lost, strategy, how, fails, **more):
    """Train until `lost` is gone, and go on; returns this rank's replica, its number, its run; None on those gone."""
    survivor, before = Survivor(), world.Dup()
    with pytest.raises(Failed):
        leg(world.Dup(), survivor, strategy, how, fails, **more)
    left = world.Split(MPI.UNDEFINED if world.rank in lost else 0, world.rank)
    if left == MPI.COMM_NULL:
        return None
    comm, gone = survivor.hand_over(left, before)
    assert gone == lost
    run, replica = leg(comm, survivor, strategy, how, **more)
    return replica, comm.rank, run


LOCAL = [
    {"sync_every": 3},
    {"sync_every": 1, "local_momentum": "average"},
    {"sync_every": 4, "local_momentum": "reset", "local_from": 1},
    {"sync_every": 2, "outer": "nesterov", "outer_lr": 0.7, "local_momentum": "average"},
]


@pytest.mark.parametrize("how, at, anchor", [*zip(LOCAL, [7] * 4, [6, 7, 7, 6], strict=True), (LOCAL[2], 2, 2)])
@pytest.mark.parametrize("lost", [[0], [1]])
def test_local_sgd_goes_on_from_its_last_average(how, at, anchor, lost, world):
    """Killed within a round, or at its end: the round is done again by those that are left, each with its momentum."""
    found = outlive(world, lost, local_sgd, how, (at, "after"))
    if found is None:
        return
    replica, rank, run = found
    wanted = reference(world.size, lost, anchor, local_sgd, how)
    assert np.abs(replica - wanted.w[rank]).max() <= 1e-12
    assert np.abs(run.parameters - wanted.mean).max() <= 1e-12
    assert run.step == STEPS and run.survivor.handover.recorded == anchor  # all losses up to it are known
    if rank == 0:
        (loss,) = run.summary["losses"]
        assert (loss["step"], loss["redone"], loss["left"]) == (anchor, at - anchor, world.size - 1)
        assert [leg["steps"] for leg in run.summary["legs"]] == [anchor, STEPS - anchor]
        assert run.examples == 4 * 29


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("method", ["adapt-then-combine", "dpsgd", "gradient-tracking"])
def test_gossip_goes_on_after_each_step(method, topology, world):
    how = {"method": method, "topology": topology}
    found = outlive(world, [1], gossip, how, (5, "after"), lr=0.02)
    if found is None:
        return
    replica, rank, run = found
    wanted = reference(world.size, [1], 5, gossip, how, lr=0.02)
    assert np.abs(replica - wanted.w[rank]).max() <= 1e-12
    assert [line["step"] for line in run.metrics.recent if "learning_rate" in line] == [STEPS]  # they meet at each step
    assert run.step == STEPS and (rank or run.summary["losses"][0]["step"] == 5)


@pytest.mark.parametrize("average", ["", "from=1"])
@pytest.mark.parametrize("step", [4, STEPS])
def test_who_has_come_to_an_anchor_goes_back_with_who_has_not(step, average, world):
    """One has ended the step, another not: all go back to the one before, which both still have."""
    fails = step, "before" if world.rank == world.size - 1 else "after"
    how, more = {"sync_every": 1}, {"average": average}
    found = outlive(world, [0], local_sgd, how, fails, **more)
    if found is None:
        return
    _, rank, run = found
    wanted = reference(world.size, [0], step - 1, local_sgd, how, **more)
    averages = [optimizer.state["average"] for optimizer in wanted.optimizers] if average else wanted.w
    assert np.abs(run.parameters - np.mean(averages, axis=0)).max() <= 1e-12
    if rank == 0:
        (loss,) = run.summary["losses"]
        assert (loss["step"], loss["redone"]) == (step - 1, 1)


def test_what_was_decided_since_is_undone(world):
    """The best score so far, how long ago it was, and that the run is over."""
    known = {}

    class Watched(Survivor):
        def passed(self, run):
            super().passed(run)
            known[run.step] = run.progress.best, run.progress.waited

    survivor = Watched()
    run, _ = leg(MPI.COMM_SELF, survivor, local_sgd, {"sync_every": 1}, lr=0.5)
    assert known[11] != known[12] and run.progress.stopped == "finished"
    survivor.anchors.kept.pop()
    assert survivor.anchors.go_back(run, MPI.COMM_SELF) == 1
    assert (run.progress.best, run.progress.waited) == known[11]
    assert run.progress.stopped is None and not run.over


def test_nothing_in_common_is_said(world):
    """It cannot be, as long as ranks meet between two anchors."""
    survivor = Survivor()
    run, _ = leg(MPI.COMM_SELF, survivor, local_sgd, {"sync_every": 1})
    survivor.anchors.kept = [
        Anchor(replace(each.progress, step=each.progress.step + 10 * world.rank), each.vectors)
        for each in survivor.anchors.kept
    ]
    with pytest.raises(TrainingError, match="no step in common"):
        survivor.anchors.go_back(run, world)


def test_what_cannot_be_copied_is_refused(world):
    data, options = rows(), options_of()
    context = RunContext(survivor=Survivor())
    model = for_data("mlp:5", data, "float64")
    refused = pytest.raises(AgreedError, match="cannot keep a copy of odd")
    with Run(Communicator(MPI.COMM_SELF), options, context) as run, refused:
        run.track("odd", Summed(np.zeros(3)))
        run.begin("gossip", Replicas(model, run.initial(model), run.make_optimizer(model, data)), data)
