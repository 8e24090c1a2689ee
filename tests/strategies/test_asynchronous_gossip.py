"""AD-PSGD: on one rank it is sequential SGD; on several no rank waits for a slow one, and all meet for the average."""

import numpy as np
import pytest
from mpi4py import MPI
from paths import agree
from written_runs import lines

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm import Communicator
from hpcdl.comm.gossip.pairwise import PairwiseGossip
from hpcdl.comm.gossip.topology import topology
from hpcdl.comm.progress import activity
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.layered import Layered
from hpcdl.optim import Optimizer
from hpcdl.runs import Options, Run, signals
from hpcdl.strategies.asynchronous_gossip import train

GRAPHS = ["ring", "star", "complete", "random-regular:degree=2", "erdos-renyi:p=0.6", "torus", "random-matching"]


def graph(spec, size):
    """The topology, or None where there is none of this size."""
    try:
        return topology(spec, size, seed=3)
    except UsageError:
        return None


@pytest.mark.parametrize(
    "options",
    [
        *({"optimizer": name} for name in ("nesterov", "adam")),
        {"clip_norm": 0.05, "weight_decay": 0.1},
        {"accumulate": 3},
        {"batch_size": "full", "epochs": 6},
        {"checkpoint_every": 5},
        {"steps": 5},
    ],
    ids=str,
)
def test_one_rank_is_sequential_step_by_step(options, follow, alone):
    if MPI.COMM_WORLD.rank == 0:
        run = follow(MPI.COMM_SELF, train, own={"topology": topology("ring", 1)}, **options)
        reference = alone(**options)
        agree(run, reference)
        assert run.own_losses == pytest.approx(reference.own_losses, rel=1e-12)
        assert run.summary["test_loss"] == pytest.approx(reference.summary["test_loss"], rel=1e-12)


@pytest.fixture
def start(follow):
    """A function: train on `bare` with this topology; wrap(model): the model to train instead."""

    def run(bare, spec="ring", wrap=lambda model: model, data=None, model="mlp:5", observer=None, **options):
        options = Options(**{"batch_size": 13, "epochs": 4, "dtype": "float64", "progress": "none"} | options)
        comm, before = Communicator(bare, "ring"), set(activity.in_flight)
        data = data or follow.examples(options.dtype)
        made = wrap(make_model(model, data.features, data.classes, options.dtype))
        with Run(comm, options) as run:
            if observer is not None:
                run.observe(observer)
            train(comm, made, data, run.make_optimizer(made, data), run, graph(spec, bare.size))
        comm.free()
        assert not set(activity.in_flight) - before
        return run

    return run


