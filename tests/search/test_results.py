"""hpcdl/search/results.py: trials.csv, best.yaml and the command for the best, from a journal alone."""

import csv
import json
import shlex

import pytest
import yaml
from fuzz import cases
from hypothesis import given
from hypothesis import strategies as st
from made_search import ODD, ODD_SETTINGS, events_of, settings_of, write_journal

from hpcdl.errors import UsageError
from hpcdl.launch.option_parser import parse
from hpcdl.runs.options import Options
from hpcdl.search.results import options_of, training_command, write_tables
from hpcdl.search.search_log_reader import Trials, best, read


def table_of(folder):
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def search(folder, values, score=0.5, **settings):
    """A search of one trial."""
    key = {"trial": 0, "rung": 0, "seed": 0}
    events = [{"event": "search", "version": 1, "settings": settings_of() | settings}]
    events += [{"event": "begin", **key, "values": values}, {"event": "end", **key, "score": score, "failed": None}]
    return write_journal(folder, events)


def test_a_row_for_each_trial(tmp_path):
    folder = write_journal(tmp_path, trials=9, rungs=2, failing=(4,), seeds=2, method="asha")
    path = folder / "journal.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:-1]) + '{"event": "en')
    top = write_tables(folder)
    found, known = table_of(folder), read(folder).rows()
    assert [int(row["trial"]) for row in found] == list(range(9)) == [row.trial for row in known]
    assert found[4]["status"] == "failed" and found[4]["score"] == ""
    assert found[4]["reason"] == "seed 0: its loss is not finite (step 17)" and not found[3]["reason"]
    for mine, row in zip(found, known, strict=True):
        if row.score is not None:
            assert float(mine["score"]) == row.score and float(mine["spread"]) == row.spread
            assert int(mine["steps"]) == row.steps and float(mine["lr"]) == row.values["lr"]
            assert (mine["momentum:beta"] == "") == (row.values["optimizer"] == "sgd")
    assert [row["status"] for row in found].count("begun") == 1  # of which the last line was cut off
    assert top == best(known, 1)[0] and {row["amount"] for row in found} == {"1.0", "3.0"}
    assert found[top.trial]["folder"] == f"trials/000{top.trial}" and found[top.trial]["rung"] == "1"


def test_values_of_names_that_are_ours_and_what_breaks_a_table(tmp_path):
    write_tables(search(tmp_path, {"steps": 7, "a,b": 'x"\n;'}, space=["steps=int:1..9"]))
    (row,) = table_of(tmp_path)
    assert row["--steps"] == "7" and row["steps"] == "" and row["a,b"] == 'x"\\n;'


def test_the_best_is_a_file_of_options(tmp_path):
    values = {"lr": 0.1 + 0.2, "batch-size": 64, "optimizer": "momentum", "momentum:beta": 0.91}
    line = "train-local-sgd --data digits --epochs=5 --sync-every 4 --time-limit 0 --validation 0.2 --seed 3 --force"
    folder = search(tmp_path / "a b", values, 0.875, program=line)
    write_tables(folder)
    text = (folder / "best.yaml").read_text()
    expected = {"data": "digits", "epochs": "5", "sync_every": "4", "time_limit": "0", "validation": "0.2"}
    expected |= {"lr": "0.30000000000000004", "batch_size": "64", "optimizer": "momentum:beta=0.91"}
    assert yaml.load(text, yaml.BaseLoader) == expected
    assert "# score: validation_accuracy 87.50%\n" in text and "# trial: 0, in trials/0000\n" in text
    command = training_command(folder, read(folder), best(read(folder).rows())[0])
    assert f"# train it longer: {command}\n" in text
    assert shlex.split(command) == [
        *("mpiexec", "-n", "2", "hpcdl", "train-local-sgd", "--config", f"{folder}/best.yaml"),
        *("--epochs", "10", "--out", f"{folder}-best"),
    ]


def test_a_program_takes_it(tmp_path):
    values = {"lr": 0.0123, "batch-size": 64, "model": "mlp:16", "optimizer": "momentum", "momentum:beta": 0.91}
    folder = search(tmp_path, values, program="--data digits --epochs 3 --progress none --validation 0.25")
    write_tables(folder)
    options = parse(Options, "train-allreduce", "", [f"--config={folder / 'best.yaml'}"])
    assert (options.lr, options.batch_size, options.model) == (0.0123, 64, "mlp:16")
    assert (options.optimizer, options.epochs, options.validation) == ("momentum:beta=0.91", 3, 0.25)


