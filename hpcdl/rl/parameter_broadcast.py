"""Asynchronous broadcast of parameters from a learner to actors: always the newest, without a queue.

    learner   publisher                                          actor   receiver
        every so many updates, to each actor
        that has received the last ones:  parameters  ------->       takes them between two chunks
                                                <-------------       acknowledgement

A slow actor receives the newest parameters once it has acknowledged its last ones, and never the versions in between:
at most one message to an actor is in flight. The last message is empty."""

from collections.abc import Iterable

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.requests import Request
from hpcdl.kernels.device import Array, Device
from hpcdl.rl.tally import BytesByKind

PARAMETERS, GOT = 41, 42  # tags; memories use smaller ones


class Publisher:
    """The learner's side: sends parameters to `actors`."""

    def __init__(self, comm: Communicator, actors: Iterable[int], by_kind: BytesByKind):
        self.comm, self.by_kind = comm, by_kind
        self.acknowledgements: dict[int, Request | None] = dict.fromkeys(actors)  # by actor; None: nothing sent yet
        self.behind: set[int] = set()

    def publish(self, parameters: Array, device: Device) -> None:
        """Send the parameters to actors that have acknowledged their last ones, to other actors in `catch_up`."""
        self.behind.update(self.acknowledgements)
        self.catch_up(parameters, device)

    def catch_up(self, parameters: Array, device: Device) -> None:
        """Send the newest parameters to actors that lack them and have acknowledged the last ones they got."""
        free = [actor for actor in self.behind if self._free(actor)]
        if not free:
            return
        copy = np.array(device.host(parameters))
        for actor in free:
            self.acknowledgements[actor] = self.comm.iwait(None, actor, GOT)
            with self.by_kind("parameters"):
                self.comm.ipush(copy, actor, PARAMETERS)
        self.behind -= set(free)

    def _free(self, actor: int) -> bool:
        coming = self.acknowledgements[actor]
        return coming is None or coming.test()

    def close(self) -> None:
        """Wait for all acknowledgements, then send the last message."""
        self.comm.wait_until(lambda: all(map(self._free, self.acknowledgements)), patient=True)
        for actor in self.acknowledgements:
            with self.by_kind("control"):
                self.comm.push(np.empty(0, np.float32), actor, PARAMETERS)


class Receiver:
    """The actor's side. parameters: array of the newest received parameters, valid once `first` has returned."""

    def __init__(self, comm: Communicator, learner: int, parameters: np.ndarray, by_kind: BytesByKind):
        self.comm, self.learner, self.parameters, self.by_kind = comm, learner, parameters, by_kind
        self.buffer, self.over = np.empty_like(parameters), False
        self.coming = comm.iwait(self.buffer, learner, PARAMETERS)

    def first(self) -> None:
        self.comm.wait_until(lambda: self.coming.done, patient=True)
        self.newest()

    def newest(self, *_: int) -> np.ndarray:
        """Receive new parameters if any have arrived; return the newest."""
        while not self.over and self.coming.test():
            self.over = self.coming.result.size == 0
            if not self.over:
                self.parameters[:] = self.buffer
                with self.by_kind("control"):
                    self.comm.inotify(self.learner, GOT)
                self.coming = self.comm.iwait(self.buffer, self.learner, PARAMETERS)
        return self.parameters

    def close(self) -> None:
        def over() -> bool:
            self.newest()
            return self.over

        self.comm.wait_until(over, patient=True)
