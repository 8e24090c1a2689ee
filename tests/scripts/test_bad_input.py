"""Bad input on several ranks: one clear line on rank 0, status 2, nothing written, no hang."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from few import write_few

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


@pytest.mark.parametrize("progress", ["none", "lines"])
def test_names_are_neither_markup_nor_commands_to_a_terminal_nor_yaml(run_on, tmp_path, progress):
    """A data set, a file and a folder may bear any name."""
    data, out = tmp_path / "data [v2]\x1b[31m\nseed: 7.h5", tmp_path / "run [-red]\nlr: {"
    write_few(tmp_path)
    with h5py.File(tmp_path / "few.h5", "r+") as made:
        made.attrs["name"] = "sensors [/v2]\x1b[31m\x07"
    (tmp_path / "few.h5").rename(data)
    options = ["--data", data, "--model", "softmax", "--epochs", "2", "--progress", progress, "--lr", "0.25"]
    done = run_on(2, SCRIPT, *options, "--out", out, check=0)
    assert json.loads((out / "summary.json").read_text())["data"] == "sensors [/v2]\x1b[31m\x07"
    assert yaml.safe_load((out / "config.yaml").read_text())["lr"] == 0.25
    again = run_on(2, SCRIPT, "--resume", out, "--epochs", "3", "--progress", progress, check=0)
    refusal = run_on(2, SCRIPT, *options, "--out", out, check=2)
    for each in (done.stdout, again.stdout, refusal.stdout, refusal.stderr):
        assert "\x1b" not in each and "\x07" not in each
    assert (r"sensors [/v2]\x1b[31m\x07" in done.stdout) == (progress == "lines")


@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_one_rank_alone_comes_upon(launch, tmp_path, servers):
    """NaN in a row that is read, as all are, only when its turn comes: by one rank, or for it by a data server."""
    x = np.ones((4000, 3), "f4")
    x[3777] = np.nan
    write_few(tmp_path, 2)
    with h5py.File(tmp_path / "few.h5", "r+") as made:
        for name, array in (("test/x", x), ("test/y", np.arange(4000) % 2)):
            del made[name]
            made[name] = array
    options = ["--data", "few.h5", "--placement", "streamed", "--model", "logistic", "--epochs", "1", "--out", "none"]
    done = launch(3, SCRIPT, *options, "--data-servers", servers, timeout=30, check=2)
    assert len([line for line in done.stderr.splitlines() if re.match("error: .* in row 3777", line)]) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "kind, advice",
    [
        ("none", ""),
        ("float16", "above 65504: --compress bfloat16 may help"),
        *((kind, "") for kind in ("qsgd", "terngrad", "sign", "sign:vote", "topk:0.01")),
    ],
)
def test_a_run_that_diverges_is_one_line_and_status_1(run_on, tmp_path, kind, advice):
    done = run_on(2, SCRIPT, "--lr", "1e30", "--steps", "9", "--compress", kind, "--out", "a", check=1)
    assert len([line for line in done.stderr.splitlines() if line.startswith("train-allreduce: error: the ")]) == 1
    assert "not finite" in done.stderr and advice in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_checkpoint_that_someone_damages_during_the_run(launch, run_on, interfere):
    program = interfere(25, 0, "os.truncate('a/checkpoint.h5', 100)")
    options = ["--steps", "40", "--checkpoint-every", "20", "--keep", "2", "--out", "a"]
    launch(2, program, *options, check=0)
    run_on(2, SCRIPT.with_name("evaluate.py"), "a", check=0)  # the last one is whole


@pytest.mark.long
def test_a_pipeline_that_diverges_with_micro_batches_in_flight(launch):
    options = ["--schedule", "pipedream", "--model", "mlp:40,40", "--lr", "1e30", "--batch-size", "300"]
    options += ["--steps", "50"]
    done = launch(3, SCRIPT.with_name("train_pipeline.py"), *options, timeout=30, check=1)
    assert len([line for line in done.stderr.splitlines() if line.startswith("train-pipeline: error: the ")]) == 1
    assert "not finite" in done.stderr and "Traceback" not in done.stderr
