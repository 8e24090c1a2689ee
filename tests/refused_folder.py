"""The folder in which the programs of the table of refusals (tests/refusals.py) start: small data, modules, runs."""

import shutil
from pathlib import Path

import h5py
import numpy as np
from few import write_few
from in_process import ends

from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_text import prepare_text

HERE = Path(__file__).parent
MODULE = HERE.joinpath("chains.py").read_text()


def write_data(path, x, y, classes):
    """A data file whose two parts are the same."""
    with h5py.File(path, "w") as file:
        for part in ("train", "test"):
            file[f"{part}/x"], file[f"{part}/y"] = x, y
        file.attrs["classes"] = classes


def write_folder(folder):
    """Write it; programs are started on one rank, in this process."""
    write_few(folder, 2)
    (folder / "few.h5").rename(folder / "two.h5")
    write_few(folder)
    write_data(folder / "penguins.h5", np.ones((4, 3)), np.arange(4.0), 0)
    write_data(folder / "narrow.h5", np.arange(20.0).reshape(20, 1), np.arange(20) % 2, 2)
    write_data(folder / "same.h5", np.ones((9, 3)) * (np.arange(9) % 2)[:, None], np.arange(9) % 2, 2)
    (folder / "words.txt").write_text("the cat sat on the mat and the dog sat on the cat " * 9)
    prepare_text(str(folder / "words.txt"), Output(str(folder / "text.h5")), length=10)
    (folder / "mine.html").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "begun").mkdir()
    (folder / "begun" / "config.yaml").touch()
    (folder / "bad.h5").write_text("x,y\n1,2\n")
    for name, text in {"pieces": "0 1\n", "far": "0 7\n", "heavy": "0 1 0.7\n1 2 0.7\n2 3 0.1\n"}.items():
        (folder / f"{name}.edges").write_text(text)
    (folder / "line.yaml").write_text("line: [train-allreduce]\n")
    (folder / "refusedchains.py").write_text(MODULE)
    shutil.copy(HERE / "torch_nets.py", folder)
    shutil.copy(HERE.parent / "docs" / "examples" / "cnn.py", folder)
    small = ["--model", "softmax", "--epochs", "1", "--progress", "none", "--out", str(folder / "run")]
    assert ends("train_sequential", small)[0] == 0
