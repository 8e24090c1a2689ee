"""`hpcdl` lists the scripts and runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl import cli

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_every_script_is_listed_with_what_it_does(capsys, monkeypatch):
    monkeypatch.setattr(cli, "first", lambda: True)  # as rank 0, also where these tests run on several
    cli.main([])
    text = capsys.readouterr().out
    names = [path.stem.replace("_", "-") for path in SCRIPTS.glob("[a-z]*.py")]
    assert len(names) >= 4
    for name in names:
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 2


def test_every_script_opens_with_the_command_that_runs_it():
    for path in SCRIPTS.glob("[a-z]*.py"):
        assert f"scripts/{path.name}" in path.read_text().split("\n\n")[0]


def test_the_list_needs_neither_mpi_nor_numpy():
    code = (
        "import sys; from hpcdl import cli; cli.main(['--help']); print(sorted({'mpi4py', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_an_unknown_name_is_one_line_and_status_2(launch, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train-allredcue"])
    assert caught.value.code == 2
    assert "did you mean 'train-allreduce'?" in capsys.readouterr().err
    done = launch(2, "-m", "hpcdl", "trane")
    assert done.returncode == 2 and done.stderr.count("error: unknown script 'trane'") == 1


def test_dashes_and_underscores_run_the_same_program(launch):
    for ranks, name in ((2, "train-allreduce"), (1, "train_allreduce")):
        done = launch(ranks, "-m", "hpcdl", name, "--epochs", "1", "--out", "none", check=0)
        assert "test accuracy" in done.stdout
