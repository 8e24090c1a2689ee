"""What is known of a search before its first trial."""

from dataclasses import replace

import pytest
from few import write_few

from hpcdl.data import row_cache
from hpcdl.errors import UsageError
from hpcdl.launch.option_parser import parse
from hpcdl.search.checks import (
    boundary_values,
    data_key,
    epochs_of,
    objective_of,
    open_all_data,
    probes,
    read_training,
    refuse_names,
    with_epochs,
    with_words,
)
from hpcdl.search.space import Space


def space(*lines):
    return Space.read(lines)


def test_each_choice_and_both_ends_are_tried_with_what_their_conditions_ask_for():
    found = boundary_values(
        space(
            "lr=log:0.001..0.1",
            "optimizer=sgd|momentum|adam",
            "momentum:beta=0.5..0.9 if optimizer=momentum",
            "batch-size=int:8..64:log",
        )
    )
    values = [each for _, each in found]
    assert {each["lr"] for each in values} >= {0.001, 0.1} and {each["batch-size"] for each in values} >= {8, 64}
    assert {each["optimizer"] for each in values} == {"sgd", "momentum", "adam"}
    betas = {each["momentum:beta"] for each in values if "momentum:beta" in each}
    assert betas >= {0.5, 0.9} and all(
        ("momentum:beta" in each) == (each["optimizer"] == "momentum") for each in values
    )
    assert len(values) <= 9


def test_a_line_and_its_ranks():
    line = "train-allreduce --data digits"
    assert read_training(line, 0, 4).ranks == 1 and read_training(line, 2, 4).ranks == 2
    with pytest.raises(UsageError, match="--ranks-per-trial 2: train-sequential works on 1"):
        read_training("train-sequential", 2, 4)
    more = with_words(read_training(line, 1, 1), "--model=mlp:8", "--lr=0.5")
    assert more.text == f"{line} --model=mlp:8 --lr=0.5" and more.options(parse, "--out=none").lr == 0.5


def test_how_long_a_trial_is():
    line, federated = read_training("train-allreduce --epochs 9", 1, 1), read_training("train-federated", 1, 1)
    assert with_epochs(line, 0) == line and with_epochs(line, 4).text.endswith("--epochs=4")
    assert with_epochs(federated, 4).text.endswith("--rounds=4")
    options = line.options(parse, "--out=none")
    assert epochs_of(line, "asha", options) == 9
    options = replace(options, steps=5)
    assert epochs_of(line, "random", options) == 9
    with pytest.raises(UsageError, match="--method pbt:population=4 counts in epochs"):
        epochs_of(line, "pbt:population=4", options)


def test_names_of_others_are_refused():
    line = read_training("train-federated", 1, 1)
    for text, said in (
        ("epochs=int:1..4", "no option --epochs"),
        ("out=a|b", "decides --out"),
        ("l-r=1..2", "no option"),
    ):
        with pytest.raises(UsageError, match=said):
            refuse_names(space(text), line, "random")
    refuse_names(space("rounds=int:1..4"), line, "random")
    with pytest.raises(UsageError, match="decides how long"):
        refuse_names(space("rounds=int:1..4"), line, "hyperband")


@pytest.fixture
def judged(world, mpi_tmp_path):
    """A function: the objective of a search with these options, on data with classes or without."""

    def run(name, *more, lines=("lr=0.1..1",), classes=3):
        if world.rank == 0:
            write_few(mpi_tmp_path, classes)
        world.Barrier()
        path = mpi_tmp_path / "few.h5"
        command = with_words(read_training("train-allreduce", 1, world.size), f"--data={path}", *more)
        tried = probes(space(*lines), command, parse)
        data = open_all_data(world, [each.options for each in tried])
        try:
            return objective_of(name, command, tried, data)
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
    assert name == "test_accuracy" and "--validation=0.1" not in command.words and "as was asked for" in said
    name, command, said = judged("", lines=["validation=0.1..0.4"])
    assert "10%, 40%" in said and "--validation=0.1" not in command.words
    for wrong in ("test_rmse", "accuracy", "test_acuracy"):
        with pytest.raises(UsageError, match="unknown objective"):
            judged(wrong)


def test_data_of_each_type_are_looked_at_once(world, mpi_tmp_path):
    command = read_training("train-allreduce --data digits", 1, world.size)
    tried = probes(space("dtype=float32|float64", "lr=0.1..1", "placement=shared|streamed"), command, parse)
    data = open_all_data(world, [each.options for each in tried])
    assert set(data) == {data_key(each.options) for each in tried} and len(data) == 3
    for each in data.values():
        each.close()
    row_cache.clear()


def test_a_fault_that_touches_the_folder_of_a_trial_is_not_refused():
    """Only who writes nothing has no disk that is full; what is tried here has no folder yet."""
    training = read_training("train-allreduce --inject diskfull:step=9", 1, 4)
    (probe, *_) = probes(space("lr=log:0.001..0.1"), training, parse)
    assert probe.options.inject == "diskfull:step=9"
    with pytest.raises(UsageError, match=r"--space lr=.*the ranks are 0 to 0, and there is no rank 1"):
        probes(space("lr=log:0.001..0.1"), read_training("train-allreduce --inject diskfull:rank=1", 1, 4), parse)
