"""What a benchmark prints, and the file that it writes."""

import json
import re

import pytest


def table(text):
    """The rows of the first table, as lists of cells."""
    lines = text[text.index("| ") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_of(path, benchmark):
    """The rows of the file of --json, which has the form that is the same for all."""
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(found)[:5] == ["schema_version", "benchmark", "command", "environment", "options"]
    assert (found["schema_version"], found["benchmark"], list(found)[-1]) == (1, benchmark, "rows")
    assert re.match(r"\d+ ranks?: ", found["command"]) and found["options"]["json"] == path.name
    assert {"commit", "python", "numpy", "mpi", "machine"} <= set(found["environment"])
    assert all(isinstance(text, str) for text in found["environment"].values()) and found["rows"]
    for row in found["rows"]:
        for key, value in row.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", key)
            assert isinstance(value, list) == bool(re.search("_per_(rank|turn|evaluation)$", key)) or not value, key
            each = value if isinstance(value, list) else [value]
            assert all(cell is None or isinstance(cell, bool | int | float | str) for cell in each), key
    return found["rows"]
