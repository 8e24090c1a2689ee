"""What scripts/search.py refuses, in one line and before anything starts."""

import pytest
from in_process import ends
from searched import LR, TRAINING

CHECKED = [
    (["--trials", "3"], "there is nothing to search"),
    ([*LR, "--space", "lrr=0.1..1"], "--space lrr: train-allreduce has no option --lrr (did you mean 'lr'?)"),
    ([*LR, "--space", "seed=int:0..9"], "the search itself decides --seed"),
    (["--space", "lr=log:0..0.5"], "lr"),
    (["--space", "lr=0.5..0.1"], "lr"),
    (["--space", "lr=-1..0.5"], "--space lr=-1.0: --lr must be greater than 0"),
    (["--space", "optimizer=adam|addam"], "--space optimizer=addam: unknown optimizer 'addam' (did you mean 'adam'?)"),
    (["--space", "model=mlp:8|mpl:8"], "--space model=mpl:8: unknown model 'mpl'"),
    (["--space", "optimizer=sgd|momentum", "--space", "momentum:betta=0.5..0.9 if optimizer=momentum"], "betta"),
    ([*LR, "--objective", "test_acuracy"], "unknown objective 'test_acuracy' (did you mean 'test_accuracy'?)"),
    ([*LR, "--objective", "test_rmse"], "unknown objective 'test_rmse'"),
    ([*LR, "--method", "ransom"], "unknown method 'ransom' (did you mean 'random'?)"),
    ([*LR, "--trials", "-1"], "--trials"),
    ([*LR, "--method", "asha", "--space", "epochs=int:2..5"], "--method asha decides how long a trial is"),
    ([*LR, "--method", "asha", "--least", "9"], "epochs"),
    ([*LR, "--most", "2.5"], "--most: a whole trial has a whole number of epochs, not 2.5"),
    ([*LR, "--ranks-per-trial", "3"], "--ranks-per-trial 3: there"),
    ([*LR, "--controller", "own"], "--controller own"),
    ([*LR, "--seeds", "0"], "--seeds is 1 or more"),
    ([*LR, "--out", "none"], "name a folder"),
    ([*LR, "--out", "/proc/nothing"], "cannot be written"),
    ([*LR, "--data", "nowhere.h5"], "nowhere.h5"),
    ([*LR, "--topology", "ring"], "--topology"),
    ([*LR, "--space-file", "nowhere.yaml"], "--space-file nowhere.yaml cannot be read"),
    (["--resume", "nowhere"], "there is no run in that folder"),
]


@pytest.mark.parametrize("given, said", CHECKED)
def test_bad_input_is_told_before_anything_starts(few, monkeypatch, given, said):
    monkeypatch.chdir(few)
    more = [] if {"--trials", "--resume"} & {*given} else ["--trials", "3"]
    out = [] if {"--out", "--resume"} & {*given} else ["--out", "s"]
    status, told = ends("search", [*TRAINING, *given, *more, *out])
    assert status == 2 and said in told and told.count("\n") == 1, told
    assert not (few / "s").exists()


def test_the_program_comes_first_and_trains(few, monkeypatch):
    monkeypatch.chdir(few)
    for given, said in (
        (["--data", "few.h5"], "the program that trains comes first"),
        (["train-alreduce"], "unknown program 'train-alreduce' (did you mean 'train-allreduce'?)"),
        (["train-allreduce", "--steps", "9", "--method", "asha"], "--method asha counts in epochs"),
        (["train-kmeans"], "trains by no strategy"),
        (["-n 2: train-allreduce"], "by --ranks-per-trial"),
    ):
        status, told = ends("search", [*given, *LR, "--trials", "2", "--out", "s"])
        assert status == 2 and said in told and told.count("\n") == 1, told
