"""Sharded models and grids: what is foretold is what each rank holds, by the stage of ZeRO."""

import pytest

GPT = ["--model", "gpt:layers=2,width=32,heads=4", "--data", "text", "--steps", "3", "--batch-size", "8"]


@pytest.mark.parametrize(
    "ranks, program, more",
    [
        pytest.param(3, "train-fully-sharded", ["--stage", "1"], marks=pytest.mark.long),
        (3, "train-fully-sharded", ["--stage", "2", "--accumulate", "2"]),
        (3, "train-fully-sharded", ["--stage", "3", "--optimizer", "adam"]),
        pytest.param(3, "train-fully-sharded", ["--stage", "3", "--gather", "broadcast"], marks=pytest.mark.long),
        (4, "train-grid", ["--grid", "data=2,pipeline=2", "--stage", "3"]),
        (4, "train-grid", ["--grid", "pipeline=2,tensor=2", "--sequence-parallel", "--average"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_gpt(foretold, ranks, program, more):
    foretold(ranks, program, *GPT, *more)


def test_mlp(foretold):
    shape = "--model", "mlp:64,32,32", "--steps", "3"
    foretold(4, "train-grid", *shape, "--grid", "data=2,pipeline=2", "--stage", "1")
    foretold(2, "train-tensor-parallel", *shape)
