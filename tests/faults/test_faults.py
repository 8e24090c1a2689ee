"""The matrix of faults: its cases, that what is wrong is seen, and a few of them as jobs; all of them: make faults."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.cases import FAULTS, LINES, draw, of
from faults.judging import Job, Wrong, broken, complete, judge, whole
from mpi4py import MPI

from hpcdl.faults import inject

pytestmark = pytest.mark.usefixtures("alone")
PAIRS = len(LINES) * len(FAULTS)


def test_each_line_meets_each_fault_once_in_a_round():
    found = {(case.line, case.kind) for case in (draw(1, number) for number in range(PAIRS))}
    assert len(found) == PAIRS
    assert draw(1, 5) == draw(1, 5) and draw(1, 5 + PAIRS).number == 5 + PAIRS
    assert [draw(1, number) for number in range(20)] != [draw(2, number) for number in range(20)]


def test_every_case_can_be_read():
    for case in (draw(3, number) for number in range(PAIRS)):
        assert case.ranks in LINES[case.line][0]
        for fault in inject.parse_faults(case.inject):
            assert fault.kind == "random" or fault.rank < case.ranks


@pytest.mark.parametrize(
    "line, kind, inject, ended",
    [
        pytest.param(
            "all-reduce, ring",
            "kill",
            "kill:rank=1,step=13",
            ["ended, in a line, gone on with"],
            marks=pytest.mark.long,
        ),
        (  # MPICH's launcher says nothing of it, Open MPI's does
            "sequential",
            "exit, status 0",
            "exit:step=3,status=0,how=os",
            ["status 0, without a summary", "ended, in a line"],
        ),
    ],
)
def test_a_case(tmp_path, line, kind, inject, ended):
    case = of(1, line, min(LINES[line][0]), kind, inject, resumed=kind == "kill")
    assert judge(case, tmp_path / "case", {}) in ended


@pytest.mark.parametrize(
    "name, text, said",
    [("metrics.jsonl", '{"step": 1}\n{"st', "broken"), ("a.json", "{", "broken"), (".a.json.12.part", "", "is left")],
)
def test_what_is_half_written_is_seen(tmp_path, name, text, said):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    whole(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(Wrong, match=said):
        whole(tmp_path)


def test_a_step_that_counts_twice_is_seen(tmp_path):
    case = of(1, "sequential", 1, "slow", "slow")
    (tmp_path / "summary.json").write_text('{"stopped": "finished", "replicas_agree": true, "steps": 24}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 1}\n{"step": 1, "seconds": 1, "test_loss": 1}\n')
    complete(case, tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "seconds": 2}\n')
    with pytest.raises(Wrong, match="a step counts twice"):
        complete(case, tmp_path)


@pytest.mark.parametrize(
    "kind, text, said",
    [
        ("kill", "prterun: rank 1 exited on\nsignal 9", None),
        ("kill", "", "no line names the cause"),
        ("disk full", "error: run cannot be written: No space left on device\n", None),
        ("disk full", 2 * "error: run cannot be written: No space left on device\n", "more than one line"),
        ("disk full", "Traceback\nerror: No space left on device\n", "a traceback"),
        ("stop", 2 * "hpcdl watchdog: a rank has waited longer than --timeout 4 s, and rank 0 does not answer\n", None),
        ("exit, os", "", None),
        ("exit, os", "killed\n", "no line names"),
    ],
)
def test_what_a_job_says(kind, text, said):
    struck = "the process leaves by os._exit(7)" if kind == "exit, os" else "something happens"
    job = SimpleNamespace(struck=1.0, seconds=0.5, status=7, text=f"inject: rank 1, step 2: {struck}\n{text}")
    case = of(1, "all-reduce, ring", 2, kind, kind)
    if said is None:
        broken(case, job)
    else:
        with pytest.raises(Wrong, match=said):
            broken(case, job)
    job.struck, job.seconds = 1.0, 1e3
    with pytest.raises(Wrong, match="until all had ended"):
        broken(case, job)
    job.struck = 0.0
    with pytest.raises(Wrong, match="nothing has struck"):
        broken(case, job)


def test_what_is_left_of_a_job_is_found(tmp_path, monkeypatch):
    """A process that has left the launcher's group, and a file that it has in its memory."""
    program = (
        "import mmap, os, subprocess, sys, time; path = '/dev/shm/hpcdl-faults-%d' % os.getppid();"
        "file = open(path, 'wb+'); file.write(bytes(4096)); file.flush(); kept = mmap.mmap(file.fileno(), 4096);"
        "subprocess.Popen(['sleep', '50'], start_new_session=True, stdout=-3, stderr=-3);"  # -3: DEVNULL
        "time.sleep(1)"
    )
    monkeypatch.setattr("faults.judging.SOON", 0.5)
    (tmp_path / "hpcdl.py").write_text(program)
    monkeypatch.setattr("faults.judging.HERE", tmp_path / "here")  # the folder above is where Python looks first
    job = Job(1, [], tmp_path)
    assert len(job.left) == 1 and len([name for name in job.shm if name.startswith("hpcdl-faults")]) == 1
    assert job.status == 0 and not job.hangs and MPI.COMM_WORLD.size == 1
    assert not Path(f"/dev/shm/{job.shm[0]}").exists()
