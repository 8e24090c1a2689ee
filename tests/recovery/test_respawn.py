"""hpcdl/recovery/respawn.py: a launcher that starts nothing leaves the others alone; who was started is told."""

import logging

from mpi4py import MPI

from hpcdl.recovery import respawn


class Left:
    """A world of those that are left, for which no rank can be started."""

    def __init__(self):
        self.asked = []

    def Spawn(self, *about):  # as mpi4py calls it
        self.asked.append(about)
        raise MPI.Exception(MPI.ERR_SPAWN)


def test_where_nothing_is_started_those_that_are_left_go_on_alone(caplog):
    left = Left()
    with caplog.at_level(logging.WARNING, "hpcdl"):
        assert respawn.brought_back(left, 2) is left
    ((program, arguments, number, _),) = left.asked
    assert number == 2 and [program, *arguments][1:] == list(respawn.sys.orig_argv[1:])
    assert "no lost rank is replaced" in caplog.text and not respawn.mixed


def test_a_rank_of_a_launcher_is_not_new():
    assert not respawn.is_new()
    respawn.tell_the_launcher()  # of no use where none was
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
