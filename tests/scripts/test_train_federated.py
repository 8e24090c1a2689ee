"""The program train-federated, as a user starts it."""

from pathlib import Path

import numpy as np
import pytest
from written_runs import lines, summary

from hpcdl.errors import UsageError
from hpcdl.launch.option_parser import parse
from hpcdl.strategies.federated import FederatedOptions

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_federated.py"
FEW = "--clients", 12, "--fraction", 0.5, "--rounds", 3, "--seed", 1


def test_digits_are_learned(run_on, tmp_path):
    own = ["--clients", "40", "--fraction", "0.25", "--rounds", "30", "--data", "digits", "--seed", "1"]
    printed = run_on(2, SCRIPT, *own, "--out", "a", check=0).stdout
    assert "round 30/30" in printed and "30 of 10 of 40 clients" in printed
    found = summary(tmp_path / "a")
    assert found["test_accuracy"] >= 0.94
    assert (found["strategy"], found["rounds"], found["steps"], found["epochs"]) == ("federated", 30, 30, 30)
    assert (found["clients"], found["clients_per_round"], found["batch_size"]) == (40, 10, 10)
    assert found["replicas_agree"] is True and "rounds_to_accuracy" not in found
    examples = found["examples_per_second"] * found["seconds"]
    assert abs(examples - 30 * 5 * 1438 / 4) < 30 * 5 * 10  # shares of 35 or 36 rows
    for scored in (False, True):
        assert [line["round"] for line in lines(tmp_path / "a") if ("test_loss" in line) == scored] == [*range(1, 31)]


def test_owners_from_a_table_and_rounds_to_an_accuracy(run_on, tmp_path):
    random = np.random.default_rng(0)
    kind, who = random.integers(0, 3, 400), random.choice(["ann", "bob", "cleo", "dan", "eve"], 400)
    rows = np.round(random.standard_normal((400, 4)) + 2 * np.eye(4)[kind], 3)
    lines = [",".join(map(str, [*row, *one])) for row, *one in zip(rows, kind, who, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,c,d,kind,writer", *lines]))
    prepare = SCRIPT.with_name("prepare_data.py")
    run_on(1, prepare, "csv", "table.csv", "table.h5", "--label", "kind", "--group", "writer", check=0)
    own = ["--data", "table.h5", "--partition", "column:group", "--clients", "0", "--fraction", "0.5", "--rounds", "50"]
    done = run_on(2, SCRIPT, *own, "--model", "softmax", "--rounds-to", "0.75", "--out", "a", check=0)
    found = summary(tmp_path / "a")
    assert found["clients"] == 5 and found["clients_per_round"] == 2
    assert found["stopped"] == "accuracy" and found["rounds_to_accuracy"] == found["rounds"] < 50
    assert "rounds to accuracy" in done.stdout and "ended by" in done.stdout
    done = run_on(2, SCRIPT, *own[:5], "4", "--out", "none")
    assert done.returncode == 2 and "the column holds 5 owners, not 4" in done.stderr


def test_options_that_mean_nothing_to_clients_are_left_out_of_a_file(tmp_path, monkeypatch, capsys):
    """A file of another strategy has epochs; on the command line they are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("epochs: 3\nbatch_size: 32\nlr: 0.5\n")
    read = parse(FederatedOptions, "train-federated", "", ["--config", "c.yaml"])
    assert (read.lr, read.epochs, read.batch_size) == (0.5, 20, 32)
    assert "warning: --config c.yaml: options of another strategy are left out: epochs\n" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--epochs: federated averaging has --rounds"):
        parse(FederatedOptions, "train-federated", "", ["--config", "c.yaml", "--epochs", "3"])


def test_secure_aggregation_names_the_package_that_it_needs(launch, tmp_path):
    (tmp_path / "cryptography.py").write_text("raise ImportError")
    done = launch(2, SCRIPT, *FEW, "--secure", check=2, PYTHONPATH=str(tmp_path))
    (ours,) = [line for line in done.stderr.splitlines() if line.startswith("train-federated: error: ")]
    assert "pip install 'hpcdl[private]'" in ours and "Traceback" not in done.stderr  # the launcher may say more
