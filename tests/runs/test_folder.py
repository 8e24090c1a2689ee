"""A run's folder: what is half-written is not read, and what JSON cannot say is not written."""

import json
import subprocess
import sys

import pytest
from written_runs import lines

from hpcdl.errors import UsageError
from hpcdl.machine.launcher import clean_environment
from hpcdl.runs import Options
from hpcdl.runs.folder import Folder, remove_run


def test_lines_of_later_steps_and_one_that_was_cut_off_are_dropped_when_a_run_resumes(tmp_path):
    (tmp_path / "logs").mkdir()
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2}')
    folder = Folder(tmp_path, 0)
    folder.open(2)
    folder.record([{"step": 3, "again": True}])
    folder.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}', '{"step": 3, "again": true}']


def test_lines_that_its_last_writer_had_not_written_are_added(tmp_path):
    """Those that are missing, and no evaluation that is done again."""
    (tmp_path / "logs").mkdir()
    steps = [{"step": step, "learning_rate": None} for step in range(1, 5)]
    told = [*steps[:2], {"step": 2, "test_loss": 2}, *steps[2:], {"step": 4, "test_loss": 4}]
    text = "".join(f"{json.dumps(line)}\n" for line in told[:4])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4')
    for step, scored, wanted in ((4, None, told), (4, 4, told[:-1]), (2, None, told[:3]), (2, 2, told[:2])):
        folder = Folder(tmp_path, 0)
        folder.open(step, told[1:], scored)
        folder.close()
        assert lines(tmp_path) == wanted


def test_lines_that_a_crash_has_broken_are_left_out_and_the_log_says_so(tmp_path):
    (tmp_path / "logs").mkdir()
    path = tmp_path / "metrics.jsonl"
    broken = [b"\x00\x00\x00", b'{"st', b"[1]", b'{"epoch": 1}', b'{"step": "x"}', b'{"step": NaN}', b"\xff{}", b""]
    path.write_bytes(b'{"step": 1}\n' + b"\n".join(broken) + b'\n{"step": 2}\n')
    folder = Folder(tmp_path, 0)
    folder.open(2)
    folder.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    said = (tmp_path / "logs" / "rank-0000.log").read_text()
    assert "WARNING" in said and "metrics.jsonl: 8 lines are broken, and left out; the first is line 2" in said


