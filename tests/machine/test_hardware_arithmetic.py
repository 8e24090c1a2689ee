"""Each level computes in registers of its width, as its machine code shows, and measures what it is asked for."""

import json
import subprocess
import sys

import llvmlite.binding
import pytest

from hpcdl.errors import UsageError
from hpcdl.machine import hardware_arithmetic
from hpcdl.machine.hardware_arithmetic import CHAINS, Level, arithmetic, levels, measure_in_process
from hpcdl.machine.topology import MachineTopology, Processor, from_sys

X86 = llvmlite.binding.get_process_triple().startswith("x86_64")
TOLD = {"bits": 0, "cpus": from_sys().usable[:1], "siblings": [], "seconds": 1e-4}


def one_processor():
    number = from_sys().usable[0]
    return MachineTopology("made", "", [Processor(number, number, 0, 0)], [], {}, [number])


@pytest.mark.long
@pytest.mark.skipif(not X86, reason="reads x86-64 machine code")
@pytest.mark.parametrize("level", levels(), ids=lambda level: level.name)
def test_the_machine_code_has_the_width(level):
    rows = arithmetic(one_processor(), 1e-4, [level])
    assert [(row["dtype"], row["chains"]) for row in rows] == [(t, c) for t in ("float32", "float64") for c in CHAINS]
    for row in rows:
        assert row["what"] == "arithmetic" and row["level"] == level.name and row["bits"] == level.bits
        assert 0 < row["gflops"] <= row["gflops_best"] and (row["threads"], row["on"]) == (1, "cores")
        used = {int(bits) for bits, count in row["instructions"].items() if bits != "scalar" and count}
        assert max(used, default=0) == level.bits
        assert row["instructions"]["scalar"] > 0  # what is left of an array that fills no register


def test_siblings_and_several_cores_have_rows(monkeypatch):
    told = []
    monkeypatch.setattr(hardware_arithmetic, "compiled", lambda dtype: (None, {}))
    monkeypatch.setattr(hardware_arithmetic, "flops", lambda *args: told.append(args) or {"gflops": 1.0})
    rows = hardware_arithmetic.measure({"bits": 256, "cpus": [0, 1, 2], "siblings": [0, 3], "seconds": 1.0})
    found = [(row["chains"], row["threads"], row["on"] == "cores") for row in rows if row["dtype"] == "float64"]
    assert found == [*((c, 1, True) for c in CHAINS), (16, 2, True), (16, 3, True), (1, 2, False), (16, 2, False)]
    elements = {args[1]: max(a[2] for a in told if a[1] == args[1]) for args in told}
    assert elements == {"float32": 8 * 16, "float64": 4 * 16}


def test_levels_are_those_that_the_processor_has(monkeypatch):
    has = {"avx2": True, "fma": True}
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: has)
    monkeypatch.setattr(llvmlite.binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    assert [level.name for level in levels()] == ["scalar", "SSE", "AVX2"]
    monkeypatch.setattr(llvmlite.binding, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    assert [level.name for level in levels()] == ["scalar", "native"]


def test_what_a_user_tells_numba_is_left_out(monkeypatch):
    monkeypatch.setenv("NUMBA_LOOP_VECTORIZE", "0")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert "NUMBA_LOOP_VECTORIZE" not in Level("native", 128).environment()
    assert "NUMBA_CPU_NAME" not in Level("native", 128).environment()
    assert Level("scalar", 0).environment()["NUMBA_LOOP_VECTORIZE"] == "0"


def test_a_process_that_fails_is_one_line():
    with pytest.raises(UsageError, match=r"the loop for wrong could not be measured: .*KeyError"):
        measure_in_process(Level("wrong", 0), {"bits": 0})


def test_the_process_starts_no_mpi():
    """Under mpiexec it would be a rank too many."""
    code = (
        "import sys, json; from hpcdl.machine import hardware_arithmetic as h; "
        f"h.measure({json.dumps(TOLD)}); print('mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
