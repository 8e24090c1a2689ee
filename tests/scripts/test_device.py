"""`--device cuda` on a stand-in for a GPU: the same training, and checkpoints that fit both devices."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRAIN = SCRIPTS / "train_allreduce.py"
FEDERATED = "--clients 4 --fraction 1 --rounds 2 --local-epochs 1 --local-batch 0 --proximal 0.1 --late 0.4 --seed 2"
FEDERATED += " --server-optimizer momentum --evaluate-every 2"
OPTIONS = ["--data", "few.h5", "--model", "mlp:3", "--dtype", "float64", "--batch-size", "8", "--progress", "none"]


def parameters(folder):
    with h5py.File(folder / "checkpoint.h5") as file:
        return file["parameters"][...]


def test_training_resuming_and_scoring(simulate, run_on, few):
    simulate(2, TRAIN, *OPTIONS, "--epochs", "2", "--device", "cuda", "--out", "gpu", check=0, STANDIN_GPUS="2")
    run_on(2, TRAIN, *OPTIONS, "--epochs", "2", "--out", "cpu", check=0)
    whole, reference = parameters(few / "gpu"), parameters(few / "cpu")
    assert np.abs(whole - reference).max() <= 1e-10 * np.abs(reference).max()
    summary, wanted = (json.loads((few / name / "summary.json").read_text()) for name in ("gpu", "cpu"))
    assert summary["device"] == "cuda" and summary["exchange"] == "staged"
    assert summary["device_per_rank"] == ["cuda:0 (stand-in)", "cuda:1 (stand-in)"]
    assert summary["device_memory_bytes_per_rank"] == [12345, 12345]
    more = {"exchange", "device_per_rank", "device_memory_bytes_per_rank"}
    assert wanted["device"] == "cpu" and set(summary) - set(wanted) == more
    for name in ("steps", "replicas_agree", "bytes_sent_per_rank", "messages_per_rank"):
        assert summary[name] == wanted[name]
    assert summary["test_loss"] == pytest.approx(wanted["test_loss"], abs=1e-10)
    # Resumed = never stopped, to the bit; and what one device saved the other goes on with.
    steps = ["--steps", "6", "--schedule", "constant"]
    simulate(2, TRAIN, *OPTIONS, *steps, "--device", "cuda", "--out", "never", check=0, STANDIN_GPUS="2")
    steps[1] = "4"
    simulate(2, TRAIN, *OPTIONS, *steps, "--device", "cuda", "--out", "part", check=0, STANDIN_GPUS="2")
    scored = run_on(2, SCRIPTS / "evaluate.py", "part", "--export", "part.npz", check=0)
    assert "test_loss" in scored.stdout
    simulate(2, TRAIN, "--resume", "part", "--steps", "6", "--out", "again", check=0, STANDIN_GPUS="2")
    assert np.array_equal(parameters(few / "again"), parameters(few / "never"))
    run_on(2, TRAIN, "--resume", "part", "--steps", "6", "--device", "cpu", "--out", "over", check=0)
    assert np.abs(parameters(few / "over") - parameters(few / "never")).max() <= 1e-10


@pytest.mark.long
def test_without_a_gpu(simulate, launch, tmp_path):
    """One line on rank 0 and status 2, before the data are read."""
    for words, start, environment in [
        ("CuPy is missing (libcudart", launch, {"PYTHONPATH": str(tmp_path)}),
        ("this process sees no GPU (cudaErrorNoDevice", simulate, {"STANDIN_GPUS": "0"}),
    ]:
        (tmp_path / "cupy.py").write_text("raise ImportError('libcudart is missing')\n")
        done = start(2, TRAIN, "--device", "cuda", "--data", "nowhere.h5", **environment)
        lines = [line for line in done.stderr.splitlines() if line.startswith("train-allreduce: error: device cuda")]
        assert done.returncode == 2 and len(lines) == 1 and words in lines[0]
        assert "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.long
def test_the_identities_hold_on_the_device(simulate):
    program = Path(__file__).parents[1] / "standin" / "train.py"
    for ranks in (1, 2):
        assert f"cases agree on {ranks} ranks" in simulate(ranks, program, check=0, STANDIN_GPUS="2").stdout


@pytest.mark.long
def test_models_that_are_cut_on_the_device(simulate):
    program = Path(__file__).parents[1] / "standin" / "cut.py"
    assert "4 cases agree on 2 ranks" in simulate(2, program, check=0, STANDIN_GPUS="2").stdout


@pytest.mark.long
@pytest.mark.parametrize("servers", ["parameter", "parameter unasked", "data"])
def test_workers_on_gpus_whose_servers_have_none(simulate, run_on, few, servers):
    script = TRAIN if servers == "data" else SCRIPTS / "train_parameter_server.py"
    more = {
        "data": ["--data-servers", "1", "--allreduce", "ring"],
        "parameter": ["--clip-norm", "0.5"],
        "parameter unasked": ["--broadcast-every", "1"],
    }
    options = [*OPTIONS, *more[servers], "--epochs", "1"]
    simulate(3, script, *options, "--device", "cuda", "--out", "gpu", check=0)
    run_on(3, script, *options, "--out", "cpu", check=0)
    whole, reference = parameters(few / "gpu"), parameters(few / "cpu")
    assert np.abs(whole - reference).max() <= 1e-10 * np.abs(reference).max()
    summary, wanted = (json.loads((few / name / "summary.json").read_text()) for name in ("gpu", "cpu"))
    assert summary["device"] == "cuda" and summary["exchange"] == "staged" and wanted["device"] == "cpu"
    assert summary["device_per_rank"] == [None, "cuda:0 (stand-in)", "cuda:0 (stand-in)"]
    assert summary["bytes_sent_per_rank"][1:] == wanted["bytes_sent_per_rank"][1:]


@pytest.mark.long
@pytest.mark.parametrize(
    "program, options",
    [
        ("local_sgd", "--epochs 3 --sync-every 2 --local-from 1 --local-momentum average --outer nesterov"),
        ("svrg", "--epochs 2 --inner-epochs 1 --snapshot random"),
        ("sgld", "--epochs 2 --burn-in 1 --thin 1 --chains 2"),
        ("federated", FEDERATED),
    ],
)
def test_strategies_end_where_they_do_on_the_cpu(simulate, run_on, few, program, options):
    """With all that their checkpoints hold, and their samples."""
    options = [*(OPTIONS[:6] + OPTIONS[8:] if program == "federated" else OPTIONS), *options.split()]
    script = SCRIPTS / f"train_{program}.py"
    simulate(2, script, *options, "--device", "cuda", "--out", "gpu", check=0, STANDIN_GPUS="2")
    run_on(2, script, *options, "--out", "cpu", check=0)
    for path in sorted(path for path in (few / "cpu").glob("*.h5")):
        with h5py.File(few / "gpu" / path.name) as gpu, h5py.File(path) as cpu:
            names = []
            cpu.visititems(lambda key, value, names=names: names.append(key) if hasattr(value, "shape") else None)
            assert "parameters" in names or "samples" in names
            for name in names:
                assert np.abs(gpu[name][()] - cpu[name][()]).max(initial=0) <= 1e-10, name
