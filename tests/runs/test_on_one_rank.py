"""A run that rank 0 runs by itself, over parameters that lie elsewhere."""

from functools import partial

import numpy as np
import pytest
from written_runs import evaluations, steps, summary

from hpcdl.checkpoint.attributes import SUMMED
from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.checkpoint.state import RemoteVector
from hpcdl.comm import Communicator
from hpcdl.models import make_model
from hpcdl.runs import Options, Run, signals
from hpcdl.runs.context import RunContext
from hpcdl.runs.on_one_rank import OnOneRank

pytestmark = pytest.mark.four


@pytest.fixture
def lead(world, data):
    """A function: rank 0 runs a run alone, over parameters that lie elsewhere: `whole` has them after `refresh` only.
    The k-th step adds 1 to all of them and 2 to a vector of the optimizer's state. log: what was called at which
    step."""

    def start(horizon=None, at_step=lambda run: None, refreshing=lambda run: None, **options):
        defaults = {"batch_size": 7, "epochs": 3, "dtype": "float64", "progress": "none", "model": "mlp:6"}
        options = Options(**defaults | options)
        world.Barrier()
        comm = Communicator(world, "ring")
        model = make_model(options.model, data.features, data.classes, options.dtype)
        whole, lying, log = np.zeros(model.layout.size), np.zeros(model.layout.size), []
        state = np.zeros(model.layout.size)
        with Run(comm, options, RunContext(workers=max(1, world.size - 1))) as run:

            def refresh():
                log.append(("refresh", run.step))
                refreshing(run)
                whole[:] = lying

            def read():
                log.append(("read", run.step))
                return state.copy()

            class Led(OnOneRank):
                def tracked(self):
                    write = partial(state.__setitem__, slice(None))
                    state_there = {"optimizer/momentum": RemoteVector(read, write, state)}
                    return super().tracked() | (state_there if self.leads else {})

                def refresh(self):
                    refresh()

                def horizon(self, step):
                    return horizon or step

            optimizer = run.make_optimizer(model, data, 0)
            run.begin("led", Led(model, whole if world.rank == 0 else None, optimizer, works=False), data)
            lying[:] = whole
            run.start()
            while world.rank == 0 and not run.over:
                with run.stopwatch.step():
                    lying += 0.001
                    state += 2
                    run.record(1.0, 7)
                    at_step(run)
                    run.boundary()
            run.end()
        run.log, run.state = log, state
        world.Barrier()
        return run

    return start


def test_a_run_that_rank_0_runs_alone(lead, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    first = lead(out=out, checkpoint_every=5, keep=9)
    assert (first.stopped, first.agree) == ("finished", True)
    assert first.step == (12 if world.rank == 0 else 0)
    if world.rank == 0:
        assert first.summary["workers"] == max(1, world.size - 1) and first.summary["steps"] == 12
        assert {("refresh", step) for step in (4, 5, 8, 10, 12)} == {each for each in first.log if each[0] == "refresh"}
        assert {step for what, step in first.log if what == "read"} >= {5, 10, 12}
        for step in (5, 10):
            found = Checkpoint.read(mpi_tmp_path / "a" / f"checkpoint-{step:09d}.h5").vectors
            assert np.allclose(found["parameters"], step * 0.001) and (found["optimizer/momentum"] == 2 * step).all()
    else:
        assert not first.log and first.summary is None
    second = lead(out=out, resume=f"{out}/checkpoint-000000005.h5")
    if world.rank == 0:
        assert np.allclose(second.parameters, 0.012) and (second.state == 24).all()
        assert [line["step"] for line in steps(mpi_tmp_path / "a")] == list(range(1, 13))


def test_what_the_others_have_spent_is_known_when_the_run_ends_and_not_where_it_is_killed(lead, world, mpi_tmp_path):
    out, ranks = mpi_tmp_path / "a", world.size
    lead(out=str(out), checkpoint_every=5, keep=9)
    of = {step: Checkpoint.read(path).attributes["legs"] for step, path in ((5, older(out, 5)), (12, out))}
    assert [len(legs) for legs in of.values()] == [1, 1]
    for name in SUMMED:
        known, *unknown = of[5][0][name]
        assert known is not None and unknown == (ranks - 1) * [None]
        assert None not in of[12][0][name] and len(of[12][0][name]) == ranks
    lead(out=str(out), resume=str(older(out, 5)))  # as if it had been killed there
    found = summary(out)
    assert [leg["steps"] for leg in found["legs"]] == [5, 7]
    assert found["compute_seconds_per_rank"][1:] == (ranks - 1) * [None]
    assert None not in found["legs"][1]["compute_seconds_per_rank"]


def older(out, step):
    return out / f"checkpoint-{step:09d}.h5"


@pytest.mark.parametrize("reason", ["signal", "time limit", "patience"])
def test_steps_that_are_under_way_are_ended_before_a_run_stops(reason, lead, world, monkeypatch, mpi_tmp_path):
    monkeypatch.setattr(signals, "received", [])
    options = {"epochs": 1000, "out": str(mpi_tmp_path / "a")}
    if reason == "patience":
        options |= {"patience": 1, "validation": 0.2}
    if reason == "time limit":
        options["time_limit"] = 1e-9
    told, over = [], []

    def at_step(run):
        run.agreement.interval = 1
        if run.step == 3 and reason == "signal":
            signals.received.append("SIGTERM")
        if run.stopping.pending is not None:
            told.append(run.step)

    run = lead(horizon=14, at_step=at_step, refreshing=lambda run: over.append((run.step, run.over)), **options)
    assert run.stopped == reason  # on all ranks
    if world.rank == 0:
        assert run.step == 14 and told[-1] == 14 and Checkpoint.read(mpi_tmp_path / "a").attributes["step"] == 14
        assert evaluations(mpi_tmp_path / "a")[-1]["step"] == 14
        assert all(ended == (step == 14) for step, ended in over)  # not before: what is over applies what was delayed


def test_what_a_boundary_sends_and_waits_for_is_no_part_of_the_steps(lead, world):
    def refreshing(run):
        traffic = run.comm.traffic["wait"]
        traffic.seconds, traffic.blocked_seconds = traffic.seconds + 1000, traffic.blocked_seconds + 1000

    run = lead(refreshing=refreshing)
    for rank in world.allgather(run.legs.measured()):
        assert rank["compute_seconds_per_rank"] >= 0
        assert 0 <= rank["idle_seconds_per_rank"] <= rank["communication_seconds_per_rank"] < 1000
    if world.rank == 0:
        assert run.stopwatch.apart_seconds > 0
