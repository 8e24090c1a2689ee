"""docs/api.md: what is public stands there and in the reference, and has an example that runs."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "api.md").read_text()
ROOMS = dict(re.findall(r"^## hpcdl\.(\w+)\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
NAMES = re.findall(r"`(hpcdl\.[\w.]+)`(?=[^|\n]*\|)", PAGE)
INTERNAL = DOCS / "examples" / "cost_of_checking.py"  # measures what is not public


def shown():
    """The Python programs of pages, examples and notebooks."""
    for page in DOCS.rglob("*.md"):
        yield from re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        yield from re.findall(r"(?:^    (?:from hpcdl|import hpcdl).*\n)+", page.read_text(), re.MULTILINE)
    yield from (path.read_text() for path in DOCS.rglob("*.py") if path != INTERNAL)


def imported(program):
    """The names of hpcdl's that a program imports."""
    for module, names in re.findall(r"^ *from (hpcdl[\w.]*) import ([\w, ]+)", program, re.MULTILINE):
        end = ".train" if module == "hpcdl.strategies" else ""
        yield from (f"{module}.{name}{end}" for name in names.strip().split(", "))
    if re.search(r"^ *import hpcdl", program, re.MULTILINE):
        yield from re.findall(r"(?<!import )(?<!from )\b(hpcdl(?:\.\w+)+)(?=[(\s])", program)


def test_what_programs_of_the_pages_import_is_listed_and_what_is_listed_has_an_example():
    used = {name for program in shown() for name in imported(program)}
    returned = {"hpcdl.launch.launched_run.LaunchedRun", "hpcdl.search.SearchResult", "hpcdl.search.Trial"}
    raised = {"hpcdl.errors.LoneError", "hpcdl.errors.TrainingError"}
    assert len(NAMES) == len(set(NAMES)) > 60
    in_text = {"hpcdl.reports.trials"}  # docs/search.md; tests/reports/test_load.py calls it
    assert used - set(NAMES) == set() and set(NAMES) - used == returned | raised | in_text


def test_what_rooms_offer_is_listed():
    offered = set()
    for init in (ROOT / "hpcdl").glob("*/__init__.py"):
        for names in re.findall(r"^__all__ = \[(.*?)\]", init.read_text(), re.MULTILINE | re.DOTALL):
            offered |= {f"hpcdl.{init.parent.name}.{name}" for name in re.findall(r"\w+", names)}
    assert len(offered) > 25 and offered - set(NAMES) == set()


def test_what_is_listed_exists_with_a_docstring_and_stands_in_the_reference():
    reference = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    blocks = re.findall(r"^::: ([\w.]+)\n((?:    .*\n)*)", reference, re.MULTILINE)
    stands = {name for name, _ in blocks}
    for name, options in blocks:
        stands |= {f"{name}.{each}" for each in re.findall(r"\w+", options.partition("members:")[2])}
    homes = {"hpcdl.job": "hpcdl.comm.failure.job", "hpcdl.launch": "hpcdl.launch.launched_run.launch"}
    homes["hpcdl.optim.make_schedule"] = "hpcdl.optim.schedules.make_schedule"
    for name in NAMES:
        if not name.startswith("hpcdl.torch."):
            room, _, attribute = name.rpartition(".")
            found = getattr(importlib.import_module(room), attribute)
            assert found.__doc__ or not callable(found), name
        assert homes.get(name, name) in stands, f"{name} is not in docs/api/"


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("torch", "launch")])
def test_examples(room, run_on, tmp_path):
    (tmp_path / "example.py").write_text(ROOMS[room])
    done = run_on(2, tmp_path / "example.py", check=0)
    assert done.stdout and "Error" not in done.stderr


@pytest.mark.long
def test_example_of_torch(launch, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "example.py").write_text(ROOMS["torch"])
    done = launch(2, "example.py", check=0)
    assert done.stdout.count("'all_reduce': 1") == 2


def test_example_of_launch(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(ROOMS["launch"])
    runpy.run_path("example.py")
    assert float(capsys.readouterr().out.split()[0]) > 0.8
