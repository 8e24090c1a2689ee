"""The supervisor's loop, over a stand-in for a job: a script that does what its plan says, one line for each start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError
from hpcdl.recovery import supervisor
from hpcdl.recovery.launch_command import JobLine
from hpcdl.recovery.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
# What a plan may say: save STEP, damage NAME, end, exit STATUS, kill, leave, wait. A start notes how it was told.
STANDIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
plan, starts, run = Path("plan"), Path("starts"), Path("run")
first, *rest = plan.read_text().splitlines()
plan.write_text("\\n".join(rest))
with starts.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
run.mkdir(exist_ok=True)
if "--resume" not in sys.argv:
    (run / "config.yaml").write_text(first)
last = None
for word in first.split("; "):
    what, _, value = word.partition(" ")
    if what == "save":
        import numpy as np
        from hpcdl.checkpoint.checkpoint_file import Checkpoint, rotate
        rotate(run, 2, Checkpoint({"parameters": np.ones(3)}, {"step": int(value)}), last)
        last = int(value)
        (run / "metrics.jsonl").write_text(json.dumps({"step": last + 1}) + "\\n")
    elif what == "damage":
        (run / value).write_bytes(b"nothing")
    elif what == "end":
        (run / "summary.json").write_text(json.dumps({"steps": int(value)}))
    elif what == "exit":
        sys.exit(int(value))
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "leave":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        Path("left").write_text(str(left.pid))
    elif what == "wait":
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
        Path("waits").touch()
        time.sleep(60)
"""


@pytest.fixture
def supervise(alone, tmp_path, monkeypatch):
    """A function: supervise a job with this plan; returns its status, what was said, and how it was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = tmp_path / "train_allreduce.py"
    program.write_text(STANDIN)

    def run(*plan, told=(), **how):
        Path("plan").write_text("\n".join(plan))
        Path("starts").unlink(missing_ok=True)
        said = []
        job = JobLine.read([sys.executable, str(program), "--out", "run", *told])
        status = Supervisor(job, **{"backoff": 0.0, **how}, say=said.append).run()
        return status, said, Path("starts").read_text().splitlines()

    return run


def test_what_is_started_again_and_from_where(supervise):
    status, said, starts = supervise("kill", "save 10; exit 1", "save 20; kill", "save 30; end 30", told=["--lr=1"])
    assert status == 0
    again = "--lr=1 --resume run --out run"
    assert starts == ["--out run --lr=1", "--out run --lr=1", again, again]
    assert [line.split("; ")[0] for line in said] == [
        "the job ended with status 137 (SIGKILL)",
        "the job ended with status 1 after step 11 or later",
        "the job ended with status 137 (SIGKILL) after step 21 or later",
    ]
    where = "from the beginning, as nothing was saved (its files are now in run-try-1)"
    assert said[0].endswith(f"restart 1 of 3 in 0 s, 2 left, {where}")
    assert said[2].endswith("restart 3 of 3 in 0 s, 0 left, from step 20 (run/checkpoint.h5)")
    assert Path("run-try-1", "config.yaml").exists() and Checkpoint.read(Path("run")).attributes["step"] == 30


@pytest.mark.parametrize("status", [2, 85])
def test_statuses_that_are_not_started_again(supervise, status):
    assert supervise(f"save 10; exit {status}") == (status, [], ["--out run"])


def test_a_status_of_0_before_the_runs_end_is_a_failure(supervise):
    status, said, starts = supervise("save 10; exit 0", "end 20; exit 0")
    assert status == 0 and len(starts) == 2 and "status 0 before the run's end" in said[0]


def test_restarts_and_progress_are_limited(supervise):
    status, said, starts = supervise(*["save 10; exit 7"] * 5, restarts=9, no_progress=2)
    assert (status, len(starts)) == (7, 2)
    assert said[-1].endswith("given up: 2 failures in a row without another step saved (--no-progress)")
    status, said, starts = supervise("exit 7", "save 20; exit 8", restarts=1, told=["--resume=run"])
    assert (status, len(starts)) == (8, 2) and said[-1].endswith("given up: all --restarts 1 are used")


def test_the_pause_doubles_until_the_run_moves_on(supervise, monkeypatch):
    pauses = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda self, seconds: pauses.append(seconds))
    plan = ["save 10; exit 1", "exit 1", "exit 1", "save 20; exit 1", "exit 1", "end 20"]
    assert supervise(*plan, backoff=2.0, restarts=9, no_progress=9)[0] == 0
    assert pauses == [2, 4, 8, 2, 4]


def test_a_damaged_checkpoint_is_passed_over(supervise):
    plan = ["save 10; save 20; damage checkpoint.h5; kill", "save 30; end 30"]
    status, said, starts = supervise(*plan)
    assert status == 0 and said[0].startswith("run/checkpoint.h5 is damaged")
    assert starts[1] == "--resume run/checkpoint-000000010.h5 --out run" and "from step 10 (" in said[1]


def test_where_no_checkpoint_is_whole_it_gives_up(supervise):
    status, said, starts = supervise("save 10; damage checkpoint.h5; kill")
    assert (status, len(starts)) == (137, 1)
    assert said[-1].endswith("given up: all checkpoints in run are damaged (--keep 2 or more keeps older ones)")


def test_what_others_have_left_is_neither_gone_on_with_nor_set_aside(supervise):
    """A job that fails before it has replaced another run, with --force, is told the same again."""
    Path("run").mkdir()
    Checkpoint({"parameters": np.ones(3)}, {"step": 99}).write(Path("run", "checkpoint.h5"))
    status, _, starts = supervise("kill", "end 99", told=["--resume", "elsewhere"])
    assert starts == ["--out run --resume elsewhere"] * 2 and status == 0
    assert Path("run", "checkpoint.h5").exists() and not Path("run-try-1").exists()


def test_faults_on_purpose_are_kept_when_it_begins_anew(supervise):
    Path("run").mkdir()
    Path("run", "injected.jsonl").write_text('{"fault": "kill"}\n')
    assert supervise("kill", "end 0")[0] == 0
    assert Path("run", "injected.jsonl").read_text() == '{"fault": "kill"}\n'


def test_a_job_without_news_is_ended(supervise, monkeypatch):
    """Its last news are long ago as soon as it waits."""
    waits = Path("waits")
    news = lambda self: 0.0 if waits.exists() and waits.unlink() is None else time.time()  # noqa: E731
    monkeypatch.setattr(Supervisor, "_last_news", news)
    status, said, starts = supervise("save 10; wait", "end 10", stalled=0.1)
    assert status == 0 and len(starts) == 2
    assert said[0] == "no news in run for 0.1 s: the job is ended (--stalled)"
    assert "status 143 (SIGTERM)" in said[1]


def test_a_launcher_that_outlives_its_ranks_is_ended_with_what_it_leaves(supervise, monkeypatch):
    """Nobody holds the folder any more. Who has made the supervisor keeps its own processes."""
    monkeypatch.setattr(supervisor, "LEFT", 0.0)
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    status, said, starts = supervise("leave a process; save 10; wait", "end 10")
    assert status == 0 and len(starts) == 2
    assert said[0] == "its ranks released run 0 s ago: the launcher, which still runs, is ended"
    assert "status 143 (SIGTERM)" in said[1] and not Path("/proc", Path("left").read_text()).exists()
    assert own.poll() is None
    own.kill()
    own.wait()


def test_a_folder_of_the_job_that_goes_while_it_is_looked_at(alone, tmp_path, monkeypatch):
    """As that of the flight recorder does at a run's end, and that of the pieces when they are swept."""
    listed, run, removed = os.scandir, tmp_path / "run", []

    def late(path="."):
        if Path(path).name in ("flight", "pieces"):
            Path(path).rmdir()
            removed.append(Path(path).name)
        return listed(path)

    kept = Supervisor(JobLine.read([sys.executable, "train_allreduce.py", "--out", str(run)]))
    for name in ("flight", "pieces", "logs"):
        (run / name).mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        (run / name).write_text("{}")
    monkeypatch.setattr(os, "scandir", late)
    assert kept._last_news() == (run / "metrics.jsonl").stat().st_mtime and sorted(removed) == ["flight", "pieces"]
    assert kept._progress() == (1, 0)


