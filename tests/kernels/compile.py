"""Compile every kernel for every element type, on all cores: python compile.py

So that no test pays for it. What is in the cache is left as it is.
"""

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from hpcdl.csr import CSR
from hpcdl.data import from_arrays
from hpcdl.kernels import libsvm, shuffle
from hpcdl.kernels.cases import CASES
from hpcdl.models import make_model
from hpcdl.models.linear_form import linear_form
from hpcdl.optim import make_optimizer
from hpcdl.parallel.thread_team import ThreadTeam, words_for


def compile_case(name: str) -> None:
    for dtype in CASES[name].dtypes:
        args = CASES[name].make(1, 3, dtype, np.random.default_rng(0))
        CASES[name].kernel.compile(args[0].dtype)


def compile_hogwild(kind: str) -> None:
    """The loops of threads, which have no case: of sparse rows, and of dense ones."""
    dtype, _, rows = kind.partition(" of ")
    x = np.eye(3, dtype=dtype)
    data = from_arrays(CSR.of(x) if rows == "sparse" else x, np.arange(3), dtype=dtype)
    model = make_model("softmax", (3,), 3, dtype, sparse=data.sparse)
    optimizer = make_optimizer("sgd", model.layout.size, dtype, lambda step: 0.1)
    form, w = linear_form(model, "HOGWILD!"), np.zeros(model.layout.size, dtype)
    ThreadTeam(form, data, w, optimizer, threads=1, locking="none", batch=1, words=words_for(1)).close()


if __name__ == "__main__":
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        loops = [f"{dtype} of {rows}" for rows in ("sparse", "dense") for dtype in ("float32", "float64")]
        list(pool.map(compile_hogwild, loops))
        list(pool.map(compile_case, CASES))
    for loop in libsvm.SIGNATURES:
        libsvm.compiled(loop)
    shuffle.loop()
