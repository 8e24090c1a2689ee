"""hpcdl/reports/watching.py: what the files of a run say while it goes on, stops, dies, or begins anew."""

import fcntl
import json
import os

import pytest
from written_runs import lines_of

from hpcdl.errors import UsageError
from hpcdl.reports import watching
from hpcdl.reports.watching import WatchedRun, Watching, is_held, last_change

STARTED = {"schema_version": 1, "program": "train-allreduce", "ranks": 2, "model": "mlp", "data": "digits"}
STARTED |= {"batch_size": 32, "first_step": 0, "steps": 100, "steps_per_epoch": 2, "started": 1000.0}
STARTED |= {"time_limit": 0.0, "ends": None, "job": None}


@pytest.fixture
def clock():
    """A function that tells the time that was set: `clock.at`."""

    def now():
        return now.at

    now.at = 0.0
    return now


@pytest.fixture
def at(clock):
    """A function: let the files of a folder be of one time, and now so many seconds later."""

    def settle(folder, time, later=0.0):
        for path in folder.rglob("*"):
            os.utime(path, (time, time))
        clock.at = time + later

    return settle


@pytest.fixture
def hold():
    """A function: hold a folder's lock, as a run does."""
    held = []

    def lock(folder):
        held.append(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT))
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return held[-1]

    yield lock
    for each in held:
        os.close(each)


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """The folders of tests are of this machine, whatever they lie on."""
    monkeypatch.setattr(watching, "file_system", lambda path: "ext4")


def append(folder, lines, end=""):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + end)


def test_a_run_is_followed(write_run, clock):
    folder = write_run("a", started=STARTED)
    run = WatchedRun(folder, clock)
    assert run.look() and (run.step, run.steps, run.epochs, run.batch) == (8, 100, 50, 32)
    assert run.score == "test_accuracy" and run.scores == {"test_loss": 0.25, "test_accuracy": 0.875}
    assert run.rates() == (pytest.approx(4), pytest.approx(4)) and run.left() == pytest.approx(92 / 4)
    assert not run.look() and len(run.points("loss")) == 8
    append(folder, lines_of(2, first=9)[:1], '{"step": 10, "ep')
    assert run.look() and run.step == 9 and not run.look()
    append(folder, [], 'och": 5.0}\n{"broken\n')
    assert run.look() and run.step == 10 and run.lines.broken == 1
    assert [x for x, _ in run.points("test_accuracy")] == [4, 8]


def test_a_run_begun_anew_is_read_anew(write_run, clock):
    run = WatchedRun(write_run("a", lines_of(40)), clock)
    run.look()
    write_run("a", lines_of(5, loss=lambda step: 7.0))  # the same file, shorter
    assert run.look() and run.step == 5 and {y for _, y in run.points("loss")} == {7.0}
    (run.folder / "metrics.jsonl").unlink()
    assert run.look() and run.step == 0 and not run.look()
    write_run("a", lines_of(50))
    assert run.look() and run.step == 50
    path = run.folder / "metrics.jsonl"  # gone on with: another file, longer than what was read
    (run.folder / "new").write_text("".join(json.dumps(line) + "\n" for line in lines_of(60, loss=lambda step: 3.0)))
    (run.folder / "new").replace(path)
    assert run.look() and run.step == 60 and [y for _, y in run.points("loss")] == [3.0] * 60


def test_how_a_run_stands(write_run, clock, at, hold):
    folder = write_run("a", started=STARTED | {"steps": 8})
    (folder / "logs" / "rank-0000.log").write_text("")
    run = WatchedRun(folder, clock)

    def state(later=5.0):
        at(folder, 2000.0, later)
        run.look()
        return run.state()

    lock = hold(folder)
    assert state() == ("going", "") and state(200) == ("going", "") and run.quiet() == 200
    fcntl.flock(lock, fcntl.LOCK_UN)
    assert state() == ("dead", "")
    (folder / "logs" / "rank-0000.log").write_text("2026 INFO from step 0\n2026 INFO ended after step 8: signal\n")
    assert state() == ("stopped", "signal")
    (folder / "logs" / "rank-0000.log").write_text("2026 INFO ended after step 8: signal\n2026 INFO from step 8\n")
    assert state() == ("dead", "")
    (folder / "summary.json").write_text('{"steps": 8, "stopped": "finished"}')
    assert state() == ("ended", "finished")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state() == ("ended", "finished")  # it is about to close the folder
    at(folder, 2000.0, 5)
    os.utime(folder / "config.yaml", (2001, 2001))  # another leg has begun
    run.look()
    assert run.state() == ("going", "")
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    run.look()
    assert run.state() == ("gone", "")


def test_of_a_network_file_system_nothing_is_said(write_run, clock, at, monkeypatch):
    folder = write_run("a", started=STARTED)
    (folder / ".lock").write_text("")
    at(folder, 2000.0, 500)
    run = WatchedRun(folder, clock)
    run.look()
    assert is_held(folder) is False and run.state() == ("dead", "")
    for kind in ("nfs4", "lustre", ""):
        monkeypatch.setattr(watching, "file_system", lambda path, kind=kind: kind)
        assert is_held(folder) is None and run.state() == ("going", "")
    (folder / "summary.json").write_text('{"steps": 8, "stopped": "patience"}')
    at(folder, 2000.0, 500)
    run.look()
    assert run.state() == ("ended", "patience")


