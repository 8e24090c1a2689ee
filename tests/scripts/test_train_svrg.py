"""The program as its user starts it: what it reaches and writes, how it is gone on with, and what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from hpcdl.checkpoint.checkpoint_file import Checkpoint
from hpcdl.errors import UsageError
from hpcdl.runs.options import parse
from hpcdl.scripts.train_svrg import SvrgOptions

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "train_svrg.py"
SMALL = ["--data", "digits", "--model", "softmax", "--batch-size", "64", "--epochs", "4", "--lr", "0.2", "--seed", "1"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "ranks, more, gradients",
    [
        (4, [], 2 * 4 + 2),
        (3, ["--snapshot", "random", "--inner-epochs", "1"], 2 * 4 + 4),
        (4, ["--method", "saga"], 4 + 1),
        (1, ["--threads", "2", "--batch-size", "32"], 2 * 4 + 2),
        (2, ["--data-servers", "1", "--model", "mlp:16"], 2 * 4 + 2),
        (2, ["--placement", "streamed"], 2 * 4 + 2),
        (2, ["--placement", "partitioned", "--method", "saga"], 4 + 1),
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
    said = run_on(2, SCRIPTS / "evaluate.py", "a", "--export", "w.npz", check=0).stdout
    assert f"test_accuracy {found['test_accuracy']:.6g}"[:20] in said and (tmp_path / "w.npz").exists()


@pytest.mark.parametrize("more", [[], ["--method", "saga"]], ids=["svrg", "saga"])
def test_gone_on_with_within_a_round_on_other_ranks(run_on, tmp_path, more):
    options = [*SMALL, *more, "--dtype", "float64"]
    run_on(2, SCRIPT, *options, "--out", "a", "--checkpoint-every", "30", "--keep", "9", check=0)
    whole = Checkpoint.read(tmp_path / "a")
    for ranks, exact in ((2, True), (3, False)):
        run_on(ranks, SCRIPT, "--resume", "a/checkpoint-000000030.h5", "--out", str(ranks), check=0)
        again = Checkpoint.read(tmp_path / str(ranks))
        assert whole.attributes["step"] == again.attributes["step"] == 92
        assert {*again.vectors} == {*whole.vectors} > {"parameters"}
        for name, vector in whole.vectors.items():
            apart = np.abs(again.vectors[name] - vector).max(initial=0)
            assert apart == 0 if exact else apart < 1e-12, name


def test_on_a_stand_in_for_a_gpu(simulate, run_on, few):
    options = ["--data", "few.h5", "--model", "mlp:3", "--dtype", "float64", "--batch-size", "8", "--epochs", "2"]
    options += ["--inner-epochs", "1", "--snapshot", "random"]
    simulate(2, SCRIPT, *options, "--device", "cuda", "--out", "gpu", check=0, STANDIN_GPUS="2")
    run_on(2, SCRIPT, *options, "--out", "cpu", check=0)
    gpu, cpu = (Checkpoint.read(few / name).vectors for name in ("gpu", "cpu"))
    assert set(gpu) == set(cpu) == {"parameters", "snapshot", "full_gradient", "drawn"}
    for name, vector in cpu.items():
        assert np.abs(gpu[name] - vector).max() <= 1e-10, name


@pytest.mark.parametrize(
    "options, words",
    [
        (["--optimizer", "adam"], "--optimizer adam: steps of reduced variance are plain ones; take sgd"),
        (["--inner-epochs", "0"], "--inner-epochs must be greater than 0, not 0.0"),
        (["--clip-norm", "1"], "--clip-norm: a clipped step is none of reduced variance"),
        (["--augment", "flip"], "--augment: an example that changes has no gradient that could be kept"),
        (["--method", "sag"], "--method: expected one of 'svrg', 'saga', not sag"),
        (["--method", "saga", "--inner-epochs", "1"], "--method saga takes no snapshots: leave out --inner-epochs"),
        (["--method", "saga", "--threads", "2"], "--method saga takes no snapshots: leave out --inner-epochs"),
        (["--method", "saga", "--device", "cuda"], "--method saga works on single examples, on the CPU"),
        (["--method", "saga", "--accumulate", "2"], "--method saga has no parts of a batch to add up"),
        (["--threads", "2", "--straggler", "0:2"], "--threads calls no model that could be slowed"),
        (["--threads", "-1"], "--threads must not be negative, and is -1"),
        (["--threads", "2000"], "--threads is 1024 at most, not 2000"),
        (["--threads", "2", "--snapshot", "random"], "--threads: no iterate can be drawn where nobody sees each"),
        (["--threads", "2", "--inner-epochs", "1.5"], "--threads meet at the ends of epochs: --inner-epochs is whole"),
        (["--threads", "2", "--batch-size", "16"], "--threads take steps of one example: leave out --batch-size"),
        (["--threads", "2", "--device", "cuda"], "--threads works on single examples, on the CPU"),
        (["--threads", "2", "--placement", "streamed"], "--threads read rows in memory: --placement shared"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(options, words):
    with pytest.raises(UsageError, match="^" + re.escape(words)) as found:
        parse(SvrgOptions, "train-svrg", "", options)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "ranks, options, words",
    [
        (2, ["--threads", "2", "--model", "softmax"], "--threads share the parameters of one rank, not of 2"),
        (2, ["--method", "saga"], "--method saga works on the coordinates of linear models: take --model"),
        (1, ["--threads", "1"], "--threads works on the coordinates of linear models: take --model"),
    ],
)
def test_refused_in_one_line_by_all_ranks(run_on, tmp_path, ranks, options, words):
    done = run_on(ranks, SCRIPT, *options, "--out", "a", check=2)
    ours = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(ours) == 1 and ours[0].startswith(f"train-svrg: error: {words}") and "Traceback" not in done.stderr
    assert not (tmp_path / "a").exists()
