"""The commands of docs/tour.md, as they stand there; those of tables and comparisons: test_tour_answers.py."""

import re
from pathlib import Path

import pytest
from printed import shell

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^    ((?:mpiexec|hpcdl|python)\b.*)$", re.MULTILINE)
COMMANDS = COMMAND.findall((ROOT / "docs" / "tour.md").read_text())
PARTS = {
    "by hand": COMMANDS[:4],
    "a table": [each for each in COMMANDS if "penguins" in each],
    "a comparison": [each for each in COMMANDS if "runs/c " in each],
    "planning": [each for each in COMMANDS if "hpcdl plan" in each],
    "images": [each for each in COMMANDS if "fashion" in each],
    "a job that is kept": [each for each in COMMANDS if "supervise" in each],
    "a gpt": [each for each in COMMANDS if "gpt" in each or "runs/p " in each],
}
IMAGES = Path("/usr/share/datasets/fashion-mnist")
MADE = {
    "by hand": "weights.npz",
    "a table": "species.csv",
    "a comparison": "report.html",
    "planning": ".",
    "images": "fashion.h5",
    "a job that is kept": "runs/s/summary.json",
    "a gpt": "runs/p/summary.json",
}


def test_none_is_left_out():
    assert sorted(each for part in PARTS.values() for each in part) == sorted(COMMANDS) and len(COMMANDS) == 19


def test_the_readme_has_two_of_them():
    found = COMMAND.findall((ROOT / "README.md").read_text())
    assert len(found) == 3 and found.pop(0).startswith("hpcdl doctor") and {*found} <= {*COMMANDS}


@pytest.mark.long
@pytest.mark.parametrize("part", ["images", "a gpt", "a job that is kept", "by hand", "planning"])
def test_as_printed(part, alone, environment, tmp_path):
    if part == "images" and not IMAGES.exists():
        pytest.skip("dataset-fashion-mnist is not installed")
    walk(part, tmp_path, environment)


def walk(part, tmp_path, environment):
    """Run the commands of a part, one after the other."""
    for name in ("scripts", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in PARTS[part]:
        done = shell(command, tmp_path, environment, timeout=200)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
    assert (tmp_path / MADE[part]).exists()
