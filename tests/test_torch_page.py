"""docs/torch.md as printed: one's own module, trained, gone on with, scored, exported, loaded, tuned."""

import json
from pathlib import Path

import pytest
from in_process import ends
from printed import assert_said, commands, shell

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[1] / "scripts"
PAGE = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()


def test_the_whole_way_as_printed(environment, run_on, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = PAGE[PAGE.index("### The whole way") : PAGE.index("### A state_dict")]
    blocks = files_of(page)
    shown = commands(page)
    assert len(shown) == 7 and blocks.keys() == {"nets.py", "load.py"}
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
            assert ends(name.replace("-", "_"), [*told, "--progress", "none"] if "train" in name else told) == (0, "")
        else:
            run_on(ranks, SCRIPTS / f"{name.replace('-', '_')}.py", *told, check=0, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs/cnn/summary.json").read_text())
    assert [leg["ranks"] for leg in summary["legs"]] == [2, 1] and summary["test_accuracy"] > 0.9
    tuned = json.loads((tmp_path / "runs/tuned/summary.json").read_text())
    assert tuned["test_accuracy"] > 0.9 and tuned["epochs"] == 1  # it began where the other had ended


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