def test_only_numbers_that_json_has_are_written(tmp_path):
    folder = Folder(tmp_path, 0)
    with pytest.raises(ValueError, match="JSON"):
        folder.write("summary.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_run_has_just_taken_is_refused(alone, tmp_path):
    """Both found it free; the second comes to make it while the first writes, and once more after it."""
    first, second = (Folder(tmp_path / "a", 0) for _ in range(2))
    first.create(Options(out="a"), False)
    before = (tmp_path / "a" / "config.yaml").read_bytes()
    with pytest.raises(UsageError, match=r"another job is writing to .*a; wait for its end or give another --out"):
        second.create(Options(out="a", seed=3), False)
    first.close()
    with pytest.raises(UsageError, match="a holds another run"):
        second.create(Options(out="a", seed=3), False)
    assert (tmp_path / "a" / "config.yaml").read_bytes() == before


def test_one_of_two_jobs_goes_on_in_a_folder_and_a_dead_one_keeps_no_lock(alone, tmp_path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom hpcdl.runs.folder import Folder\n"
        "folder = Folder(Path(sys.argv[1]), 0)\nfolder.claim()\nprint('has it', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, tmp_path]
    folder = Folder(tmp_path, 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as process:
        try:
            assert process.stdout.readline() == "has it\n"
            with pytest.raises(UsageError, match="another job is writing"):
                folder.claim()
        finally:
            process.kill()
    folder.claim()
    folder.close()


def test_whoever_outlives_the_one_that_had_the_folder_waits_for_the_end_of_its_process(alone, tmp_path, monkeypatch):
    """The kernel may close its connections, by which others know that it is gone, before it lets go of the lock."""
    gone, left, naps = Folder(tmp_path, 0), Folder(tmp_path, 0), []
    gone.claim()
    with pytest.raises(UsageError, match="another job is writing"):
        left.claim()

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            gone.close()

    monkeypatch.setattr("hpcdl.runs.folder.time.sleep", sleep)
    left.claim(outlived=True)
    assert left.lock is not None and len(naps) == 3
    left.close()


def test_what_a_killed_run_left_half_written_is_removed_and_nothing_else(alone, tmp_path):
    ours = [".checkpoint.h5.123.part", ".checkpoint-000000003.h5.9.part", ".best.h5.77.part", ".summary.json.5.part"]
    ours += [".table.csv.5.part", ".table.md.5.part", ".report.html.5.part", ".best.yaml.5.part", ".weights.npz.5.part"]
    ours += [".until-4.0.h5.5.part", "later/.checkpoint.h5.5.part"]
    others = [".mine.h5.123.part", "checkpoint.h5.part", ".checkpoint.h5.part", ".checkpoint.h5.12.part.keep"]
    (tmp_path / "later").mkdir()
    for name in [*ours, *others]:
        (tmp_path / name).write_text("")
    folder = Folder(tmp_path, 0)
    folder.create(Options(out=str(tmp_path)), True)
    folder.close()
    assert {path.name for path in tmp_path.rglob("*")} == {*others, ".lock", "logs", "config.yaml", "later"}


def test_two_runs_of_one_folder_at_once(run, world, mpi_tmp_path):
    """The second is refused on all ranks, before it reads or writes anything; afterwards the folder is free."""
    out, second = str(mpi_tmp_path / "a"), []

    def resume(running, loss, total):
        if running.step == 6 and not second:
            with pytest.raises(UsageError) as refused:
                run(resume=out, out=out, epochs=9)
            second.append(refused)

    done = run(out=out, epochs=2, checkpoint_every=5, observer=resume)
    assert "another job is writing" in str(second[0].value)
    assert run(resume=out, out=out, epochs=3).step == done.step * 3 // 2


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(run, world, mpi_tmp_path, monkeypatch):
    """Though those of earlier runs are there with all that a run leaves."""
    monkeypatch.chdir(mpi_tmp_path)
    monkeypatch.setattr("hpcdl.runs.folder.time.strftime", lambda *form: "20260101-000000")
    folders = [run(out="auto", epochs=1).folder.path for _ in range(3)]
    assert [str(path) for path in folders] == [f"runs/all_reduce-20260101-000000{end}" for end in ("", "-2", "-3")]
    assert all((path / "summary.json").exists() for path in folders)
    monkeypatch.undo()


def test_what_a_run_has_left_is_removed_and_nothing_else(tmp_path):
    ours = ["config.yaml", "started.json", "metrics.jsonl", "summary.json", "trace.json"]
    ours += ["checkpoint.h5", "checkpoint-000000012.h5"]
    ours += ["best.h5", "logs/rank-0000.log", "logs/rank-12345.log", "later/checkpoint.h5", "later/metrics.jsonl"]
    others = ["notes.txt", "checkpoint-12.h5", "checkpoint-mine.h5", "best.h5.txt", "rank-0000.log", ".lock", "few.h5"]
    others += ["logs/mine.log", "logs/summary.json", "later/mine.txt", "sub/config.yaml", "trace.json5"]
    for name in (*ours, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    remove_run(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(others)


def test_links_are_not_followed_and_folders_stay(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (elsewhere / "checkpoint.h5").write_text("")
    (run / "later").symlink_to(elsewhere)
    (run / "best.h5").symlink_to(elsewhere / "checkpoint.h5")
    (run / "config.yaml").mkdir()
    remove_run(run)
    assert {path.name for path in run.iterdir()} == {"later", "config.yaml"}
    assert (elsewhere / "checkpoint.h5").exists()
