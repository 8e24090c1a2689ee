"""hpcdl/launch/command_lines.py: from a line to a program with all its options."""

import pytest

from hpcdl.errors import UsageError
from hpcdl.launch.command_lines import read_commands
from hpcdl.launch.option_parser import parse


def options(line, size=4, **common):
    (command,) = read_commands([line], common, size)
    return command, command.options(parse, "--seed=7", "--out=none")


def test_common_options_are_beside_a_lines_own():
    command, found = options("train-gossip --topology 'ring' --lr 0.2", epochs="3", lr="0.5", model="mlp:8")
    assert (command.ranks, command.folder) == (4, "1-train-gossip")
    assert command.text == "train-gossip --topology 'ring' --lr 0.2"
    assert (found.topology, found.lr, found.epochs, found.model, found.seed) == ("ring", 0.2, 3, "mlp:8", 7)
    assert found.progress == "none"


def test_an_own_option_replaces_the_common_one_that_says_the_same_otherwise():
    _, found = options("train-allreduce --steps 5 --batch-per-rank 8", epochs="3", batch_size="64")
    assert (found.steps, found.batch_per_rank) == (5, 8)
    _, found = options("train-allreduce --epochs 2", steps="9")
    assert (found.steps, found.epochs) == (0, 2)


def test_common_options_mean_the_same_to_each_program():
    _, found = options("train-pipeline --schedule gpipe", schedule="constant", size=2)
    assert (found.schedule, found.lr_schedule) == ("gpipe", "constant")
    _, found = options("train-federated --rounds 3", epochs="5", batch_size="64")  # clients count otherwise
    assert found.rounds == 3


def test_a_fault_that_touches_the_folder_of_a_run_is_not_refused():
    (command,) = read_commands(["train-allreduce --inject corrupt:what=checkpoint"], {}, 2)
    assert command.options(parse, "--out=a").inject == "corrupt:what=checkpoint"


def test_ranks():
    assert options("-n 2: train-allreduce")[0].ranks == 2
    assert options(" -n3:train-allreduce ")[0].ranks == 3
    assert options("train-sequential")[0].ranks == 1  # it works on no more


@pytest.mark.parametrize(
    "line, said",
    [
        ("evaluate", "unknown program"),
        ("train-allreduce --lr x", "expected a number"),
        ("train-allreduce --seed 3", "--seed cannot be given in a line"),
        ("train-allreduce --out=x", "--out cannot be given in a line"),
        ("train-allreduce -h", "--help cannot be given in a line"),
        ("-n 9: train-allreduce", "asks for 9 ranks, and the job has 4"),
        ("-n 0: train-allreduce", "asks for 0 ranks"),
        ("train-parameter-server --servers 4", "no worker is left over"),
        ("-n 2: train-sequential", "runs on 1 rank: leave out -n 2:"),
        ("train-kmeans", "trains by no single strategy"),
        ("", "names no program"),
        ("train-allreduce 'x", "quote that is not closed"),
    ],
)
def test_bad_lines(line, said):
    with pytest.raises(UsageError, match=r"^line 2, ") as caught:
        read_commands(["train-allreduce", line], {}, 4)
    assert said in str(caught.value)


def test_all_bad_lines_are_told_of_at_once():
    with pytest.raises(UsageError) as caught:
        read_commands(["train-x", "train-allreduce", "train-y", "train-allreduce"], {}, 4)
    for text in ("line 1, 'train-x'", "line 3, 'train-y'", "line 4, 'train-allreduce'", "twice"):
        assert text in str(caught.value)
