"""hpcdl.launch: a job of a plain Python process, its results, what it refuses, an interrupt and what goes on."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import hpcdl
from hpcdl.errors import LoneError, UsageError
from hpcdl.launch import launched_run


@pytest.fixture(autouse=True)
def folder(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_of_a_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(launched_run, "run_program", lambda words, *_, **__: seen.append(words) or "")
    hpcdl.launch("compare", "a", "b --c", seeds=3, lr=None, out="o", config=["x", "y"], force=True, survive=False)
    assert seen == [["compare", "a", "b --c", "--seeds", "3", "--config", "x", "y", "--force", "--out", "o"]]
    run = hpcdl.launch("train_gossip", resume="runs/g")
    assert seen[1:] == [["train-gossip", "--resume", "runs/g"]] and str(run.folder) == "runs/g"


def test_what_is_wrong_is_told_before_a_rank_starts():
    for options, said in [
        ({"ranks": 0}, "ranks is a whole number"),
        ({"data": 3}, r"arrays \(x, y\)"),
        ({"launcher": "nowhere -x"}, "nowhere cannot be started"),
    ]:
        with pytest.raises(UsageError, match=said):
            hpcdl.launch("train-allreduce", **options)
    with pytest.raises(UsageError, match="did you mean 'train-gossip'"):
        hpcdl.launch("train-gosip")


def test_what_the_job_says_is_the_error():
    with pytest.raises(UsageError, match=r"train-allreduce: error: .*--lrr 3 .*did you mean '--lr'"):
        hpcdl.launch("train-allreduce", ranks=2, lrr=3, show=False)
    with pytest.raises(LoneError, match=r"(?s)on 2 ranks ended with status [1-9]\d*: .*\nhpcdl.*InjectedFault"):
        hpcdl.launch("train-allreduce", ranks=2, inject="exception:rank=1,step=2", show=False)


def test_arrays_metrics_and_predictions(capsys):
    x = np.random.default_rng(0).normal(size=(20, 3))
    y = x @ [1.0, 2.0, -1.0]
    given = {"ranks": 2, "data": (x, y, x[:4], y[:4]), "model": "linear", "epochs": 30, "batch_size": 10}
    run = hpcdl.launch("train-allreduce", **given, lr=0.2, optimizer="sgd")
    assert capsys.readouterr().out == run.output and "replicas agree" in run.output
    assert run.summary["ranks"] == 2 and run.metrics["step"].tolist() == [2.0 * epoch for epoch in range(1, 31)]
    assert len(run.metrics["test_rmse"]) == 30 and run.metrics["test_rmse"][-1] == run.summary["test_rmse"]
    assert {"train_loss", "learning_rate"} <= {*run.train_metrics}
    predicted = run.predict(x[:4])
    assert np.sqrt(np.mean((predicted["prediction"].ravel() - y[:4]) ** 2)) == pytest.approx(
        run.summary["test_rmse"], rel=1e-3
    )


@pytest.fixture
def interruptible():
    """Ctrl-C as in a plain Python process; programs that ran in this process have set a handler of their own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_saves_and_the_run_goes_on(interruptible):
    def interrupt():
        while not os.path.exists("runs/a/metrics.jsonl"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        hpcdl.launch(
            "train-allreduce", ranks=2, out="runs/a", epochs=2, pretend_compute=50, evaluate_every=1, show=False
        )
    run = hpcdl.launch("train-allreduce", ranks=1, resume="runs/a", pretend_compute=0, show=False)
    assert [leg["ranks"] for leg in run.summary["legs"]] == [2, 1] and run.summary["steps"] == 90
