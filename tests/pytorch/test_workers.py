"""Processes that call a function for a rank: in order, with its errors, gone when the rank is."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hpcdl.errors import UsageError
from hpcdl.torch.workers import Workers


def where(number):
    if number == 3:
        raise ValueError("no three\nat all")
    return number, os.getpid(), "PMI_OF_A_TEST" in os.environ, torch.get_num_threads()


def leaves(number):
    os._exit(3)


@pytest.fixture(scope="module")
def two():
    workers = Workers(where, 2)
    yield workers
    workers.close()


def test_they_answer_in_order_know_nothing_of_the_launcher_and_stay(two, monkeypatch):
    monkeypatch.setenv("PMI_OF_A_TEST", "1")
    before = dict(os.environ), sys.modules["__main__"]
    found = two.all((number,) for number in (5, 1, 2, 8))
    assert [each[0] for each in found] == [5, 1, 2, 8]
    assert {each[2:] for each in found} == {(False, 1)}
    assert os.getpid() not in {each[1] for each in found}
    pids = {process.pid for process in two.pool._processes.values()}
    two.all([(1,)])
    assert len(pids) == 2 and pids == {process.pid for process in two.pool._processes.values()}
    assert (dict(os.environ), sys.modules["__main__"]) == before


def test_what_one_raises_is_a_line(two):
    with pytest.raises(UsageError, match=r"^ValueError: no three$"):
        two.all([(1,), (3,)])
    assert two.all([(4,)])[0][0] == 4


class Moved:
    """What a worker cannot import."""

    def __reduce__(self):
        return __import__, ("nowhere_to_be_found",)


def test_one_that_cannot_make_the_function_says_why():
    with pytest.raises(UsageError, match="unpickle the data set: ModuleNotFoundError: No module named 'nowhere"):
        Workers(Moved(), 1).all([(1,)])


@pytest.mark.long
def test_one_that_is_gone_is_told():
    workers = Workers(leaves, 1)
    with pytest.raises(UsageError, match="a worker process has ended by itself"):
        workers.all([(1,)])


def test_what_cannot_be_pickled_is_told():
    with pytest.raises(UsageError, match="workers=2 cannot pickle the data set"):
        Workers(lambda: 0, 2)


PROGRAM = """
import sys
from hpcdl.torch.workers import Workers
def square(x):
    return x * x
if __name__ == "__main__":
    workers = Workers(square, 1)
    assert workers.all([(3,)]) == [9]
    print(*[each.pid for each in workers.pool._processes.values()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_they_end_when_their_rank_is_killed_and_find_what_the_program_defines(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(tmp_path / "program.py")], **pipes) as rank:
        worker = int(rank.stdout.readline())
        os.kill(worker, 0)  # it is there
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    for _ in range(200):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{worker}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":  # nobody has asked for its status
                return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("it lives on")
