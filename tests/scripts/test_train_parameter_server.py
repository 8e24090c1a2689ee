"""The program as its user starts it: what it reaches and writes, how it ends early, and what it refuses."""

import re
import signal
from pathlib import Path

import pytest
from written_runs import lines, summary

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.launch.option_parser import parse
from hpcdl.models import make_model
from hpcdl.parameter_server.roles import divide
from hpcdl.strategies.parameter_server import ServerOptions, check_servers

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_parameter_server.py"
SMALL = ["--data", "digits", "--model", "mlp:16", "--batch-size", "64", "--seed", "1"]
PER_RANK = {
    *("bytes_sent_per_rank", "messages_per_rank", "bookkeeping_bytes_per_rank", "compute_seconds_per_rank"),
    *("communication_seconds_per_rank", "idle_seconds_per_rank", "peak_memory_bytes_per_rank"),
}


def steps_of(folder):
    return [line["step"] for line in lines(folder) if "test_loss" not in line]


def errors(done, program="train-parameter-server: "):
    """What the program says of its errors; launchers add lines of their own."""
    return [line for line in done.stderr.splitlines() if line.startswith(program + "error: ")]


@pytest.mark.parametrize(
    "how",
    [pytest.param(["bsp"], marks=pytest.mark.long), ["ssp", "--staleness", "2"], ["async"]],
    ids=lambda how: how[0],
)
def test_digits_are_learned_in_every_consistency(run_on, tmp_path, how):
    out = tmp_path / "a"
    options = ["--servers", "2", "--consistency", *how, "--data", "digits", "--epochs", "8", "--seed", "1"]
    done = run_on(4, SCRIPT, *options, "--out", out, check=0)
    found = summary(out)
    assert found["test_accuracy"] >= 0.93
    assert f"({how[0]})" in done.stdout and ("on average" in done.stdout) == (how[0] != "bsp")
    held, whole = found["memory_bytes_per_rank"], 4 * found["parameters"]
    assert all(whole / 2 <= each <= 2 * whole for each in held["parameters"][:2])  # a slice, and copies that are sent
    assert held["parameters"][2:] == held["gradients"][2:] == [whole, whole]
    assert held["optimizer"] == [whole // 2, whole // 2, 0, 0]
    assert all(each in (whole // 2, whole) for each in held["gradients"][:2])  # buffers for one or both of the workers
    assert held["activations"][:2] == [0, 0] and min(held["activations"][2:]) > 0
    assert found["allreduce"] is None and "all-reduce" not in done.stdout
    assert (found["strategy"], found["ranks"], found["workers"], found["servers"]) == ("parameter_server", 4, 2, 2)
    assert (found["steps"], found["stopped"], found["replicas_agree"]) == (360, "finished", True)
    histogram = found["staleness_histogram"]
    assert sum(histogram) == (360 if how == ["async"] else 360 * 2)
    assert len(histogram) <= {"bsp": 1, "ssp": 3}.get(how[0], 360)
    assert steps_of(out) == list(range(1, 361))
    assert found.keys() >= PER_RANK and all(len(found[name]) == 4 for name in PER_RANK)
    for rank in range(4):
        compute, talk, idle = (found[f"{name}_seconds_per_rank"][rank] for name in ("compute", "communication", "idle"))
        assert compute >= 0 and 0 <= idle <= talk
    done = run_on(4, SCRIPT.with_name("evaluate.py"), out, check=0)
    (scored,) = re.findall(r"test_accuracy ([\d.]+)", done.stdout)
    assert float(scored) == pytest.approx(found["test_accuracy"], abs=1e-6)


SIGNALLED = f"""
import os, sys
from hpcdl.scripts import train_parameter_server
from hpcdl.parameter_server.slice_server import SliceServer
calls = []
def handle(self, *arguments, original=SliceServer.handle, **keywords):
    calls.append(1)
    if len(calls) == 20 and self.comm.rank == 1: os.kill(os.getpid(), {int(signal.SIGTERM)})
    return original(self, *arguments, **keywords)
SliceServer.handle = handle
train_parameter_server.main(sys.argv[1:])
"""


@pytest.mark.long
def test_a_signal_to_a_server_saves_and_exits_with_85(launch, run_on, tmp_path):
    program = tmp_path / "signalled.py"
    program.write_text(SIGNALLED)
    options = [*SMALL, "--servers", "2", "--consistency", "async", "--out", tmp_path / "a"]
    done = launch(4, program, *options, "--epochs", "100000", check=85)
    step = Checkpoint.read(tmp_path / "a").attributes["step"]
    assert 1 <= step < 100_000 * 23 and len(steps_of(tmp_path / "a")) == step
    assert f"stopped by a signal after step {step}" in done.stdout and "Traceback" not in done.stderr
    run_on(4, SCRIPT, "--resume", tmp_path / "a", "--steps", str(step + 9), check=0)
    assert len(steps_of(tmp_path / "a")) == summary(tmp_path / "a")["steps"] == step + 9


@pytest.mark.parametrize(
    "how, reason",
    [
        (["ssp", "--staleness", "2", "--time-limit", "0.3"], "time limit"),
        (["async", "--broadcast-every", "2", "--patience", "2", "--validation", "0.2", "--lr", "0.5"], "patience"),
    ],
    ids=["time limit", "patience"],
)
def test_a_time_limit_and_lost_patience_end_in_good_order(run_on, tmp_path, how, reason):
    run_on(4, SCRIPT, *SMALL, "--consistency", *how, "--epochs", "100000", "--out", tmp_path / "a", check=0)
    found = summary(tmp_path / "a")
    assert (found["stopped"], found["replicas_agree"]) == (reason, True)
    assert found["steps"] == len(steps_of(tmp_path / "a")) == Checkpoint.read(tmp_path / "a").attributes["step"]
    assert found["test_accuracy"] is not None


def test_a_run_that_diverges_is_one_line_and_status_1(run_on):
    data_servers = ["--data-servers", "1"]
    for ranks, how in (
        (3, ["async"]),
        (2, ["ssp", "--staleness", "1", "--servers-on-workers"]),
        (4, ["bsp", *data_servers]),
        (3, ["bsp", "--servers-on-workers", *data_servers]),
    ):
        done = run_on(
            ranks, SCRIPT, *SMALL, "--consistency", *how, "--lr", "1e30", "--out", "none", check=1, timeout=30
        )
        (line,) = errors(done)
        assert re.search(r"the loss of step [1-9]\d* is not finite on rank [0-3]; there is no checkpoint yet", line)
        assert "Traceback" not in done.stderr


def test_what_just_makes_sense():
    for line in ("--servers 4", "--broadcast-every 1", "--consistency ssp --staleness 2 --broadcast-every 3"):
        check_servers(parse(ServerOptions, "p", "", line.split()), 5, make_model("softmax", (4,), 3, "float32"))
    on_workers = parse(ServerOptions, "p", "", ["--servers-on-workers"])
    assert on_workers.servers == 0 and divide(5, on_workers.servers).workers == range(5)
    alone = parse(ServerOptions, "p", "", ["--consistency", "async", "--batch-per-rank", "8"])
    assert (alone.batch_size, alone.batch_per_rank) == (8, 0)  # an update is one rank's
