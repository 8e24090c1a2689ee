"""docs/context_parallel.md as printed: memory of long sequences, planned and held; the other commands, shorter."""

import json
import re
from pathlib import Path

import pytest
import ready_ranks
from printed import as_printed, commands, program

PAGE = (Path(__file__).parents[1] / "docs" / "context_parallel.md").read_text()
PLAIN = [line[4:] for line in PAGE.splitlines() if re.match("    mpiexec ", line)]


@pytest.mark.long
def test_memory_as_printed(environment, tmp_path):
    as_printed(commands(PAGE), tmp_path, environment)
    run = json.loads((tmp_path / "runs/c2/summary.json").read_text())
    assert run["attention"] == "ring" and run["replicas_agree"] is True
    assert run["memory_bytes_per_rank"]["activations"] == [77856768, 77856768]  # 148.5 MiB / 2


@pytest.mark.parametrize("command", PLAIN)
def test_other_commands_run(command, tmp_path):
    """Of a small model, and short."""
    small = command.replace("llama:", "llama:layers=1,width=16,heads=4,").replace("gpt ", "gpt:layers=1,width=16 ")
    started = program(f"{small} --steps 2 --batch-size 8 --progress none --out none")
    done = ready_ranks.run(*started, tmp_path, 120, {})
    assert done.returncode == 0, done.stdout + done.stderr