@pytest.mark.parametrize(
    ("spec", "model"),  # the second model is beyond what MPI sends unasked
    [*((spec, "mlp:5") for spec in GRAPHS), *((spec, "mlp:30000") for spec in ("ring", "star", "complete"))],
)
def test_runs_end_on_every_graph(spec, model, start, world):
    if graph(spec, world.size) is None:
        return
    run = start(world, spec, model=model, lr=0.001)
    done, averagings = run.reported["steps_per_rank"], run.reported["averagings_per_rank"]
    assert sum(done) * -(-13 // world.size) >= 4 * 29  # the largest share of a batch
    assert sum(averagings) % 2 == 0
    assert sum(run.reported["staleness_histogram"]) == sum(done)
    if world.rank == 0:
        assert run.step == 12 and run.examples == 4 * 29
        assert len(run.summary["replica_test_accuracy"]) == world.size
        assert (run.summary["method"], run.summary["replicas_agree"]) == ("adpsgd", None)
        assert (run.summary["consensus_distance"] > 0) == (world.size > 1)


@pytest.fixture
def events(monkeypatch):
    """What this rank does, in order: averagings, of a lower rank when it sends; copies; steps; means that come."""
    found = []

    def note(owner, name, event):
        original = getattr(owner, name)

        def noted(self, *arguments, **options):
            if (happened := event(*arguments)) is not None:
                found.append(happened)
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(PairwiseGossip, "listen", found.clear)  # of what was compiled before
    note(PairwiseGossip, "_send", lambda to: ("average", to))
    note(PairwiseGossip, "_average", lambda source: ("average", source))
    note(PairwiseGossip, "_take_mean", lambda: ("mean", None))
    note(Layered, "loss_and_gradient", lambda w, *_: ("copy", w.copy()))
    note(Optimizer, "update", lambda *_: ("step", None))
    return found


def replay(logs, x):
    """Algorithm 1 in an order that the ranks' logs allow: the models at its end, and averagings done.

    Rows of x: the models. An average of i and j is x <- W x with W = 1/2 in rows and columns i, j; a step of rank i is
    x_i <- x_i - its change. Each copy that a gradient was taken at is compared. Until the mean has come back, a rank
    copies a model that lacks the average."""
    left, lacks, averagings = [list(log)[::-1] for log in logs], np.zeros_like(x), 0
    while any(left):
        before = sum(map(len, left))
        for rank, log in enumerate(left):
            while log and log[-1][0] != "average":
                kind, what = log.pop()
                if kind == "copy":
                    assert np.abs(what - (x[rank] - lacks[rank])).max() < 1e-12
                elif kind == "step":
                    x[rank] -= what
                else:
                    lacks[rank] = 0
            other = log[-1][1] if log else rank
            if other != rank and left[other] and left[other][-1] == ("average", rank):
                w = np.eye(len(x))
                w[np.ix_([rank, other], [rank, other])] = 0.5
                mixed = w @ x
                lower = min(rank, other)
                lacks[lower], x = mixed[lower] - x[lower], mixed
                averagings += 1
                log.pop()
                left[other].pop()
        assert sum(map(len, left)) < before, "no order of the averagings agrees with all logs"
    return x, averagings


@pytest.mark.parametrize("spec", ["ring", "complete"])
def test_it_is_algorithm_1_in_some_order(spec, events, start, follow, world):
    """Each gradient is that of the rank's share at a copy of its model; averagings and steps commute to a sequence."""
    rate, batch = 0.1, 13
    run = start(world, spec, optimizer="sgd", schedule="constant", lr=rate, epochs=8, evaluate_every=100)
    data, log = follow.examples("float64"), events.copy()
    w = run.model.initialize(run.random)
    batches, taken, copied = data.cursor(batch, (world.rank, world.size)), 0, None
    for at, (kind, what) in enumerate(log):
        copied = what if kind == "copy" else copied
        if kind == "step":
            share = batches.take(*divmod(taken, 3))
            while not len(share.y):
                taken += 1
                share = batches.take(*divmod(taken, 3))
            gradient, taken = np.zeros_like(w), taken + 1
            run.model.loss_and_gradient(copied, share, gradient)
            log[at] = "step", rate * world.size / share.total * gradient
    batches.close()
    logs = world.gather(log)
    if world.rank == 0:
        assert [sum(kind == "step" for kind, _ in log) for log in logs] == run.reported["steps_per_rank"]
        models, averagings = replay(logs, np.tile(w, (world.size, 1)))
        assert 2 * averagings == sum(run.reported["averagings_per_rank"])
        assert np.abs(models.mean(axis=0) - run.parameters).max() < 1e-12 < np.abs(run.parameters - w).max()


class Slow:
    """A model whose first gradient, on one rank, waits until the others together have computed `least`."""

    def __init__(self, model, comm, held, least):
        self.model, self.comm, self.held, self.least = model, comm, held, least
        self.others, self.count, self.heard = sorted({*range(comm.size)} - {held}), 0, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hear(self, until):
        """On the rank that is held: take the word of each gradient of another, `until` so many."""
        while self.heard < until:
            for other in self.others:
                if self.comm.iprobe(source=other):
                    self.comm.recv(source=other)
                    self.heard += 1

    def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):
        if len(batch.y):
            if self.comm.rank == self.held:
                self.hear(self.least)
            else:
                self.count += 1
                self.comm.send(None, self.held)
        return self.model.loss_and_gradient(parameters, batch, gradient, on_ready)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("spec", ["star", "complete"])
