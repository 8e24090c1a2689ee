"""Every CUDA kernel against numpy, in Numba's simulator: no GPU is needed. The comparisons are in simulate.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.kernels.cases import CASES
from hpcdl.machine.launcher import clean_environment


@pytest.fixture(scope="module")
def wrong():
    """Return {case: traceback or ""} of all cases, which one program runs."""
    command = [sys.executable, Path(__file__).with_name("simulate.py")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_in_the_simulator(name, wrong):
    assert not wrong[name], wrong[name]
