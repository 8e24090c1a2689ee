"""What is one's own is found by its name, made with what it takes, and refused in one line that says where it fails."""

import sys
import textwrap

import pytest

from hpcdl.errors import UsageError
from hpcdl.plugins import call_plugin, is_plugin, load_plugin, names_in, names_in_line, refuse_untrusted


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function: write a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(name, text):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_what_looks_like_a_name_of_ones_own():
    assert is_plugin("a:b") and is_plugin("a.b:c,width=3") and is_plugin("mlp:f")
    assert not any(map(is_plugin, ("mlp:256,128", "a/b.h5", ":f", "a:", "a-b:c", "digits")))


def test_settings_are_values_of_python_or_texts(module):
    name = module("shop.parts", "class Part: pass")
    _, settings = load_plugin(f"{name}:Part,width=3,rate=1e-2,on=True,kind=relu,none=None", "x")
    assert settings == {"width": 3, "rate": 0.01, "on": True, "kind": "relu", "none": None}
    assert load_plugin(f"{name}:Part", "x")[0].__name__ == "Part"


def test_what_it_takes_is_given(module):
    name = module("take", "def f(features, width=2, *, dtype): return features, width, dtype")
    found, settings = load_plugin(f"{name}:f", "x")
    offered = {"features": 5, "dtype": "d", "classes": 3}
    assert call_plugin(found, settings, offered, "x") == (5, 2, "d")
    assert call_plugin(found, {"width": 7, "features": 1}, offered, "x") == (1, 7, "d")
    with pytest.raises(UsageError, match="there is no setting 'deep'; it takes features, width, dtype"):
        call_plugin(found, {"deep": 1}, offered, "x")
    with pytest.raises(UsageError, match="settings missing: features; write them as in NAME,features=VALUE"):
        call_plugin(found, {}, {"dtype": 1}, "x")
    assert call_plugin(lambda **names: names, {"any": 1}, {"features": 2}, "x") == {"any": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere:f", "No module named 'nowhere'"),
        ("bad:absent", "has no attribute 'absent'"),
        ("broken:f", r"ZeroDivisionError: division by zero \(broken.py, line 3\)"),
        ("leaves:f", "leaves the program, with status 3"),
        ("bad:f,width", "a setting is written NAME=VALUE, not 'width'"),
        ("bad", "should be an importable package.module:name"),
    ],
)
def test_refusals(module, text, words):
    module("bad", "def f(): pass")
    module("broken", "\ndef g():\n    1 / 0\ng()")
    module("leaves", "import sys; sys.exit(3)")
    with pytest.raises(UsageError, match=words) as refusal:
        load_plugin(text, "--model")
    assert "\n" not in str(refusal.value)


def test_what_fails_inside_is_one_line_that_says_where(module):
    found, _ = load_plugin(f"{module('fails', chr(10) + 'def f(width=1):' + chr(10) + '    return [][width]')}:f", "x")
    with pytest.raises(UsageError, match=r"--data fails:f: IndexError: list index out of range \(fails.py, line 3\)"):
        call_plugin(found, {}, {}, "--data fails:f")


@pytest.mark.parametrize(
    ("option", "text", "names"),
    [
        ("model", "nets:Net,width=3", ["nets:Net"]),
        ("model", "torch:mlp:net", ["mlp:net"]),
        ("model", "mlp:64,64,dueling", []),
        ("model", "mlp:dueling|minatar:f|gpt:layers=2", ["minatar:f"]),
        ("data", "mlp:f", ["mlp:f"]),
        ("env", "package:Name-v0", ["package:Name-v0"]),  # which gymnasium imports
        ("env", "9names/x:Name-v0", ["9names/x:Name-v0"]),
        ("env", "minatar:space_invaders", []),
        ("env", "minatar:a:b", ["minatar:a:b"]),
        ("algorithms", "ring,mine:ring", ["mine:ring"]),
        ("launcher", "touch x;", ["touch x;"]),
        ("schedule", "os:abort", []),
    ],
)
def test_names_in_the_value_of_an_option(option, text, names):
    assert names_in(option, text) == names


def test_names_in_a_line():
    """Quotes hide none: the line is divided as the program divides it."""
    found = names_in_line("""-n 2: train-dqn --model 'a':"B" --env=c:d --lr 0.1 --optimizer torch:Adam --trust e""")
    assert found == [("model", "a:B"), ("env", "c:d"), ("trust", "e")]
    assert names_in_line("--model 'a:b") == []


def test_what_a_file_names_is_trusted_by_name_or_by_place(tmp_path):
    (tmp_path / "other").symlink_to(tmp_path / "runs")
    file, names = str(tmp_path / "runs/a/config.yaml"), [("model", "a:B"), ("data", "c:d")]
    for trust in ([file], [tmp_path / "runs"], [tmp_path / "other/a"], ["a:B,width=3", "c:d"], ["torch:a:B", "c:d"]):
        refuse_untrusted(names, file, map(str, trust))
    for trust in ([], ["a:B"], ["a:Bc", "c:d"], [tmp_path / "runs/a/c"], [tmp_path / "run"]):
        with pytest.raises(UsageError, match=r"config.yaml names (a:B|c:d) \((model|data)\), code that"):
            refuse_untrusted(names, file, map(str, trust))
