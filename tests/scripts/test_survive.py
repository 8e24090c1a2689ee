"""--survive: ranks are killed, and the others go on in the job, as if they had been alone from that step on."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from survived import EPOCH, KILL, SGD, STEPS, ULFM, evaluations, losses, with_ulfm

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import TrainingError
from hpcdl.formatting import counted
from hpcdl.recovery.ulfm_recovery import neighbours, refuse_minority

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


@with_ulfm
@pytest.mark.parametrize(
    "step, rank, more",
    [
        pytest.param(30, 2, [], id="any"),
        pytest.param(1, 0, ["--overlap", "--optimizer", "adam", "--lr", "0.01"], id="first"),
        pytest.param(EPOCH, 0, ["--optimizer", "momentum", "--checkpoint-every", "5"], id="epoch"),
        pytest.param(STEPS, 1, ["--average", "from=1", "--allreduce", "ring"], id="last"),
    ],
)
def test_those_that_are_left_take_the_same_steps(step, rank, more, launch, run_on, interfere, tmp_path):
    """A step's gradient is the batch's whoever shares it: to rounding it is the run that lost nobody."""
    run_on(2, SCRIPT, *SGD, *more, "--out", tmp_path / "whole", check=0)
    program, out = interfere(step, rank, KILL), tmp_path / "left"
    done = launch(3, program, *SGD, *more, "--out", out, "--survive", "1", given=ULFM, check=0)
    whole, left = (Checkpoint.read(tmp_path / name) for name in ("whole", "left"))
    assert left.attributes["step"] == STEPS
    for name, vector in whole.vectors.items():
        assert np.abs(left.vectors[name] - vector).max() <= 1e-12 * np.abs(vector).max()
    for known in (losses, evaluations):
        assert known(out) == pytest.approx(known(tmp_path / "whole"), rel=1e-10)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["ranks"], summary["replicas_agree"], summary["stopped"]) == (2, True, "finished")
    (loss,) = summary["losses"]
    assert loss["ranks"] == [rank] and loss["left"] == 2 and loss["step"] in (step - 1, step)
    assert [leg["ranks"] for leg in summary["legs"]] == [3, 2]
    assert sum(leg["steps"] for leg in summary["legs"]) == STEPS
    assert summary["legs"][0]["bytes_sent_per_rank"][rank] is None  # who is gone cannot say it
    assert None not in summary["legs"][1]["bytes_sent_per_rank"]
    assert f"rank {rank} is gone after step {loss['step']}; 2 ranks go on" in done.stdout


@with_ulfm
def test_a_batch_per_rank_stays_the_batch_that_it_was(launch, run_on, interfere, tmp_path):
    options = [{"--batch-size": "--batch-per-rank", "64": "32"}.get(word, word) for word in SGD]
    run_on(2, SCRIPT, *options, "--out", tmp_path / "whole", check=0)
    launch(2, interfere(31, 0, KILL), *options, "--out", "left", "--survive", "1", given=ULFM, check=0)
    whole, left = (Checkpoint.read(tmp_path / name) for name in ("whole", "left"))
    assert left.attributes["batch"] == 64 and left.attributes["step"] == STEPS
    assert np.abs(left.vectors["parameters"] - whole.vectors["parameters"]).max() <= 1e-12


@with_ulfm
def test_more_are_gone_than_it_says(launch, interfere, tmp_path):
    program = interfere(12, 1, KILL)
    program.write_text(program.read_text().replace("rank == 1 and", "rank and"))
    done = launch(3, program, *SGD, "--out", "a", "--survive", "1", given=ULFM, check=1)
    assert "2 in all, more than --survive 1" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "hosts, left, ends",
    [
        ("aabb", [0, 1], False),  # as many there, and the lowest rank here
        ("aabb", [2, 3], True),
        ("aabb", [3], True),  # one of the others is gone with both of theirs
        ("aabb", [1, 3], False),  # nobody is gone with a whole host
        ("aabb", [3, 0], False),
        ("aaabc", [4, 3], True),
        ("abccc", [0, 1], True),
        ("abccc", [2, 4, 0], False),
        ("aaaa", [3], False),  # on one host nobody is on another side
    ],
)
def test_the_larger_side_goes_on(hosts, left, ends):
    """Of two sides of a cut link at most one goes on, whatever is left on either."""
    with pytest.raises(TrainingError) if ends else contextlib.nullcontext() as found:
        refuse_minority(list(hosts), left)
    assert not ends or f"this side, of {counted(len(left), 'rank')}, is not the larger one" in str(found.value)
    others = [rank for rank, host in enumerate(hosts) if host not in {hosts[each] for each in left}]
    if others and not ends:  # theirs ends
        with pytest.raises(TrainingError):
            refuse_minority(list(hosts), others)


def test_ranks_that_watch_each_other_are_on_different_hosts(monkeypatch):
    """Only where silence is taken for a failure, and a host can vanish without the others."""
    assert neighbours(list("aabb")) == neighbours(list("ab")) == ""
    monkeypatch.setenv("OMPI_MCA_mpi_ft_detector", "true")
    assert neighbours(list("abcabc")) == neighbours(list("aaaa")) == ""
    assert neighbours(list("aabb")) == "ranks 0 and 1, of which one watches the other, are both on a"
    assert neighbours(list("abcba")) == "ranks 0 and 4, of which one watches the other, are both on a"


@with_ulfm
def test_whoever_may_be_cut_off_ends(launch, interfere, tmp_path):
    """All that are gone were on another host, and were more."""
    program = interfere(12, 1, KILL)
    elsewhere = "training.MPI.Get_processor_name = lambda: f'host{min(training.MPI.COMM_WORLD.rank, 1)}'\n"
    text = program.read_text().replace("rank == 1 and", "rank and")
    program.write_text(text.replace("def record", elsewhere + "def record"))
    patient = {"": "true", "_period": "100", "_timeout": "600"}  # the launcher says it at once
    given = [*ULFM, *(word for name, value in patient.items() for word in ("--mca", f"mpi_ft_detector{name}", value))]
    done = launch(3, program, *SGD, "--out", "a", "--survive", "2", given=given, check=1)
    assert done.stderr.count("ranks 1 and 2 (host1) cannot be reached") == 1 and "Traceback" not in done.stderr
    assert "ranks 1 and 2, of which one watches the other, are both on host1; if it vanishes" in done.stderr


@with_ulfm
def test_a_rank_that_raises_says_why_and_is_gone(launch, interfere, tmp_path):
    program = interfere(12, 1, "raise ValueError('at twelve')")
    done = launch(2, program, *SGD, "--out", "a", "--survive", "1", given=ULFM, check=0)
    assert "ValueError: at twelve" in done.stderr and "1 rank goes on" in done.stdout


@with_ulfm
def test_ranks_that_all_raise_leave_a_status(launch, interfere, tmp_path):
    program = interfere(12, 1, "raise ValueError('at twelve')")
    program.write_text(program.read_text().replace("rank == 1 and", "rank >= 0 and"))
    done = launch(3, program, *SGD, "--out", "a", "--survive", "1", given=ULFM, check=1)
    assert "ValueError: at twelve" in done.stderr


@with_ulfm
def test_a_rank_that_is_lost_before_the_next_leg_ends_the_job(launch, interfere, tmp_path):
    """With a line and a status, though one rank is left."""
    program = interfere(12, 1, KILL)
    patch = f"    if training.MPI.COMM_WORLD.rank == 0: {KILL}\n    return found(*told)\n"
    patch = f"def dying(*told, found=survivor.Survivor.hand_over):\n{patch}survivor.Survivor.hand_over = dying\n"
    patch = f"from hpcdl.recovery import survivor\n{patch}"
    program.write_text(program.read_text().replace("def record", f"{patch}def record"))
    done = launch(3, program, *SGD, "--out", "a", "--survive", "2", given=ULFM, check=1)
    assert "error: another rank is lost before the first step of the surviving ranks" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "a" / "summary.json").exists()


@with_ulfm
@pytest.mark.parametrize(
    "more, said",
    [
        (["--allreduce", "shared"], "no rank sees that another is lost; take --allreduce recursive, ring, tree or mpi"),
        (["--timeout", "5"], "--timeout ends all ranks, but this run is to outlive lost ranks: leave out --timeout"),
        (["--survive", "-1"], "--survive is the number of ranks that may be lost, at least 0, not -1"),
        (["--compress", "bfloat16"], "each rank has its own residual, which a lost rank takes away"),
        (["--placement", "partitioned"], "the rows of a lost rank would be lost, too"),
    ],
)
def test_refusals(more, said, launch, tmp_path):
    done = launch(2, SCRIPT, *SGD, "--out", "none", "--survive", "1", *more, given=ULFM, check=2)
    assert said in done.stderr and done.stderr.count("error") == 1


@with_ulfm
def test_a_rank_that_is_lost_while_the_summary_is_gathered(launch, interfere, tmp_path):
    """The others wait for nobody, and find the folder free."""
    dies = f"    if training.MPI.COMM_WORLD.rank == 1: {KILL}\n    return found(*told, **named)\n"
    patch = "from hpcdl.runs import summary\n" + f"def dying(*told, found=summary.conclude, **named):\n{dies}"
    program = interfere(10**6, 1, KILL)
    text = program.read_text().replace("def record", f"{patch}summary.conclude = dying\ndef record")
    program.write_text(text)
    launch(3, program, *SGD, "--out", "a", "--survive", "1", given=ULFM, check=0)
    assert list(evaluations(tmp_path / "a")) == [EPOCH, STEPS]
