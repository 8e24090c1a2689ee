"""What survivors go on from: whoever is furthest hands its state over, and the steps are those of one run."""

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.data import from_arrays
from hpcdl.errors import AgreedError
from hpcdl.models import for_data
from hpcdl.runs.options import Options
from hpcdl.runs.run import Run
from hpcdl.runs.survivor import Survivor
from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four
OPTIONS = {"epochs": 3, "batch_size": 13, "dtype": "float64", "allreduce": "ring", "progress": "none", "out": "none"}


class Failed(Exception):
    """In the place of what MPI raises."""


def rows():
    random = np.random.default_rng(4)
    x, y = random.standard_normal((29, 6)), random.integers(0, 3, 29)
    return from_arrays(x, y, x[:11], y[:11], dtype="float64")


def train(bare, survivor, fails_after=None, boundary=False, **more):
    """A leg on the ranks of `bare`, which fails after a step: before its boundary, or after it; returns the run."""
    options = Options(**OPTIONS | more)
    options.survivor = survivor
    data = rows()
    model, run = for_data("mlp:5", data, "float64"), Run(Communicator(bare, "ring", ends_job=False), options)

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
    assert gone == [] and (comm.rank == 0) == last and survivor.owed and survivor.goes_on
    assert (survivor.found is not None) == last
    found = train(comm, survivor, **more)
    assert found.step == wanted.step == 9
    assert np.abs(found.parameters - wanted.parameters).max() <= 1e-12
    assert found.scores == pytest.approx(wanted.scores, rel=1e-10)
    assert found.stopping.best == pytest.approx(wanted.stopping.best, rel=1e-10)
    if comm.rank == 0:
        assert [(leg["steps"], leg["ranks"]) for leg in found.summary["legs"]] == [(6, 1), (3, world.size)]
        assert found.summary["losses"][0]["step"] == 6
    before.Free()
    comm.Free()


def test_what_only_one_rank_has_is_refused():
    def tracks(run):
        from hpcdl.runs.state import PerRank

        run.track("residual", PerRank(np.zeros(3)))

    data, options = rows(), Options(**OPTIONS)
    options.survivor = Survivor()
    with Run(Communicator(MPI.COMM_SELF), options) as run, pytest.raises(AgreedError, match="its own residual, which"):
        tracks(run)
        model = for_data("mlp:5", data, "float64")
        all_reduce.train(run.comm, model, data, run.make_optimizer(model, data), run)