def test_a_run_that_has_ended_well_has_whatever_its_launcher_does(supervise, monkeypatch):
    monkeypatch.setattr(supervisor, "LEFT", 0.0)
    status, said, starts = supervise("save 10; end 10; wait")
    assert status == 0 and len(starts) == 1 and "is ended" in said[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_it_as_usr1_does(supervise, tmp_path, monkeypatch, number):
    """The stand-in ends with 85 on USR1 alone."""
    original = Supervisor._ended_within

    def look(self, seconds):
        if (tmp_path / "waits").exists() and not self.signals:
            os.kill(os.getpid(), number)
        return original(self, seconds)

    monkeypatch.setattr(Supervisor, "_ended_within", look)
    assert supervise("wait", "end 0") == (85, [], ["--out run"])


def test_the_job_ends_with_its_supervisor(supervise, tmp_path):
    (tmp_path / "plan").write_text("wait")
    code = (
        "import sys\n"
        "from hpcdl.recovery.launch_command import JobLine\n"
        "from hpcdl.recovery.supervisor import Supervisor\n"
        "Supervisor(JobLine.read([sys.executable, 'train_allreduce.py', '--out', 'run'])).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    (child,) = until(lambda: (tmp_path / "waits").exists() and children(parent.pid))
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def until(holds, seconds=30.0):
    """Wait for it, and return it."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)
    return found


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("words, said", [("mpiexec -n 2", "which is 2"), ("mpiexec", "which is not given")])
def test_min_ranks_needs_ranks_to_lower(words, said):
    with pytest.raises(UsageError, match=said):
        Supervisor(JobLine.read([*words.split(), "hpcdl", "train-svrg", "--out", "run"]), min_ranks=3)
