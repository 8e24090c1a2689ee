"""Faults on purpose in programs of several ranks: a line names the cause, the job ends, and what is saved is whole."""

import json
from pathlib import Path

import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMON = ["--data", "few.h5", "--model", "softmax", "--batch-size", "5", "--steps", "400", "--progress", "none"]
COMMON += ["--out", "run", "--evaluate-every", "999"]
LONG, MORE = pytest.mark.long, pytest.mark.exhaustive
RING = ["--allreduce", "ring", "--checkpoint-every", "10", "--timeout", "4"]


@pytest.mark.parametrize(
    "program, ranks, more, fault, said",
    [
        pytest.param("allreduce", 2, RING, "stop:rank=1,step=25", "hpcdl watchdog: rank 1: no answer", marks=LONG),
        ("allreduce", 2, RING, "memory:rank=1,mib=20,step=25", "rank 1 has no memory left at step"),
        pytest.param("allreduce", 2, RING, "corrupt:rank=1,step=25", "the replicas do not agree", marks=MORE),
        ("parameter_server", 3, ["--consistency", "async"], "exit:rank=2,step=25", "by os._exit(3)"),  # a worker
        pytest.param(  # a server
            "parameter_server", 3, ["--servers", "2"], "exit:rank=1,step=25", "by os._exit(3)", marks=LONG
        ),
    ],
)
def test_what_a_job_says_and_leaves(launch, few, program, ranks, more, fault, said):
    """Other faults, and under other programs: tests/faults/."""
    done = launch(ranks, SCRIPTS / f"train_{program}.py", *COMMON, *more, "--inject", fault, cwd=few)
    assert done.returncode != 0 and said in done.stderr, done.stderr
    if more is RING:
        assert Checkpoint.read(few / "run").attributes["step"] == (400 if "corrupt" in fault else 20)
    (line,) = (few / "run" / "injected.jsonl").read_text().splitlines()
    struck = json.loads(line)
    assert (struck["fault"], struck["step"]) == (fault, 25)


def test_a_run_that_is_gone_on_with_gets_beyond_it(run_on, few):
    """Whether it is told so anew, or config.yaml says it."""
    slow = ["--allreduce", "ring", "--inject", "slow:rank=1,step=399,seconds=0.001"]
    for count, words in ((1, slow), (0, ["--resume", "run", "--steps", "410"]), (0, ["--resume", "run", *slow])):
        told = COMMON if count else []
        done = run_on(2, SCRIPTS / "train_allreduce.py", *told, *words, check=0, cwd=few)
        assert done.stderr.count("inject: ") == count
    done = run_on(2, SCRIPTS / "train_allreduce.py", *COMMON, *slow, "--force", check=0, cwd=few)
    assert done.stderr.count("inject: ") == 1
