"""docs/torch.md as printed: one's own module, trained, gone on with, scored, exported, loaded, tuned."""

from pathlib import Path

import pytest
from in_process import ends
from printed import assert_said, commands, shell
from written_runs import steps, summary

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[1] / "scripts"
PAGE = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()


@pytest.fixture
def as_shown(environment, run_on, tmp_path, monkeypatch):
    """A function: run the commands of the page between two headings; `files` and `count` say what they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(heading, following, count, files):
        page = PAGE[PAGE.index(f"### {heading}") : PAGE.index(f"### {following}")]
        blocks, shown = files_of(page), commands(page)
        assert len(shown) == count and blocks.keys() == files
        for command, printed in shown:
            if command.startswith("cat "):
                (tmp_path / command.split()[1]).write_text(blocks[command.split()[1]])
                continue
            if command.startswith("python "):
                done = shell(command, tmp_path, environment | {"OMP_NUM_THREADS": "1"})
                assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
                assert_said(done, printed)
                continue
            words = command.split()
            ranks = int(words[2]) if words[0] == "mpiexec" else 1
            _, name, *told = words[words.index("hpcdl") :]
            if ranks == 1:  # PyTorch is in this process already
                told = [*told, "--progress", "none"] if "train" in name else told
                assert ends(name.replace("-", "_"), told) == (0, "")
            else:
                run_on(ranks, SCRIPTS / f"{name.replace('-', '_')}.py", *told, check=0, cwd=tmp_path)

    return run


def test_the_whole_way_as_printed(as_shown):
    as_shown("The whole way", "A state_dict", 7, {"nets.py", "load.py"})
    run = summary(Path("runs/cnn"))
    assert [leg["ranks"] for leg in run["legs"]] == [2, 1] and run["test_accuracy"] > 0.9
    tuned = summary(Path("runs/tuned"))
    assert tuned["test_accuracy"] > 0.9 and tuned["epochs"] == 1  # it began where the other had ended


def test_long_sequences_as_printed(as_shown):
    as_shown("Long sequences", "Sharded by children", 3, {"reader.py"})
    same = "--model torch:reader:net --optimizer adam --lr 0.003 --epochs 2 --progress none"
    assert ends("train_sequential", [*same.split(), "--out", "runs/one"]) == (0, "")
    shared, one = (summary(Path("runs", name)) for name in ("reader", "one"))
    assert shared["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)


def test_sharded_by_children_as_printed(as_shown):
    as_shown("Sharded by children", "The whole way", 3, {"skip.py"})
    same = ["--model", "torch:skip:net", "--lr", "0.02", "--epochs", "2", "--progress", "none"]
    assert ends("train_sequential", [*same, "--out", "runs/one"]) == (0, "")
    sharded, one = ([line["train_loss"] for line in steps(Path("runs", name))] for name in ("skip", "one"))
    assert sharded == pytest.approx(one, rel=1e-5) and one[-1] < 0.5 * one[0]


def files_of(page):
    """The files that the page shows by `cat`, blank lines included, up to the next command or text."""
    found, name = {}, None
    for line in page.splitlines():
        if line.startswith("    $ cat "):
            name = line.split()[-1]
            found[name] = ""
        elif line.startswith("    $ ") or (line and not line.startswith("    ")):
            name = None
        elif name:
            found[name] += line[4:] + "\n"
    return found