def test_nobody_waits_for_a_rank_that_computes(spec, start, world):
    for held in range(world.size):
        talk = world.Dup()
        run = start(world, spec, lambda model: Slow(model, talk, held, 15), batch_size=29, steps=30, evaluate_every=30)  # noqa: B023
        done = run.reported["steps_per_rank"]
        assert sum(done) - done[held] >= 15
        assert sum(done) * -(-29 // world.size) >= 29 * 30
        if world.rank == held:
            run.model.hear(sum(done) - done[held])
        talk.Free()


def test_ranks_without_examples_average_only(start, world):
    run = start(world, "complete", batch_size=1, steps=40)
    done = run.reported["steps_per_rank"]
    assert done[0] >= 40 and done[1:] == [0] * (world.size - 1)
    assert (run.reported["averagings_per_rank"][-1] > 0) == (world.size > 1)


def test_gone_on_with_from_the_average_on_any_number_of_ranks(start, world, mpi_tmp_path):
    folder = str(mpi_tmp_path / "a")
    saved = start(world, steps=9, out=folder).parameters
    world.Barrier()
    found = Checkpoint.read(mpi_tmp_path / "a")
    assert np.array_equal(found.vectors["parameters"], saved)
    assert found.attributes["step"] == found.attributes["updates"] == 9
    assert sorted(found.vectors) == ["optimizer/momentum", "parameters"]
    for size in (world.size, 1):
        part = world.Split(0 if world.rank < size else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            again = start(part, steps=9, resume=folder)
            assert again.step == 9 and np.array_equal(again.parameters, saved)
            still = start(part, steps=12, resume=folder, lr=1e-30)
            assert np.abs(still.parameters - saved).max() < 1e-14
            if part.rank == 0:
                assert still.step == 12
            part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.four
def test_an_evaluation_knows_what_all_ranks_have_sent(start, world, mpi_tmp_path):
    """The last one all but the last sign of each rank to its neighbours; between meetings what rank 0 has been told."""
    agreed = []

    def note(run, loss, total):
        agreed.append(run.legs.sent)

    run = start(world, steps=12, out=str(mpi_tmp_path / "a"), observer=note)
    world.Barrier()
    if world.rank == 0:
        told = [(line["bytes"], line["messages"]) for line in lines(mpi_tmp_path / "a") if "test_loss" in line]
        signs = sum(1 for rank, to in graph("ring", world.size).edges if rank != to)
        assert sum(run.summary["bytes_sent_per_rank"]) - told[-1][0] == 8 * signs
        assert sum(run.summary["messages_per_rank"]) - told[-1][1] == signs
        assert told == sorted(told) and agreed == sorted(agreed)


@pytest.mark.four
def test_a_time_limit_and_a_signal_to_any_rank_end_all(start, world):
    if world.rank == 0:
        assert start(MPI.COMM_SELF, steps=10**6, time_limit=0.1).stopped == "time limit"
    run = start(world, steps=10**6, time_limit=0.3)
    assert run.stopped == "time limit" and len(run.reported["steps_per_rank"]) == world.size
    last = world.size - 1
    signals.received.extend(["SIGTERM"] * (world.rank == last))
    run = start(world, steps=10**6)
    signals.received.clear()
    assert run.stopped == "signal"


PROGRAM = """
import sys
from hpcdl.launch.training import Training
from hpcdl.runs.options import Options
from hpcdl.comm.gossip.topology import topology
from hpcdl.strategies.asynchronous_gossip import train
from hpcdl.strategies.description import Strategy
from hpcdl.strategies.gossip import held, step

def start(comm, model, data, optimizer, run):
    train(comm, model, data, optimizer, run, topology("ring", comm.size))

Training(Strategy("try", Options, start, held, step)).main(sys.argv[1:])
"""


def test_a_loss_that_is_not_finite_ends_the_job_with_one_line(run_on, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_on(3, "program.py", "--lr", "1e30", "--progress", "none", check=1)
    assert "is not finite on rank" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_with_data_servers(run_on, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    run_on(4, "program.py", "--data-servers", "1", "--epochs", "2", "--progress", "none", "--out", "a", check=0)
    assert Checkpoint.read(tmp_path / "a").attributes["epoch"] == 2
