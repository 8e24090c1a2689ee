"""What survivors go on from: whoever is furthest hands its state over, and the steps are those of one run."""

import numpy as np
import pytest
from mpi4py import MPI
from small_legs import Failed, options_of, rows
from written_runs import evaluations, steps

from hpcdl.checkpoint.state import PerRank
from hpcdl.comm import Communicator
from hpcdl.errors import AgreedError
from hpcdl.models import for_data
from hpcdl.recovery.survivor import Survivor
from hpcdl.runs import agreement
from hpcdl.runs.context import RunContext
from hpcdl.runs.run import Run
from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four


def train(bare, survivor, fails_after=None, boundary=False, change=None, **more):
    """A leg on the ranks of `bare`, which fails after a step: before its boundary, or after it; returns the run.
    change: called with the run before it begins."""
    options = options_of(**{"epochs": 3} | more)
    context = RunContext(survivor=survivor)
    data = rows()
    model, run = for_data("mlp:5", data, "float64"), Run(Communicator(bare, "ring", ends_job=False), options, context)

    def fail(run, loss, total):
        if run.step == fails_after and not boundary:
            raise Failed

    run.observe(fail)
    passed = run.boundary

    def bounded():
        passed()
        if run.step == fails_after and boundary:
            raise Failed

    run.boundary = bounded
    if change is not None:
        change(run)
    with run:
        all_reduce.train(run.comm, model, data, run.make_optimizer(model, data), run)
    return run


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "more", [{}, {"average": "from=1"}, {"average": "from=0.5", "schedule": "step:every=1,factor=0.5"}]
)
def test_the_furthest_rank_hands_over(optimizer, more, world):
    """Each rank alone, but for the last one as far as step 4; that one is at 6, the end of an epoch, not yet scored."""
    more = {"optimizer": optimizer, "lr": 0.05} | more
    wanted = train(MPI.COMM_SELF, Survivor(), **more)
    survivor = Survivor()
    last = world.rank == world.size - 1
    with pytest.raises(Failed):
        train(MPI.COMM_SELF, survivor, 6 if last else 4, boundary=not last, **more)
    before = world.Dup()
    comm, gone = survivor.hand_over(world.Dup(), before)
    assert gone == [] and (comm.rank == 0) == last and survivor.handover.owed and survivor.goes_on
    assert (survivor.found is not None) == last
    found = train(comm, survivor, **more)
    assert found.step == wanted.step == 9
    assert np.abs(found.parameters - wanted.parameters).max() <= 1e-12
    assert found.scores == pytest.approx(wanted.scores, rel=1e-10)
    assert found.progress.best == pytest.approx(wanted.progress.best, rel=1e-10)
    if comm.rank == 0:
        assert [(leg["steps"], leg["ranks"]) for leg in found.summary["legs"]] == [(6, 1), (3, world.size)]
        assert found.summary["losses"][0]["step"] == 6
    before.Free()
    comm.Free()


def losses_in(folder):
    """(step, loss) of the lines of steps, and of those of evaluations, in the order of the file."""
    of_steps = [(line["step"], line["train_loss"]) for line in steps(folder)]
    return of_steps, [(line["step"], line["test_loss"]) for line in evaluations(folder)]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("where", ["before a meeting", "before its lines", "before its scores", "after its scores"])
@pytest.mark.parametrize("again", [False, True])
def test_each_step_has_one_line_with_the_loss_of_all_ranks(where, again, world, mpi_tmp_path, monkeypatch):
    """Rank 0, which writes, is lost after step 5 of 9, between two meetings, or after step 6, an epoch's last. again:
    rank 0 of those that are left is lost, too, before it meets the others."""
    if again and world.size < 4:
        pytest.skip("two of 3 ranks that are left")
    monkeypatch.setattr(agreement, "SECONDS", 1e6)  # they meet where an epoch ends

    def lose(run):
        """Rank 0 fails before it writes, others behind."""
        save = run.saver.save
        run.saver.save = lambda *names: None if run.step == 6 else save(*names)  # rank 0 would have to answer
        for name, found in {"record": "before its lines", "evaluated": "before its scores"}.items():
            original = getattr(run.metrics, name)

            def call(*told, original=original, fails=where == found):
                fails = fails and run.step == 6
                if fails and run.comm.rank == 0:
                    raise Failed
                original(*told)
                if fails:
                    raise Failed

            setattr(run.metrics, name, call)
        if where == "after its scores":  # of which only rank 0 has no line
            scored = run.metrics.evaluated
            run.metrics.evaluated = lambda *told: None if run.comm.rank == 0 and run.step == 6 else scored(*told)

    more = {"out": str(mpi_tmp_path / "left")}
    wanted = mpi_tmp_path / f"whole{world.rank}"
    train(MPI.COMM_SELF, Survivor(), **more | {"out": str(wanted)})
    step, boundary = (5, False) if where == "before a meeting" else (6, True)
    survivor = Survivor()
    with pytest.raises(Failed):
        train(world, survivor, step, boundary, lose, **more)
    before = world
    for lost in range(1 + again):
        left = before.Split(MPI.UNDEFINED if before.rank == 0 else 0, before.rank)
        if left == MPI.COMM_NULL:
            break
        before, gone = survivor.hand_over(left, before)
        assert gone == [0]
        if lost < again:
            with pytest.raises(Failed):
                train(before, survivor, 7, False, **more)
    else:
        assert train(before, survivor, **more).step == 9
        before.Barrier()
        found, undisturbed = losses_in(mpi_tmp_path / "left"), losses_in(wanted)
        assert [[step for step, _ in lines] for lines in found] == [[*range(1, 10)], [3, 6, 9]]
        for mine, theirs in zip(found, undisturbed, strict=True):
            assert dict(mine) == pytest.approx(dict(theirs), rel=1e-10)


def test_what_only_one_rank_has_is_refused():
    with pytest.raises(AgreedError, match="its own residual, which"):
        train(MPI.COMM_SELF, Survivor(), change=lambda run: run.track("residual", PerRank(np.zeros(3))))
