"""A run that pauses, and goes on, is one that never paused: every program that trains, whatever it holds where."""

import shutil

import numpy as np
import pytest
from few import write_few
from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import AgreedError
from hpcdl.launch.command_lines import read_command
from hpcdl.launch.option_parser import parse
from hpcdl.runs.context import RunContext

pytestmark = pytest.mark.four
COMMON = (
    "--epochs=6 --batch-size=5 --dtype=float64 --model=mlp:12 --schedule=cosine:warmup=1 --optimizer=adam --lr=0.05"
)
DEEP = COMMON.replace("--schedule", "--lr-schedule") + " --model=mlp:12,12,12,12"
ROUNDS = "--rounds=6 --clients=4 --local-batch=3"
EXACT = {
    "train-allreduce": COMMON,
    "train-allreduce --data-servers=1": COMMON,
    "train-allreduce --average=from=1": COMMON,
    "train-local-sgd --sync-every=3": COMMON,
    "train-gossip --topology=ring": COMMON,
    "train-parameter-server --servers=1": COMMON,
    "train-fully-sharded": COMMON,
    "train-pipeline --microbatches=2": DEEP,
    "train-tensor-parallel": COMMON,
    "train-federated": ROUNDS + " --dtype=float64 --model=mlp:12",
    "train-svrg": "--epochs=6 --batch-size=5 --model=softmax --dtype=float64",
    "train-coordinate-descent": "--rounds=6 --model=svm --dtype=float64",
}
BESIDE = {  # hold what another one holds in the same way
    *("train-allreduce --average=from=1", "train-coordinate-descent", "train-svrg", "train-tensor-parallel"),
    *("train-local-sgd --sync-every=3", "train-pipeline --microbatches=2", "train-federated"),
}
OTHERS = {  # of which no two runs are the same, or what is under way is done first
    "train-parameter-server --servers=1 --consistency=async": COMMON,
    "train-gossip --method=adpsgd --topology=ring": COMMON,
    "train-pipeline --schedule=pipedream": DEEP,
}


@pytest.fixture
def paused(world, mpi_tmp_path):
    """A function: train by a line until these epochs, one leg after another; returns the checkpoint of each leg."""

    def run(line, options, pauses, name):
        if world.rank == 0:
            write_few(mpi_tmp_path, classes=2 if "svm" in options else 3)
        world.Barrier()
        command, folder, found = read_command(1, line, {}, world.size), mpi_tmp_path / name, []
        for pause in pauses:
            how = [f"--resume={folder}"] if found else [f"--out={folder}", f"--data={mpi_tmp_path / 'few.h5'}"]
            made = command.options(parse, *options.split(), *how)
            ended = command.training.run(world, made, RunContext(pause=pause))
            read = Checkpoint.read(folder)
            found.append(Checkpoint(dict(read.vectors), read.attributes))  # before the next leg replaces the file
            written = summary(folder)
            assert written["stopped"] == ended.stopped == ("paused" if pause else "finished")
            assert written["test_loss"] is not None or "test_rmse" in written
            world.Barrier()
        return found

    yield run
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(mpi_tmp_path, ignore_errors=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "line", [pytest.param(each, marks=[pytest.mark.exhaustive] * (each in BESIDE)) for each in EXACT]
)
def test_a_run_that_pauses_is_one_that_never_did_to_the_bit(line, paused):
    (whole,) = paused(line, EXACT[line], [0], "whole")
    first, second, third = paused(line, EXACT[line], [2, 3.25, 0], "parts")
    assert [each.attributes["epoch"] for each in (first, third)] == [2, whole.attributes["epoch"]]
    assert second.attributes["step"] == round(3.25 * first.attributes["step"] / 2)
    assert third.vectors.keys() == whole.vectors.keys()
    for name, vector in whole.vectors.items():
        assert np.array_equal(third.vectors[name], vector), name
        assert not np.array_equal(first.vectors["parameters"], vector)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("line", OTHERS)
def test_others_pause_at_the_step_too(line, paused):
    first, second, last = paused(line, OTHERS[line], [2, 3.25, 0], "parts")
    steps = first.attributes["step"] // 2
    assert [each.attributes["step"] for each in (second, last)] == [round(3.25 * steps), 6 * steps]


@pytest.mark.mpi(min_size=2)
def test_what_has_paused_there_has_nothing_left_to_do(paused):
    first, again = paused("train-allreduce", COMMON, [2, 2], "twice")
    assert len(again.attributes["legs"]) == 1 and again.digest() == first.digest()


@pytest.mark.mpi(min_size=2)
def test_an_heir_goes_on_with_options_of_its_own(world, paused, mpi_tmp_path):
    """At the same epoch, with the optimizer's vectors; without that, another batch size is refused."""
    paused("train-allreduce", COMMON, [2], "parent")
    command = read_command(1, "train-allreduce", {}, world.size)
    changed = ["--batch-size=10", "--optimizer=adam:beta1=0.8", "--lr=0.01", "--schedule=constant"]
    made = command.options(parse, *changed, f"--resume={mpi_tmp_path / 'parent'}")
    with pytest.raises(AgreedError, match="optimizer is adam, not adam:beta1"):
        command.training.run(world, made)
    run = command.training.run(world, made, RunContext(heir=True, pause=3))
    assert (run.step, run.optimizer.step) == (6, 6)  # 2 steps an epoch, no longer 4
    assert len(run.legs.earlier) == 1 and run.legs.first == 4
    last = Checkpoint.read(mpi_tmp_path / "parent").attributes
    assert (last["batch"], last["epoch"], last["optimizer"]) == (10, 3, "adam:beta1=0.8")
    made = command.options(parse, f"--resume={mpi_tmp_path / 'parent'}", "--optimizer=sgd")
    with pytest.raises(AgreedError, match="that run's state is"):
        command.training.run(world, made, RunContext(heir=True))
