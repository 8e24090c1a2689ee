"""The examples of docs/examples under every strategy by changing one word."""

# ruff: noqa: E402 - PyTorch may be missing

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from written_runs import summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
CNN = "torch:cnn:make,width=4,hidden=16,kernel=3"
RESNET = "torch:resnet:make,width=4,stages=2"
FASHION = Path("/usr/share/datasets/fashion-mnist")
STRATEGIES = ["allreduce", "parameter_server", "gossip", "local_sgd", "federated", "pipeline", "fully_sharded"]
EVALUATED = ["allreduce", "parameter_server", "fully_sharded"]
ROUNDS = ["--rounds", "1", "--clients", "4", "--fraction", "0.5", "--local-epochs", "1", "--local-batch", "100"]


@pytest.fixture
def examples(tmp_path):
    for name in ("cnn.py", "resnet.py"):
        shutil.copy(ROOT / "docs" / "examples" / name, tmp_path)
    shutil.copy(ROOT / "tests" / "torch_nets.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", [CNN, RESNET])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.in_turn("model")
def test_any_strategy_by_changing_one_word(name, model, run_on, examples):
    length = ROUNDS if name == "federated" else ["--steps", "4", "--batch-size", "100"]
    options = ["--model", model, "--seed", "1", *length, "--out", "a"]
    run_on(2, SCRIPTS / f"train_{name}.py", *options, check=0)
    found = summary(examples / "a")
    assert found["model"] == model and found["train_loss"] < 4 and 0 <= found["test_accuracy"] <= 1
    vectors = Checkpoint.read(examples / "a").vectors
    assert ("extra/2.running_mean" in vectors) == (model == RESNET)
    assert model != RESNET or vectors["extra/2.running_mean"].any()
    if name not in EVALUATED:
        return
    done = run_on(2, SCRIPTS / "evaluate.py", "a", "--trust", "a", check=0)
    shown = float(re.search(r"test_accuracy ([\d.e-]+)", done.stdout)[1])
    assert shown == pytest.approx(found["test_accuracy"], rel=1e-5)


@pytest.mark.skipif(not FASHION.exists(), reason="Fashion-MNIST is not at hand")
def test_fashion_mnist_is_learned(run_on, examples):
    run_on(1, SCRIPTS / "prepare_data.py", "idx", FASHION, "fashion.h5", check=0)
    options = ["--data", "fashion.h5", "--optimizer", "adam", "--lr", "0.005", "--steps", "120", "--batch-size", "64"]
    run_on(2, SCRIPTS / "train_allreduce.py", "--model", CNN.replace("16", "32"), *options, "--out", "a", check=0)
    assert summary(examples / "a")["test_accuracy"] > 0.65


@pytest.mark.long
def test_with_data_servers(run_on, examples):
    options = ["--model", CNN, "--dtype", "float64", "--batch-size", "100", "--schedule", "constant"]
    run_on(2, SCRIPTS / "train_allreduce.py", *options, "--steps", "3", "--out", "a", check=0)
    run_on(3, SCRIPTS / "train_allreduce.py", *options, "--steps", "3", "--data-servers", "1", "--out", "b", check=0)
    a, b = (Checkpoint.read(examples / name).vectors["parameters"] for name in "ab")
    assert np.abs(a - b).max() < 1e-10
