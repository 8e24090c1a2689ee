"""Whatever is changed in a checkpoint: a run goes on from it, and it is evaluated, or one line refuses it.

What is changed inside gets a right checksum again, as if another program had written it; then bytes are changed."""

import contextlib
import copy

import h5py
import numpy as np
import pytest
from fuzz import cases, damage, small_run
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_ends

from hpcdl.checkpoint.attributes import ATTRIBUTES
from hpcdl.checkpoint.checkpoint_file import Checkpoint

NESTED = [(name, inner) for name, kind in ATTRIBUTES.items() if isinstance(kind, dict) for inner in kind]
PATHS = [*[(name,) for name in ATTRIBUTES], *NESTED, ("scores", "test_accuracy"), ("scores", "replica_test_accuracy")]
PATHS += [("layout", 0, "shape"), ("layout", 0, "dtype"), ("layout", 0), ("fixed", "clients"), ("else",)]
VALUES = [None, True, "", "x", "mlp:4", "digits", "adam", -1, 0, 3, 2**62, 10**30, 0.5, 1e308]
VALUES += [float("nan"), float("inf"), [], {}, [1], [[1]], {"a": 1}, ["x", None], "x" * 5000, "é\x1b[31m\n"]
FORMS = {
    "as float16": lambda vector: vector.astype("f2"),
    "as float64": lambda vector: vector.astype("f8"),
    "as integers": lambda vector: vector.astype("i8"),
    "as truths": lambda vector: vector > 0,
    "as texts": lambda vector: vector.astype("S3"),
    "as complex numbers": lambda vector: vector.astype("c8"),
    "big-endian": lambda vector: vector.astype(">f4"),
    "shorter": lambda vector: vector.ravel()[:-1],
    "longer": lambda vector: np.append(vector, vector.ravel()[:1]),
    "in rows": lambda vector: vector.reshape(1, -1),
    "of no elements": lambda vector: vector.ravel()[:0],
    "one number": lambda vector: vector.ravel().sum(),
    "not finite": lambda vector: np.full_like(vector, np.nan),
    "infinite": lambda vector: vector * np.float32("inf"),
}
ABOUT = st.sampled_from(["format", "version", "attributes", "checksum"])
TEXTS = st.sampled_from([None, "", "x", "[]", "{}", "null", "[" * 3000, 1, 2.5, [1, 2], "hpcdl checkpoint"])


@st.composite
def changes(draw):
    """(what is changed, and how), up to three of them."""
    attribute = st.tuples(st.just("attribute"), st.sampled_from(PATHS), st.sampled_from(["drop", *range(len(VALUES))]))
    vector = st.tuples(st.just("vector"), st.integers(0, 1), st.sampled_from(["drop", "rename", "add", *FORMS]))
    about = st.tuples(st.just("about"), ABOUT, TEXTS)
    byte = st.tuples(st.just("byte"), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
    cut = st.tuples(st.just("cut"), st.floats(0, 1), st.just(0))
    inside = draw(st.lists(attribute | vector | attribute, max_size=2))
    return inside, draw(st.lists(about | byte | byte | cut, max_size=1 if inside else 3))


def change_attribute(attributes, path, how):
    """Drop what lies there, or put another value in its place; where there is no such place, nothing."""
    *above, name = path
    for each in above:
        try:
            attributes = attributes[each]
        except (KeyError, IndexError, TypeError):
            return
    if how == "drop" and isinstance(attributes, dict):
        attributes.pop(name, None)
    elif isinstance(attributes, dict) or (isinstance(attributes, list) and name in range(len(attributes))):
        attributes[name] = copy.deepcopy(VALUES[how]) if how != "drop" else None


def change_vector(vectors, which, how):
    """Drop, rename or reshape one of the vectors."""
    name = sorted(vectors)[which % len(vectors)] if vectors else None
    if how == "add" or name is None:
        vectors["optimizer/another"] = np.ones(3)
    elif how in FORMS:
        # A change before it may have left nothing that could be changed so.
        with contextlib.suppress(TypeError, ValueError), np.errstate(all="ignore"):
            vectors[name] = np.asarray(FORMS[how](vectors[name]))
    else:
        vector = vectors.pop(name)
        if how == "rename":
            vectors[name + "s"] = vector


def change_file(path, what, where, how):
    """Change what stands around it, or bytes of the file, and leave the checksum."""
    if what == "about":
        with h5py.File(path, "a") as file:
            del file.attrs[where]
            if how is not None:
                file.attrs[where] = how
        return
    damage(path, where, how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three steps, and its data."""
    path = tmp_path_factory.mktemp("fuzz")
    small_run(path, "--trace", "0")
    return path


@given(changes())
@cases(250)
def check(folder, made):
    inside, around = made
    path, found = folder / "a" / "changed.h5", Checkpoint.read(folder / "a")
    found = Checkpoint(dict(found.vectors), copy.deepcopy(found.attributes))
    for what, where, how in inside:
        if what == "attribute":
            change_attribute(found.attributes, where, how)
        else:
            change_vector(found.vectors, where, how)
    found.write(path)
    for what, where, how in around:
        if what != "about" or h5py.is_hdf5(path):
            try:
                change_file(path, what, where, how)
            except (OSError, KeyError, RuntimeError):
                break  # it is no file that h5py could change any more
    evaluated = assert_ends("evaluate", [str(path)])
    resumed = assert_ends("train_sequential", ["--resume", str(path), "--out", "none", "--steps", "4"])
    if not inside and not around:
        assert evaluated == resumed == 0
    assert 1 not in (evaluated, resumed) or not inside


@pytest.mark.long
def test_it_goes_on_or_one_line_refuses(alone, folder, monkeypatch):
    monkeypatch.chdir(folder)
    check(folder)
