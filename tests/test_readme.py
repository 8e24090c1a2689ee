"""What README and the pages show runs as it stands there; what they name exists."""

import configparser
import re
from pathlib import Path

from hpcdl.programs import own_options, programs
from hpcdl.runs.options import COMMON

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_library_example_on_one_and_three_ranks(launch, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "library.md").read_text(), re.DOTALL)
    (tmp_path / "quadratic.py").write_text(program)
    for ranks in (1, 3):
        done = launch(ranks, "quadratic.py", check=0)
        assert "w = [ 3. -1.  2.]" in done.stdout


def test_the_primitives_example_prints_what_the_page_says(launch, tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "primitives.md").read_text()
    (program, printed) = re.search(r"```python\n(.*?)```.*?It prints\n\n(.*?)\n\n", page, re.DOTALL).groups()
    (tmp_path / "primitives.py").write_text(program)
    done = launch(4, "primitives.py", check=0)
    assert done.stdout.splitlines() == [line.strip() for line in printed.splitlines()]
    assert "WARN" not in done.stdout + done.stderr and done.stderr == ""


def test_every_page_and_file_that_is_named_exists():
    root = Path(__file__).parents[1]
    for page in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        text = re.sub(r"\n## Five recipes\n.*?(?=\n## )", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page} links to {link}"
        for name in re.findall(r"`((?:hpcdl|tests|scripts|kernels)/[\w/.]+)`", text):
            assert (root / name).exists(), f"{page} names {name}"


def test_every_module_that_is_named_exists():
    """`hpcdl.room.file.name`: folders, then a file, then a name in it, or in the folder's __init__.py."""
    root, wrong, names = Path(__file__).parents[1], [], 0
    for page in [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "docs").rglob("*.py")]:
        for name in re.findall(r"\bhpcdl(?!\.(?:def|sif|txt)\b)(?:\.[a-zA-Z_]\w*)+", page.read_text()):
            place, (*parts,) = root, name.replace("hpcdl.kernels", "kernels").split(".")
            while parts and ((place / parts[0]).is_dir() or (place / f"{parts[0]}.py").exists()):
                place /= parts.pop(0)
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names += 1
            if parts and (not re.search(rf"\b{parts[0]}\b", file.read_text())):
                wrong.append((str(page.relative_to(root)), name))
    assert not wrong and names > 40


def test_every_file_has_its_row_in_the_table_of_files():
    """A cell names a folder once: `hpcdl/checkpoint/state.py`, `resume.py`."""
    root, named = Path(__file__).parents[1], set()
    for cell in (DOCS / "files.md").read_text().split("|"):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", cell):
            folder, name = name.rpartition("/")[::2] if "/" in name else (folder, name)
            named.add(f"{folder}/{name}")
    missing = [name for name in named if not (root / name).exists()]
    files = {str(path.relative_to(root)) for path in (root / "hpcdl").rglob("*.py") if not path.stem.startswith("__")}
    assert not missing and files <= named, f"no such file: {missing}; no row for {sorted(files - named)}"


def program_of(command, program=None):
    """The program that a command names, `program` for options alone; the options of programs that train exist."""
    words, own = command.removeprefix("hpcdl ").split(), own_options()
    if not command.startswith("--"):
        program = words.pop(0)
        assert program in programs() or command == "hpcdl", command
    if program is None or program in own:
        for word in (word[2:].replace("-", "_") for word in words if word.startswith("--")):
            assert word in COMMON or word in own.get(program, {}) or word in ("config", "help"), command
    return program


def test_every_command_in_the_table_of_files_exists():
    """In each row the second of five cells: programs, with options of theirs, and options that all have that train."""
    named = set()
    for row in re.findall(r"^\| (.*) \|$", (DOCS / "files.md").read_text(), re.MULTILINE):
        cells = re.split(r" ?\| ?", row)
        assert len(cells) == 5 or (len(cells) == 4 and row.endswith("|")), row
        program = None
        for command in re.findall(r"`([^`]+)`", cells[1]):
            program = program_of(command, program)
            named.add(program)
    assert set(programs()) <= named


def test_every_command_of_the_concepts_and_of_the_strategies_exists():
    for page, column, least in (("README.md", 1, 30), ("strategies.md", 1, 24)):
        rows = re.findall(r"^\| (.*) \|$", (DOCS / page).read_text(), re.MULTILINE)
        commands = [each for row in rows for each in re.findall(r"`([^`]+)`", row.split(" | ")[column])]
        named = {program_of(command) for command in commands}
        assert len(commands) >= least and len(named) > 20
        if page == "strategies.md":
            assert {each for each in programs() if each.startswith("train-")} - named == {"train-kmeans"}


def test_the_table_of_extras_is_that_of_the_installation():
    root = Path(__file__).parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    extras = {}
    for name, lines in setup["options.extras_require"].items():
        packages = [re.match(r"[\w-]+", line)[0] for line in lines.split("\n") if line and not line.startswith("#")]
        extras[name] = set(packages)
    text = (root / "docs" / "running.md").read_text()
    rows = re.findall(r"^\| `hpcdl\[(\w+)\]` \| ([^|]+) \|", text, re.MULTILINE)
    assert {name: set(re.findall(r"[\w-]+", packages)) for name, packages in rows} == extras
    assert len(rows) == len(extras) and "(docs/running.md#extras)" in (root / "README.md").read_text()
