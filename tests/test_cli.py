"""`hpcdl` lists the scripts and runs them."""

from pathlib import Path

import pytest

from hpcdl import cli
from hpcdl.launch import start
from hpcdl.programs import programs

SCRIPTS = Path(__file__).parents[1] / "scripts"


def shown(capsys, monkeypatch, columns):
    monkeypatch.setattr(cli, "first_process", lambda: True)  # as rank 0, also where these tests run on several
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main([])
    return capsys.readouterr().out.splitlines()


def test_every_script_is_listed_with_what_it_does(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, 120)
    names = [path.stem.replace("_", "-") for path in SCRIPTS.glob("[a-z]*.py")]
    assert len(names) >= 4
    for name in names:
        (line,) = [line for line in lines if line.startswith("  ") and line.split()[:1] == [name]]
        assert line.endswith(f"  {programs()[name].sentence}")
    columns = {line.index(programs()[line.split()[0]].sentence[:10]) for line in lines if line.startswith("  ")}
    assert len(columns) == 1


def test_on_a_narrow_terminal_nothing_is_cut(capsys, monkeypatch):
    lines = shown(capsys, monkeypatch, 60)
    assert max(map(len, lines)) <= 60
    words = " ".join(" ".join(lines).split())
    assert all(about.sentence in words for about in programs().values())


def test_sections_have_the_order_of_the_docs():
    found = cli.listed([*programs()])
    assert list(found) == ["train", "data and results", "benchmarks", "the machine"]
    assert found["train"][:4] == ["train-sequential", "train-allreduce", "train-svrg", "train-sgld"]
    assert sorted(name for names in found.values() for name in names) == sorted(programs())


def test_scripts_to_come_find_a_section():
    found = cli.listed(
        ["predict", "train-dqn", "train-ensemble", "train-grid", "bench-new", "plan", "novelty", "search"]
    )
    assert found["train"] == ["train-grid", "train-dqn", "train-ensemble", "search"]
    rest = {"data and results": ["predict"], "benchmarks": ["bench-new"], "the machine": ["plan"], "more": ["novelty"]}
    assert {section: names for section, names in found.items() if section != "train"} == rest


def test_an_unknown_name_is_one_line_and_status_2(launch, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train-allredcue"])
    assert caught.value.code == 2
    assert "did you mean 'train-allreduce'?" in capsys.readouterr().err
    done = launch(2, "-m", "hpcdl", "trane")
    assert done.returncode == 2 and done.stderr.count("error: unknown script 'trane'") == 1


def test_dashes_and_underscores_run_the_same_program(capsys, monkeypatch):
    monkeypatch.setattr(start, "first_process", lambda: True)
    for name in ("train-allreduce", "train_allreduce"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert capsys.readouterr().out.startswith("usage: hpcdl train-allreduce ")


def test_a_program_that_takes_a_command_line_has_help_too(capsys):
    for words in (["-h"], ["--restarts", "2", "--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["supervise", *words])
        assert caught.value.code in (None, 0) and capsys.readouterr().out.startswith("usage: hpcdl supervise ")
