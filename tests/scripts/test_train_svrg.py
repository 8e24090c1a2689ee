"""The program as its user starts it: what it reaches and writes."""

from pathlib import Path

import pytest
from written_runs import summary

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_svrg.py"
SMALL = ["--data", "digits", "--model", "softmax", "--batch-size", "64", "--epochs", "4", "--lr", "0.2", "--seed", "1"]


@pytest.mark.parametrize(
    "ranks, more, gradients",
    [
        (4, [], 2 * 4 + 2),
        (3, ["--snapshot", "random", "--inner-epochs", "1"], 2 * 4 + 4),
        (4, ["--method", "saga"], 4 + 1),
        (1, ["--threads", "2", "--batch-size", "32"], 2 * 4 + 2),
        pytest.param(2, ["--data-servers", "1", "--model", "mlp:16"], 2 * 4 + 2, marks=pytest.mark.long),
        pytest.param(2, ["--placement", "streamed"], 2 * 4 + 2, marks=pytest.mark.long),
        pytest.param(2, ["--placement", "partitioned", "--method", "saga"], 4 + 1, marks=pytest.mark.long),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_digits_are_learned(run_on, tmp_path, ranks, more, gradients):
    printed = run_on(ranks, SCRIPT, *SMALL, *more, "--out", "a", check=0).stdout
    found = summary(tmp_path / "a")
    assert found["strategy"] == "svrg" and found["method"] == ("saga" if "saga" in more else "svrg")
    assert found["test_accuracy"] > 0.85 and found["replicas_agree"] is True
    assert found["gradients_per_example"] == pytest.approx(gradients, abs=0.01)
    assert f"gradients per example  │ {gradients}" in " ".join(printed.split()).replace("example │", "example  │")
    assert found["epochs"] == 4 and found["steps"] == (4 if "--threads" in more else 4 * 23)
