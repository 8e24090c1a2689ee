"""Which words of a command line are whose."""

import shlex

import pytest

from hpcdl.errors import UsageError
from hpcdl.launch.nested_command_line import divided

KINDS = {"trials": int, "out": str, "at_once": bool}


@pytest.mark.parametrize(
    "text, own, line, spaces",
    [
        ("train-x --lr 0.1 --trials 3", ["--trials=3"], "train-x --lr 0.1", []),
        ("--trials=3 train-x --overlap --out a", ["--trials=3", "--out=a"], "train-x --overlap", []),
        ("train-x --at-once --batch-size 7", ["--at-once"], "train-x --batch-size 7", []),
        ("train-x --space a=1..2 --lr=3 --space=b=x|y", [], "train-x --lr=3", ["a=1..2", "b=x|y"]),
        ("'train-x --out b' --out a --data 'a b'", ["--out=a"], "train-x --out b --data 'a b'", []),
        ("-h", ["-h"], "", []),
    ],
)
def test_words_are_divided(text, own, line, spaces):
    assert divided(shlex.split(text), KINDS, ("space",)) == (own, line, {"space": spaces})


def test_a_value_that_is_missing():
    with pytest.raises(UsageError, match="--trials needs a value"):
        divided(["train-x", "--trials"], KINDS)
