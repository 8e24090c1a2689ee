"""train-federated with privacy: as a user starts it, and what it refuses."""

import json
from pathlib import Path

import pytest

from hpcdl.federated.privacy import divergences, epsilon

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_federated.py"
FEW = "--clients", 12, "--fraction", 0.5, "--rounds", 3, "--seed", 1


def test_secure_and_private_as_a_user_starts_it(run_on, tmp_path):
    """The summary and the table say what the model keeps of its clients' privacy."""
    private = "--secure", "--threshold", 0.6, "--clip", 1, "--noise", 0.8, "--delta", 1e-4
    done = run_on(2, SCRIPT, *FEW, *private, "--out", tmp_path / "run", check=0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    wanted = epsilon(3 * divergences(0.8, 0.5), 1e-4)
    assert summary["epsilon"] == pytest.approx(wanted) and f"epsilon {wanted:.3g} at delta 0.0001" in done.stdout
    assert {name: summary[name] for name in ("clip", "noise", "delta")} == {"clip": 1, "noise": 0.8, "delta": 1e-4}
    assert summary["rounds_abandoned"] == 0 and summary["replicas_agree"]


def test_secure_aggregation_names_the_package_that_it_needs(launch, tmp_path):
    (tmp_path / "cryptography.py").write_text("raise ImportError")
    done = launch(2, SCRIPT, *FEW, "--secure", check=2, PYTHONPATH=str(tmp_path))
    (ours,) = [line for line in done.stderr.splitlines() if line.startswith("train-federated: error: ")]
    assert "pip install 'hpcdl[private]'" in ours and "Traceback" not in done.stderr  # the launcher may say more
