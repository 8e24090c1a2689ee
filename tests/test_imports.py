"""Importing hpcdl, programs too, starts nothing and changes nothing in a user's process."""

import importlib.util
import json
import pkgutil
import subprocess
import sys

import pytest
from mpi4py import MPI

import hpcdl
import hpcdl.kernels
import hpcdl.scripts

LEFT_OUT = "hpcdl.__main__", "hpcdl.kernels.gpu"  # a program; kernels that need CUDA
TORCH = importlib.util.find_spec("torch") is not None
OF_TORCH = "hpcdl.torch", "hpcdl.rl.torch_values"

LOOK = """
import atexit, contextlib, importlib, json, os, signal, sys, threading, warnings
import numpy as np, threadpoolctl
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI  # starts MPI without that, as any module does that sends messages
import h5py, numba, rich.console, networkx  # what these change is theirs
with contextlib.suppress(ImportError):
    # Filters of warnings, an OpenMP of its own, a variable of the environment.
    import torch, torch._dynamo, torch.distributed, torch.fx

registered = []
atexit.register = lambda function, *arguments, **options: registered.append(function) or function


def state():
    return {
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "sys.exit": sys.exit,
        "threading.excepthook": threading.excepthook,
        "np.geterr": np.geterr(),
        "np.geterrcall": np.geterrcall(),
        "np.printoptions": np.get_printoptions(),
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "MPI": MPI.Is_initialized(),
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "threads of BLAS": {each["filepath"]: each["num_threads"] for each in threadpoolctl.threadpool_info()},
        "threads": threading.active_count(),
        "os.environ": dict(os.environ),
        "atexit": [each for each in registered if (each.__module__ or "").startswith("hpcdl")],
    }


before = state()
changes = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    after = state()
    changes += [f"{name}: {key}" for key in after if after[key] != before[key]]
    before = after
print(json.dumps(changes))
"""


def modules():
    """The names of all modules, programs among them."""
    for package in (hpcdl, hpcdl.kernels, hpcdl.scripts):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
            if not found.name.startswith(LEFT_OUT) and (TORCH or not found.name.startswith(OF_TORCH)):
                yield found.name


@pytest.mark.long
@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="starts a process of its own")
def test_importing_any_module_changes_nothing():
    names = list(modules())
    assert {"hpcdl.comm.failure", "hpcdl.launch.training", "hpcdl.kernels.reduce", "hpcdl.scripts.search"} <= set(names)
    done = subprocess.run([sys.executable, "-c", LOOK, json.dumps(names)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
