"""Which rank was where when a run broke off, from what the ranks have recorded."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpcdl.comm.diagnostics import flight_recorder
from hpcdl.comm.diagnostics.call_signature import TYPES
from hpcdl.comm.diagnostics.deadlock import status_lines
from hpcdl.comm.diagnostics.flight_recorder import ALL, BROKE, DONE, GROUP, HEAD, MAGIC, RECORD, VERSION, WAITING
from hpcdl.errors import UsageError
from hpcdl.reports.postmortem import recordings, said, story, table
from hpcdl.scripts import postmortem

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SCRIPTS = EXAMPLES.parents[1] / "scripts"
TRAIN = ("--data", "faulty:curve", "--allreduce", "ring", "--progress", "none", "--force")
CALLS = ["", "all_reduce", "sum", "barrier", "train.py:7 in main", "push"]
SECOND = 10**9


def written(folder, rank, records, size=4, last=(40, 3), state=0, why=b"", seen=0.0, **changed):
    """The recording of one rank: each record as a dictionary of what is not as it mostly is."""
    (folder / "flight").mkdir(parents=True, exist_ok=True)
    capacity = 8
    texts, groups, first, length = flight_recorder.sizes(capacity)
    data = bytearray(length)
    head = np.zeros(1, HEAD)
    head["magic"], head["version"], head["capacity"], head["rank"], head["size"] = MAGIC, VERSION, capacity, rank, size
    head["host"], head["process"], head["born"], head["texts"] = b"elsewhere", 1, 0, len(CALLS)
    head["time"], head["groups"], head["state"], head["why"] = 1_700_000_000 * SECOND, 2, state, why
    head["seen"], head["ended"] = int((100 + seen) * SECOND), int((100 + seen) * SECOND)
    for name, value in changed.items():
        head[name] = value
    data[: HEAD.itemsize] = head.tobytes()
    for i, text in enumerate(CALLS):
        at = texts + i * flight_recorder.WIDTH
        data[at : at + len(text)] = text.encode()
    table = np.zeros(2, GROUP)
    table["name"], table["key"], table["last"] = [b"world", b"part"], [b"a.1", b"b.1"], last
    table["rank"], table["size"] = rank, size
    data[groups : groups + table.nbytes] = table.tobytes()
    found = np.zeros(len(records), RECORD)
    for i, each in enumerate(records):
        usual = {"number": i + 1, "start": (90 + i) * SECOND, "end": (90 + i) * SECOND + 1000, "call": 30 + i}
        usual |= {"operation": 1, "reduction": 2, "kind": TYPES[np.dtype("f4")], "elements": 1000}
        usual |= {"other": ALL, "line": 4, "state": DONE}
        for name, value in (usual | each).items():
            found[i][name] = value
    data[first : first + found.nbytes] = found.tobytes()
    path = folder / "flight" / f"rank-{rank:04d}.bin"
    path.write_bytes(data)
    return path


WAITS = {"state": WAITING, "end": 0}
BARRIER = {"operation": 3, "kind": 255, "elements": 0, "reduction": 0}


def test_one_rank_calls_something_else(tmp_path):
    for rank in (0, 1, 3):
        written(tmp_path, rank, [{}, WAITS | BARRIER | {"call": 41}])
    written(tmp_path, 2, [{}, WAITS | {"call": 41}])
    lines = story(tmp_path, recordings(tmp_path))
    assert lines[0] == f"{tmp_path}: 4 ranks, the job has ended"
    assert "ranks 0, 1 and 3 wait in call number 41 of 'world', barrier, at train.py:7 in main" in lines
    assert "rank 2 waits in call number 41 of 'world', all_reduce of 1000 float32 (sum), at train.py:7 in main" in lines
    differ = "call number 41 of 'world': the ranks make different collective calls ("
    assert any(each.startswith(differ) for each in lines)


def test_one_has_not_come_and_one_waits_for_another(tmp_path):
    written(tmp_path, 0, [{}, WAITS | {"call": 41}])
    written(tmp_path, 1, [{}, WAITS | {"call": 0, "operation": 5, "other": 3, "kind": 255}])
    written(tmp_path, 2, [{"call": 41}])
    lines = story(tmp_path, recordings(tmp_path))
    assert "rank 0 waits for rank 1, which has not come to call number 41 of 'world'" in lines
    assert "rank 1 waits in push of 'world', for rank 3, at train.py:7 in main" in lines
    assert "rank 1 waits for rank 3" in lines and "rank 3: nothing is known" in lines
    assert any(each.startswith("rank 2: in no communication (the last was all_reduce of 1000") for each in lines)
    assert "the first rank to end is not known; rank 2 waited for no other rank: look there first" in lines


def test_calls_of_different_communicators(tmp_path):
    for rank in (0, 1):
        written(tmp_path, rank, [WAITS | {"call": 41}], size=4, last=(40, 3))
    for rank in (2, 3):
        written(tmp_path, rank, [WAITS | BARRIER | {"call": 4, "group": 1}], last=(40, 3))
    found = status_lines(said(recordings(tmp_path)), 4)
    wait = "ranks 0, 1, 2 and 3 wait for each other for ever (ranks 0 and 1 in call number 41 of 'world'"
    assert found[-1].startswith(wait)


def test_who_was_first(tmp_path):
    for rank in range(4):
        written(tmp_path, rank, [WAITS | {"call": 41}], seen=0.0 if rank == 2 else 5.0)
    lines = story(tmp_path, recordings(tmp_path))
    assert re.fullmatch(r"rank 2 was seen last at \d\d:\d\d:\d\d\.00, 5\.0 s before the others", lines[1])
    written(tmp_path, 3, [], state=BROKE, why=b"failed with ValueError: x\x1b[31m", seen=4.0)
    written(tmp_path, 1, [], state=BROKE, why=b"ended the job: a rank has waited", seen=4.5)
    lines = story(tmp_path, recordings(tmp_path))
    assert lines[1].startswith("rank 3 failed with ValueError: x\\x1b[31m, at ")
    assert lines[2].startswith("rank 1 ended the job")
    assert table(recordings(tmp_path)[0], 5)[0] == "rank 0, the last 1 operation:"


def test_each_try_is_kept_and_told_apart(tmp_path):
    """The last one is shown, where no other is asked for; nothing is left of a run that has ended well."""
    for number in (1, 2, 3):
        flight_recorder.set_aside(tmp_path)
        written(tmp_path, 0, [{}, WAITS], size=1, state=BROKE, why=f"failed in try {number}".encode())
    for number, shown, others in ((0, 3, "tries 1 and 2"), (1, 1, "tries 2 and 3"), (3, 3, "tries 1 and 2")):
        lines = story(tmp_path, recordings(tmp_path, number))
        assert lines[0] == f"{tmp_path}: 1 rank, the job has ended (try {shown}; --which shows {others})"
        assert lines[1].startswith(f"rank 0 failed in try {shown}, at ")
    with pytest.raises(UsageError, match="--which 4: there are recordings of tries 1, 2 and 3"):
        recordings(tmp_path, 4)
    flight_recorder.set_aside(tmp_path)  # the fourth was stopped by a signal
    assert story(tmp_path, recordings(tmp_path))[0].endswith("(try 3; --which shows tries 1 and 2)")
    flight_recorder.forget(tmp_path)
    assert not (tmp_path / "flight").exists()


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda data: b"what" + data[4:], "is no flight recording"),
        (lambda data: data[:3], "is no flight recording"),
        (lambda data: data[:8] + b"\x07" + data[9:], "version 7, and this hpcdl reads version 1"),
        (lambda data: data[:-64], "is damaged"),
        (lambda data: data[: HEAD.fields["texts"][1]] + b"\x02" + data[HEAD.fields["texts"][1] + 1 :], "is damaged"),
        (lambda data: data[: HEAD.fields["rank"][1]] + b"\x09" + data[HEAD.fields["rank"][1] + 1 :], "is damaged"),
    ],
)
def test_files_that_are_none(change, line, tmp_path):
    path = written(tmp_path, 0, [{}, WAITS])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=line):
        recordings(tmp_path)


def program(*arguments, folder):
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            postmortem.main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), error.getvalue()


def test_a_rank_without_a_recording_is_refused(alone, tmp_path):
    written(tmp_path / "a", 0, [{}])
    line = "postmortem: error: --rank 5: there are only recordings of ranks 0\n"
    assert program("a", "--rank", "5", folder=tmp_path) == (2, "", line)


@pytest.mark.long
def test_of_runs_that_break_off(launch, tmp_path):
    """One raises, one leaves, one is killed; of a run that comes to its end nothing is kept."""
    where = {"PYTHONPATH": str(EXAMPLES)}

    def run(what):
        model = f"faulty:Line,what={what}"
        return launch(3, SCRIPTS / "train_allreduce.py", *TRAIN, "--model", model, "--out", what, **where)

    with ThreadPoolExecutor(2) as pool:
        ends = dict(zip(("raise", "exit", "kill"), pool.map(run, ("raise", "exit", "kill")), strict=True))
    first = {
        "raise": "rank 1 failed with ZeroDivisionError: division by zero, at ",
        "exit": "rank 1 left by sys.exit(7), at ",
        "kill": "ranks 0, 1 and 2 ended without a word, at about ",
    }
    for what, done in ends.items():
        assert done.returncode != 0
        status, out, error = program(what, "--last", "4", "--rank", "1", folder=tmp_path)
        assert status == 0 and not error
        lines = out.splitlines()
        assert lines[0] == f"{what}: 3 ranks, the job has ended" and lines[1].startswith(first[what]), out
        assert re.search(r"wait for rank 1, which has not come to call number \d+ of 'world'", out), out
        assert re.search(r"ranks 0 and 2 wait in call number \d+ of 'world', all_reduce of 2 float32 \(sum\), at "
                         r"hpcdl/strategies/all_reduce.py:\d+ in train", out)  # fmt: skip
        assert "rank 1, the last 4 operations:" in lines
        assert "all_reduce of 2 float32 (sum), number" in "".join(lines[-4:])
    launch(3, SCRIPTS / "train_allreduce.py", *TRAIN, "--model", "faulty:Line,what=kill", "--steps", "9",
           "--out", "kill", check=0, **where)  # fmt: skip
    assert not (tmp_path / "kill" / "flight").exists()
    status, out, _ = program("kill", folder=tmp_path)
    assert status == 0 and out == "kill: the run has ended in good order, and has left no recordings\n"
    run = SCRIPTS / "train_sequential.py", *TRAIN, "--model", "faulty:Line", "--steps", "9"
    launch(1, *run, "--out", "kept", "--flight", "0", check=0, **where)
    assert not (tmp_path / "kept" / "flight").exists()


@pytest.mark.long
def test_of_a_run_that_hangs(alone, environment, tmp_path, launch):
    """While it does: from its folder, and by SIGUSR2 to any rank, which ends nothing."""
    command = [launch.mpiexec, "-n", "3", sys.executable, SCRIPTS / "train_allreduce.py", *TRAIN]
    command += ["--model", "faulty:Line,what=hang", "--out", "hang"]
    with (tmp_path / "said").open("w+b") as output:
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(EXAMPLES)}, stdout=output, stderr=output
        )
        try:
            wanted = "ranks 0 and 2 wait for rank 1, which has not come to call number"
            until(lambda: wanted in program("hang", folder=tmp_path)[1])
            assert program("hang", folder=tmp_path)[1].startswith("hang: 3 ranks, all running\n")
            for rank in (1, 0):
                head = np.frombuffer((tmp_path / "hang" / "flight" / f"rank-000{rank}.bin").read_bytes(), HEAD, 1)[0]
                before = (tmp_path / "said").read_text().count(wanted)
                ask = partial(os.kill, int(head["process"]), signal.SIGUSR2)
                ask()
                until(lambda before=before: (tmp_path / "said").read_text().count(wanted) > before, again=ask)
                time.sleep(1.5)  # one answer a second
            assert job.poll() is None
        finally:
            job.kill()
            job.wait()
    assert "hpcdl: rank 1: in no communication (the last was all_reduce), at " in (tmp_path / "said").read_text()


def until(condition, seconds=60, again=lambda: None):
    """Wait for it; ask `again` every 15 seconds: a signal that comes while another is answered is not answered."""
    begun = asked = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < begun + seconds
        if now > asked + 15:
            again()
            asked = now
        time.sleep(0.3)
