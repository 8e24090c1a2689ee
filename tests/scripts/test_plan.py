"""`hpcdl plan` as its user starts it: what it prints, and that bad input is one line and status 2."""

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
    "no run": ["scaling", "nowhere", "nothing"],
    "nothing to scale": ["scaling"],
    "reinforcement learning": ["memory", "-n 1: train-dqn"],
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
