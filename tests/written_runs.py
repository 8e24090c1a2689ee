"""What runs have written: their summary; and the lines of runs that were never done, for tests of what reads them."""

import json


def lines_of(steps, first=1, every=4, loss=None, seconds=0.25):
    """The lines of so many steps, 2 to an epoch, with an evaluation after each `every` steps."""
    found = []
    for step in range(first, first + steps):
        train_loss = loss(step) if loss else 1 / step
        where = {"step": step, "epoch": step / 2}
        found.append(where | {"train_loss": train_loss, "seconds": step * seconds})
        if step % every == 0:
            scores = {"test_loss": 2 / step, "test_accuracy": 1 - 1 / step}
            sent = {"bytes": 100 * step, "messages": 2 * step}
            found.append(where | scores | {"train_loss": train_loss, "seconds": step * seconds} | sent)
    return found


def lines(folder):
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder):
    """The lines of steps."""
    return [line for line in lines(folder) if "test_loss" not in line]


def evaluations(folder):
    """The lines of evaluations."""
    return [line for line in lines(folder) if "test_loss" in line]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())
