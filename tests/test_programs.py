"""What a program says of itself, and its options, without starting it."""

import ast

import pytest

from hpcdl.programs import about, docstring, files, of_strategy, own_options, programs
from hpcdl.runs.options import COMMON


@pytest.mark.parametrize(
    "text, found",
    [
        ("Train well: python x.py --a\n\nMore of it.", ("Train well", ["python x.py --a"], "More of it.")),
        ("Train:\nmpiexec -n 4 python x.py\nand so on", ("Train", ["mpiexec -n 4 python x.py"], "and so on")),
        ("Look: python d.py; srun hpcdl d", ("Look", ["python d.py", "srun hpcdl d"], "")),
        ("No command: none. And\nmore.\n\n    a table", ("No command: none", [], "And\nmore.\n\n    a table")),
        ("about it", ("about it", [], "")),
        ("", ("", [], "")),
    ],
)
def test_a_docstring_taken_apart(text, found):
    assert about(text) == found


def test_every_program_says_what_it_does_in_a_whole_sentence_and_how_to_start_it():
    for name, said in programs().items():
        assert len(said.sentence.split()) > 3, name
        assert said.sentence[0].isupper() and (said.sentence[-1].isalnum() or said.sentence[-1] == ")"), name
        assert said.commands and any(f"hpcdl {name}" in each for each in said.commands), name


def test_what_is_read_of_a_file_is_its_docstring():
    for name, path in files().items():
        assert docstring(path) == ast.get_docstring(ast.parse(path.read_text())), name


def test_own_options_are_those_that_a_program_adds_or_has_otherwise():
    known = own_options()
    assert set(known) == {name for name in files() if name.startswith("train-")}
    assert known["train-sequential"] == {}
    assert known["train-svrg"].keys() - COMMON.keys() == {"method", "inner_epochs", "snapshot", "threads"}
    assert known["train-svrg"].keys() & COMMON.keys() == {"optimizer", "schedule"}
    assert known["train-gossip"]["draw"] is str and known["train-grid"]["draw"] is bool
    assert known["train-grid"]["microbatches"] is int and known["train-local-sgd"]["survive"] is int  # of classes above
    assert known["train-gorila"]["env_steps"] is int and known["train-ensemble"]["bagging"] is bool


def test_programs_of_strategies():
    assert of_strategy("all_reduce") == "train-allreduce" and of_strategy("local_sgd") == "train-local-sgd"
    assert of_strategy("nothing") is None
