"""Bad input on several ranks: one clear line on rank 0, status 2, nothing written, no hang."""

import json
import re
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_allreduce.py"


def file(path, change=None, **replaced):
    """A small data file; `replaced` changes a data set, `change` the open file."""
    arrays = {"train/x": np.ones((20, 3), "f4"), "train/y": np.arange(20) % 2}
    arrays |= {"test/x": np.ones((6, 3), "f4"), "test/y": np.arange(6) % 2}
    arrays |= {name.replace("_", "/"): value for name, value in replaced.items()}
    with h5py.File(path, "w") as made:
        for name, array in arrays.items():
            if array is not None:
                made[name] = array
        made.attrs["classes"] = 2
        if change:
            change(made)


DATA = {
    "labels outside the classes": ({"train_y": np.arange(20)}, "label"),
    "NaN in the data": ({"train_x": np.full((20, 3), np.nan)}, "NaN|not finite"),
    "without the groups": ({"train_x": None, "train_y": None}, "train"),
    "other lengths of x and y": ({"train_y": np.arange(19) % 2}, "20.*19|19.*20"),
    "labels beyond all": ({"train_y": np.full(20, 2**64 - 1, "u8")}, "has the label 18446744073709551615 in row 0"),
    "the wrong type": ({"train_x": np.full((20, 3), b"text")}, "type|integers or floats"),
}


def refused(start, tmp_path, words, *options, name="allreduce", ranks=2):
    """One such line, status 2, nothing left behind; Open MPI's launcher adds lines of its own to ours."""
    before = {path for path in tmp_path.rglob("*")}
    done = start(ranks, SCRIPT.with_name(f"train_{name}.py"), *options, timeout=60)
    program = f"train-{name.replace('_', '-')}: error: "
    ours = [line for line in done.stderr.splitlines() if line.startswith(program)]
    assert done.returncode == 2, done.stderr
    assert len(ours) == 1 and re.search(words, ours[0]), done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert {path for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("what", sorted(DATA))
def test_data_files(run_on, tmp_path, what):
    replaced, words = DATA[what]
    file(tmp_path / "bad.h5", **replaced)
    refused(run_on, tmp_path, words, "--data", tmp_path / "bad.h5", "--model", "softmax")


@pytest.mark.parametrize("progress", ["none", "lines"])
def test_names_are_neither_markup_nor_commands_to_a_terminal_nor_yaml(run_on, tmp_path, progress):
    """A data set, a file and a folder may bear any name."""
    data, out = tmp_path / "data [v2]\x1b[31m\nseed: 7.h5", tmp_path / "run [-red]\nlr: {"
    file(data, lambda made: made.attrs.update(name="sensors [/v2]\x1b[31m\x07"))
    options = ["--data", data, "--model", "softmax", "--epochs", "2", "--progress", progress, "--lr", "0.25"]
    done = run_on(2, SCRIPT, *options, "--out", out, check=0)
    assert json.loads((out / "summary.json").read_text())["data"] == "sensors [/v2]\x1b[31m\x07"
    assert yaml.safe_load((out / "config.yaml").read_text())["lr"] == 0.25
    again = run_on(2, SCRIPT, "--resume", out, "--epochs", "3", "--progress", progress, check=0)
    refusal = run_on(2, SCRIPT, *options, "--out", out, check=2)
    for each in (done.stdout, again.stdout, refusal.stdout, refusal.stderr):
        assert "\x1b" not in each and "\x07" not in each
    assert (r"sensors [/v2]\x1b[31m\x07" in done.stdout) == (progress == "lines")


def outside(made):
    """The bytes of another file as features."""
    del made["train/x"]
    made.create_dataset("train/x", (20, 3), "u1", external=[("/etc/passwd", 0, 60)])


def huge(made):
    """A shape that costs nothing to declare."""
    del made["train/x"], made["train/y"]
    made.create_dataset("train/x", (10**12, 3), "f4", chunks=(10, 3))[:10] = 1
    made.create_dataset("train/y", (10**12,), "u1", chunks=(10,))[:10] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (outside, r"train/x has its elements in another file \('/etc/passwd'\)"),
        (huge, "train has 1000000000000 rows, whose labels needs? .* bytes at least"),
        (lambda made: made.attrs.update(classes=2**40), "the number of classes is 1099511627776; there can be"),
        (lambda made: made.attrs.update(name=np.bytes_(b"caf\xe9")), "the attribute name is b'caf.*a text in UTF-8"),
    ],
    ids=["outside", "huge", "classes", "name"],
)
def test_files_made_to_do_harm(run_on, tmp_path, change, words):
    file(tmp_path / "bad.h5", change)
    refused(run_on, tmp_path, words, "--data", tmp_path / "bad.h5", "--model", "softmax")


