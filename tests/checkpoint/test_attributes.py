"""What a checkpoint must hold beside its vectors: each attribute that is missing, or of another type, is named."""

import copy

import pytest

from hpcdl.checkpoint.attributes import ATTRIBUTES, SUMMED, check_attributes
from hpcdl.errors import UsageError
from hpcdl.runs.segments import leg

GOOD = {
    "strategy": "all_reduce",
    "model": "mlp",
    "source": "digits",
    "layout": [{"name": "w", "shape": [3, 2], "dtype": "float32"}],
    "data": {"name": "digits", "features": [64], "classes": 10, "rows": 1438, "more": "as it is"},
    "optimizer": "sgd",
    "seed": 0,
    "batch": 32,
    "step": 7,
    "epoch": 0.5,
    "updates": 7,
    "examples": 224,
    "best": None,
    "waited": 0,
    "scores": {"test_accuracy": 0.5, "replica_test_accuracy": None},
    "train_loss": 1.5,
    "seconds": 0.25,
    "fixed": {},
    "more": None,
}
LEGS = [leg(2, 5, 1.5, [dict.fromkeys(SUMMED, 3), {}], ["here"], {}), leg(None, 2, 1.0, None, None, None)]
COUNTS = ["seed", "batch", "step", "updates", "examples", "waited"]
TEXTS = ["strategy", "model", "source", "optimizer"]
NO_NUMBERS = [True, "1", [], {}, float("nan"), float("inf")]


def refused(path, value, words):
    changed, (*above, name) = copy.deepcopy(GOOD), path.split(".")
    place = changed[above[0]] if above else changed
    place[name] = value
    with pytest.raises(UsageError, match=rf"^it: its attribute {path} should be {words}"):
        check_attributes(changed, "it")


def test_what_a_run_writes_and_more_is_good():
    assert GOOD.keys() >= ATTRIBUTES.keys()
    check_attributes(GOOD, "it")
    check_attributes(GOOD | {"best": 3, "scores": {"replica_test_accuracy": [0.5, 1]}}, "it")


@pytest.mark.parametrize("path", [*ATTRIBUTES, "data.name", "data.features", "data.classes", "data.rows"])
def test_each_must_be_there(path):
    changed, (*above, name) = copy.deepcopy(GOOD), path.split(".")
    del (changed[above[0]] if above else changed)[name]
    with pytest.raises(UsageError, match=f"^it: its attribute {path} is missing$"):
        check_attributes(changed, "it")


def test_each_must_be_of_its_type():
    for name in COUNTS:
        for value in [*NO_NUMBERS, None, -1, 0.5, 2**63]:
            refused(name, value, "a whole number of 0 or more")
    for name in ("seconds", "epoch"):
        for value in [*NO_NUMBERS, None]:
            refused(name, value, "a finite number$")
    for name in ("best", "train_loss"):
        for value in NO_NUMBERS:
            refused(name, value, "a finite number, or null")
    for name in TEXTS:
        refused(name, 3, "a text")
    for value in ([1, -1], [[1]], "64", None):
        refused("data.features", value, "a list of whole numbers")
    for value in (None, {"a": "x"}, {"a": None}, {"replica_test_accuracy": [None]}, {"replica_test_accuracy": 1}):
        refused("scores", value, "a mapping of names to numbers")
    for tensor in (3, {}, GOOD["layout"][0] | {"shape": 3}, GOOD["layout"][0] | {"dtype": None}):
        refused("layout", [tensor], "a list of tensors")
    refused("fixed", [], "a mapping")
    for value in ([], None, "x"):
        refused("data", value, "a mapping")
        with pytest.raises(UsageError, match=r"^it: its attributes should be a mapping$"):
            check_attributes(value, "it")


def test_what_older_versions_did_not_keep_may_be_missing_and_must_be_right():
    check_attributes(GOOD | {"legs": LEGS, "sent": {"bytes": 12, "messages": None}}, "it")
    check_attributes(GOOD | {"legs": []}, "it")
    older = [{name: value for name, value in of.items() if name != "bookkeeping_seconds_per_rank"} for of in LEGS]
    check_attributes(GOOD | {"legs": older}, "it")
    refused("legs", [LEGS[0] | {"bookkeeping_seconds_per_rank": [1]}], "a list of the run's legs and their costs")
    refused("legs", [LEGS[0] | {"bookkeeping_seconds_per_rank": "1"}], "a list of the run's legs and their costs")
    wrong = [{"ranks": 3}, {"ranks": -1}, {"steps": None}, {"seconds": "1"}, {"ranks": None}]
    wrong += [{"messages_per_rank": value} for value in (7, [1], [1, "2"])]
    for value in (None, {}, [3], [{}], *([LEGS[0] | each] for each in wrong)):
        refused("legs", value, "a list of the run's legs and their costs")
    refused("sent", 3, "a mapping")
    with pytest.raises(UsageError, match=r"attribute sent\.messages is missing"):
        check_attributes(GOOD | {"sent": {"bytes": 1}}, "it")
