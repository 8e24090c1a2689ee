"""hpcdl runs: a row for each run, of each state; its order, as JSON, and what is refused."""

import fcntl
import json

import pytest
from in_process import ends
from written_runs import lines_of

from hpcdl.scripts import runs

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three runs: finished, dead at its second evaluation, and running without one; one lies below a comparison."""
    monkeypatch.chdir(tmp_path)
    for name in ("c/1-a", "dead", "now"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ".lock").touch()
        (tmp_path / name / "config.yaml").write_text("model: mlp\ndata: digits\n")
    (tmp_path / "c" / "results.json").write_text("{}")
    done = {"strategy": "gossip", "ranks": 4, "steps": 8, "test_accuracy": 0.5, "test_loss": 1.5, "seconds": 12.0}
    done |= {"bytes_sent_per_rank": [1024, 2048], "stopped": "finished", "model": "gpt", "data": "text"}
    (tmp_path / "c/1-a/summary.json").write_text(json.dumps(done))
    (tmp_path / "dead/started.json").write_text('{"strategy": "local_sgd", "ranks": 2}')
    (tmp_path / "dead/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of(10)))
    (tmp_path / "now/metrics.jsonl").write_text("")
    with open(tmp_path / "now" / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield tmp_path


def test_a_row_for_each_in_any_order(folder, capsys):
    runs.main(["."])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [
        "run",
        "strategy",
        "model",
        "data",
        "ranks",
        "steps",
        "score",
        "value",
        "seconds",
        "bytes",
        "state",
    ]
    assert lines[1:3] == [
        ["c/1-a", "gossip", "gpt", "text", "4", "8", "test_accuracy", "50.00%", "12", "s", "3.00", "KiB", "finished"],
        ["dead", "local_sgd", "mlp", "digits", "2", "8", "test_accuracy", "87.50%", "2.0", "s", "800", "B", "dead"],
    ]
    assert lines[3] == ["now", "mlp", "digits", "-", "-", "-", "-", "-", "running"]
    for more, order in ((["value", "--reverse"], ["dead", "c/1-a", "now"]), (["value"], ["c/1-a", "dead", "now"])):
        runs.main([".", "--json", "--sort", *more])
        assert [row["run"] for row in json.loads(capsys.readouterr().out)] == order
    runs.main(["c", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["value"], row["bytes"], row["state"]) == (0.5, 3072, "finished")


def test_a_run_that_was_stopped_is_not_dead(folder, capsys):
    """Its log has the reason; a run that goes on is running, whatever its first leg has summed up."""
    for name, said in (("dead", "signal"), ("c/1-a", "failed: the loss of step 2: nan")):
        (folder / name / "logs").mkdir()
        log = f"2026-01-01 00:00:00,000 INFO gossip\n2026-01-01 00:00:01,000 INFO ended after step 8: {said}\n"
        (folder / name / "logs/rank-0000.log").write_text(log)
    (folder / "now/summary.json").write_text('{"stopped": "finished"}')
    runs.main([".", "--json"])
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["failed", "signal", "running"]


def test_refused(folder):
    for words, said in (
        ([".", "--sort", "bites"], "--sort: unknown column 'bites' (did you mean 'bytes'?)"),
        (["nowhere"], "nowhere does not exist"),
        ([], "give the folder of a run, or a folder with runs below it"),
    ):
        status, text = ends("runs", words)
        assert status == 2 and said in text
