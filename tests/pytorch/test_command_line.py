"""A module from the command line: what works with our models works with it."""

import json
import sys

import pytest
import yaml
from in_process import ends

NETS = """
from torch import nn

def small(features, classes, width=3):
    first, last = nn.Linear(64, width), nn.Linear(width, classes)
    return nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(width), nn.ReLU(), last)
"""
TRUST = ["--trust", "a"]  # the run of the fixture
MODEL = ["--model", "torch:nets_of_commands:small,width=4", "--progress", "none"]
SHORT = [*MODEL, "--epochs", "1", "--batch-size", "128"]
MANY = ["--epochs", "1", "--batch-size", "256"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "nets_of_commands.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert ends("train_allreduce", [*SHORT, "--optimizer", "torch:AdamW,betas=(0.9,0.95)", "--out", "a"]) == (0, "")
        yield folder
    sys.modules.pop("nets_of_commands", None)


@pytest.mark.parametrize(
    ("program", "more"),
    [
        ("train_sequential", ["--optimizer", "torch:NAdam"]),
        ("train_gossip", ["--optimizer", "torch:Adam"]),
        ("train_local_sgd", ["--sync-every", "3", "--outer", "torch:SGD,momentum=0.9", "--local-momentum", "average"]),
        ("train_sgld", ["--optimizer", "sgd"]),
        ("train_svrg", ["--optimizer", "sgd"]),
    ],
)
def test_programs_that_train_take_a_module_and_a_rule(folder, program, more):
    assert ends(program, [*SHORT, *more, "--out", program]) == (0, "")
    assert json.loads((folder / program / "summary.json").read_text())["model"] == MODEL[1]


def test_federated_with_a_rule_of_the_servers(folder):
    told = "--rounds 2 --clients 8 --fraction 0.5 --server-optimizer torch:Adam --server-lr 0.01 --optimizer torch:SGD"
    assert ends("train_federated", [*MODEL, *told.split(), "--out", "f"]) == (0, "")


def test_a_run_goes_on_and_repeats_from_its_options(folder):
    """The optimizer's vectors are in its checkpoint; config.yaml names model and rule."""
    config = yaml.safe_load((folder / "a/config.yaml").read_text())
    assert config["optimizer"] == "torch:AdamW,betas=(0.9,0.95)" and config["model"] == MODEL[1]
    assert ends("train_allreduce", ["--config", "a/config.yaml", *TRUST, "--out", "again", *MODEL[2:]]) == (0, "")
    one, other = (json.loads((folder / each / "summary.json").read_text()) for each in ("a", "again"))
    assert one["test_loss"] == other["test_loss"]
    told = ["--config", "a/config.yaml", *TRUST, "--epochs", "2", "--out", "g", *MODEL[2:]]
    assert ends("train_gossip", told) == (0, "")
    assert ends("train_allreduce", ["--resume", "a", *TRUST, "--epochs", "2", "--out", "longer", *MODEL[2:]]) == (0, "")
    assert json.loads((folder / "longer/summary.json").read_text())["epochs"] == 2
    status, said = ends("train_allreduce", ["--resume", "a", *TRUST, "--epochs", "2", "--optimizer", "torch:Adam"])
    assert status == 2 and "optimizer is torch:AdamW,betas=(0.9,0.95), not torch:Adam" in said


def test_a_search_over_it(folder):
    """Settings of the module and rules of PyTorch's are values like others."""
    models, rules = f"model={MODEL[1][:-8]}|{MODEL[1]}", "optimizer=torch:AdamW,betas=(0.9,0.95)|momentum"
    told = ["--space", models, "--space", rules, "--method", "grid", *MANY, "--out", "found"]
    assert ends("search", ["train-allreduce", *told])[0] == 0
    assert len([*(folder / "found").glob("trials/*/*/summary.json")]) == 4


def test_an_ensemble_of_it(folder):
    told = ["--members", "2", "--model", MODEL[1], *MANY, "--out", "many"]
    assert ends("train_ensemble", ["train-allreduce", *told])[0] == 0
    assert ends("evaluate", ["many", "--trust", "many", "--json", "many.json"])[0] == 0


@pytest.mark.long
def test_compared(folder):
    told = ["train-sequential", "train-allreduce", "--model", MODEL[1], *MANY, "--out", "c"]
    assert ends("compare", told)[0] == 0


def test_runs_are_scored_predicted_and_reported(folder):
    assert ends("evaluate", ["a", *TRUST, "--json", "a.json", "--predict", "p.csv"]) == (0, "")
    scores = json.loads((folder / "a.json").read_text())["scores"]
    assert scores["accuracy"] == json.loads((folder / "a/summary.json").read_text())["test_accuracy"]
    assert ends("report", ["a", "--out", "report.html"])[0] == 0
