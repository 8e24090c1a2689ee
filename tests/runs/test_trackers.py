"""hpcdl/runs/trackers.py: a tracker gets what metrics.jsonl holds, and one that fails stops nothing."""

import json
import logging
import sys
import types
from pathlib import Path

import pytest
from in_process import ends

from hpcdl.runs.trackers import TRACKERS

LINES = [{"step": 1, "epoch": 0.5, "train_loss": 0.5, "seconds": 2.0}, {"step": 2, "train_loss": 0.25, "bytes": None}]


class FakeTracker:
    """Stands for both packages: notes each call of theirs that hpcdl makes."""

    def __init__(self, monkeypatch):
        self.calls, self.broken = [], ""
        wandb, mlflow, entities = (types.ModuleType(name) for name in ("wandb", "mlflow", "mlflow.entities"))
        wandb.Settings, wandb.init = dict, self.named("init")
        mlflow.MlflowClient, entities.Metric = lambda: self, lambda *values: values
        for module in (wandb, mlflow, entities):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        self.info = self

    def named(self, name):
        def call(*given, **named):
            if name == self.broken:
                raise ConnectionError("no\nservice")
            self.calls.append((name, given, named))
            return self if name in ("init", "create_run") else None

        return call

    def __getattr__(self, name):
        return "r1" if name == "run_id" else self.named(name)


@pytest.fixture
def fake(monkeypatch):
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return FakeTracker(monkeypatch)


def test_wandb_gets_the_numbers(fake, tmp_path):
    tracker = TRACKERS["wandb"](tmp_path / "a", LINES[:1], 100.0, {"lr": 0.5})
    tracker.write(LINES[1:])
    tracker.close()
    (init, _, how), *logged, end = fake.calls
    assert init == "init" and how["name"] == "a" and how["project"] == "hpcdl" and how["config"] == {"lr": 0.5}
    first, second = (each[1][0] for each in logged)
    assert first == {"train_loss": 0.5, "seconds": 2.0} and second == {"train_loss": 0.25, "seconds": None}
    assert [each[2]["step"] for each in logged] == [1, 2] and end[0] == "finish"


def test_mlflow_gets_the_numbers(fake, tmp_path):
    tracker = TRACKERS["mlflow"](tmp_path / "a", LINES[:1], 100.0, {"lr": 0.5})
    tracker.write(LINES[1:])
    tracker.close()
    names = ["get_experiment_by_name", "create_experiment", "create_run", "log_param", "log_batch", "log_batch"]
    assert [each[0] for each in fake.calls] == [*names, "set_terminated"]
    assert fake.calls[2][2] == {"start_time": 100_000, "run_name": "a"} and fake.calls[3][1] == ("r1", "lr", 0.5)
    assert [each[1] for each in fake.calls[4:6]] == [
        ("r1", [("train_loss", 0.5, 102_000, 1)]),
        ("r1", [("train_loss", 0.25, 100_000, 2)]),
    ]


@pytest.mark.parametrize(("name", "broken"), [("wandb", "init"), ("wandb", "log"), ("mlflow", "log_batch")])
def test_a_tracker_that_fails_is_left_out(fake, tmp_path, caplog, name, broken):
    fake.broken = broken
    with caplog.at_level(logging.WARNING, "hpcdl"):
        tracker = TRACKERS[name](tmp_path / "a", LINES, 100.0, {})
        tracker.write(LINES)
        tracker.close()
    assert [each.getMessage() for each in caplog.records] == [f"--log {name}: no service; the run goes on without it"]
    assert fake.calls[-1:] == [] or fake.calls[-1][0] not in ("finish", "set_terminated")


def test_mlflow_holds_what_metrics_jsonl_holds(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    told = [
        "--model",
        "softmax",
        "--epochs",
        "2",
        "--out",
        str(tmp_path / "a"),
        "--progress",
        "none",
        "--log",
        "mlflow",
    ]
    assert ends("train_allreduce", told)[0] == 0
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("hpcdl").experiment_id])
    lines = [json.loads(line) for line in (Path(tmp_path) / "a" / "metrics.jsonl").read_text().splitlines()]
    assert run.info.run_name == "a" and run.info.status == "FINISHED" and run.data.params["model"] == "softmax"
    for name in ("train_loss", "test_accuracy"):
        found = {(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)}
        assert found == {(line["step"], line[name]) for line in lines if name in line}