def test_the_end_against_slurms_and_the_limit(write_run, clock, at):
    folder = write_run("a", lines_of(50), started=STARTED | {"ends": 2100.0, "time_limit": 1005.0})
    at(folder, 2000.0)
    run = WatchedRun(folder, clock)
    run.look()
    assert run.left() == pytest.approx(50 / 4) and run.ends() == [("--time-limit", 5.0), ("Slurm", 100.0)]
    clock.at = 2050.0
    assert run.ends() == [("--time-limit", -45.0), ("Slurm", 50.0)]


def test_what_comes_beside_steps_counts_in_what_is_left(write_run, clock, at):
    """The leg's second half of 100 s of steps has taken 150 s on the clock; those before it do not count."""
    lines = lines_of(200, seconds=1.0)
    folder = write_run("a", lines, started=STARTED | {"steps": 300, "first_step": 100, "started": 5000.0})
    at(folder, 5150.0)
    run = WatchedRun(folder, clock)
    run.look()
    assert run.before == 100.0 and run.left() == pytest.approx(100 * 1.5)
    assert run.rates() == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize(
    "budget, left",
    [("seconds=5", 3.0), ("bytes=1200", 1.0), ("examples=512", 2.0), ("seconds=5,bytes=1e9", 3.0), ("x=3", 23.0)],
)
def test_a_budget_may_end_it_before(write_run, clock, budget, left):
    folder = write_run("a", started=STARTED)
    (folder / "config.yaml").write_text(f"budget: {budget}\n")
    run = WatchedRun(folder, clock)
    run.look()
    assert run.left() == pytest.approx(left)


def test_the_last_while(write_run, clock):
    """100 steps of a second, then 1,000 of a tenth: the pace of now is that of the last minute."""
    lines = [{"step": n, "seconds": float(n)} for n in range(1, 101)]
    lines += [{"step": 100 + n, "seconds": 100 + n / 10} for n in range(1, 1001)]
    run = WatchedRun(write_run("a", lines), clock)
    run.look()
    assert run.rates() == (pytest.approx(10), pytest.approx(1100 / 200)) and len(run.recent) < 70


def test_an_older_run_says_less(write_run, clock):
    run = WatchedRun(write_run("a"), clock)
    run.options = {}
    run.look()
    assert (run.steps, run.batch, run.ends(), run.left()) == (None, 32, [], None)
    (run.folder / "config.yaml").write_text("epochs: 7\nbatch_size: full\n")
    run.look()
    assert (run.steps, run.epochs, run.batch) == (14, 7, None) and run.left() == pytest.approx(6 / 4)
    (run.folder / "config.yaml").write_text("epochs: 7\nsteps: 9\nbatch_size: 8\nbatch_per_rank: 4\n")
    run.look()
    assert (run.steps, run.batch) == (9, None)
    (run.folder / "config.yaml").write_text("a: [1\n")
    run.look()
    assert run.steps is None and "config.yaml: the file is not valid YAML" in run.problem


@pytest.mark.parametrize("text", ["", "[1]", '{"steps": "x", "batch_size": NaN, "ends": [], "started": HUGE}', '{"st'])
def test_files_that_say_nothing(write_run, clock, text):
    folder = write_run("a", [{"step": 1, "seconds": None, "train_loss": "x", "epoch": "y"}, {"step": 2.5}])
    for name in ("started.json", "summary.json"):
        (folder / name).write_text(text.replace("HUGE", str(10**400)))
    run = WatchedRun(folder, clock)
    run.look()
    assert run.step == 2 and run.rates() is run.left() is run.steps is None and run.ends() == []
    assert run.state()[0] in ("going", "dead")


def test_of_several_runs_the_last_to_change(write_run, tmp_path, clock):
    folders = [write_run(f"c/{name}/seed-0") for name in ("1-a", "2-b", "10-c")]
    for time, folder in zip((3000, 5000, 4000), folders, strict=True):
        for path in folder.rglob("*"):
            os.utime(path, (time, time))
    (folders[0] / "summary.json").write_text('{"steps": 8}')
    os.utime(folders[0] / "summary.json", (3000, 3000))
    found = Watching([str(tmp_path / "c")], clock)
    found.look()
    assert (found.name, found.done, list(found.runs)) == ("2-b/seed-0", 1, ["1-a/seed-0", "2-b/seed-0", "10-c/seed-0"])
    os.utime(folders[2] / "metrics.jsonl", (6000, 6000))
    found.look()
    assert found.name == "10-c/seed-0" and found.run.step == 8 and last_change(folders[2]) == 6000
    write_run("c/11-d/seed-0", [])
    found.look()
    assert found.name == "11-d/seed-0" and found.run.step == 0 and len(found.runs) == 4
    with pytest.raises(UsageError, match="is no run's folder"):
        Watching([str(tmp_path / "c" / "1-a" / "seed-0" / "logs")], clock)
