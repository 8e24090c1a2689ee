"""A small search by random points, as the tests of the program run it; and what its journal tells."""

import json

TRAINING = ["train-allreduce", "--data", "few.h5", "--model", "softmax", "--epochs", "4", "--batch-size", "4"]
TRAINING += ["--validation", "0.3"]
LR, BATCH = ["--space", "lr=log:0.001..0.5"], ["--space", "batch-size=int:2..10:log"]
RANDOM = [*TRAINING, *LR, *BATCH, "--method", "random", "--trials", "6", "--progress", "none"]


def events(folder, kind="end"):
    found = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [each for each in found if each["event"] == kind]


def scores(folder):
    """By trial, rung and seed; each has ended once."""
    ended = events(folder)
    found = {(each["trial"], each["rung"], each["seed"]): each["score"] for each in ended}
    assert len(found) == len(ended)
    return found
