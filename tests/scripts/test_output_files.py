"""Files that a program could not write are refused before it measures anything; what is no file is never replaced."""

import os
import stat
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from few import write_few
from in_process import ends

SCRIPTS = Path(__file__).parents[2] / "scripts"
BENCHMARKS = {path.stem for path in SCRIPTS.glob("bench_*.py")} - {"bench_training", "bench_torch"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_few(tmp_path)
    (tmp_path / "x.json").mkdir()
    (tmp_path / "x.png").mkdir()
    (tmp_path / "file").touch()


def refused(program, *given):
    """The reason, in the one line that there is; nothing is left behind."""
    before = sorted(os.listdir())
    status, said = ends(program, [*given])
    assert status == 2 and said.count("\n") == 1, said
    assert sorted(os.listdir()) == before
    return said


@pytest.mark.parametrize("program", sorted(BENCHMARKS | {"doctor", "gpu_check"}))
def test_the_numbers_of_a_benchmark(program):
    for path, words in [
        ("no/such/x.json", "there is no such folder"),
        ("x.json", "Is a directory"),
        ("y" * 253 + ".json", "File name too long"),
        ("file/x.json", "there is no such folder"),
    ]:
        little = ["--megabytes", "1"] if program == "bench_checkpoint" else []  # for which a disk has room
        said = refused(program, *little, "--json", path)
        assert f"error: --json {path} cannot be written: {words}" in said


@pytest.fixture
def matplotlib(monkeypatch):
    """A stand-in that knows two kinds of pictures, which hold a line each."""

    class Figure:
        canvas = types.SimpleNamespace(get_supported_filetypes=lambda: {"png": "", "svg": ""})

    made = types.SimpleNamespace(Figure=Figure)
    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace(figure=made))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", made)


def test_the_picture_of_a_benchmark(matplotlib):
    for path, words in [
        ("no/x.png", "--plot no/x.png cannot be written: there is no such folder"),
        ("x.png", "--plot x.png cannot be written: Is a directory"),
        ("x.txt", "--plot x.txt: the name should end in .png, .svg or .pdf"),
    ]:
        assert words in refused("bench_batch_size", "--plot", path)


def test_a_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused("bench_batch_size", "--plot", "a.png")
    assert said == "bench-batch-size: error: --plot needs matplotlib: pip install 'hpcdl[report]'\n"
    small = ["--data", "few.h5", "--model", "softmax", "--steps", "1", "--out", "a", "--draw", "a.png"]
    assert "a picture needs matplotlib" in refused("train_gossip", *small)


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_a_data_file(more):
    np.savez("a.npz", x=np.ones((6, 2)), y=[0, 1] * 3)
    os.mkfifo("pipe")
    for path, words in [
        ("x.json", "x.json is a folder; name the file to be made"),
        ("pipe", "pipe is no file; name the file"),
        ("/proc/x.h5", "/proc/x.h5 cannot be written: "),
        ("no/x.h5", "the folder no does not exist"),
    ]:
        assert words in refused("prepare_data", "npz", "a.npz", path, *more)
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_a_file_that_is_there_is_replaced_as_a_whole():
    with open("k.json", "w") as file:
        file.write("older")
    little = ["--kernels", "scale", "--sizes", "64", "--seconds", "0.001"]
    assert ends("bench_kernels", [*little, "--json", "k.json"]) == (0, "")
    with open("k.json") as file:
        assert file.read().startswith('{\n  "schema_version": 1')


def test_few_rows_to_score():
    """As many as there are: 6."""
    with h5py.File("few.h5") as file:
        assert len(file["test/x"]) == 6
    little = ["--data", "few.h5", "--model", "mlp:4,4", "--steps", "1", "--repeats", "1", "--microbatches", "1"]
    assert ends("bench_model_parallel", little) == (0, "")
