"""Whatever options a script is given, on the command line or in a file: a run, or one line that refuses it.

Each case takes one of the programs, gives some of its options values that were picked to hurt, and starts it in this
process: on one rank, with 20 rows, for one step. Memory is limited to a little more than there is in use, and so is the
time: nothing may be allocated, or gone through, by a number that nobody has looked at."""

import importlib
import math
from typing import get_args

import pytest
import yaml
from few import write_few
from fuzz import cases
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_ends, ends
from mpi4py import MPI

from hpcdl.comm.compression import methods
from hpcdl.comm.gossip.topology import topology
from hpcdl.comm.grid import AXES
from hpcdl.data.formats.prepare import Output
from hpcdl.data.formats.prepare_text import prepare_text
from hpcdl.federated.server import SETTINGS as SERVERS
from hpcdl.formatting import dashed
from hpcdl.models import SETTINGS as MODELS
from hpcdl.optim import SETTINGS as OPTIMIZERS
from hpcdl.optim.schedules import SETTINGS as SCHEDULES
from hpcdl.runs.options import kinds_of

TRAIN = """sequential allreduce coordinate_descent federated pipeline grid local_sgd svrg sgld gossip hogwild kmeans
    parameter_server tensor_parallel context_parallel model_parallel fully_sharded"""
PROGRAMS = [f"train_{name}" for name in TRAIN.split()]
MANY = ["1e20", "100000000000000000000", "2147483648", "9223372036854775807", "9223372036854775808", "9" * 5000]
BAD = ["", "-1", "nan", "inf", "-inf", "1e308", "-1e308", "1e-200", "5e-324", "0x10", "null", "half", "1\n2", "\ud800"]
FEW = ["0", "1", "2", "3", "0.5", " 1", "1_0", "٣"]
NUMBERS = st.sampled_from([*FEW, *MANY, *BAD])
LARGE = st.sampled_from([*MANY, *BAD])
NAMES = st.sampled_from(["", ":", "..", "a b", "x" * 5000, "é\ud800", "\x1b[31m", "{", "[/]", "1\n2", "%s", "null"])
PATHS = st.sampled_from(
    ["/dev/null", "/proc/self/mem", "/proc/nothing", "x" * 5000, "y" * 200 + "/" + "z" * 300, "a\0b"]
)


def specs(settings):
    """NAME, or NAME:KEY=VALUE,... with a value that hurts."""
    pairs = st.tuples(st.sampled_from(sorted(settings)), st.sampled_from([*{k for v in settings.values() for k in v}]))
    return st.tuples(pairs, NUMBERS).map(lambda drawn: f"{drawn[0][0]}:{drawn[0][1]}={drawn[1]}")


WIDTHS = st.lists(NUMBERS, min_size=1, max_size=3).map(lambda drawn: "mlp:" + ",".join(drawn))
GPTS = ["gpt:layers=99999999", "gpt:layers=99999999,width=4", "gpt:heads=3", "gpt:width=8,heads=2"]
DEEP = st.sampled_from(["mlp:99999999999", *GPTS])
STRAGGLERS = ["0:2", "0:inf", "0:1e308", "0:nan", "0:", "1:2", "-1:2", "random:2:2", "random:0:2", "0:0.5"]
GRAPHS = ["torus:0x0", "torus:1x1", "torus:1e20x1", "random-regular:degree=-1", "erdos-renyi:p=nan", "erdos-renyi:p=-1"]
GRIDS = st.tuples(st.sampled_from([*AXES, ""]), NUMBERS).map("=".join)
FUNCTIONS = ["..:x", ":", ".:x", "a..b:x", "os:path", "os:nothing", "this is:no", "json.nothing:x"]
COMPRESSIONS = {
    each.name: each.settings | {"feedback": "", each.first or "feedback": ""} for each in methods().values()
}
PARTITIONS = ["shards", "dirichlet", "column", "iid", "by-label"]
FIELDS = {
    "model": specs(MODELS) | WIDTHS | DEEP | st.sampled_from([*MODELS]),
    "optimizer": specs(OPTIMIZERS),
    "schedule": specs(SCHEDULES) | st.sampled_from(["gpipe", "naive", "interleaved", "pipedream"]),
    "lr_schedule": specs(SCHEDULES),
    "server_optimizer": specs(OPTIMIZERS | SERVERS),
    "compress": specs(COMPRESSIONS) | st.tuples(st.sampled_from([*COMPRESSIONS]), NUMBERS).map(":".join),
    "compress_pull": specs(COMPRESSIONS),
    "outer": specs(OPTIMIZERS) | st.just("average"),
    "partition": st.tuples(st.sampled_from(PARTITIONS), NUMBERS).map(":".join),
    "augment": NUMBERS.map("shift:{}".format) | st.just("flip"),
    "straggler": st.sampled_from(STRAGGLERS),
    "topology": st.sampled_from(GRAPHS) | NUMBERS.map("random-regular:degree={}".format),
    "grid": GRIDS,
    "allreduce": st.sampled_from([*FUNCTIONS, "ring", "auto", "tree"]),
    "out": PATHS,
    "resume": PATHS,
    "draw": st.sampled_from(["graph.txt", "/proc/graph.png"]),
    "device": NAMES,  # where there is a GPU, it is not asked for
    # What these ask for they get: of time, or the job's end.
    "pretend_compute": st.sampled_from(["0", "0.01", "1e10", "1e308", "inf", "-1"]),
    "timeout": st.sampled_from(["0", "1e10", "1e308", "inf", "nan", "-1", "1000000"]),
    "local_steps": st.sampled_from(["0", "0.5", "3", "-1", "nan", "inf", "1e7", "1e308", "9" * 30]),
    "local_epochs": st.sampled_from(["0", "1", "-1", "nan", "1e20", "9" * 30]),
    "noise": LARGE,
}


