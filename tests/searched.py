"""A small search by random points, as the tests of the program run it; and what its journal tells."""

import fcntl

import searching

TRAINING = ["train-allreduce", "--data", "few.h5", "--model", "softmax", "--epochs", "4", "--batch-size", "4"]
TRAINING += ["--validation", "0.3"]
LR, BATCH = ["--space", "lr=log:0.001..0.5"], ["--space", "batch-size=int:2..10:log"]
RANDOM = [*TRAINING, *LR, *BATCH, "--method", "random", "--trials", "6", "--progress", "none"]


def events(folder, kind="end"):
    return [each for each in searching.events(folder / "journal.jsonl") if each["event"] == kind]


def scores(folder):
    """By trial, rung and seed."""
    return searching.ends(events(folder))


def wait_for_the_end_of_its_ranks(folder):
    """mpiexec may leave before the last of the ranks that it has killed."""
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
