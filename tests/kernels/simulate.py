"""Run the CUDA twins of all cases, or of the named ones, in Numba's simulator; print {case: traceback or ""} as JSON.

This is a program, as the simulator has to be chosen before Numba is imported."""

import copy
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import quick_simulator  # noqa: F401
from agreement import TOLERANCE, OnDevice, agrees
from bad_values import with_bad

from hpcdl.kernels import gpu
from hpcdl.kernels.cases import CASES

# More elements than threads, so that the grid strides; more columns than a block sums at once; none; a few.
SHAPES = {"float32": [(41, 21), (3, 130), (0, 3)], "float64": [(3, 5)]}


def launched(case, args, tolerance):
    """Launch the kernel on these arguments, and compare with its reference."""
    placed = {id(arg): arg.copy().view(OnDevice) for arg in args if isinstance(arg, np.ndarray)}
    device = [placed.get(id(arg), arg) for arg in args]  # an array that is passed twice is one array there, too
    agrees(case, device, copy.deepcopy(args), tolerance)


def unusual(name, dtype):
    """Return arguments of further calls: empty parts, a result that is an argument, more tokens than threads."""
    random = np.random.default_rng(2)

    def draw(*shape):
        return random.random(shape).astype(dtype)

    labels, tokens = random.integers(0, 9, 3), random.integers(0, 9, (2, 3)).astype(dtype)
    many, dy, gain = random.integers(0, 9, (10, 9)).astype(dtype), draw(5, 9), draw(9)
    return {
        "row_max": [(draw(3, 0), draw(3))],
        "partial_softmax": [(draw(3, 0), labels, 4, draw(3), draw(3, 0), draw(3, 2))],
        "finish_softmax": [
            (draw(3, 0), labels, 4, 9, draw(3, 2)),
            (draw(3, 2), labels + 1, 8, 9, draw(3, 2)),
            (draw(3, 2), labels - 9, 0, 9, draw(3, 2)),
        ],
        "embed": [
            (tokens, draw(0, 5), 4, 9, draw(6, 5)),
            (tokens, draw(6, 5), 3, 9, draw(6, 5)),
            (tokens - 0.5, draw(9, 5), 0, 9, draw(6, 5)),
            (tokens + 8, draw(9, 5), 0, 9, draw(6, 5)),
            (tokens - 8, draw(9, 5), 0, 9, draw(6, 5)),
        ],
        "embed_backward": [
            (tokens, draw(6, 5), 4, draw(0, 5)),
            (many, draw(90, 20), 3, draw(4, 20)),
            (many - 0.5, draw(90, 20), 0, draw(9, 20)),
        ],
        "layer_norm_backward": [(dy, draw(5, 9), gain, draw(5), draw(5), dy, draw(9), draw(9))],
        "rms_norm_backward": [(dy, draw(5, 9), gain, draw(5), dy, draw(9))],
    }.get(name, [])


def check(name, case):
    """Call a kernel with several shapes and element types, with NaN, and with unusual arguments."""
    for dtype in case.dtypes:
        for shape in SHAPES["float32" if len(case.dtypes) == 1 else dtype]:
            launched(case, case.make(*shape, dtype, np.random.default_rng(0)), TOLERANCE[dtype])
    if case.nan:
        args = case.make(5, 7, case.dtypes[0], np.random.default_rng(0))
        launched(case, with_bad(args), TOLERANCE["float32"])
    for args in unusual(name, case.dtypes[0]):
        launched(case, args, TOLERANCE["float32"])


def main():
    assert gpu.SIMULATED and gpu.THREADS * gpu.BLOCKS == 256
    wrong = {}
    for name in sys.argv[1:] or CASES:
        try:
            check(name, CASES[name])
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