def test_a_module_that_fails_in_whatever_way_as_it_is_imported(run_on, tmp_path):
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    bodies = {"raising": "raise KeyError('mine')", "leaving": "import sys\nsys.exit(3)", "broken": "def ("}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
    for name, words in {
        "raising": "'mine'",
        "leaving": "leaves the program, with status 3",
        "broken": "syntax",
    }.items():
        refused(partial(run_on, **environment), tmp_path, f"importable.*: .*{words}", "--allreduce", f"{name}:f")


def test_an_option_refused_by_ranks_of_its_own(launch, tmp_path):
    """As any other, but mpiexec tells the status, and that all ranks are gone."""
    refused(launch, tmp_path, "unrecognized arguments: --nonsense", "--nonsense", ranks=2)


def test_what_one_rank_alone_comes_upon(launch, tmp_path):
    """NaN in a row that is read, as all are, only when its turn comes: by one rank, in the midst of the training."""
    x = np.ones((4000, 3), "f4")
    x[3777] = np.nan
    file(tmp_path / "bad.h5", test_x=x, test_y=np.arange(4000) % 2)
    options = ["--data", "bad.h5", "--placement", "streamed", "--model", "logistic", "--epochs", "1", "--out", "none"]
    done = launch(3, SCRIPT, *options, timeout=30)
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in done.stderr


def test_a_run_that_diverges_is_one_line_and_status_1(run_on, tmp_path):
    done = run_on(2, SCRIPT, "--lr", "1e30", "--steps", "9", "--out", "a")
    assert done.returncode == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("train-allreduce: error: the ")]) == 1
    assert "not finite" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_a_checkpoint_that_someone_damages_during_the_run(launch, run_on, interfere):
    program = interfere(25, 0, "os.truncate('a/checkpoint.h5', 100)")
    options = ["--steps", "40", "--checkpoint-every", "20", "--keep", "2", "--out", "a"]
    launch(2, program, *options, check=0)
    run_on(2, SCRIPT.with_name("evaluate.py"), "a", check=0)  # the last one is whole


def test_a_name_with_the_signs_of_a_mark_up_language(run_on, tmp_path):
    file(tmp_path / "odd.h5", change=lambda made: made.attrs.update(name="a[/b] [red]"))
    done = run_on(2, SCRIPT, "--data", "odd.h5", "--model", "logistic", "--epochs", "1", "--out", "[i]o[/]", check=0)
    assert "a[/b] [red]" in done.stdout and (tmp_path / "[i]o[" / "]" / "summary.json").exists()


def test_resuming_on_other_data(run_on, tmp_path):
    file(tmp_path / "one.h5")
    file(tmp_path / "two.h5", train_x=np.ones((30, 3), "f4"), train_y=np.arange(30) % 2)
    run_on(2, SCRIPT, "--data", "one.h5", "--model", "logistic", "--epochs", "1", "--out", "a", check=0)
    refused(
        run_on, tmp_path, "data are one with 20 training rows, not two with 30", "--resume", "a", "--data", "two.h5"
    )


def test_an_out_folder_with_another_run_and_a_resume_folder_of_another_model(run_on, tmp_path):
    run_on(2, SCRIPT, "--epochs", "1", "--out", "a", check=0)
    refused(run_on, tmp_path, "--out a holds another run; .*--resume a", "--out", "a")
    refused(run_on, tmp_path, "that run's model is mlp with 9610 parameters", "--resume", "a", "--model", "mlp:32")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    for wrong in (["--model", "nonsense"], ["--data", "absent.h5"], ["--batch-size", "0"]):
        refused(run_on, tmp_path, wrong[0].strip("-").replace("-size", ""), "--out", "a", "--force", *wrong)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}


@pytest.mark.long
def test_a_pipeline_that_diverges_with_micro_batches_in_flight(launch):
    options = [
        "--schedule",
        "pipedream",
        "--model",
        "mlp:40,40",
        "--lr",
        "1e30",
        "--batch-size",
        "300",
        "--steps",
        "50",
    ]
    done = launch(3, SCRIPT.with_name("train_pipeline.py"), *options, timeout=30, check=1)
    assert len([line for line in done.stderr.splitlines() if line.startswith("train-pipeline: error: the ")]) == 1
    assert "not finite" in done.stderr and "Traceback" not in done.stderr
