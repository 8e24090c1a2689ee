"""Every CUDA kernel compiled for sm_90: to PTX, then by ptxas, whose registers are printed (pytest -s) and spills fail.

No GPU is needed, but NVIDIA's compiler library (libnvvm, of the CUDA toolkit or its packages), and ptxas for the rest.
"""

import functools
import importlib
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from hpcdl.kernels.bind import numba_types
from hpcdl.kernels.cases import CASES


@pytest.fixture(scope="module")
def gpu():
    """Return the module gpu.py, or skip without a compiler; Numba reads the capability of a stand-in device."""
    gpu = pytest.importorskip("hpcdl.kernels.gpu", reason="Numba has no CUDA target here")
    if gpu.SIMULATED:
        pytest.skip("the simulator compiles nothing")
    try:
        importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
    except ImportError as error:  # Numba's NvvmSupportError is one
        pytest.skip(" ".join(str(error).split()))
    with pytest.MonkeyPatch.context() as patch:
        device = SimpleNamespace(compute_capability=(9, 0))
        patch.setattr(importlib.import_module("numba.cuda.dispatcher"), "get_current_device", lambda: device)
        yield gpu


def ptxas():
    """Return the path of the assembler ptxas; None: not installed."""
    folders = [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    return shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


def marked(name):
    """Return the case, marked long (CI only) if elementwise: such bodies are compiled for the processor, too."""
    return pytest.param(name, marks=[pytest.mark.long] * (CASES[name].kernel.kind == "elementwise"))


@pytest.mark.long
@pytest.mark.parametrize("kind", [0, 1])  # which of its element types
@pytest.mark.parametrize("name", map(marked, CASES))
@pytest.mark.in_turn("kind")
def test_compiles(name, kind, gpu, tmp_path):
    case, assembler, rows = CASES[name], ptxas(), []
    dtype = case.dtypes[kind % len(case.dtypes)]
    element = case.make(1, 3, dtype, np.random.default_rng(0))[0].dtype
    for kernel in gpu.functions(case.kernel):
        text = compiled(gpu.cuda, kernel, element)
        assert ".target sm_90" in text and ".visible .entry" in text
        if assembler:
            rows.append((kernel.name, element, *assembled(assembler, text, tmp_path)))
    assert assembler or rows == []
    for kernel, element, registers, shared, spilled in rows:
        print(
            f"\n{name:24} {kernel:24} {element!s:8} {registers:3} registers {shared:5} B shared {spilled} B spilled",
            end="",
        )
        assert spilled == 0


@functools.cache
def compiled(cuda, kernel, element):
    """Return the PTX of a kernel; several cases share kernels."""
    types = numba_types(kernel.signature, element)
    body, returns = kernel.make(types[0].dtype), numba.types.void(*types)
    return cuda.compile(body, returns, cc=(9, 0), device=False, abi="numba", output="ptx")[0]


def assembled(assembler, text, folder):
    """Return (registers of a thread, bytes of shared memory of a block, bytes spilled) of the kernel in this PTX."""
    (folder / "kernel.ptx").write_text(text)
    command = [assembler, "-v", "-arch=sm_90", "-o", os.devnull, folder / "kernel.ptx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    registers = re.search(r"Used (\d+) registers", done.stderr)
    shared = re.search(r"(\d+) bytes smem", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert registers and spills, done.stderr
    return int(registers[1]), int(shared[1]) if shared else 0, sum(map(int, spills))
