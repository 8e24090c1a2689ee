"""What is one's own is found by its name, made with what it takes, and refused in one line that says where it fails."""

import sys
import textwrap

import pytest

from hpcdl.comm.allreduce import algorithm
from hpcdl.errors import UsageError
from hpcdl.own import is_own, made, own


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
    assert is_own("a:b") and is_own("a.b:c,width=3") and is_own("mlp:f")
    assert not any(map(is_own, ("mlp:256,128", "a/b.h5", ":f", "a:", "a-b:c", "digits")))


def test_settings_are_values_of_python_or_texts(module):
    name = module("shop.parts", "class Part: pass")
    assert own(f"{name}:Part,width=3,rate=1e-2,on=True,kind=relu,none=None", "x")[1] == {
        "width": 3,
        "rate": 0.01,
        "on": True,
        "kind": "relu",
        "none": None,
    }
    assert own(f"{name}:Part", "x")[0].__name__ == "Part"


def test_what_it_takes_is_given(module):
    found, settings = own(
        f"{module('take', 'def f(features, width=2, *, dtype): return features, width, dtype')}:f", "x"
    )
    offered = {"features": 5, "dtype": "d", "classes": 3}
    assert made(found, settings, offered, "x") == (5, 2, "d")
    assert made(found, {"width": 7, "features": 1}, offered, "x") == (1, 7, "d")
    with pytest.raises(UsageError, match="there is no setting 'deep'; it takes features, width, dtype"):
        made(found, {"deep": 1}, offered, "x")
    with pytest.raises(UsageError, match="it needs features; write them as in :features=VALUE"):
        made(found, {}, {"dtype": 1}, "x")
    assert made(lambda **names: names, {"any": 1}, {"features": 2}, "x") == {"any": 1}


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
        own(text, "--model")
    assert "\n" not in str(refusal.value)


def test_what_fails_inside_is_one_line_that_says_where(module):
    found, _ = own(f"{module('fails', chr(10) + 'def f(width=1):' + chr(10) + '    return [][width]')}:f", "x")
    with pytest.raises(UsageError, match=r"--data fails:f: IndexError: list index out of range \(fails.py, line 3\)"):
        made(found, {}, {}, "--data fails:f")


def test_of_a_file_only_what_is_the_users_own_is_imported(module):
    """A checkpoint may come from anywhere: what it names must not be the standard library's, nor installed."""
    name = module("mine", "def f(): return 1")
    assert own(f"{name}:f", "x", from_file=True)[0]() == 1
    for bad in ("shutil:rmtree,path=/", "os.path:join", "numpy:save", "hpcdl.files:atomic_write", "yaml:load"):
        with pytest.raises(UsageError, match="stands in a file, and is no module of yours"):
            own(bad, "x", from_file=True)
        assert own(bad, "x")


def test_an_all_reduce_that_a_file_names_is_a_users_own(module):
    name = module("mine", "def ring(comm, vector, op): pass")
    assert algorithm(f"{name}:ring", from_file=True).blocking is not None
    for text in ("os:abort", "antigravity:fly", "numpy:add"):
        with pytest.raises(UsageError, match="stands in a file"):
            algorithm(text, from_file=True)
