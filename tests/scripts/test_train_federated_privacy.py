"""train-federated with privacy: as a user starts it, and what it refuses."""

import json
from pathlib import Path

import pytest

from hpcdl.errors import UsageError
from hpcdl.federated.privacy import divergences, epsilon
from hpcdl.scripts.train_federated import FederatedOptions

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise": 1.0}, "--noise is in units of --clip"),
        ({"noise": -1.0, "clip": 1.0}, "--noise must not be negative"),
        ({"clip": -1.0}, "--clip is a norm"),
        ({"clip": 1024.0}, "less than 1024"),
        ({"delta": 0.0}, "--delta is greater than 0"),
        ({"delta": 1.0}, "--delta is greater than 0"),
        ({"threshold": 0.4}, "--threshold is at least 0.5"),
        ({"threshold": 1.1}, "--threshold is at least 0.5"),
        ({"secure": True, "late": 0.1}, "--late: with --secure"),
        ({"clip": 1.0, "late": 0.1}, "--late: with --clip"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(UsageError, match=words):
        FederatedOptions(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--fraction", 0.1), "2 at least"), ((), "pip install 'hpcdl[private]'")],
    ids=["a client by itself", "without the package"],
)
def test_what_only_the_run_can_refuse(run_on, launch, tmp_path, options, words):
    start, environment = run_on, {}
    if not options:
        (tmp_path / "cryptography.py").write_text("raise ImportError")
        start, environment = launch, {"PYTHONPATH": str(tmp_path)}
    done = start(2, SCRIPT, *FEW, "--secure", *options, check=2, **environment)
    (ours,) = [line for line in done.stderr.splitlines() if line.startswith("train-federated: error: ")]
    assert words in ours and "Traceback" not in done.stderr  # the launcher may say more
