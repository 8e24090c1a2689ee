"""Compile every kernel for every element type that tests use, on all cores: python compile.py

tests/conftest.py runs this program first, so that no test waits for a compiler. Cached code is not compiled again."""

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.kernels import gather, libsvm, reduce, replay_ring, shared, shuffle, sum_tree, svrg, td
from hpcdl.kernels.cases import CASES
from hpcdl.models import make_model
from hpcdl.models.linear_form import linear_form
from hpcdl.optim import make_optimizer
from hpcdl.parallel.dual_ascent import Ascent
from hpcdl.parallel.thread_team import ThreadTeam, words_for


def compile_case(name: str) -> None:
    for dtype in CASES[name].dtypes:
        args = CASES[name].make(1, 3, dtype, np.random.default_rng(0))
        CASES[name].kernel.compile(args[0].dtype)


def linear_problem(name: str, y: np.ndarray, kind: str):
    """Return a linear model, data and the model's form; kind: "float32 of sparse" for sparse rows of float32."""
    of_rows, _, rows = kind.partition(" of ")
    x, dtype = np.eye(3, dtype=of_rows), of_rows if of_rows.startswith("float") else "float32"
    data = from_arrays(CSR.of(x) if rows == "sparse" else x, y, dtype=dtype)
    model = make_model(name, (3,), int(y.max()) + 1, dtype, sparse=data.sparse)
    return model, data, linear_form(model, "compile.py")


def compile_hogwild(kind: str) -> None:
    """Compile HOGWILD!'s rounds, which have no case."""
    model, data, form = linear_problem("softmax", np.arange(3), kind)
    w = np.zeros(model.layout.size, model.layout.dtype)
    optimizer = make_optimizer("sgd", w.size, w.dtype, lambda step: 0.1)
    ThreadTeam(form, data, w, optimizer, threads=1, locking="none", batch=1, words=words_for(1)).close()


def compile_ascent(kind: str) -> None:
    """Compile the passes of dual coordinate ascent."""
    _, data, form = linear_problem("svm", np.array([0, 1, 1]), kind)
    Ascent(data, form, (0, 1), weight_decay=0.1, l1=0.0, seed=0, threads=1, locking="none").compile()


def compile_loops(dtype: str) -> None:
    """Compile loops for one element type: reductions, shared memory, gathers, SVRG, temporal differences."""
    for loop in (reduce.add_into, reduce.max_into, reduce.min_into, shared.all_reduce, *shared.OVER_NODES):
        loop.compile(dtype)
    for rows in gather.gather.values():
        rows.compile(dtype)
    if dtype.startswith("float"):
        svrg.compile_for(dtype)
        td.ready(dtype)


def compile_the_rest(_: None) -> None:
    """Compile the loops that have only one element type."""
    for loop in shared.FLAGS:
        loop.compile("int64")
    text, numbers, places = np.frombuffer(b"", np.uint8), np.empty(0), np.zeros(libsvm.WORDS, np.int64)
    libsvm.count(text, 0)
    libsvm.parse(text, 0, 0, 0, numbers, places, np.empty(0, np.int32), numbers, np.empty((0, 3), np.int64), places)
    shuffle.ready(shuffle.LONG)
    sum_tree.SumTree(1)
    replay_ring.ready()


FLOATS = "float32", "float64"
JOBS = {
    compile_case: CASES,
    compile_hogwild: [f"{dtype} of {rows}" for rows in ("sparse", "dense") for dtype in FLOATS] + ["uint8 of dense"],
    compile_ascent: ["float64 of sparse", "float64 of dense", "float32 of dense", "uint8 of dense"],
    compile_loops: ["float32", "float64", "int64", "int32", "int16", "int8", "uint8"],
    compile_the_rest: [None],
}

if __name__ == "__main__":
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(compiles, what) for compiles, them in JOBS.items() for what in them]:
            done.result()
