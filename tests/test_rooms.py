"""Imports point one way: a room imports from rooms below it, never from one above or beside."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# beneath all rooms
GROUND = {"chunks", "csr", "drill", "errors", "files", "formatting", "memory", "plugins", "programs", "random"}
GROUND |= {"metric_lines", "shared_memory", "time_slice"}
LOWEST = ("drill", "errors")  # of those
ORDER = [  # from the bottom; those of one line stand beside each other
    "kernels",
    "comm",
    "models optim data machine",
    "torch",
    "checkpoint",
    "faults",
    "runs",
    "federated inference parallel parameter_server",
    "data_server recovery",
    "strategies",
    "launch",
    "planning rl search",
    "reports",
    "scripts",
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms.split()}
ALLOWED = {"kernels": {"numpy", "numba", "llvmlite", "hpcdl"}}  # numpy and numba, with its llvmlite, only
WITHOUT_MPI = {"models", "optim", "kernels"}
# What strategies have in common has a file of its own; and one description may choose between variants.
COMMON = ("compressing", "description", "pipeline_options", "pipeline_schedules", "workload", "zero_bubble")
SHARED = {f"hpcdl.strategies.{name}" for name in COMMON}
VARIANTS = {
    "svrg": {"hpcdl.strategies.asynchronous_svrg", "hpcdl.strategies.saga"},
    "gossip": {"hpcdl.strategies.asynchronous_gossip"},
}
STANDARD = set(__import__("sys").stdlib_module_names)


def files():
    for folder in ("hpcdl", "kernels", "scripts"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "hpcdl" else parts[0]


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module if node.module != "hpcdl" else f"hpcdl.{node.names[0].name}"


@pytest.mark.parametrize("path", list(files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    room = room_of(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if room in WITHOUT_MPI:
            assert top != "mpi4py" and not name.startswith("hpcdl.comm")
        if room in ALLOWED:
            assert top in ALLOWED[room] | STANDARD | ({"cupy"} if path.name == "device.py" else set())
        if room in GROUND:
            assert top in STANDARD | {"numpy", "platformdirs"} or (room not in LOWEST and name.endswith(LOWEST))
        below = rest.split(".")[0]
        if top != "hpcdl" or below in GROUND or room not in LEVEL:
            continue
        assert below in LEVEL, f"{path} imports {name}, which is no room"
        if room == "strategies":
            other = f"{name}.".startswith("hpcdl.strategies.") and name not in SHARED | VARIANTS.get(path.stem, set())
            assert not other, "strategies do not import each other"
        assert LEVEL[below] < LEVEL[room] or below == room, f"{room} imports {name}, from above or beside"


# Modules that are named by a string and lie above the room that imports them, and why.
BY_NAME = {
    (
        "hpcdl/models/__init__.py",
        "hpcdl.torch.module_factory",
    ): "a spec torch:... is PyTorch's, which only torch/ imports",
    ("hpcdl/optim/__init__.py", "hpcdl.torch.optimizer"): "the same",
    ("hpcdl/torch/state.py", "hpcdl.inference.trained_model"): "TorchModel.state_dict, for users, reads a run",
    ("hpcdl/torch/state.py", "hpcdl.inference.pretrained"): "the same",
    ("hpcdl/programs.py", "hpcdl.launch.start"): "a program is started by its name",
    ("hpcdl/__init__.py", "hpcdl.launch"): "which is called as hpcdl.launch(...), too",
    ("hpcdl/programs.py", "hpcdl.scripts."): "the same",
    ("hpcdl/programs.py", "hpcdl.strategies."): "the same",
}


def named_imports(path: Path):
    """The modules of hpcdl that import_module gets as a string; of one that is put together, its beginning."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            given = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(given, ast.Constant) and given.value.startswith("hpcdl."):
                yield given.value


def test_modules_named_by_a_string_lie_below_too():
    above = set()
    for path in files():
        room = room_of(path)
        for name in named_imports(path):
            below = name.split(".")[1]
            if below != room and LEVEL[below] >= LEVEL.get(room, 0):
                above.add((str(path.relative_to(ROOT)), name))
    assert above == BY_NAME.keys()


def test_the_rooms_are_all_packaged():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packaged = setup["options"]["packages"].split()
    folders = {path.parent for path in files() if path.name == "__init__.py"}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(packaged) == sorted(name if name.startswith("hpcdl") else f"hpcdl.{name}" for name in names)


def test_objects_keep_their_class_and_models_declare_their_abilities():
    for path in files():
        text = path.read_text()
        # hpcdl.launch is a room, and is called as a function
        assert path == ROOT / "hpcdl/launch/__init__.py" or not re.search(r"\b__class__ = ", text), path
        if room_of(path) != "models":
            assert not re.search(r"\b(getattr|hasattr)\((\w+\.)*model, ", text), path
        if room_of(path) != "comm":  # what a process holds of communication is changed by calls alone
            assert not re.search(r"progress import .*\bactivity\b|\.(activity|watchdog)\.\w+ \S?= ", text), path


MOST_FILES, MOST_LINES = 25, 5000  # of a folder of hpcdl/, without its __init__.py
SCREEN = 80  # lines of a strategy's `train`, its docstring and its signature apart


def test_a_folder_can_be_held_in_the_head():
    for folder in {path.parent for path in (ROOT / "hpcdl").rglob("*.py")} - {ROOT / "hpcdl"}:
        name = str(folder.relative_to(ROOT))
        held = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(held) <= MOST_FILES, name
        assert sum(len(path.read_text().splitlines()) for path in held) <= MOST_LINES, name


@pytest.mark.parametrize("path", sorted((ROOT / "hpcdl/strategies").glob("*.py")), ids=lambda path: path.stem)
def test_a_strategy_fits_on_a_screen(path):
    """From the first statement after the docstring to the end of `train`, comments and blank lines included."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == "train":
            first = node.body[1] if ast.get_docstring(node) else node.body[0]
            assert node.end_lineno - first.lineno < SCREEN


def test_no_class_name_stands_twice():
    names = [
        node.name
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}
