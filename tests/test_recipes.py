"""The recipes of CONTRIBUTING.md, as printed: each makes its thing in a copy of the tree, where a user then uses it."""

import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:^`([^`\n]+)`:\n\n)?^```(python|diff|markdown|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def recipe(title):
    """The blocks of a recipe, in order: (file, kind, text); a block without a file belongs to that before it."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(rf"^### {title}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    blocks, file = [], ""
    for name, kind, text in BLOCK.findall(section):
        file = name or file
        blocks.append((file, kind, text))
    return blocks


def follow(title, tree):
    """Do in a tree what a recipe says; returns the files that it makes or changes."""
    for file, kind, text in recipe(title):
        path = tree / file
        if kind == "diff":
            before, after = (
                "".join(line[1:] for line in text.splitlines(keepends=True) if line[0] in signs)
                for signs in (" -", " +")
            )
            assert before and path.read_text().count(before) == 1, f"{title}: {file} has not once:\n{before}"
            path.write_text(path.read_text().replace(before, after))
        else:
            assert not path.exists(), f"{title}: {file} is there already"
            path.write_text(text)
    return {file for file, *_ in recipe(title)}


@pytest.fixture
def tree(alone, tmp_path):
    """A copy of the tree, as a user has it; kernels are those of here, which are compiled, until they are changed."""
    for name in ("hpcdl", "scripts", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("kernels", "scripts"):
        (tmp_path / "hpcdl" / name).symlink_to((ROOT if name == "kernels" else tmp_path) / name)
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    return tmp_path


@pytest.fixture
def in_tree(tree, launch):
    """A function: start `python ARGUMENTS` on ranks, with the packages of the copy."""

    def run(ranks, *arguments, **environment):
        return launch(ranks, *arguments, cwd=tree, check=0, PYTHONPATH=str(tree), **environment)

    return run


AS_NUMPY = """
import numpy as np
from hpcdl.kernels.cases import CASES

case, x = CASES["sum_of_absolutes"], np.random.default_rng(0).standard_normal(1001)
assert abs(case.kernel(x) / case.reference(x) - 1) < 1e-12
"""


def summary(tree, out):
    return json.loads((tree / out / "summary.json").read_text())


@pytest.mark.long
def test_an_all_reduce_algorithm(tree, in_tree):
    follow("An all-reduce algorithm", tree)
    common = ["-m", "hpcdl", "train-allreduce", "--steps=4", "--dtype=float64", "--progress=none"]
    in_tree(3, *common, "--allreduce=line", "--out=line")
    in_tree(3, *common, "--allreduce=ring", "--out=ring")
    line, ring = (summary(tree, name) for name in ("line", "ring"))
    assert line["allreduce"] == "line" and line["replicas_agree"] is True
    assert line["train_loss"] == pytest.approx(ring["train_loss"], rel=1e-12)
    sent = [each["all_reduce"]["messages"] for each in line["traffic_per_rank"]]
    assert sent == [4 * 1, 4 * 2, 4 * 1]


@pytest.mark.long
def test_a_strategy(tree, in_tree):
    assert len(follow("A strategy", tree)) == 5
    command = ["-m", "hpcdl", "train-majority-vote", "--lr=0.001", "--epochs=1", "--progress=none", "--out=run"]
    in_tree(3, *command)
    found = summary(tree, "run")
    assert found["strategy"] == "majority_vote" and found["replicas_agree"] is True and found["test_accuracy"] > 0.5
    assert "train-majority-vote" in in_tree(1, "-m", "hpcdl").stdout
    assert "Train by a majority vote of signs" in in_tree(1, "-m", "hpcdl", "train-majority-vote", "--help").stdout


@pytest.mark.long
def test_a_data_format(tree, in_tree):
    follow("A data format", tree)
    lines = [json.dumps({"x": [i % 7, i % 3], "y": ["no", "yes"][i % 7 > i % 3]}) for i in range(100)]
    (tree / "a.jsonl").write_text("\n".join(lines))
    done = in_tree(1, "-m", "hpcdl", "prepare-data", "jsonl", "a.jsonl", "a.h5", "--test-fraction=0.3")
    assert "70 training and 30 test rows of 2" in done.stdout
    in_tree(1, "-m", "hpcdl", "train-sequential", "--data=a.h5", "--model=logistic", "--progress=none", "--out=run")
    assert summary(tree, "run")["test_accuracy"] > 0.5


@pytest.mark.long
def test_an_option(tree, in_tree):
    follow("An option", tree)
    command = ["-m", "hpcdl", "train-allreduce", "--steps=4", "--progress=none"]
    losses = []
    for noise in ("0", "0.1"):
        in_tree(2, *command, f"--gradient-noise={noise}", f"--out=noise-{noise}")
        losses.append(summary(tree, f"noise-{noise}")["train_loss"])
    assert losses[0] != losses[1] and "gradient_noise: 0.1" in (tree / "noise-0.1" / "config.yaml").read_text()


@pytest.fixture
def with_kernels(tree):
    """The copy, with kernels of its own."""
    for link in (tree / "kernels", tree / "hpcdl" / "kernels"):
        link.unlink()
    shutil.copytree(ROOT / "kernels", tree / "kernels", ignore=shutil.ignore_patterns("*.nb[ci]", "compiled-*"))
    (tree / "hpcdl" / "kernels").symlink_to(tree / "kernels")
    return tree


@pytest.mark.long
def test_a_kernel(with_kernels, in_tree):
    follow("A kernel with its twins", with_kernels)
    options = ["--kernels=sum_of_absolutes", "--sizes=4KiB", "--seconds=0.01", "--json=k.json"]
    in_tree(1, "-m", "hpcdl", "bench-kernels", *options)
    in_tree(1, "-c", AS_NUMPY)
    (row,) = json.loads((with_kernels / "k.json").read_text())["rows"]
    assert row["kernel"] == "sum_of_absolutes" and row["moved_bytes"] == 4096
    done = in_tree(1, "tests/kernels/simulate.py", "sum_of_absolutes")  # the CUDA twin beside the reference
    assert json.loads(done.stdout) == {"sum_of_absolutes": ""}


@pytest.mark.long
def test_what_recipes_make_passes_the_tests(tree, in_tree):
    titles = ["An all-reduce algorithm", "A strategy", "A data format", "An option"]
    files = sorted(set().union(*(follow(title, tree) for title in titles)))
    sources = [file for file in files if file.endswith(".py")]
    in_tree(1, "-m", "ruff", "check", *sources)
    in_tree(1, "-m", "ruff", "format", "--check", *sources)
    made = ["tests/comm/test_allreduce.py", *(file for file in files if Path(file).name.startswith("test_"))]
    in_tree(3, "-m", "pytest", "-q", "-k", "line or majority", *made)
    in_tree(1, "-m", "pytest", "-q", "tests/data/test_prepare_jsonl.py")
    every = ["tests/test_rooms.py", "tests/scripts/test_refusals.py"]
    in_tree(1, "-m", "pytest", "-q", "-k", "down or screen or train_allreduce", *every)
