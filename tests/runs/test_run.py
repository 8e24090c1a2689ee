"""One training run: what it writes, when it stops, and that going on from a checkpoint changes nothing."""

import itertools
import json
import math
import shutil
import time

import numpy as np
import pytest
from written_runs import evaluations, steps, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import TrainingError, UsageError
from hpcdl.faults.straggler import with_stragglers
from hpcdl.models import make_model
from hpcdl.reports.watching import logged_end
from hpcdl.runs import Options, Whole, signals

pytestmark = pytest.mark.four

KEYS = {
    *("schema_version", "strategy", "ranks", "workers", "data", "model", "parameters", "epochs", "steps", "seed"),
    *("allreduce", "train_loss", "test_loss", "test_accuracy", "seconds", "examples_per_second", "replicas_agree"),
    *("bytes_sent_per_rank", "messages_per_rank", "bookkeeping_bytes_per_rank", "compute_seconds_per_rank"),
    *("communication_seconds_per_rank", "idle_seconds_per_rank", "peak_memory_bytes_per_rank"),
}


class Hooked:
    """A model that calls each(number of the call, gradient) with every gradient; its loss is what that returns, if any.
    The first call is the warm-up."""

    def __init__(self, each):
        self.model, self.each, self.calls = make_model("mlp:6", (4,), 3, "float64"), each, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def loss_and_gradient(self, parameters, batch, gradient, on_ready=None):
        self.calls += 1
        loss = self.model.loss_and_gradient(parameters, batch, gradient, on_ready)
        other = self.each(self.calls, gradient)
        return loss if other is None else other


def test_the_folder_of_a_run(run, world, data, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    done = run(out=str(out), trace=500)
    assert (done.summary is not None) == (world.rank == 0)
    names = {"best.h5", "checkpoint.h5", "config.yaml", "metrics.jsonl", "summary.json", "trace.json", "logs", ".lock"}
    names.add("started.json")
    assert {path.name for path in out.iterdir()} == names
    assert {path.name for path in (out / "logs").iterdir()} == {f"rank-{rank:04d}.log" for rank in range(world.size)}
    found = summary(out)
    assert found.keys() >= KEYS
    assert (found["ranks"], found["steps"], found["epochs"]) == (world.size, 20, 5)
    assert found["replicas_agree"] is True
    assert all(len(found[name]) == world.size for name in KEYS if name.endswith("per_rank"))
    for rank in range(world.size):
        times = [found[f"{name}_seconds_per_rank"][rank] for name in ("compute", "communication", "data")]
        assert min(times) >= 0
        assert found["idle_seconds_per_rank"][rank] <= found["communication_seconds_per_rank"][rank]
        if rank == 0:
            assert math.isclose(sum(times), found["seconds"], rel_tol=1e-6)
    assert [line["step"] for line in steps(out)] == list(range(1, 21))
    assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(steps(out)))
    scored = evaluations(out)
    assert [line["step"] for line in scored] == [4, 8, 12, 16, 20]
    assert scored[-1]["test_accuracy"] == found["test_accuracy"] > 0.5
    assert scored[-1].keys() >= {"validation_loss", "validation_accuracy", "test_loss", "train_loss", "epoch"}
    spans = {event["name"] for event in json.loads((out / "trace.json").read_text())["traceEvents"]}
    assert spans >= {"step", "all_reduce", "broadcast", "agree", "evaluate", "checkpoint"}


def test_the_trace_has_the_end_of_the_run(run, world, mpi_tmp_path):
    run(out=str(mpi_tmp_path / "a"), trace=6, allreduce="ring")
    events = json.loads((mpi_tmp_path / "a" / "trace.json").read_text())["traceEvents"]
    for rank in range(world.size):
        spans = [event["name"] for event in events if event["ph"] == "X" and event["tid"] % world.size == rank]
        assert len(spans) == 6 and {"step", "all_reduce", "agree", "evaluate", "checkpoint"} <= set(spans)


def test_what_is_slow_on_purpose_does_not_slow_the_warm_up(run, data):
    """Ranks without a vector to warm up with would wait for it, and --timeout would end the run."""
    options = Options(pretend_compute=0.1, model="mlp:6", dtype="float64")
    slow = with_stragglers(make_model(options.model, data.features, data.classes, options.dtype), options, 0, range(1))
    run(own=slow, steps=3)
    assert slow.count == 3


