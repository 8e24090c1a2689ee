"""hpcdl watch: a run that goes on elsewhere, on a terminal and through a pipe; it ends with the run, or with Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from in_process import ends
from rich.console import Console
from written_runs import lines_of

from hpcdl.comm.launcher import clean_environment
from hpcdl.reports.watching import LOCAL, file_system
from hpcdl.scripts import watch

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of which nobody knows whether it lives, at step 4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcdl.reports.watching.is_held", lambda folder: None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("model: mlp\ndata: digits\nsteps: 8\nbatch_size: 32\n")
    append(tmp_path / "a", lines_of(4))
    return tmp_path / "a"


def append(folder, lines):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def meanwhile(monkeypatch):
    """A function: what happens, in turn, each time that the program waits; then it is interrupted."""

    def happen(*events):
        left = [*events]

        def sleep(seconds):
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        monkeypatch.setattr(watch.time, "sleep", sleep)

    return happen


def end(folder):
    (folder / "summary.json").write_text('{"steps": 8, "stopped": "finished"}')


def test_a_line_for_all_news_until_the_end(folder, meanwhile, capsys):
    meanwhile(lambda: None, lambda: append(folder, lines_of(4, first=5)), lambda: None, lambda: end(folder))
    watch.main(["a", "--every", "3"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and all(line.startswith("a: step ") for line in said)
    assert [line.split(",")[0] for line in said] == ["a: step 4 of 8 (50%)", *["a: step 8 of 8 (100%)"] * 2]
    assert "1 s left" in said[0] and said[2].endswith("ended: finished")


def test_interrupted_it_ends_well_and_quietly(folder, meanwhile):
    meanwhile()
    assert ends("watch", ["a"]) == (0, "")


def test_silence_is_news_once(folder, meanwhile, capsys):
    def age(seconds):
        for path in folder.iterdir():
            os.utime(path, (time.time() - seconds,) * 2)

    meanwhile(lambda: age(180), lambda: None, lambda: None)
    watch.main(["a"])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "no news for 3 min" in said[1]


def test_a_run_that_is_removed_and_begun_anew(folder, meanwhile, capsys):
    def remove():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    def again():
        folder.mkdir()
        append(folder, lines_of(2))

    meanwhile(remove, again)
    watch.main(["a"])
    said = capsys.readouterr().out.splitlines()
    assert ["a: step 4 of 8" in said[0], "not there any more" in said[1], "a: step 2" in said[2]] == [True] * 3


@pytest.mark.parametrize("more", [[], ["--once"]])
def test_on_a_terminal(folder, meanwhile, monkeypatch, more):
    pytest.importorskip("plotext")
    file = io.StringIO()
    how = {"file": file, "width": 60, "height": 30, "force_terminal": True, "color_system": None}
    monkeypatch.setattr(watch, "Console", lambda **given: Console(**how, **given))
    meanwhile(lambda: append(folder, lines_of(4, first=5)), lambda: end(folder))
    watch.main(["a", *more])
    said = file.getvalue()
    assert "loss, by step" in said and "step 4 of 8 (50%)" in said
    assert ("ended: finished" in said) == ("step 8 of 8" in said) == (not more)


def test_several_folders(folder, meanwhile, capsys):
    other = folder.with_name("b")
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(other / "metrics.jsonl", (1000, 1000))
    end(other)
    os.utime(other / "summary.json", (1000, 1000))
    for given in (["a", "b"], ["."]):
        watch.main([*given, "--once"])
        said = capsys.readouterr().out
        assert (
            said.startswith("a: mlp on digits\nstep 4 of 8") and "1 of 2 runs done; this one has changed last" in said
        )


@pytest.mark.parametrize("text", ["", '{"step": 1, "train', "\0\0\0\n[]\n"])
def test_half_of_a_run_is_shown_as_far_as_it_goes(folder, text, capsys):
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text("- 1\n- [")
    (folder / "started.json").write_text('{"st')
    watch.main(["a", "--once"])
    said = capsys.readouterr().out
    assert said.startswith("a\nstep 0\n") and "config.yaml: this is no YAML" in said
    assert ("2 lines of a/metrics.jsonl cannot be read" in said) == (text.count("\n") == 2)


def test_it_needs_no_mpi_and_bears_a_pipe_that_closes(folder):
    code = "import sys; sys.modules['mpi4py'] = None; from hpcdl import cli; cli.main(['watch', 'a', '--once'])"
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=folder.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_really_goes_on(launch, tmp_path, capsys):
    """From its first steps to a signal: while it lives, and when it has been stopped."""
    script = os.path.join(os.path.dirname(watch.__file__), "train_allreduce.py")
    options = ["--pretend-compute", "20", "--epochs", "1000", "--model", "softmax", "--out", "a", "--progress", "none"]
    command = [launch.mpiexec, "-n", "2", sys.executable, script, *options]

    def once():
        capsys.readouterr()
        watch.main([str(tmp_path / "a"), "--once"])
        return capsys.readouterr().out

    with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL) as process:
        try:
            metrics = tmp_path / "a" / "metrics.jsonl"
            for _ in range(600):
                if metrics.exists() and metrics.stat().st_size > 1000:
                    break
                time.sleep(0.05)
            said = once()
            assert " of 45,000 (0%)" in said and "examples/s lately" in said and "left, until" in said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
    said = once()
    if LOCAL.fullmatch(file_system(tmp_path)):  # Open MPI's mpiexec may kill them
        assert "stopped: signal; go on with --resume" in said or "seems dead" in said
