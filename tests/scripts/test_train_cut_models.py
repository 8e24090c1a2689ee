"""The programs that cut the model as their user starts them: what they reach and write, and what they refuse."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.comm.grid import AXES
from hpcdl.errors import UsageError
from hpcdl.models import make_model
from hpcdl.models.part import require_layers
from hpcdl.parallel.cut_model import check_tensor

SCRIPTS = Path(__file__).parents[2] / "scripts"
DIGITS = ["--model", "mlp:24,12", "--batch-size", "60", "--epochs", "4", "--lr", "0.1", "--allreduce", "ring"]
TEXT = ["--data", "text", "--model", "gpt:layers=1,width=8,heads=2", "--batch-size", "8", "--lr-schedule", "constant"]
KINDS = ["parameters", "gradients", "optimizer", "activations"]


@pytest.fixture
def train(run_on, tmp_path):
    """A function: start a program, and return its summary and what it printed."""

    def run(ranks, name, *options, out="a"):
        done = run_on(ranks, SCRIPTS / f"train_{name}.py", *options, "--out", out, check=0)
        found = json.loads((tmp_path / out / "summary.json").read_text())
        assert found["strategy"] == name and found["ranks"] == ranks and found["stopped"] == "finished"
        assert found["replicas_agree"] is not False
        held = found["memory_bytes_per_rank"]
        assert list(held) == KINDS and all(len(each) == ranks and min(each) > 0 for each in held.values())
        assert "parameters per rank" in done.stdout and "Traceback" not in done.stderr
        return found, done.stdout

    return run


@pytest.mark.long
def test_digits_by_tensor_parallelism_gone_on_with_on_a_grid(train, tmp_path):
    found, printed = train(2, "tensor_parallel", *DIGITS)
    assert found["parts"] == 2 and "parts of each layer" in printed and found["allreduce"] == "ring"
    assert found["test_accuracy"] > 0.85 and found["replicas_agree"] is True
    held = 4 * (found["parameters"] + 12) // 2  # of the second layer, cut by rows, both have the 12 biases
    assert found["memory_bytes_per_rank"]["parameters"] == [held, held]
    before = Checkpoint.read(tmp_path / "a")
    options = ["--resume", "a", "--epochs", "5", "--grid", "data=2,pipeline=2", "--stage", "2", "--microbatches", "2"]
    found, printed = train(4, "grid", *options, out="b")
    assert (
        "data 2, pipeline 2, context 1, expert 1, tensor 1" in printed
        and "optimizer's state, gradients (stage 2)" in printed
    )
    assert [leg["ranks"] for leg in found["legs"]] == [2, 4] and len(found["bytes_sent_per_rank"]) == 4
    after = Checkpoint.read(tmp_path / "b")
    assert after.attributes["step"] == 5 * 24 and before.attributes["step"] == 4 * 24
    assert found["test_accuracy"] > 0.85 and found["grid"] == dict(zip(AXES, (2, 2, 1, 1, 1), strict=True))
    assert 0 <= found["idle_share"] <= 1 and found["in_flight_per_rank"] == [2, 1, 2, 1]
    assert not np.array_equal(before.vectors["parameters"], after.vectors["parameters"])


def test_text_by_pipelines_gone_on_with_fully_sharded(train, tmp_path):
    options = [*TEXT, "--steps", "4", "--schedule", "interleaved", "--chunks", "1", "--microbatches", "3", "--draw"]
    found, printed = train(3, "pipeline", *options)
    assert found["in_flight_per_rank"] == [3, 3, 1] and 0 <= found["idle_share"] <= 1
    layers = ["embedding", "block1.attention", "block1.mlp", "norm", "head", "loss"]
    assert [*itertools.chain(*found["layers_of_stages"])] == layers and found["schedule"] == "interleaved"
    assert len(re.findall(r"^[012] \|", printed, re.M)) == 6  # three stages, as planned and as they were
    assert "interleaved, 3 micro-batches" in printed and "idle share of stages" in printed
    assert "as planned" in printed and "as the last step was" in printed
    found, _ = train(2, "fully_sharded", "--resume", "a", "--steps", "6", out="b")
    assert Checkpoint.read(tmp_path / "b").attributes["step"] == 6 and found["stage"] == 3
    once = 4 * found["parameters"]
    assert sum(found["memory_bytes_per_rank"]["optimizer"]) == once
    layout = Checkpoint.read(tmp_path / "b").attributes["layout"]
    sizes = {"head": next(math.prod(each["shape"]) for each in layout if each["name"] == "embedding.token")}
    for each in layout:
        layer = each["name"].rpartition(".")[0].removesuffix(".norm").removesuffix(".qkv").removesuffix(".out")
        layer = layer.removesuffix(".up").removesuffix(".down")
        sizes[layer] = sizes.get(layer, 0) + math.prod(each["shape"])
    first, second = sizes["embedding"], sizes["block1.attention"]
    two = sorted(sizes.values())[-2:]
    gathered = sum(found["memory_bytes_per_rank"]["parameters"]) - once
    assert 2 * 4 * (first + second) <= gathered <= 2 * 4 * sum(two)  # two layers at once, on two ranks


def test_digits_by_model_parallelism(train):
    found, _ = train(3, "model_parallel", *DIGITS, "--balance", "measured")
    assert found["test_accuracy"] > 0.85 and found["in_flight_per_rank"] == [1, 1, 1]
    assert [*itertools.chain(*found["layers_of_stages"])] == ["dense1", "dense2", "dense3", "loss"]
    assert sum(found["memory_bytes_per_rank"]["parameters"]) == 4 * found["parameters"]
    assert 0 <= found["idle_share"] <= 1


def made(spec):
    """The model, for sequences of 12 tokens of 7 kinds, or 6 features in 2 classes."""
    return make_model(spec, (12,), 7) if spec.startswith("gpt") else make_model(spec, (6,), 2)


def test_what_can_be_shared_is_not_refused():
    for ranks, sequence in itertools.product((1, 2, 3, 4, 6, 12), (False, True)):
        check_tensor(made("gpt:heads=12,width=24"), ranks, sequence)
    for ranks in (1, 2, 4):
        check_tensor(made("mlp:8,5"), ranks, False)  # between layers 2 and 3 nothing is cut
    with pytest.raises(UsageError, match="this strategy cuts the model by its layers"):
        require_layers(object())
