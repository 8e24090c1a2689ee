"""Parameters on their way from a learner to actors, unasked: the newest, and never a queue of them.

    learner   publisher                                          actor   receiver
        every so many updates, to each actor
        that has the one before:  parameters    ----------->         takes them between two chunks
                                                <-----------         "got"

To an actor that is slow the newest is sent once it has got the one before: what is in between it never sees, and what
is in flight to it is one message. The last message is empty.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, Device
from hpcdl.rl.tally import ByKind


class BroadcastTag(IntEnum):
    """Whose message it is; those of memories are smaller."""

    PARAMETERS, GOT = 41, 42


class Publisher:
    """The learner's side, to these actors."""

    def __init__(self, comm: Communicator, actors: Iterable[int], by_kind: ByKind):
        self.comm, self.by_kind = comm, by_kind
        self.under_way: dict[int, Request | None] = dict.fromkeys(actors)  # until an actor has said that it got them
        self.behind: set[int] = set()

    def publish(self, parameters: Array, device: Device) -> None:
        """Send these to all who have the last ones, and the newest to the others when they have."""
        self.behind.update(self.under_way)
        self.catch_up(parameters, device)

    def catch_up(self, parameters: Array, device: Device) -> None:
        """Send the newest to those who are behind and can have it."""
        free = [each for each in self.behind if self._free(each)]
        if not free:
            return
        copy = np.array(device.host(parameters))
        for actor in free:
            self.under_way[actor] = self.comm.iwait(None, actor, BroadcastTag.GOT)
            with self.by_kind("parameters"):
                self.comm.ipush(copy, actor, BroadcastTag.PARAMETERS)
        self.behind -= set(free)

    def _free(self, actor: int) -> bool:
        coming = self.under_way[actor]
        return coming is None or coming.test()

    def close(self) -> None:
        """Nothing more comes; returns when all have got what was under way."""
        self.comm.wait_until(lambda: all(map(self._free, self.under_way)), patient=True)
        for actor in self.under_way:
            with self.by_kind("control"):
                self.comm.push(np.empty(0, np.float32), actor, BroadcastTag.PARAMETERS)


class Receiver:
    """The actor's side. parameters: what has come last, once `first` has returned."""

    def __init__(self, comm: Communicator, learner: int, parameters: np.ndarray, by_kind: ByKind):
        self.comm, self.learner, self.parameters, self.by_kind = comm, learner, parameters, by_kind
        self.into, self.over = np.empty_like(parameters), False
        self.coming = comm.iwait(self.into, learner, BroadcastTag.PARAMETERS)

    def first(self) -> None:
        """Wait for the first ones."""
        self.comm.wait_until(lambda: self.coming.done, patient=True)
        self.newest()

    def newest(self, *_: int) -> np.ndarray:
        """parameters <- what has come, if anything has."""
        while not self.over and self.coming.test():
            self.over = self.coming.result.size == 0
            if not self.over:
                self.parameters[:] = self.into
                with self.by_kind("control"):
                    self.comm.inotify(self.learner, BroadcastTag.GOT)
                self.coming = self.comm.iwait(self.into, self.learner, BroadcastTag.PARAMETERS)
        return self.parameters

    def close(self) -> None:
        """Wait for the last message."""

        def over() -> bool:
            self.newest()
            return self.over

        self.comm.wait_until(over, patient=True)
