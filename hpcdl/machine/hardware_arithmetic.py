"""Peak arithmetic: a loop compiled for each register width, with one or many dependency chains.

Numba compiles for one processor per process, named by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES, so each level is measured
in its own process (`python -m hpcdl.machine.hardware_arithmetic PLAN`). The process verifies the level: it counts the
loop's vector instructions by width. A step has 2 flops per element, in one instruction or two."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np

from hpcdl.errors import UsageError
from hpcdl.kernels.device import CPU
from hpcdl.kernels.probes import DEPTH, multiply_add
from hpcdl.machine.hardware_threads import per_round, run_threads, thread_counts
from hpcdl.machine.topology import MachineTopology

CHAINS = (1, 2, 4, 8, 16)
PATIENCE = 300  # seconds until a process is killed
WIDTHS = {"x": 128, "y": 256, "z": 512}
PACKED = re.compile(r"\bv?(?:mul|add|fmadd\d+)p[sd]\b.*%([xyz])mm")
SCALAR = re.compile(r"\bv?(?:mul|add|fmadd\d+)s[sd]\b.*%xmm")


@dataclass(frozen=True)
class Level:
    """A register width: bits (0: not vectorized), Numba's target (cpu, features), and processor flags that it needs."""

    name: str
    bits: int
    cpu: str = ""
    features: str = ""
    needs: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process that measures this level."""
        ours = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE"
        said = {name: value for name, value in os.environ.items() if name not in ours}
        if self.cpu:
            said |= {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": self.features}
        if not self.bits:
            said |= {"NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "0"}
        return said | {"NUMBA_OPT": "3", "NUMBA_DISABLE_JIT": "0"}


AVX512 = ("avx512f", "avx512vl", "avx512bw", "avx512dq")
X86 = (
    Level("scalar", 0, "x86-64", "+sse2"),
    Level("SSE", 128, "x86-64", "+sse2"),
    Level("AVX2", 256, "x86-64-v3", "+avx2,+fma", ("avx2", "fma")),
    # For some processors the compiler prefers narrower registers and leaves the widest unused.
    Level("AVX-512", 512, "x86-64-v4", ",".join(f"+{name}" for name in (*AVX512, "fma")) + ",-prefer-256-bit", AVX512),
)
OTHERS = (Level("scalar", 0), Level("native", 128))


def levels() -> list[Level]:
    """Return the levels that this processor supports."""
    if not llvmlite.binding.get_process_triple().startswith("x86_64"):
        return list(OTHERS)
    has = llvmlite.binding.get_host_cpu_features()
    return [level for level in X86 if all(has.get(name, False) for name in level.needs)]


def arithmetic(found: MachineTopology, seconds: float, chosen: list[Level] | None = None) -> list[dict]:
    """Return the rows of the `chosen` levels, narrowest first; None: all levels. seconds: of each measurement."""
    rows = []
    for level in levels() if chosen is None else chosen:
        plan = {"bits": level.bits, "cpus": found.one_per_core(), "siblings": found.siblings(), "seconds": seconds}
        rows += [{"what": "arithmetic", "level": level.name, **row} for row in measure_in_process(level, plan)]
    return rows


def measure_in_process(level: Level, plan: dict[str, Any]) -> list[dict]:
    """Return the rows of a process that compiles for this level. Raises UsageError, with its last line, if it fails."""
    command = [sys.executable, "-m", __name__, json.dumps(plan)]
    asked: dict[str, Any] = {"env": level.environment(), "capture_output": True, "text": True, "timeout": PATIENCE}
    try:
        done = subprocess.run(command, **asked)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"the loop for {level.name} could not be measured: {error}") from None
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise UsageError(f"the loop for {level.name} could not be measured: {last[0]}")
    return json.loads(done.stdout)


def measure(plan: dict[str, Any]) -> list[dict]:
    """Return rows for float32 and float64: each number of chains on one processor, then the most chains on several."""
    rows, cpus, siblings = [], plan["cpus"], plan["siblings"]
    for dtype in ("float32", "float64"):
        loop, instructions = compiled(dtype)
        lanes = max(1, plan["bits"] // (8 * np.dtype(dtype).itemsize))
        about = {"dtype": dtype, "bits": plan["bits"], "instructions": instructions}
        where = [(chains, cpus[:1], "cores") for chains in CHAINS]
        where += [(CHAINS[-1], cpus[:count], "cores") for count in thread_counts(len(cpus))[1:]]
        if siblings:
            where += [(chains, siblings, "siblings of one core") for chains in (CHAINS[0], CHAINS[-1])]
        for chains, on, kind in where:
            speed = flops(loop, dtype, lanes * chains, on, plan["seconds"])
            rows.append({**about, "chains": chains, "threads": len(on), "on": kind, **speed})
    return rows


def compiled(dtype: str) -> tuple[Any, dict[str, int]]:
    """Return the loop for this type, and the count of its arithmetic instructions by width in bits."""
    element = numba.from_dtype(np.dtype(dtype))
    loop = multiply_add()
    loop.compile((element[::1], element, element, numba.int64))
    return loop, widths(loop.inspect_asm(loop.signatures[0]))


def widths(machine_code: str) -> dict[str, int]:
    """Return the number of multiplications and additions by width: scalar, and registers of 128, 256 and 512 bits."""
    found = [WIDTHS[match[1]] for match in PACKED.finditer(machine_code)]
    return {"scalar": len(SCALAR.findall(machine_code)), **{str(bits): found.count(bits) for bits in WIDTHS.values()}}


def flops(loop: Any, dtype: str, elements: int, cpus: list[int], seconds: float) -> dict[str, float]:
    """Return GFLOP/s of `loop` on an array of `elements` elements on each of these processors, all at once."""
    arrays = [CPU.zeros(elements, dtype) for _ in cpus]
    factor, addend = (np.dtype(dtype).type(value) for value in (0.999, 0.001))  # -> 1: no overflow, no denormals

    def run(rounds: int) -> float:
        return run_threads(cpus, lambda i: loop(arrays[i], factor, addend, rounds))

    return per_round(run, seconds).rate("gflops", 2e-9 * DEPTH * elements * len(cpus))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
