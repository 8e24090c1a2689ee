"""A run is no drawer: of its fields, strategies and dedicated ranks touch few beside what a run is there for."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = "hpcdl/strategies", "hpcdl/parameter_server", "hpcdl/data_server", "hpcdl/rl", "scripts"
VERBS = {
    *("begin", "batches", "record", "boundary", "report", "track", "initial", "observe", "plan", "make_optimizer"),
    "stop",
}
MOST = 131  # may only fall


def is_run(node):
    """Whether it says `run` or `self.run`."""
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return (of_self and node.attr == "run") or (isinstance(node, ast.Name) and node.id == "run")


def touched(text):
    """Each access to a field of a run in a source, its verbs aside."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return [node.attr for node in nodes if is_run(node.value) and node.attr not in VERBS]


def test_how_it_is_counted():
    source = "run.begin(run.options, self.run.step)\nself.run.record(run.step)\nother.step = run\nrun.a.b = running.c"
    assert sorted(touched(source)) == ["a", "options", "step", "step"]


def test_few_fields_of_a_run_are_touched():
    found = {path: len(touched(path.read_text())) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert sum(found.values()) <= MOST, sorted(found.items(), key=lambda each: -each[1])[:9]


def test_one_place_says_why_a_run_ends():
    """`Run.stop` writes it; a record is replaced whole where a run goes on from one, or is extended."""
    writes = []
    for path in (ROOT / "hpcdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and any(each.arg == "stopped" for each in node.keywords):
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                writes += [str(path.relative_to(ROOT))] if name == "replace" else []
    assert sorted(writes) == ["hpcdl/recovery/server_failover.py", "hpcdl/runs/run.py", "hpcdl/runs/stopping.py"]