def test_options_of_lines():
    given = {"lr": "-0.5", "nan_guard": "true", "data": "a b.h5"}
    for line, expected in (
        ("train-allreduce --lr -0.5 --nan-guard --data 'a b.h5'", given),
        ("-n 2: train-allreduce --epochs 3 --epochs 4", {"epochs": "4"}),
        ("--out x --resume y", {}),
        ("train-allreduce 'open", {}),
        (None, {}),
    ):
        assert options_of(Trials(settings_of(program=line)), {}) == expected


def test_options_of_a_file_that_the_line_names(tmp_path):
    (tmp_path / "c.yaml").write_text("data: digits\nlr: 0.5\nseed: 3\n")
    line = f"train-gossip --config {tmp_path / 'c.yaml'} --lr 0.25"
    found = options_of(Trials(settings_of(program=line)), {"lr": 0.125, "batch-size": 8})
    assert found == {"data": "digits", "lr": "0.125", "batch_size": "8"}
    assert options_of(Trials(settings_of(program="train-gossip --config none.yaml")), {}) == {}


def test_how_much_longer(tmp_path):
    def longer(values=None, amount=0.0, more=None, **settings):
        found = Trials(settings_of() | settings)
        key = {"trial": 0, "rung": 0, "seed": 0}
        found.take({"event": "begin", **key, "values": values or {}, "amount": amount})
        found.take({"event": "end", **key, "score": 1.0, "failed": None, "more": more})
        return training_command(tmp_path, found, found.row(0))

    assert " --epochs 18 " in longer() and " --epochs 3 " in longer({"epochs": 1.5})
    assert " --steps 200 " in longer(program="train-allreduce --steps 100 --epochs 3")
    bare = "train-allreduce --data digits"
    assert " --epochs 6 " in longer(amount=3.0, program=bare) and "--epochs" not in longer(program=bare)
    assert " --epochs 8 " in longer(more={"epochs": 4}, program=bare)
    assert "mpiexec -n 1 hpcdl" in longer(ranks_per_trial=None) and longer(program=None) is None


def test_of_a_function_the_best_values_alone(tmp_path):
    folder = search(tmp_path, {"x": 0.5, "kind": "a: b"}, program=None, objective=None)
    write_tables(folder)
    text = (folder / "best.yaml").read_text()
    assert yaml.safe_load(text) == {"x": 0.5, "kind": "a: b"}
    assert "train it" not in text and "# score: score 0.5\n" in text


def test_without_a_score_there_is_no_best(tmp_path):
    assert write_tables(write_journal(tmp_path, trials=2, failing=(0, 1))) is None
    assert len(table_of(tmp_path)) == 2 and not (tmp_path / "best.yaml").exists()
    with pytest.raises(UsageError, match=r"journal\.jsonl is missing"):
        write_tables(tmp_path / "none")
    (tmp_path / "trials.csv").unlink()
    (tmp_path / "trials.csv").mkdir()
    with pytest.raises(UsageError, match=r"trials\.csv cannot be written"):
        write_tables(tmp_path)


def test_what_users_wrote_stays_on_its_line(tmp_path):
    evil = "x\nlr: 5\n\x1b[2J"
    events = list(events_of(trials=2, method=evil, objective=evil, program=f"train-allreduce --data '{evil}'"))
    write_tables(write_journal(tmp_path, events))
    text = (tmp_path / "best.yaml").read_text()
    assert "\x1b" not in text and yaml.safe_load(text)["data"] == evil and yaml.safe_load(text)["lr"] != 5


@cases(60)
@given(ODD_SETTINGS, st.dictionaries(st.text(max_size=4), ODD, max_size=3), ODD)
def test_settings_that_are_odd_do_no_harm(tmp_path_factory, settings, values, score):
    folder = search(tmp_path_factory.mktemp("search"), values, score, **settings)
    write_tables(folder)
    assert len(table_of(folder)) == 1 and json.dumps(settings)
