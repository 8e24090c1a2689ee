"""hpcdl watch: a run that goes on elsewhere, on a terminal and through a pipe; it ends with the run, or with Ctrl-C."""

import io
import json
import os
import subprocess
import sys
import time

import pytest
from in_process import ends
from own_time import set_own_time
from rich.console import Console
from written_runs import lines_of

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

        set_own_time(monkeypatch, watch, sleep=sleep)

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
    assert ["a: step 4 of 8" in said[0], "files are gone" in said[1], "a: step 2" in said[2]] == [True] * 3


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


def test_several_folders(folder, capsys):
    folder.with_name("b").mkdir()
    end(folder.with_name("b"))
    for path in folder.with_name("b").iterdir():
        os.utime(path, (1000, 1000))
    watch.main(["a", "b", "--once"])
    assert "1 of 2 runs done; this one has changed last" in capsys.readouterr().out


def test_it_needs_no_mpi_and_bears_a_pipe_that_closes(folder):
    code = "import sys; sys.modules['mpi4py'] = None; from hpcdl import cli; cli.main(['watch', 'a', '--once'])"
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=folder.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
