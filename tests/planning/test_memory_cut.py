"""Models that are cut: what is foretold is what each rank holds, by schedule and recomputation."""

import pytest

GPT = ["--model", "gpt:layers=2,width=32,heads=4", "--data", "text", "--steps", "3", "--batch-size", "8"]


@pytest.mark.parametrize(
    "ranks, program, more",
    [
        (2, "train-model-parallel", ["--accumulate", "2"]),
        (3, "train-pipeline", []),
        pytest.param(2, "train-pipeline", ["--schedule", "gpipe"], marks=pytest.mark.long),
        pytest.param(2, "train-pipeline", ["--schedule", "naive", "--recompute"], marks=pytest.mark.long),
        (2, "train-pipeline", ["--schedule", "interleaved", "--chunks", "2"]),
        pytest.param(2, "train-tensor-parallel", ["--optimizer", "adam"], marks=pytest.mark.long),
        (2, "train-tensor-parallel", ["--sequence-parallel"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_gpt(foretold, ranks, program, more):
    foretold(ranks, program, *GPT, *more)


def test_outputs_that_are_made_anew_stay_until_they_have_left(foretold):
    foretold(2, "train-pipeline", *GPT, "--schedule", "gpipe", "--recompute", at_most=True)


def test_pipedream_stashes_weights(foretold):
    own = [each.replace("heads=4", "heads=4,head=own") for each in GPT]
    foretold(3, "train-pipeline", *own, "--schedule", "pipedream", "--steps", "12")
