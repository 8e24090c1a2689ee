"""A module from the command line: what works with our models works with it."""

import json
import sys

import pytest
import yaml

torch = pytest.importorskip("torch")

from in_process import ends  # noqa: E402

NETS = """
from torch import nn

def small(features, classes, width=3):
    first, last = nn.Linear(64, width), nn.Linear(width, classes)
    return nn.Sequential(nn.Flatten(), first, nn.BatchNorm1d(width), nn.ReLU(), last)
"""
TRUST = ["--trust", "a"]  # the run of the fixture
MODEL = ["--model", "torch:nets_of_commands:small,width=4", "--progress", "none"]
SHORT = [*MODEL, "--epochs", "1", "--batch-size", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
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
    told = [
        "--rounds",
        "2",
        "--clients",
        "8",
        "--fraction",
        "0.5",
        "--server-optimizer",
        "torch:Adam",
        "--server-lr",
        "0.01",
    ]
    assert ends("train_federated", [*MODEL, *told, "--optimizer", "torch:SGD", "--out", "f"]) == (0, "")


def test_a_run_goes_on_and_repeats_from_its_options(folder):
    """The optimizer's vectors are in its checkpoint; config.yaml names model and rule."""
    told = yaml.safe_load((folder / "a/config.yaml").read_text())
    assert told["optimizer"] == "torch:AdamW,betas=(0.9,0.95)" and told["model"] == MODEL[1]
    assert ends("train_allreduce", ["--config", "a/config.yaml", *TRUST, "--out", "again", *MODEL[2:]]) == (0, "")
    one, other = (json.loads((folder / each / "summary.json").read_text()) for each in ("a", "again"))
    assert one["test_loss"] == other["test_loss"]
    assert ends("train_gossip", ["--config", "a/config.yaml", *TRUST, "--epochs", "2", "--out", "g", *MODEL[2:]]) == (
        0,
        "",
    )
    assert ends("train_allreduce", ["--resume", "a", *TRUST, "--epochs", "2", "--out", "longer", *MODEL[2:]]) == (0, "")
    assert json.loads((folder / "longer/summary.json").read_text())["epochs"] == 2
    status, said = ends("train_allreduce", ["--resume", "a", *TRUST, "--epochs", "2", "--optimizer", "torch:Adam"])
    assert status == 2 and "optimizer is torch:AdamW,betas=(0.9,0.95), not torch:Adam" in said


def test_runs_are_scored_predicted_and_reported(folder):
    assert ends("evaluate", ["a", *TRUST, "--json", "a.json", "--predict", "p.csv"]) == (0, "")
    scores = json.loads((folder / "a.json").read_text())["scores"]
    assert scores["accuracy"] == json.loads((folder / "a/summary.json").read_text())["test_accuracy"]
    assert ends("report", ["a", "--out", "report.html"])[0] == 0
