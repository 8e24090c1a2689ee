"""A hung job ends, and the report names each rank, its operation and the calling line."""

import re

HANG = """
import sys, time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(timeout=1)

def late():
    time.sleep(30)

if comm.rank == 2:
    late()
elif comm.rank == 1:
    comm.wait(np.zeros(3), source=2)      # line 14
comm.all_reduce(np.zeros(3))              # line 15
"""

STEADY = """
import time
import numpy as np
from hpcdl.comm import Communicator

comm = Communicator(timeout=0.8)
for _ in range(8):                        # longer than the timeout in all, but no single operation is
    time.sleep(0.2)
    comm.all_reduce(np.zeros(3))
comm.free()
print("done")
"""


def test_a_hung_job_ends_with_a_report_of_all_ranks(launch, tmp_path):
    program = tmp_path / "hang.py"
    program.write_text(HANG)
    done = launch(3, program)
    assert done.returncode != 0
    report = dict(re.findall(r"hpcdl watchdog: rank (\d): (.*)", done.stderr))
    assert re.search(r"waits in all_reduce for \d\.\d s, called from .*hang.py:15 ", report["0"])
    assert re.search(r"waits in wait for \d\.\d s, called from .*hang.py:14 ", report["1"])
    assert re.search(r"in no communication .*hang.py:9 in late", report["2"])
    assert "--timeout 1 s" in done.stderr


def test_a_slow_but_living_job_is_left_alone(launch, tmp_path):
    program = tmp_path / "steady.py"
    program.write_text(STEADY)
    assert launch(2, program, check=0).stdout.count("done") == 2
