"""hpcdl export-metrics: old runs for other tools, with what was broken said, and nothing foreign touched."""

import csv
import json
import subprocess
import sys

import pytest
from events import scalars
from in_process import ends
from written_runs import lines_of

from hpcdl.scripts import export_metrics

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs below c/, one of them without a step, one broken."""
    monkeypatch.chdir(tmp_path)
    for name, steps, end in (("1-a/seed-0", 8, ""), ("1-a/seed-1", 8, '{"st\n{"step": 9, "sec'), ("2-b/seed-0", 0, "")):
        folder = tmp_path / "c" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("model: mlp\nlr: 0.1\n")
        text = "".join(json.dumps(line) + "\n" for line in lines_of(steps))
        (folder / "metrics.jsonl").write_text(text + end)
    return tmp_path / "c"


def rows(path):
    with path.open(newline="") as file:
        return [[json.loads(cell) for cell in row if cell] for row in list(csv.reader(file))[1:]]


def test_tables_beside_the_metrics(runs, capsys):
    export_metrics.main(["c"])
    assert capsys.readouterr().out.splitlines() == [
        "c/1-a/seed-0/metrics.csv: 10 lines",
        "c/1-a/seed-1/metrics.csv: 10 lines; c/1-a/seed-1/metrics.jsonl: 1 line cannot be read, and is left out; "
        "the last line of c/1-a/seed-1/metrics.jsonl is cut off, and left out",
        "c/2-b/seed-0/metrics.csv: 0 lines",
    ]
    for seed in (0, 1):
        found = rows(runs / f"1-a/seed-{seed}/metrics.csv")
        assert sorted(map(sorted, found)) == sorted(sorted(line.values()) for line in lines_of(8))
    assert (runs / "2-b/seed-0/metrics.csv").read_text() == ""


def test_events_elsewhere(runs, capsys):
    pytest.importorskip("tensorboardX")
    (runs / "1-a/seed-0/started.json").write_text('{"started": 5000.5}')
    export_metrics.main(["c/1-a", "c/2-b", "--to", "tensorboard", "--out", "t/all"])
    found = scalars(runs.parent / "t/all/1-a/seed-0")
    assert set(found) == {"train_loss", "test_loss", "test_accuracy", "bytes", "messages"}
    assert found["train_loss"] == [(step, found["train_loss"][step - 1][1], 5000.5 + step / 4) for step in range(1, 9)]
    assert not list(runs.rglob("tensorboard")) and len(list(runs.parent.glob("t/all/*/*/events*"))) == 3
    export_metrics.main(["c/1-a/seed-0", "--to", "tensorboard", "--out", "one"])
    assert scalars(runs.parent / "one") == found


def test_steps_that_are_not_whole(runs, capsys):
    path = runs / "2-b" / "seed-0" / "metrics.jsonl"
    path.write_text('{"step": 4.5, "train_loss": 1.5}\n{"step": -3, "train_loss": 2.5}\n')
    export_metrics.main(["c/2-b", "--to", "tensorboard", "--out", "events"])
    assert capsys.readouterr().out == "events: 2 lines\n"


def test_a_table_by_name_and_several_in_a_folder(runs, capsys):
    export_metrics.main(["c/1-a/seed-0", "--out", "x/a.csv"])
    export_metrics.main(["c/1-a", "--out", "y"])
    assert len(rows(runs.parent / "x/a.csv")) == 10
    assert [path.name for path in sorted((runs.parent / "y").iterdir())] == ["seed-0.csv", "seed-1.csv"]


def test_what_is_there_stays_until_told(runs, capsys):
    pytest.importorskip("tensorboardX")
    one = runs / "1-a/seed-0"
    (one / "tensorboard").mkdir()
    (one / "tensorboard" / "events.out.tfevents.1234567890.host").write_text("another's")
    (one / "metrics.csv").write_text("mine")
    status, said = ends("export_metrics", ["c"])
    assert status == 2 and said.count("\n") == 1 and "c/1-a/seed-0/metrics.csv exists already" in said
    assert not (runs / "1-a/seed-1/metrics.csv").exists() and (one / "metrics.csv").read_text() == "mine"
    export_metrics.main(["c", "--force"])
    assert len(rows(one / "metrics.csv")) == 10
    for _ in range(2):
        export_metrics.main([str(one), "--to=tensorboard", "--force"])
    names = [path.name for path in (one / "tensorboard").iterdir()]
    assert len(names) == 2 and "events.out.tfevents.1234567890.host" in names
    status, said = ends("export_metrics", [str(one), "--to", "tensorboard"])
    assert status == 2 and "tensorboard exists already" in said


def test_what_a_job_is_writing_is_not_replaced(runs, monkeypatch, capsys):
    (runs / "1-a/seed-0/metrics.csv").write_text("its own")
    monkeypatch.setattr("hpcdl.reports.exporting.is_held", lambda folder: folder.name == "seed-0")
    status, said = ends("export_metrics", ["c", "--force"])
    assert status == 2 and "a job is writing to c/1-a/seed-0, and may write c/1-a/seed-0/metrics.csv" in said
    assert (runs / "1-a/seed-0/metrics.csv").read_text() == "its own"
    export_metrics.main(["c/1-a/seed-0", "--out", "a.csv"])
    export_metrics.main(["c/1-a/seed-1", "--force"])


def test_what_a_form_needs(runs, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, said = ends("export_metrics", ["c", "--to", "tensorboard"])
    assert status == 2 and said.endswith("--to tensorboard needs tensorboardX: pip install 'hpcdl[tensorboard]'\n")


def test_it_needs_no_mpi(runs):
    code = "import sys; sys.modules['mpi4py'] = None; from hpcdl import cli; cli.main(['export-metrics', 'c'])"
    assert subprocess.run([sys.executable, "-c", code], cwd=runs.parent, stdout=subprocess.DEVNULL).returncode == 0
