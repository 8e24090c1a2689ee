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


CAT, BAD = "RuntimeError('the cat is out')", "UsageError('no such thing; take another')"
ENDS = [  # what it raises, how, the status (None: any but 0), words, and tracebacks
    (CAT, "fail()", None, "rank 1 of 3 failed", 1),
    (CAT, "threading.Thread(target=fail).start(); time.sleep(60)", None, "rank 1 of 3 failed", 1),
    (BAD, "fail()", 2, "error: no such thing; take another", 0),
    ("None", "sys.exit(3)", 3, "", 0),
    ("None", "sys.exit('words')", 1, "words", 0),
]


@pytest.mark.parametrize("error, call, status, words, tracebacks", ENDS)
def test_what_ends_one_rank_ends_all(launch, error, call, status, words, tracebacks):
    """An exception with its traceback, once; bad input with a line; an exit in the context of a job with its status."""
    body = FAILS.format(error=error, call=call)
    in_job = f"import hpcdl\nwith hpcdl.job():\n{textwrap.indent(body, '    ')}"
    done = launch(3, "-c", in_job if "exit" in call else body, timeout=30)  # half of the minute of sleep
    assert done.returncode not in (0, None) and status in (None, done.returncode)
    assert words in done.stderr and ("words" in done.stderr) == (words == "words")
    assert done.stderr.count("Traceback") == done.stderr.count("RuntimeError: the cat is out") == tracebacks


def test_what_several_ranks_find_alone_is_said_once(launch):
    """As an environment that shows NaN to each actor: rank 0 waits, the others have a line each."""
    program = (
        "from mpi4py import MPI\nfrom hpcdl.comm import failure\nfrom hpcdl.errors import LoneError\n"
        "failure.install()\nMPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank: raise LoneError(f'environment {MPI.COMM_WORLD.rank} shows NaN')\n"
        "MPI.COMM_WORLD.recv()\n"
    )
    done = launch(3, "-c", program)
    assert done.returncode not in (0, 2) and done.stderr.count("error: environment") == 1, done.stderr


INSTALLED = """
import sys, threading
before = sys.excepthook, threading.excepthook
import hpcdl
from mpi4py import MPI
from hpcdl.comm import Communicator

def installed():
    return (sys.excepthook, threading.excepthook) != before

comm, alone = Communicator(ends_job=False), Communicator(MPI.COMM_SELF)
assert not installed()
comm = Communicator()
assert installed()
with hpcdl.job():
    try:
        sys.exit(3)
    except SystemExit as error:
        print(error.code)
    comm.barrier()
"""


def test_the_first_communicator_over_several_ranks_installs_it_and_a_caught_exit_ends_nothing(launch):
    assert launch(2, "-c", INSTALLED, check=0).stdout.split() == ["3", "3"]


def test_without_it_an_exception_is_as_python_has_it(launch):
    """The rank that fails goes on to the interpreter's own end, where what the program has registered is called."""
    program = (
        "import atexit, time\nfrom mpi4py import MPI\nfrom hpcdl.comm import Communicator\n"
        "comm = Communicator(ends_job=False)\n"
        "def end():\n    time.sleep(0.5)  # the launcher passes on what was printed\n    MPI.COMM_WORLD.Abort(7)\n"
        "if comm.rank == 1:\n    atexit.register(end)\n    raise RuntimeError('the cat is out')\n"
        "comm.barrier()\n"
    )
    done = launch(2, "-c", program, timeout=30)
    assert done.returncode == 7
    assert "RuntimeError: the cat is out" in done.stderr and "rank 1 of 2 failed" not in done.stderr


def test_it_refuses_on_all_ranks_with_the_word_of_the_lowest(world):
    with pytest.raises(UsageError, match=f"rank {world.size // 2} says no"), refuse_together(world):
        if world.rank >= world.size // 2:
            raise UsageError(f"rank {world.rank} says no")
    with refuse_together(world):
        pass  # and nobody is left waiting
