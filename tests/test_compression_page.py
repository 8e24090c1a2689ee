"""docs/compression.md: from a slow link's data sheet to a trained model, as printed; other commands, and programs."""

import json
import re
from pathlib import Path

import pytest
import ready_ranks
from printed import as_printed, commands, program, shell, write_shown

PAGE = (Path(__file__).parents[1] / "docs" / "compression.md").read_text()
PLAIN = [line[4:] for line in PAGE.splitlines() if re.match("    (mpiexec|hpcdl) ", line)]


@pytest.mark.long
def test_from_the_plan_to_the_model(environment, tmp_path):
    shown = commands(PAGE)
    write_shown(shown, tmp_path)
    as_printed([each for each in shown if not each[0].startswith("cat ")], tmp_path, environment)
    rows = json.loads((tmp_path / "runs/methods/results.json").read_text())["lines"]
    assert len(rows) == 6
    run = json.loads((tmp_path / "runs/model/summary.json").read_text())
    assert run["compress"] == "topk" and run["test_accuracy"] > 0.95


@pytest.mark.parametrize("command", [each for each in PLAIN if "compare" not in each])
def test_other_commands_run(command, tmp_path):
    """Shorter: with few steps, or rounds."""
    length = "" if "--epochs" in command else " --rounds 2" if "federated" in command else " --steps 5"
    started = program(f"{command}{length} --progress none --out none")
    done = ready_ranks.run(*started, tmp_path, 120, {})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_programs_run(environment, tmp_path):
    feedback, slow = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "feedback.py").write_text(feedback)
    (tmp_path / "slow.py").write_text(slow)
    done = shell("mpiexec -n 4 python feedback.py", tmp_path, environment)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["1", "4", "16", "64", "256"], done.stderr
    assert float(lines[-1][1]) < float(lines[-1][2]) / 50
    done = shell("mpiexec -n 4 python slow.py", tmp_path, environment)
    assert re.fullmatch(r"ring: .* ms .*\nbfloat16: .* ms .*\n", done.stdout), done.stdout + done.stderr
