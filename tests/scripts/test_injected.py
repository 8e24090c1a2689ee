"""Faults on purpose in programs of several ranks: a line names the cause, the job ends, and what is saved is whole."""

import json
from pathlib import Path

import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMON = ["--data", "few.h5", "--model", "softmax", "--batch-size", "5", "--steps", "400", "--progress", "none"]
COMMON += ["--out", "run", "--evaluate-every", "999"]
FAILURE = "rank 1 of 2 failed; all ranks are ended"
MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "fault, said",
    [
        ("kill:rank=1", "inject: rank 1, step 25: the process is killed (SIGKILL)"),
        ("stop:rank=1", "hpcdl watchdog: rank 1: no answer"),
        pytest.param("exit:rank=1,status=7", "rank 1, step 25: the process leaves by os._exit(7)", marks=MORE),
        pytest.param("exit:rank=1,how=sys", "rank 1, step 25: the process leaves by sys.exit(3)", marks=MORE),
        pytest.param("exception:rank=1", FAILURE, marks=MORE),
        pytest.param("diskfull:rank=0", "cannot be written: No space left on device", marks=MORE),
        ("memory:rank=1,mib=20", "rank 1 has no memory left at step"),
        pytest.param("corrupt:rank=1", "error: the replicas do not agree", marks=MORE),
    ],
)
def test_what_a_job_says_and_leaves(launch, few, fault, said):
    options = ["--allreduce", "ring", "--checkpoint-every", "10", "--timeout", "2", "--inject", f"{fault},step=25"]
    done = launch(2, SCRIPTS / "train_allreduce.py", *COMMON, *options, cwd=few)
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert Checkpoint.read(few / "run").attributes["step"] in ((400,) if "corrupt" in fault else (20,))
    (line,) = (few / "run" / "injected.jsonl").read_text().splitlines()
    struck = json.loads(line)
    assert (struck["fault"], struck["step"]) == (f"{fault},step=25", 25)


@pytest.mark.parametrize(
    "program, ranks, rank, options",
    [
        ("train_parameter_server", 3, 2, ["--consistency", "async"]),  # a worker
        ("train_parameter_server", 3, 1, ["--servers", "2"]),  # a server
        pytest.param("train_parameter_server", 2, 0, [], marks=MORE, id="rank 0"),
        pytest.param("train_gossip", 3, 2, ["--method", "adpsgd"], marks=MORE),
        pytest.param("train_allreduce", 3, 0, ["--data-servers", "1"], marks=MORE),
        pytest.param("train_fully_sharded", 2, 1, [], marks=MORE),
    ],
)
def test_ranks_that_no_boundary_reaches(launch, few, program, ranks, rank, options):
    fault = f"exit:rank={rank},step=9"
    done = launch(ranks, SCRIPTS / f"{program}.py", *COMMON, *options, "--inject", fault, cwd=few)
    assert done.returncode != 0, done.stderr  # under MPICH it may be that of a rank which is ended with it
    assert f"inject: rank {rank}, step 9: the process leaves by os._exit(3)" in done.stderr


def test_a_run_that_is_gone_on_with_gets_beyond_it(run_on, few):
    """Whether it is told so anew, or config.yaml says it."""
    slow = ["--allreduce", "ring", "--inject", "slow:rank=1,step=399,seconds=0.001"]
    for count, words in ((1, slow), (0, ["--resume", "run", "--steps", "410"]), (0, ["--resume", "run", *slow])):
        told = COMMON if count else []
        done = run_on(2, SCRIPTS / "train_allreduce.py", *told, *words, check=0, cwd=few)
        assert done.stderr.count("inject: ") == count
    done = run_on(2, SCRIPTS / "train_allreduce.py", *COMMON, *slow, "--force", check=0, cwd=few)
    assert done.stderr.count("inject: ") == 1
