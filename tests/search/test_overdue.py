"""A trial that hangs within a step ends the job, in a line that names it, also where no thread of Python's runs."""

import faulthandler
import re
import threading

import pytest
from few import write_few
from mpi4py import MPI
from searched import TRAINING, events, scores

from hpcdl.launch.isolated_run import begun, write_begun
from hpcdl.search.overdue import return_attempts, time_limited

# A search whose trial 0 hangs on its last rank, as long as there is a file.
PROGRAM = """
import ctypes, os, time
from hpcdl.scripts import search
from hpcdl.launch import isolated_run
from hpcdl.search import overdue

overdue.GRACE = overdue.LATE = 0.5
def attempt(comm, training, options, path, context, original=isolated_run.attempt):
    if os.path.exists("hang") and "0000" in str(path) and comm.rank == comm.size - 1:
        {hangs}
    return original(comm, training, options, path, context)
isolated_run.attempt = attempt
search.main()
"""
HANGS = {"sleep": "time.sleep(1000)", "with Python's lock": "ctypes.PyDLL(None).sleep(1000)"}


@pytest.mark.parametrize("ranks, how", [(2, "sleep"), pytest.param(1, "with Python's lock", marks=pytest.mark.long)])
def test_a_trial_that_hangs_within_a_step_ends_the_job_and_has_a_try_less(launch, tmp_path, ranks, how):
    write_few(tmp_path)
    (tmp_path / "hang").touch()
    program = tmp_path / "hangs.py"
    program.write_text(PROGRAM.format(hangs=HANGS[how]))
    words = [*TRAINING, "--space", "lr=0.1|0.2", "--method", "grid", "--ranks-per-trial", ranks, "--progress", "none"]
    done = launch(ranks, program, *words, "--trial-limit", "0.5", "--out", "s")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    if how == "sleep":
        (said,) = re.findall("^error: (.*)$", done.stderr, re.MULTILINE)
        assert said.startswith("trial 0 hangs within a step: it has taken 0.5 s longer than --trial-limit 0.5; rank 0")
    else:
        assert re.search(r'hangs.py", line \d+ in attempt', done.stderr)
    assert events(tmp_path / "s") == [] and begun(tmp_path / "s/trials/0000/seed-0") == 1
    (tmp_path / "hang").unlink()
    assert launch(ranks, program, "--resume", "s", "--trial-limit", "0", "--progress", "none").returncode == 0
    assert len(scores(tmp_path / "s")) == 2 and len(events(tmp_path / "s", "again")) == 1


def test_a_trial_that_comes_to_its_end_stops_both_clocks(alone, monkeypatch):
    until = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: until.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", until.clear)
    with pytest.raises(ZeroDivisionError), time_limited(MPI.COMM_SELF, 100, pytest.fail):
        (timer,) = (each for each in threading.enumerate() if isinstance(each, threading.Timer))
        assert timer.interval == 150 and until == [155]  # a grace of half the limit, then 5 s for the thread
        raise ZeroDivisionError
    assert timer.finished.is_set() and until == []


def test_trials_that_are_ended_with_it_keep_their_tries(alone, tmp_path):
    paths = [tmp_path / f"trials/{trial:04d}/seed-0" for trial in range(4)]
    for path, times, job in zip(paths, (2, 2, 1, 2), ("this", "this", "this", "before"), strict=True):
        path.mkdir(parents=True)
        write_begun(path, times, job)
    return_attempts(tmp_path, paths[0], "this")
    assert [begun(path) for path in paths] == [2, 1, 0, 2]
