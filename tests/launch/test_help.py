"""What --help shows; what a program makes of an option that it does not have is in tests/refusals.py."""

import dataclasses
import re

import pytest

from hpcdl.launch.help import GROUPS, MOST_USED, OTHERS_SAY, described
from hpcdl.launch.option_parser import parse
from hpcdl.runs.options import COMMON, Options, option


@dataclasses.dataclass(frozen=True)
class Own(Options):
    """Twice.
    A docstring of a dataclass is shown to nobody."""

    width: int = option(1, "how wide one-peer is, in words that go on beyond a line of a narrow terminal")


@dataclasses.dataclass
class Placed:
    run: str = option(..., "a folder")
    json: str = option("", "file")


DOCSTRING = """Train by width: mpiexec -n 4 python scripts/train_own.py --width 3

A paragraph that is
filled.

    a table    as it
    is         made
"""


def shown(capsys, options_class, program="train-own", text=DOCSTRING, word="--help-all"):
    with pytest.raises(SystemExit) as caught:
        parse(options_class, program, text, [word])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_command_stands_alone_and_own_options_come_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    text = shown(capsys, Own)
    assert text.startswith(
        "usage: hpcdl train-own [OPTIONS]\n\nTrain by width.\n\n"
        "    mpiexec -n 4 python scripts/train_own.py --width 3\n\n"
        "A paragraph that is filled.\n\n    a table    as it\n    is         made\n\noptions of train-own:\n  --width"
    )
    lines = text.splitlines()
    heads = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["options of train-own:", *(f"{name}:" for name in GROUPS)]
    assert lines.index("data:") < lines.index("model:") < lines.index("optimization:") < lines.index("run:")
    assert "one-peer" in text and max(map(len, lines)) <= 70
    (resume,) = (index for index, line in enumerate(lines) if line.startswith("  --resume"))
    assert resume > lines.index("run:")


def test_help_has_the_options_that_most_need_and_help_all_the_rest(capsys):
    short, every = (shown(capsys, Own, word=word) for word in ("--help", "--help-all"))
    first, others = ({*re.findall(r"^  (--[-a-z0-9]+)", text, re.MULTILINE)} for text in (short, every))
    assert first == {"--width", *("--" + name.replace("_", "-") for name in MOST_USED)} and len(MOST_USED) == 10
    assert others == first | {"--" + name.replace("_", "-") for name in COMMON} | {"--config", "--trust"}
    assert short.endswith(
        f"--help-all shows {len(others - first)} more options, of data, model, optimization and run.\n"
    )
    assert shown(capsys, Own, word="-h") == short and "--help-all shows" not in every


def test_a_program_that_does_not_train(capsys):
    text = shown(capsys, Placed, "look", word="--help")
    assert text.startswith("usage: hpcdl look RUN [OPTIONS]\n") and "\noptions:\n" in text and "\nrun:" not in text
    assert shown(capsys, Placed, "look", word="--help-all") == text


def test_every_common_option_has_its_group():
    assert {field.metadata["group"] for field in dataclasses.fields(Options)} == set(GROUPS)
    assert {name.replace("-", "_") for name in OTHERS_SAY.values()} <= set(COMMON)


def test_a_narrow_terminal_and_no_command():
    assert described("Say it. And more\nof it.", 40) == "Say it.\n\nAnd more of it."
