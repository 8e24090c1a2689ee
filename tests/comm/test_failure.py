"""One rank's failure ends all ranks at once, with its traceback, once."""

import textwrap

import pytest

from hpcdl.comm import refuse_together
from hpcdl.errors import UsageError

FAILS = """
import sys, threading, time
import numpy as np
from hpcdl.comm import Communicator
from hpcdl.errors import UsageError

def fail():
    raise {error}

comm = Communicator()
comm.barrier()
if comm.rank == 1:
    {call}
comm.all_reduce(np.zeros(3))
time.sleep(60)
"""


@pytest.mark.parametrize("call", ["fail()", "threading.Thread(target=fail).start(); time.sleep(60)"])
def test_an_exception_ends_all_ranks_with_its_traceback_once(launch, tmp_path, call):
    program = tmp_path / "fails.py"
    program.write_text(FAILS.format(error="RuntimeError('the cat is out')", call=call))
    done = launch(3, program, timeout=30)  # half of the minute for which the ranks would sleep
    assert done.returncode not in (0, None)
    assert done.stderr.count("RuntimeError: the cat is out") == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 of 3 failed" in done.stderr


def test_bad_input_on_one_rank_is_one_line_and_status_2(launch, tmp_path):
    program = tmp_path / "fails.py"
    program.write_text(FAILS.format(error="UsageError('no such thing; take another')", call="fail()"))
    done = launch(3, program, timeout=30)
    assert done.returncode == 2
    assert "error: no such thing; take another" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("call, status", [("sys.exit(3)", 3), ("sys.exit('words')", 1)])
def test_sys_exit_on_one_rank_ends_all(launch, tmp_path, call, status):
    """In the context of a job: at once, with that status."""
    body = FAILS.format(error="None", call=call)
    program = tmp_path / "fails.py"
    program.write_text(f"import hpcdl\nwith hpcdl.job():\n{textwrap.indent(body, '    ')}")
    done = launch(3, program, timeout=30)
    assert done.returncode == status and ("words" in done.stderr) == ("words" in call)


def test_what_several_ranks_find_alone_is_said_once(launch, tmp_path):
    """As an environment that shows NaN to each actor: rank 0 waits, the others have a line each."""
    (tmp_path / "program.py").write_text(
        "from mpi4py import MPI\nfrom hpcdl.comm import failure\nfrom hpcdl.errors import LoneError\n"
        "failure.install()\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank: raise LoneError(f'environment {MPI.COMM_WORLD.rank} shows NaN')\n"
        "MPI.COMM_WORLD.recv()\n"
    )
    done = launch(4, tmp_path / "program.py")
    assert done.returncode not in (0, 2) and done.stderr.count("error: environment") == 1, done.stderr


def test_an_exit_that_is_caught_ends_nothing(launch, tmp_path):
    program = tmp_path / "caught.py"
    program.write_text(
        "import sys\nimport hpcdl\nfrom hpcdl.comm import Communicator\nwith hpcdl.job():\n    comm = Communicator()\n"
        "    try:\n        sys.exit(3)\n    except SystemExit as error:\n        print(error.code)\n"
        "    comm.barrier()\n"
    )
    assert launch(3, program, check=0).stdout.count("3") == 3


INSTALLED = """
import sys, threading
before = sys.excepthook, threading.excepthook
from mpi4py import MPI
from hpcdl.comm import Communicator
comm = Communicator({arguments})
print("installed" if (sys.excepthook, threading.excepthook) != before else "as it was")
"""


@pytest.mark.parametrize(
    "ranks, arguments, words",
    [
        (2, "", "installed"),
        (2, "ends_job=False", "as it was"),
        (2, "MPI.COMM_SELF", "as it was"),
        (1, "", "as it was"),
    ],
)
def test_the_first_communicator_over_several_ranks_installs_it(launch, tmp_path, ranks, arguments, words):
    program = tmp_path / "installs.py"
    program.write_text(INSTALLED.format(arguments=arguments))
    assert launch(ranks, program, check=0).stdout.count(words) == ranks


def test_without_it_an_exception_is_as_python_has_it(launch, tmp_path):
    """The rank that fails goes on to the interpreter's own end, where what the program has registered is called."""
    program = tmp_path / "plugins.py"
    program.write_text(
        "import atexit, time\nfrom mpi4py import MPI\nfrom hpcdl.comm import Communicator\n"
        "comm = Communicator(ends_job=False)\n"
        "def end():\n    time.sleep(0.5)  # the launcher passes on what was printed\n    MPI.COMM_WORLD.Abort(7)\n"
        "if comm.rank == 1:\n    atexit.register(end)\n    raise RuntimeError('the cat is out')\n"
        "comm.barrier()\n"
    )
    done = launch(2, program, timeout=30)
    assert done.returncode == 7
    assert "RuntimeError: the cat is out" in done.stderr and "rank 1 of 2 failed" not in done.stderr


def test_it_refuses_on_all_ranks_with_the_word_of_the_lowest(world):
    with pytest.raises(UsageError, match=f"rank {world.size // 2} says no"), refuse_together(world):
        if world.rank >= world.size // 2:
            raise UsageError(f"rank {world.rank} says no")
    with refuse_together(world):
        pass  # and nobody is left waiting
