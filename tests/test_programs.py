"""What a program says of itself, and its options, as its file says them, without starting it."""

import dataclasses
import importlib
import re

import pytest

from hpcdl.programs import about, of_strategy, own_options, programs
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
        assert said.commands and any(name.replace("-", "_") in each for each in said.commands), name


def test_own_options_are_those_of_the_dataclasses():
    for name, options in own_options().items():
        module = importlib.import_module(f"hpcdl.scripts.{name.replace('-', '_')}")
        classes = [each for each in vars(module).values() if dataclasses.is_dataclass(each)]
        fields = {
            field.name: field.default
            for each in classes
            if each.__module__ == module.__name__ or re.fullmatch(r"hpcdl\.(?!runs\.)\w+\.options", each.__module__)
            for field in dataclasses.fields(each)
        }
        assert set(options) - set(COMMON) == set(fields) - set(COMMON), name
        assert all(isinstance(fields[each], kind) for each, kind in options.items())
    assert own_options()["train-gossip"]["draw"] is str and own_options()["train-grid"]["draw"] is bool


def test_programs_of_strategies():
    assert of_strategy("all_reduce") == "train-allreduce" and of_strategy("local_sgd") == "train-local-sgd"
    assert of_strategy("nothing") is None
