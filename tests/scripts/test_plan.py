"""`hpcdl plan` as its user starts it: what it prints, and that bad input is one line and status 2."""

import json

import pytest

from hpcdl.scripts.plan import main

REFUSED = {
    "unknown plan": ["memry"],
    "unknown configuration": ["memory", "--model", "gpt9"],
    "unknown model": ["memory", "-n 2: train-allreduce --model mpl:3"],
    "unknown program": ["memory", "-n 2: train-nothing"],
    "grid of other ranks": ["memory", "-n 4: train-grid --grid data=3"],
    "heads that do not divide": ["memory", "-n 3: train-tensor-parallel --model gpt --data text"],
    "more stages than layers": ["memory", "-n 9: train-pipeline --model mlp:8 --microbatches 1"],
    "fit without ranks": ["memory", "--model", "gpt3", "--fit", "1GiB"],
    "fit of no size": ["memory", "--model", "gpt2-xl", "--ranks", "2", "--fit", "much"],
    "fit of another program": ["memory", "train-allreduce", "--ranks", "2", "--fit", "1GiB"],
    "lines and a model": ["memory", "train-grid", "--model", "gpt3"],
    "neither a run nor a line": ["memory", "runs/none"],
    "time of nothing": ["time"],
    "time on nobody": ["time", "train-allreduce"],
    "a machine read and written": ["time", "-n 2: train-allreduce", "--machine", "a", "--measure", "b"],
    "no machine": ["time", "-n 2: train-allreduce", "--machine", "nowhere.yaml"],
    "a machine that cannot be kept": ["time", "-n 2: train-allreduce", "--measure", "nowhere/a.yaml"],
    "more ranks than are started": ["time", "-n 100000: train-allreduce"],
    "no launcher": ["time", "-n 2: train-allreduce", "--launcher", "nowhere/mpiexec"],
    "rows that touch all": ["time", "-n 2: train-parameter-server --sparse-push"],
    "an unknown line": ["time", "-n 2: train-nothing"],
    "best on nobody": ["best"],
    "best of an unknown model": ["best", "--ranks", "2", "--model", "mpl:3"],
    "best of no size": ["best", "--ranks", "2", "--fit", "much"],
    "no matrix": ["check", "nowhere.yaml"],
    "two matrices": ["check", "a.yaml", "b.yaml"],
    "runs of no time": ["check", "--seconds", "0"],
    "runs that are none": ["check", "--repeat", "0"],
    "no run": ["scaling", "nowhere", "nothing"],
    "nothing to scale": ["scaling"],
    "reinforcement learning": ["memory", "-n 1: train-dqn"],
    "unknown strategy": ["simulate", "star"],
    "ranks of no number": ["simulate", "--ranks", "ten"],
    "no steps": ["simulate", "--steps", "0"],
    "stages that do not divide": ["simulate", "pipeline:stages=3", "--ranks", "4"],
    "a picture of another kind": ["simulate", "--picture", "a.pdf"],
    "no cluster": ["simulate", "--cluster", "nowhere.yaml"],
    "more queues than fit": ["simulate", "servers:consistency=async", "--ranks", "1000000", "--steps", "1000"],
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_status_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("plan: error: ") and said.err.count("\n") == 1


def test_a_line_is_foretold_by_rank(capsys):
    main(["memory", "-n 4: train-grid --model gpt --data text --grid data=2,pipeline=2 --optimizer adam"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train-grid on 4 ranks, gpt, 814,976 parameters, float32")
    assert lines[1].split()[:6] == ["ranks", "role", "parameters", "gradients", "optimizer", "activations"]
    assert lines[-1].startswith("ranks differ in parameters")


def test_the_list_and_the_help(capsys):
    main([])
    assert "memory" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--help"])
    assert ended.value.code == 0 and "--fit" in capsys.readouterr().out


def test_16_bits_fit_where_32_do_not(capsys):
    for bits, count in ("16", 1), ("32", 0):
        words = ["--model", "gpt2-xl", "--ranks", "1", "--batch-size", "1", "--fit", "33GiB"]
        main(["memory", *words, "--bits", bits])
        assert ("first: mpiexec -n 1 hpcdl train-grid" in capsys.readouterr().out) == bool(count)


def test_steps_at_scale(capsys, tmp_path):
    picture, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    words = [
        "--ranks",
        "8,12",
        "--steps",
        "5",
        "--straggler",
        "none",
        "--picture",
        str(picture),
        "--json",
        str(numbers),
    ]
    main(["simulate", "allreduce", "pipeline", *words, "--fails-after", "1000"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "strategy" and lines[1].split()[:2] == ["allreduce", "8"]
    assert "12 ranks are not a multiple of 8 stages" in lines[4] and lines[6].split()[0] == "ranks"
    found = json.loads(numbers.read_text())
    assert [(each["strategy"], each["ranks"]) for each in found["simulated"]] == [
        ("allreduce", 8),
        ("allreduce", 12),
        ("pipeline", 8),
    ]
    assert found["simulated"][0]["seconds"] == pytest.approx(0.1 + 2 * 7 * (2e-6 + 1e8 / 8 / 12.5e9))
    assert found["cluster"]["latency"] == 2e-6 and "<svg" in picture.read_text()