def values(name, kind):
    """What the option of this name and type is given."""
    if name == "data":  # what files may hold is the affair of tests/data
        return st.sampled_from(["digit", "", "/dev/null", "nowhere.h5", "a\0b", 5000 * "x", "/proc/self/mem"]) | PATHS
    if name in FIELDS:
        return FIELDS[name] | NAMES
    if kind is bool:
        return st.just("true") | NAMES
    if kind in (str, int, float) or not all(isinstance(each, str) for each in get_args(kind)):
        return NAMES if kind is str else NUMBERS
    return st.sampled_from(get_args(kind)) | NAMES


@st.composite
def starts(draw):
    """A program, the options that it is given, and which of these stand in a file, as what YAML makes of them."""
    program = draw(st.sampled_from(sorted(PROGRAMS)))
    kinds = kinds_of(importlib.import_module(f"hpcdl.scripts.{program}").main.options_class)
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
    given = {name: draw(values(name, kinds[name])) for name in names}
    inside = draw(st.lists(st.sampled_from(names), unique=True))
    nested = st.sampled_from([None, [], {}, [1, [2]], {"a": None}, True, 1e308, math.inf, 10**20, 3])
    filed = {name: draw(st.just(given[name]) | nested) for name in inside}
    return program, {name: value for name, value in given.items() if name not in filed}, filed, draw(st.booleans())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the programs find two small data sets."""
    path = tmp_path_factory.mktemp("fuzz")
    write_few(path, 2)
    (path / "few.h5").rename(path / "two.h5")
    write_few(path)
    (path / "text.txt").write_text("the cat sat on the mat and the dog sat on the cat " * 3)
    prepare_text(str(path / "text.txt"), Output(str(path / "text.h5")), length=4)
    return path


def arguments(folder, program, given, filed, text):
    """The command line of a case: what is asked for, in the smallest of runs."""
    small = {"data": str(folder / ("text.h5" if text else "few.h5"))}
    if program == "train_kmeans":
        small |= {"clusters": "2", "rounds": "1"}
    else:
        small |= {"model": "gpt:layers=1,width=8,heads=2" if text else "mlp:4", "progress": "none", "out": "none"}
        small |= {"time_limit": "0.001", **({"rounds": "1"} if program in ROUNDS else {"steps": "1"})}
        small |= {"clients": "3"} if program == "train_federated" else {}
    if program == "train_coordinate_descent" and not text:
        small |= {"data": str(folder / "two.h5"), "model": "logistic"}
    if program == "train_hogwild" and not text:
        small |= {"model": "softmax"}
    if program == "train_parameter_server":
        small |= {"servers_on_workers": "true"}
    if "epochs" in given:
        small.pop("steps", None)
    options = {name: value for name, value in small.items() if name not in filed} | given
    if filed:
        (folder / "c.yaml").write_text(yaml.safe_dump(filed))
        options["config"] = str(folder / "c.yaml")
    return [f"--{dashed(name)}" + f"={value}" * (name != "servers_on_workers") for name, value in options.items()]


ROUNDS = {"train_federated", "train_coordinate_descent"}


@given(starts())
@cases(300)
def check(folder, start):
    program, given, filed, text = start
    options = arguments(folder, program, given, filed, text)
    assert_ends(program, options)


@pytest.mark.long
def test_a_run_or_one_line(folder, monkeypatch):
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("a program on one rank")
    monkeypatch.chdir(folder)
    topology("ring", 1, 0)
    for program in PROGRAMS:  # what is loaded once is no case's memory
        assert_ends(program, arguments(folder, program, {}, {}, False))
        ends(program, arguments(folder, program, {}, {}, True))
    check(folder)
