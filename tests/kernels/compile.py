"""Compile every kernel for every element type, on all cores: python compile.py

So that no test pays for it. What is in the cache is left as it is.
"""

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from hpcdl.kernels.cases import CASES


def compile_case(name: str) -> None:
    for dtype in CASES[name].dtypes:
        args = CASES[name].make(1, 3, dtype, np.random.default_rng(0))
        CASES[name].kernel.compile(args[0].dtype)


if __name__ == "__main__":
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_case, CASES))
