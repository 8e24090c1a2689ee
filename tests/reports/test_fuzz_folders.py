"""Whatever the files in a run's folder hold: who reads them tells of it, in a line or on a page, and nothing breaks.

report, watch, export-metrics, postmortem and a run that goes on read configuration, metrics, summary, trace, notes of
faults, the journal of a search and recordings of the flight recorder, of which each case changes one or two."""

import json
import os
import shutil

import pytest
from fuzz import cases, damaged, small_run
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_ends, ends
from mpi4py import MPI

from hpcdl.comm import Communicator
from hpcdl.comm.diagnostics.flight_recorder import FlightRecorder
from hpcdl.comm.progress import record_with

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="programs on one rank")
RUN = "config.yaml", "metrics.jsonl", "summary.json", "started.json", "trace.json", "injected.jsonl"
SEARCH = "journal.jsonl", "config.yaml", "trials.csv"
VALUES = [None, True, "", "x", -1, 0, 3, 2**62, 10**400, 0.5, -0.0, 1e308, [], {}, [1], [[1]], {"a": 1}, "x" * 5000]
VALUES += ["é\x1b[31m\n", "<script>alert(1)</script>", "../..", float("nan"), float("inf"), [None] * 3, "1e999"]
ODD = [b"", b"\n\n\n", b"[" * 100_000, b"{" * 2000, b"\xff\xfe", b'{"step": 1e400}\n', b"a: &a [*a]\n", b"null\n"]
ODD += [b"a: &x [1,1,1]\nb: &y [*x,*x,*x]\n", b"!!python/object/apply:os.system ['touch ran']\n", b"model: os:abort\n"]
ODD += [b"data: shutil:rmtree,path=.\n", b"allreduce: os:abort\n", b"step,epoch\n" * 3, b"\0" * 100, b"- 1\n"]
WHICH, NUMBER = st.integers(0, 10**6), st.floats(0, 1, exclude_max=True)
HOW = st.one_of(
    st.tuples(st.just("value"), WHICH, st.integers(0, len(VALUES) - 1)),
    st.tuples(st.just("value"), WHICH, st.integers(0, len(VALUES) - 1)),
    st.tuples(st.just("drop"), WHICH, st.just(0)),
    st.tuples(st.just("flip"), NUMBER, st.integers(1, 255)),
    st.tuples(st.just("cut"), NUMBER, st.just(0)),
    st.tuples(st.just("odd"), st.integers(0, len(ODD) - 1), st.sampled_from([0, 1])),
    st.tuples(st.sampled_from(["folder", "gone", "loop"]), st.just(0), st.just(0)),
)


def places(found, above=()):
    """The paths of all values in what JSON has made."""
    pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for name, value in pairs:
        yield (*above, name)
        yield from places(value, (*above, name))


def rewritten(text, how, which, value):
    """A file of JSON, of lines of it, or of NAME: VALUE, with one other value, or without it."""
    lines = text.splitlines()
    whole = text.startswith("{") and len(lines) > 1 and not lines[0].endswith("}")
    units = [text] if whole else lines
    if not units:
        return text
    at = which % len(units)
    try:
        found = json.loads(units[at])
    except (ValueError, RecursionError):
        name, _, _ = units[at].partition(":")
        units[at] = "" if how == "drop" else f"{name}: {VALUES[value]}"
        return "\n".join(units) + "\n"
    paths = list(places(found))
    if paths:
        *above, name = paths[(which // len(units)) % len(paths)]
        inside = found
        for each in above:
            inside = inside[each]
        if how == "drop":
            del inside[name]
        else:
            inside[name] = VALUES[value]
    units[at] = json.dumps(found)
    return "\n".join(units) + "\n"


def change(path, how, where, with_):
    """Change a file, or put something else in its place; what was put there stays."""
    if path.is_dir() or path.is_symlink():
        return
    content = path.read_bytes() if path.is_file() else b""
    if how in ("value", "drop") and content:
        try:
            path.write_text(rewritten(content.decode(), how, where, with_))
        except UnicodeError:  # a recording, which is no text
            path.write_bytes(content[: where % (1 + len(content))])
    elif how in ("flip", "cut"):
        path.write_bytes(damaged(content, where, with_))
    elif how == "odd":
        path.write_bytes(content * with_ + ODD[where])
    else:
        path.unlink(missing_ok=True)
        if how == "folder":
            path.mkdir()
        elif how == "loop":
            path.symlink_to(path.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, a search, and a recording, as they are written."""
    path = tmp_path_factory.mktemp("fuzz")
    small = small_run(path, "--trace", "9", "--inject=clock:step=2")
    line = ["train-sequential", *small, "--epochs", "1", "--space", "lr=0.1..0.2", "--trials", "1"]
    assert ends("search", [*line, "--out", str(path / "s")])[0] == 0
    (path / "f" / "flight").mkdir(parents=True)
    comm = Communicator(MPI.COMM_SELF, ends_job=False)
    record_with(FlightRecorder(path / "f" / "flight" / "rank-0000.bin", 0, 1, 50, [comm]))
    comm.barrier()
    record_with(None)
    comm.free()
    return path


def read_changed(folder, name, changes, *programs):
    """Programs on a copy of a folder of which files were changed."""
    copy = folder / "changed"
    shutil.copytree(folder / name, copy)
    try:
        for file, how in changes:
            change(copy / file, *how)
        ended = [assert_ends(program, [each.format(copy) for each in given]) for program, *given in programs]
        assert not os.path.exists("ran") and not (copy / "ran").exists(), "what stands in a file was done"
    finally:
        shutil.rmtree(copy)
    return ended


RESUME = "train_sequential", "--resume", "{}", "--out", "none", "--steps", "4", "--inject=clock:step=4"
READ = [("watch", "{}", "--once"), ("export_metrics", "{}", "--force"), RESUME]


CHECKS = [  # folder, cases, files that are changed, fewest changes, programs
    ("a", 60, RUN, 0, READ),
    ("a", 12, RUN, 1, [("report", "{}", "--force")]),
    ("s", 25, SEARCH, 1, [("search", "--resume", "{}"), ("watch", "{}", "--once")]),
    ("f", 60, ["flight/rank-0000.bin"], 1, [("postmortem", "{}")]),
]


@pytest.mark.long
@pytest.mark.parametrize("name, count, files, least, programs", CHECKS)
def test_who_reads_it_tells_of_it(folder, monkeypatch, name, count, files, least, programs):
    @cases(count)
    @given(st.lists(st.tuples(st.sampled_from(files), HOW), min_size=least, max_size=2))
    def check(changes):
        ended = read_changed(folder, name, changes, *programs)
        assert changes or ended == [0] * len(programs)

    monkeypatch.chdir(folder)
    check()