def test_the_scores_are_those_of_the_final_parameters(run, data, world):
    done = run()
    x, y = data.test.rows(0, data.test.examples)
    probabilities = done.model.predict(done.parameters, x)
    assert math.isclose(done.scores["test_accuracy"], (probabilities.argmax(1) == y).mean())
    assert math.isclose(done.scores["test_loss"], -np.log(probabilities[np.arange(len(y)), y]).mean(), rel_tol=1e-9)


def test_a_model_of_four_members_is_scored_the_same(run):
    class Four:
        """No `evaluate`: the run takes the loss from `loss_and_gradient` and the score from `predict`."""

        def __init__(self):
            self.inner = make_model("mlp:6", (4,), 3, "float64")
            self.layout, self.initialize = self.inner.layout, self.inner.initialize
            self.loss_and_gradient, self.predict = self.inner.loss_and_gradient, self.inner.predict

    four, whole = run(own=Four()), run()
    assert four.scores.keys() == whole.scores.keys()
    for name, value in whole.scores.items():
        assert math.isclose(four.scores[name], value, rel_tol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("stop", [6, 8])  # in the middle of an epoch, and at the end of one
def test_resumed_is_never_stopped_to_the_bit(run, world, mpi_tmp_path, optimizer, stop):
    whole = run(optimizer=optimizer, steps=15, out=str(mpi_tmp_path / "whole"))
    first = run(optimizer=optimizer, steps=15, out=str(mpi_tmp_path / "parts"), checkpoint_every=stop, keep=9)
    assert np.array_equal(first.parameters, whole.parameters)
    parts = mpi_tmp_path / "parts"
    second = run(optimizer=optimizer, steps=15, out=str(parts), resume=str(parts / f"checkpoint-{stop:09d}.h5"))
    assert second.step == 15
    assert np.array_equal(second.parameters, whole.parameters)
    for name, vector in whole.optimizer.state.items():
        assert np.array_equal(second.optimizer.state[name], vector)
    once = {line["step"]: line["train_loss"] for line in steps(mpi_tmp_path / "whole")}
    again = steps(parts)
    assert [line["step"] for line in again] == list(range(1, 16))  # none twice, none missing
    assert all(once[line["step"]] == line["train_loss"] for line in again)


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_starts_from_the_same_bits(run, world, mpi_tmp_path):
    from mpi4py import MPI

    out = str(mpi_tmp_path / "a")
    first = run(steps=6, optimizer="adam", out=out)
    if world.rank == 0:
        shutil.copytree(out, mpi_tmp_path / "kept")
    seen = {}

    def train(comm, model, data, optimizer, run):
        parameters = run.initial(model)
        run.begin("all_reduce", Whole(model, parameters, optimizer), data)
        seen.update({name: vector.array.copy() for name, vector in run.state.tracked.items()}, step=run.step)

    part = world.Split(0 if world.rank < world.size - 1 else MPI.UNDEFINED, world.rank)
    whole = run(steps=12, optimizer="adam")
    if part != MPI.COMM_NULL:
        second = run(comm=part, steps=12, optimizer="adam", out=out, resume=out)
        run(comm=part, steps=6, optimizer="adam", resume=str(mpi_tmp_path / "kept"), train=train)
        assert seen.pop("step") == 6
        for name, vector in first.state.tracked.items():
            assert np.array_equal(seen[name], vector.array)
        assert np.allclose(second.parameters, whole.parameters, rtol=1e-9, atol=1e-12)
    world.Barrier()


@pytest.mark.parametrize("compress", ["bfloat16", "sign", "topk:0.1", "randomk:0.2"])
def test_what_belongs_to_a_rank_comes_back_to_it(run, world, mpi_tmp_path, compress):
    """Error feedback's residuals: resumed is never stopped, to the bit."""
    settings = {"compress": compress, "steps": 15}
    whole = run(**settings, out=str(mpi_tmp_path / "whole"))
    run(**settings, out=str(mpi_tmp_path / "parts"), checkpoint_every=6, keep=9)
    found = Checkpoint.read(mpi_tmp_path / "whole").vectors["ranks/residual"]
    assert found.shape == (world.size, whole.parameters.size) and found.dtype == "float64"
    assert np.array_equal(found[world.rank], whole.state.tracked["residual"].array)
    if world.size > 1:
        assert all(row.any() for row in found)  # there is something to come back
        assert len({row.tobytes() for row in found}) == world.size  # of each rank its own
    parts = mpi_tmp_path / "parts"
    again = run(**settings, out=str(parts), resume=str(parts / "checkpoint-000000006.h5"))
    assert again.step == 15
    assert np.array_equal(again.parameters, whole.parameters)
    assert np.array_equal(again.state.tracked["residual"].array, whole.state.tracked["residual"].array)
    found = summary(parts)
    assert (found["allreduce"], found["compress"]) == ("compressed", compress)


@pytest.mark.mpi(min_size=2)
def test_residuals_are_handed_on_to_another_number_of_ranks(run, world, mpi_tmp_path):
    from mpi4py import MPI

    out = str(mpi_tmp_path / "a")
    run(steps=3, out=out, compress="bfloat16")
    whole = Checkpoint.read(mpi_tmp_path / "a").vectors["ranks/residual"][:].sum(axis=0)
    part = world.Split(0 if world.rank else MPI.UNDEFINED, world.rank)
    if part != MPI.COMM_NULL:
        again = run(comm=part, steps=3, out=out, resume=out, compress="bfloat16")
        total = part.allreduce(again.state.tracked["residual"].array)
        np.testing.assert_allclose(total, whole, rtol=0, atol=1e-15)
        assert whole.any()
        assert run(comm=part, steps=6, out=out, resume=out, compress="bfloat16").step == 6
    world.Barrier()
    assert run(steps=8, out=out, resume=out, compress="bfloat16").step == 8  # more ranks than before
    with pytest.raises(UsageError, match=r"state is .*ranks/residual; but this run's state is optimizer/momentum, p"):
        run(steps=9, out=out, resume=out)
    assert run(steps=9, out=out, resume=out, compress="float16").step == 9  # what is left over suits either kind


def test_what_does_not_fit_is_not_resumed(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    run(steps=3, out=out)
    for changed, words in [
        ({"model": "mlp:7"}, "that run's model is mlp:6 with 51 parameters of float64, not mlp:7 with 59"),
        ({"optimizer": "adam"}, "optimizer is momentum, not adam"),
        ({"seed": 5}, "seed is 0, not 5"),
        ({"loss": "huber:delta=1"}, "loss is squared, not huber:delta=1"),
        ({"batch_size": 8}, "batch is 7, not 8"),
        ({"dtype": "float64", "model": "softmax"}, "model"),
    ]:
        with pytest.raises(UsageError, match=words):
            run(steps=6, out=out, resume=out, **changed)
    with pytest.raises(UsageError, match="holds another run"):
        run(steps=3, out=out)
    with pytest.raises(UsageError, match="there is no checkpoint"):
        run(steps=3, out=str(mpi_tmp_path / "b"), resume=str(mpi_tmp_path))
    if world.rank == 0:
        path = mpi_tmp_path / "a" / "checkpoint.h5"
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="damaged"):
        run(steps=6, out=out, resume=out)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_step_and_rank(run, world, mpi_tmp_path):
    sick, out = world.size - 1, mpi_tmp_path / "a"

    def spoil(calls, gradient):
        if calls == 1 + 11 and world.rank == sick:
            gradient[3] = np.nan
            return np.nan

    with pytest.raises(TrainingError, match=rf"the loss of step 11 is not finite on rank {sick}; .*checkpoint.h5"):
        run(own=Hooked(spoil), out=str(out), checkpoint_every=4)
    world.Barrier()
    kept = Checkpoint.read(out)
    assert kept.attributes["step"] == 8 and np.isfinite(kept.vectors["parameters"]).all()
    assert not (out / "summary.json").exists()
    assert logged_end(out).startswith("failed: the loss of step 11 is not finite")


def test_a_signal_on_one_rank_stops_all_after_the_same_step_with_a_checkpoint(run, world, mpi_tmp_path, monkeypatch):
    def signal(calls, gradient):
        if calls == 1 + 3 and world.rank == world.size // 2:
            signals.received.append("SIGUSR1")

    monkeypatch.setattr(signals, "received", [])
    out = mpi_tmp_path / "a"
    stopped = run(own=Hooked(signal), out=str(out), epochs=50)
    steps = world.allgather(stopped.step)
    assert stopped.stopped == "signal" and len(set(steps)) == 1 and 3 <= steps[0] < 200
    assert Checkpoint.read(out).attributes["step"] == steps[0]
    assert np.array_equal(Checkpoint.read(out).vectors["parameters"], stopped.parameters)
    assert not (out / "summary.json").exists()  # the run is not at its end


def test_the_time_limit_ends_the_run_in_good_order(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    done = run(own=Hooked(lambda calls, gradient: time.sleep(0.02)), out=str(out), epochs=100_000, time_limit=0.3)
    assert done.stopped == "time limit"
    assert len(set(world.allgather(done.step))) == 1
    assert Checkpoint.read(out).attributes["step"] == done.step and summary(out)["stopped"] == "time limit"
    assert evaluations(out)[-1]["step"] == done.step  # scored as it ended


@pytest.mark.parametrize("budget", ["seconds=0.05", "bytes=30000", "examples=300"])
def test_a_budget_ends_the_run_when_it_is_used_up_and_resumed_it_is_still(run, world, mpi_tmp_path, budget):
    if world.size == 1 and budget.startswith("bytes"):
        pytest.skip("one rank sends nothing")
    out = mpi_tmp_path / "a"
    done = run(out=str(out), epochs=20_000, budget=budget, allreduce="ring")
    assert len(set(world.allgather(done.step))) == 1
    if budget.startswith("examples"):  # known before: the last step is that one
        assert (done.stopped, done.step) == ("budget", 43)
        return
    used = {"seconds": done.seconds, "bytes": done.legs.bytes}
    name, _, limit = budget.partition("=")
    assert done.stopped == "budget" and (world.rank > 0 or used[name] >= float(limit))
    assert evaluations(out)[-1]["step"] == done.step  # scored as it ended
    assert run(out=str(out), resume=str(out), epochs=20_000, budget=budget, allreduce="ring").step == done.step
    more = run(out=str(out), resume=str(out), steps=done.step + 2, budget="", allreduce="ring")
    assert (more.stopped, more.step) == ("finished", done.step + 2)


def test_patience_stops_a_run_that_no_longer_improves_and_keeps_the_best(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    done = run(out=str(out), patience=3, validation=0.2, epochs=500, lr=0.5)
    assert done.stopped == "patience" and done.step < 500 * 4
    losses = [line["validation_loss"] for line in evaluations(out)]
    best = int(np.argmin(losses))
    assert len(losses) - 1 - best == 3
    assert Checkpoint.read(out / "best.h5").attributes["step"] == (best + 1) * 4


def test_the_agreement_is_counted_apart(run, world):
    done = run()
    assert set(done.comm.traffic) == {"broadcast", "all_reduce"}
    assert done.comm.traffic["all_reduce"].calls == 20
    assert world.size == 1 or done.bookkeeping.traffic.bytes > 0


@pytest.mark.parametrize("seconds, agreements", [(0, 200), (1e9, 50)])  # at each step; at the end of each epoch
def test_long_steps_are_agreed_on_at_once_and_short_ones_in_bulk(run, monkeypatch, seconds, agreements):
    monkeypatch.setattr("hpcdl.runs.agreement.SECONDS", seconds)
    monkeypatch.setattr("hpcdl.runs.agreement.SHARE", math.inf)  # whatever a meeting takes
    monkeypatch.setattr("hpcdl.runs.agreement.SELDOM", max(2, seconds))
    done = run(epochs=50)
    scores, replicas = 2 * 50, 2
    # The first step is always agreed on, for what it takes is not known before.
    assert done.bookkeeping.traffic["all_reduce"].calls == agreements + scores + replicas + (seconds > 0)


def test_what_a_run_has_behind_it_goes_on_when_it_resumes(run, world, mpi_tmp_path):
    out = str(mpi_tmp_path / "a")
    first = run(out=out, epochs=3)
    second = run(out=out, resume=out, epochs=4)
    assert second.seconds > second.stopwatch.earlier_seconds > 0
    assert second.examples == 4 * 28 and second.progress.best <= first.progress.best
    worse = run(out=out, resume=out, epochs=6, patience=1, validation=0.2, lr=50.0)  # diverges: the best stays
    assert worse.progress.best == second.progress.best and worse.stopped == "patience"


def test_a_state_that_is_not_finite_is_never_saved(run, world, mpi_tmp_path):
    out = mpi_tmp_path / "a"
    with pytest.raises(TrainingError, match="not finite"):
        run(out=str(out), steps=1, lr=1e308, optimizer="sgd", weight_decay=1e10)
    world.Barrier()
    assert not (out / "checkpoint.h5").exists() and not (out / "summary.json").exists()
