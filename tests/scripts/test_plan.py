"""`hpcdl plan` as its user starts it: what it prints; what it refuses is in tests/refusals.py."""

import json

import pytest

from hpcdl.planning import fitting
from hpcdl.scripts.plan import main


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


def test_16_bits_fit_where_32_do_not(capsys, monkeypatch):
    monkeypatch.setattr(fitting, "resident", lambda: 200 << 20)  # this process has run other tests before
    for bits, count in ("16", 1), ("32", 0):
        words = ["--model", "gpt2-xl", "--ranks", "1", "--batch-size", "1", "--fit", "28GiB"]
        main(["memory", *words, "--bits", bits])
        assert ("the first grid: mpiexec -n 1 hpcdl train-grid" in capsys.readouterr().out) == bool(count)


def test_the_fastest_all_reduce(capsys, tmp_path):
    picture = tmp_path / "a.svg"
    main(["simulate", "--fastest", "--picture", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0].replace(",", "")) for line in lines[1:]] == [2**k for k in range(1, 17)]
    assert lines[3].split()[1:] == ["naive", "to", "4", "KiB,", "recursive"]
    text = picture.read_text()
    assert "<svg" in text and ">naive<" in text and ">recursive<" in text
    cluster = tmp_path / "pairs.yaml"
    cluster.write_text("ranks_per_node: 2")
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--fastest", "--cluster", str(cluster)])
    assert "give a cluster with one" in capsys.readouterr().err


def test_steps_at_scale(capsys, tmp_path):
    picture, numbers = tmp_path / "a.svg", tmp_path / "a.json"
    words = ["--ranks", "8,12", "--steps", "5", "--straggler", "none", "--fails-after", "1000"]
    words += ["--picture", str(picture), "--json", str(numbers)]
    main(["simulate", "allreduce", "pipeline", *words])
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
