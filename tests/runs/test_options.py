"""Options: one dataclass, from the command line and from YAML; what makes no sense is refused in one line."""

import ast
import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

import pytest
from in_process import ends

from hpcdl.errors import UsageError
from hpcdl.launch.help import PLACES
from hpcdl.launch.option_parser import parse, parse_command_line
from hpcdl.plugins import OPTIONS, STARTED
from hpcdl.programs import files
from hpcdl.runs.options import Options, option


def read(*arguments):
    return parse(Options, "train-it", "about it", list(arguments))


def test_defaults_and_values():
    assert read("--lr", "0.5", "--batch-size", "32", "--model", "mlp:8").lr == 0.5
    assert read("--batch-size", "full").batch_size == "full"
    assert read("--batch-size=32").batch_size == 32
    assert read().out == "auto" and Options().out == "none"


def test_a_config_file_gives_values_and_the_command_line_wins(tmp_path):
    path, other = tmp_path / "c.yaml", tmp_path / "d.yaml"
    path.write_text("lr: 0.5\nbatch_size: 8\n")
    other.write_text("batch-size: 16  # dashes, too\n")
    for order in (["--config", str(path), "--lr", "0.25"], ["--lr=0.25", f"--config={path}"]):
        found = read(*order)
        assert (found.lr, found.batch_size) == (0.25, 8)
    assert read("--config", str(path), "--config", str(other)).batch_size == 16


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("lr: 1e-3", "lr", 0.001),
        ("lr: 1", "lr", 1.0),
        ("straggler: 1:2", "straggler", "1:2"),  # not 62, as in YAML 1.1
        ("data: on", "data", "on"),
        ("standardize: true", "standardize", "yes"),
        ("standardize: No", "standardize", "no"),
        ("batch_size: full", "batch_size", "full"),
        ("model: ''", "model", ""),
    ],
)
def test_a_value_in_a_file_is_read_as_on_the_command_line(tmp_path, text, name, value):
    (tmp_path / "c.yaml").write_text(text)
    found = getattr(read("--config", str(tmp_path / "c.yaml")), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("learning_rate: 0.5", "there is no option 'learning_rate'"),
        ("epoch: 5", "there is no option 'epoch' (did you mean 'epochs'?)"),
        ("config: other.yaml", "there is no option 'config'"),
        ("lr: null", "lr in c.yaml: expected a number, not null"),
        ("lr: [1, 2]", "lr in c.yaml: expected a number, not ['1', '2']"),
        ("dtype: float16", "dtype in c.yaml: expected one of 'float32', 'float64', 'bfloat16', not float16"),
        ("standardize: 1", "standardize in c.yaml: expected one of 'auto', 'yes', 'no', not 1"),
        ("lr", "--config c.yaml: a line should be NAME: VALUE"),
        ("", "--config c.yaml: a line should be NAME: VALUE"),
        ("lr: [\n", "--config c.yaml: the file is not valid YAML: "),
        ("lr: \x00", "--config c.yaml: the file is not valid YAML: "),
        ("? {a: 1}\n: 2", "--config c.yaml: the file is not valid YAML: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read("--config", "c.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(UsageError, match=r"--config c.yaml: the file is not valid YAML"):
        read("--config", "c.yaml")


def test_the_name_of_a_run_is_no_pattern(tmp_path):
    for name in ("sweep[lr=0.001]", "a*", "b?", "~"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("lr: 0.5\n")
        assert read("--resume", str(tmp_path / name)).lr == 0.5
    (tmp_path / "c.yaml").write_text(f"resume: {tmp_path / 'a*'}\nseed: 3\n")
    found = read("--config", str(tmp_path / "c.yaml"))
    assert (found.lr, found.seed, found.out) == (0.5, 3, str(tmp_path / "a*"))


@dataclass(frozen=True)
class More(Options):
    overlap: bool = option(False, "a switch")
    source: str = option("x", "where 100% is from")
    stage: Literal[1, 2] = option(1, "what is sharded")


@dataclass
class Placed:
    run: str = option(..., "a folder")
    rows: int | str = option("all", "how many")
    epochs: int = option(1, "without --steps beside it")


def test_a_script_adds_its_own():
    found = parse(More, "p", "d", ["--overlap", "--source", "y", "--lr", "1", "--stage=2"])
    assert (found.overlap, found.source, found.lr, found.stage) == (True, "y", 1, 2)
    with pytest.raises(UsageError, match="--stage: expected one of 1, 2, not 3"):
        parse(More, "p", "d", ["--stage", "3"])


def test_options_are_replaced_and_not_changed():
    made = More(lr=0.1, budget="examples=64")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.lr = 0.2
    other = dataclasses.replace(made, lr=0.2, budget="examples=32")
    assert (made.lr, other.lr, other.allowance.examples) == (0.1, 0.2, 32)


def test_a_value_of_two_lines_is_refused_in_one():
    with pytest.raises(UsageError, match=r"^--lr: expected a number, not x y$"):
        read("--lr", "x\ny")


def test_several_that_need_not_be_there(tmp_path, capsys):
    @dataclass(frozen=True)
    class Several(Options):
        places: list[str] = option(list, "where")

    made = parse_command_line(Several, "a-program", "", ["a", "--lr", "0.5", "--out", "x"])
    assert (made.options.places, made.options.lr) == (["a"], 0.5)
    assert made.told == made.given | {"out"} == {"places", "lr", "out"}
    assert parse(Several, "a-program", "", []).places == []
    (tmp_path / "c.yaml").write_text("places: [a b, c]\nsteps: 4\n")
    made = parse_command_line(Several, "a-program", "", ["--config", str(tmp_path / "c.yaml"), "--epochs", "2"])
    assert made.options.places == ["a b", "c"] and (made.options.steps, made.options.epochs) == (0, 2)
    assert made.given == {"places", "epochs"}  # the steps of the file hold no longer
    with pytest.raises(UsageError, match="expected a text"):
        parse(Several, "a-program", "", ["a\0b"])
    with pytest.raises(SystemExit):
        parse(Several, "a-program", "", ["--help"])
    assert "usage: hpcdl a-program PLACES... [OPTIONS]" in capsys.readouterr().out


def test_a_positional_argument(tmp_path):
    (tmp_path / "c.yaml").write_text("rows: 5\n")
    assert parse(Placed, "p", "d", ["there", "--config", str(tmp_path / "c.yaml")]) == Placed("there", 5)
    assert parse(Placed, "p", "d", ["--rows", "some", "there", "--epochs", "3"]) == Placed("there", "some", 3)
    with pytest.raises(UsageError, match=r"required: run$"):
        parse(Placed, "p", "d", [])
    with pytest.raises(UsageError, match="unrecognized arguments: here"):
        parse(Placed, "p", "d", ["there", "here"])


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(More, "train-it", "about it", ["--help-all"])
    text = capsys.readouterr().out
    begin = "usage: hpcdl train-it [OPTIONS]\n\nabout it.\n\noptions of train-it:"
    assert caught.value.code == 0 and text.startswith(begin)
    words = " ".join(text.split())
    assert "--source SOURCE where 100% is from (default: x)" in words
    assert "--overlap a switch --source" in words and "auto: runs/STRATEGY-TIME (default: auto)" in words
    assert "--stage {1,2} what is sharded (default: 1)" in words


def test_one_of_two_ways_to_say_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("steps: 10\nbatch_per_rank: 8\nlr: 0.5\n")
    again = read("--resume", str(tmp_path), "--epochs", "4", "--batch-size=32")
    assert (again.steps, again.epochs, again.batch_per_rank, again.batch_size, again.lr) == (0, 4, 0, 32, 0.5)
    assert read("--resume", str(tmp_path)).steps == 10 and read("--resume", str(tmp_path)).out == str(tmp_path)
    for both in (["--epochs", "3", "--steps", "4"], ["--batch-size", "3", "--batch-per-rank", "4"]):
        with pytest.raises(UsageError, match="not both"):
            read(*both)


def test_batch_sizes():
    assert Options(batch_size=10).global_batch(4, 100) == 10
    assert Options(batch_per_rank=10).global_batch(4, 100) == 40
    assert Options(batch_size="full").global_batch(4, 100) == 100


def test_code_that_a_file_names_is_what_the_command_line_allows(tmp_path):
    """The name itself, which wins; the file or a folder around it; or the name by --trust. A file trusts nothing."""
    (tmp_path / "a").mkdir()
    config = tmp_path / "a/config.yaml"
    config.write_text("data: shutil:rmtree\n")
    ways = {("--config", str(config)): str(config), ("--resume", str(tmp_path / "a")): str(config)}
    for told, file in ways.items():
        words = f"{file} names shutil:rmtree .*: add --trust shutil:rmtree, or --trust {file}"
        with pytest.raises(UsageError, match=words):
            parse(Options, "p", "", [*told])
        for allowed in (["--data", "a:b"], ["--trust", "shutil:rmtree"], ["--trust", "x:y", "--trust", str(tmp_path)]):
            read = parse_command_line(Options, "p", "", [*told, *allowed])
            assert read.options.data == (allowed[1] if allowed[0] == "--data" else "shutil:rmtree")
            assert ("data" in read.origin) == (allowed[0] == "--trust")
    config.write_text("data: shutil:rmtree\ntrust: shutil:rmtree\n")
    with pytest.raises(UsageError, match="there is no option 'trust'"):
        parse(Options, "p", "", ["--config", str(config)])
    for trust, said in (("nowhere", "there is no such file; a name of code is written"), ("", "is empty")):
        with pytest.raises(UsageError, match=f"--trust .*{said}"):
            parse(Options, "p", "", ["--trust", trust])


def test_every_option_that_may_name_code_is_looked_at():
    """By its help: who adds one adds it to plugins.py, too."""
    for program, path in files().items():
        for name, text in helps(path):
            if re.search(r"package\.module|torch:|all-reduce algorithm|model, as in|that starts ranks", text):
                assert name in {*OPTIONS, *STARTED, "optimizer"}, f"{program} --{name}: {text}"


def test_an_option_of_a_file_or_folder_is_not_empty(alone):
    """By its help: who adds one adds it to PLACES, too."""
    for program, path in files().items():
        for name, text in helps(path):
            if re.search(r"\b(file|folder)s?\b|NAME\.", text) and "lines as they would be run" not in text:
                assert name in {*PLACES, "topology"}, f"{program} --{name}: {text}"  # a graph by a name, or by a file
    for name in ("resume", "out", "initial", "config", "data"):
        for text in ("", " "):
            with pytest.raises(UsageError, match=f"--{name} is empty: name a file or a folder, or leave the"):
                parse(Options, "p", "", [f"--{name}", text])
    assert parse(Options, "p", "", ["--augment", ""]).augment == ""
    for program, given in (
        ("train_allreduce", ["--resume", ""]),
        ("train_ensemble", ["--resume", ""]),
        ("train_ensemble", ["train-allreduce", "--from", "", "--best", "2"]),
        ("search", ["train-allreduce", "--resume", ""]),
        ("compare", ["train-allreduce --config ''"]),
        ("evaluate", ["", "--json", "a.json"]),
        ("prepare_data", ["csv", "", "a.h5"]),
        ("prepare_data", ["csv", "a.csv", "b.h5", "--like", ""]),
    ):
        status, said = ends(program, given)
        assert status == 2 and re.search("(--(resume|from|config|like)|RUN|SOURCE) is empty: ", said), said


def helps(path):
    """The options of texts that a program adds, and their help."""
    for node in ast.walk(ast.parse(path.read_text())):
        made_by = getattr(getattr(node, "value", None), "func", None)
        option = isinstance(node, ast.AnnAssign) and getattr(made_by, "id", "") == "option"
        if option and "str" in ast.unparse(node.annotation):
            yield node.target.id, ast.unparse(node.value.args[1])


def test_what_is_left_out_is_not_said_of_options_that_are_refused(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("topology: ring\n")
    with pytest.raises(UsageError, match="--accumulate must be greater than 0"):
        read("--config", str(tmp_path / "c.yaml"), "--accumulate", "0")
    assert capsys.readouterr().err == ""
    assert read("--config", str(tmp_path / "c.yaml")).accumulate == 1
    assert "options of another strategy are left out: topology" in capsys.readouterr().err
