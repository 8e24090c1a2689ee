"""What is known of a search before its first trial."""

from dataclasses import replace

import h5py
import pytest
from few import write_few

from hpcdl.data import row_cache
from hpcdl.errors import UsageError
from hpcdl.launch.option_parser import parse
from hpcdl.search import checks
from hpcdl.search.space import Space


def space(*lines):
    return Space.read(lines)


def test_each_choice_and_both_ends_are_tried_with_what_their_conditions_ask_for():
    lines = ["lr=log:0.001..0.1", "optimizer=sgd|momentum|adam", "momentum:beta=0.5..0.9 if optimizer=momentum"]
    values = [each for _, each in checks.boundary_values(space(*lines, "batch-size=int:8..64:log"))]
    assert {each["lr"] for each in values} >= {0.001, 0.1} and {each["batch-size"] for each in values} >= {8, 64}
    assert {each["optimizer"] for each in values} == {"sgd", "momentum", "adam"}
    betas = {each["momentum:beta"] for each in values if "momentum:beta" in each}
    assert betas >= {0.5, 0.9} and len(values) <= 9
    assert all(("momentum:beta" in each) == (each["optimizer"] == "momentum") for each in values)


def test_a_line_and_its_ranks():
    line = "train-allreduce --data digits"
    assert checks.read_training(line, 0, 4).ranks == 1 and checks.read_training(line, 2, 4).ranks == 2
    with pytest.raises(UsageError, match="--ranks-per-trial 2: train-sequential works on 1"):
        checks.read_training("train-sequential", 2, 4)
    more = checks.with_words(checks.read_training(line, 1, 1), "--model=mlp:8", "--lr=0.5")
    assert more.text == f"{line} --model=mlp:8 --lr=0.5" and more.options(parse, "--out=none").lr == 0.5


def test_how_long_a_trial_is():
    line = checks.read_training("train-allreduce --epochs 9", 1, 1)
    federated = checks.read_training("train-federated", 1, 1)
    assert checks.with_epochs(line, 0) == line and checks.with_epochs(line, 4).text.endswith("--epochs=4")
    assert checks.with_epochs(federated, 4).text.endswith("--rounds=4")
    options = line.options(parse, "--out=none")
    assert checks.epochs_of(line, "asha", options) == 9
    options = replace(options, steps=5)
    assert checks.epochs_of(line, "random", options) == 9
    with pytest.raises(UsageError, match="--method pbt:population=4 counts epochs"):
        checks.epochs_of(line, "pbt:population=4", options)


def test_names_of_others_are_refused():
    line = checks.read_training("train-federated", 1, 1)
    with pytest.raises(UsageError, match="no option --epochs"):
        checks.refuse_names(space("epochs=int:1..4"), line, "random")
    checks.refuse_names(space("rounds=int:1..4"), line, "random")
    with pytest.raises(UsageError, match="sets --"):
        checks.refuse_names(space("rounds=int:1..4"), line, "hyperband")


@pytest.fixture
def judged(world, mpi_tmp_path):
    """A function: the objective of a search with these options, on data with classes or without."""

    def run(name, *more, lines=("lr=0.1..1",), parts=("train", "test")):
        if world.rank == 0:
            write_few(mpi_tmp_path)
            with h5py.File(mpi_tmp_path / "few.h5", "a") as file:
                for part in {*file} - {*parts}:
                    del file[part]
        world.Barrier()
        path = mpi_tmp_path / "few.h5"
        command = checks.with_words(checks.read_training("train-allreduce", 1, world.size), f"--data={path}", *more)
        tried = checks.probes(space(*lines), command, parse)
        data = checks.open_all_data(world, [each.options for each in tried])
        try:
            return checks.objective_of(name, command, tried, data)
        finally:
            for each in data.values():
                each.close()
            row_cache.clear()
            world.Barrier()

    return run


def test_by_what_trials_are_judged(judged):
    name, command, said = judged("")
    assert name == "validation_accuracy" and command.words[-1] == "--validation=0.1" and "10%" in said
    name, command, said = judged("validation_loss", "--validation=0.3")
    assert name == "validation_loss" and "--validation=0.1" not in command.words and "30%" in said
    name, command, said = judged("test_accuracy")
    assert name == "test_accuracy" and "--validation=0.1" not in command.words and "as --objective says" in said
    name, command, said = judged("", lines=["validation=0.1..0.4"])
    assert "10%, 40%" in said and "--validation=0.1" not in command.words
    for wrong in ("test_rmse", "accuracy", "test_acuracy"):
        with pytest.raises(UsageError, match="unknown objective"):
            judged(wrong)
    name, command, said = judged("validation_macro_f1", "--scores=roc_auc")
    assert name == "validation_macro_f1" and "--scores=macro_f1,roc_auc" in command.words
    with pytest.raises(UsageError, match="unknown objective 'test_loss'"):
        judged("test_loss", parts=["train"])


def test_data_of_each_type_are_looked_at_once(world, mpi_tmp_path):
    command = checks.read_training("train-allreduce --data digits", 1, world.size)
    tried = checks.probes(space("dtype=float32|float64", "lr=0.1..1", "placement=shared|streamed"), command, parse)
    data = checks.open_all_data(world, [each.options for each in tried])
    assert set(data) == {checks.data_key(each.options) for each in tried} and len(data) == 3
    for each in data.values():
        each.close()
    row_cache.clear()


def test_a_fault_that_touches_the_folder_of_a_trial_is_not_refused():
    """Only who writes nothing has no disk that is full; what is tried here has no folder yet."""
    training = checks.read_training("train-allreduce --inject diskfull:step=9", 1, 4)
    (probe, *_) = checks.probes(space("lr=log:0.001..0.1"), training, parse)
    assert probe.options.inject == "diskfull:step=9"
    training = checks.read_training("train-allreduce --inject diskfull:rank=1", 1, 4)
    with pytest.raises(UsageError, match=r"--space lr=.*the ranks are 0 to 0, and there is no rank 1"):
        checks.probes(space("lr=log:0.001..0.1"), training, parse)
