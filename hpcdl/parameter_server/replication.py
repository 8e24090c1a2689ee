"""Replicas of the slices of a parameter store: slice i on the servers i, i + 1, ..., i + R - 1 of a ring of S.

    worker               server i, the primary             server i + 1, a backup
      | push n, values ------> | keeps it                       |
      |                        | copy of n, values -----------> | keeps it
      |                        | <------------------------ held |
      | <-------------- receipt|                                |
      | (receipts of all slices have come: n is whole)          |
      | pull n + 1 ----------> | applies n                      |
      |                        | commit n --------------------> | applies n
      | <------- values after n|                                |

Primary-backup rather than a chain: a push is on all R servers after two messages whatever R, in a chain of R servers
after R; on a ring where each server is the primary of one slice and a backup of R - 1 the bytes of a server are the
same, R - 1 copies of what is pushed to it. The gradient travels, not what it makes of the slice: a backup does the same
updates in the same order, and so holds the same bits (slice_state.py) of the values and of the optimizer's vectors,
which would be up to three.

A push is applied only when its worker has asked for more, and so has had the receipts of all slices. Until then no
server has applied it, from then on all servers have it: when one is gone, each push is on all slices, and is applied,
or it is dropped from all, and its worker computes it again (hpcdl/recovery/server_failover.py). Its number is the
worker's clock; a store takes no other than the next one, so none is applied twice.

Costs of a step, S servers, W workers, K values of k bytes: a server sends R - 1 copies of the W K k / S bytes that are
pushed to it, with headers of 96 bytes, and 8 bytes for each push as a backup and 8 as the primary. A push waits for two
more messages.

(Alsberg and Day, "A principle for resilient sharing of distributed resources", ICSE 1976; Li et al., OSDI 2014, whose
servers forward pushes along a chain, and who name what it saves to add up the pushes of a round before they are copied)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.requests import Request
from hpcdl.errors import TrainingError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.parameter_server.step_coordinator import Notes
from hpcdl.parameter_server.store_messages import COPY_HEADER, Push, StoreOperation, StoreTag, as_message, new_header

if TYPE_CHECKING:
    from hpcdl.memory import Memory


def backups(primary: int, servers: int, replicas: int) -> list[int]:
    """The servers that hold replicas of the slice of server `primary`."""
    return [(primary + each) % servers for each in range(1, replicas)]


class PendingPush:
    """A push that waits until it is whole. waits: for the acknowledgements of those that hold replicas."""

    def __init__(self, push: Push, buffer: np.ndarray):
        self.push, self.buffer = push, buffer
        self.waits: list[Request] = []
        self.told = False  # whether its client has its receipt


class Following(SliceState):
    """A slice as who is no server of it, or not alone, follows it: pushes are kept until they are told to be whole.

    led: whether its primary tells a lead of steps. kept: of each client the push that is not applied. taken: how many
    events it has followed. notes: what who takes the lead's place has to know.
    """

    def __init__(self, values: np.ndarray, clocks: Clocks, update: Callable, led: bool, memory: "Memory | None" = None):
        super().__init__(values, clocks, update, memory=memory)
        self.led, self.taken, self.notes = led, 0, Notes()
        self.kept: dict[int, PendingPush] = {}

    def step_done(self, step: int) -> None:
        """Whoever takes the lead's place tells it of steps of which it had not noted anything: their losses stay."""
        if not self.led:
            self.losses.pop(step, None)

    def note(self, noted: bytes, step: int, known: int) -> None:
        """What the lead has noted after a step: the losses until there are known to it."""
        self.notes.add(step, noted, known)
        for each in [each for each in self.losses if each < step]:
            del self.losses[each]


def commit(state: SliceState, kept: dict[int, PendingPush], client: int) -> bool:
    """Apply the push of this client that is kept; whether there was one. Raises TrainingError for any but its next."""
    if client not in kept:
        return False
    push, buffer = kept[client].push, kept[client].buffer
    due = state.clocks.of_client[client]
    if push.clock != due:
        raise TrainingError(f"a server was to apply push {push.clock} of rank {client}, and push {due} is next")
    del kept[client]
    state.take_in(push, buffer)
    return True


class Copies:
    """What a server sends to those that hold replicas of its slice, `backups`.

    careful: whether pushes are acknowledged, and wait until they are whole; without, there are no backups.
    """

    def __init__(self, comm: Communicator, state: SliceState):
        self.comm, self.state = comm, state
        self.careful = False
        self.backups: list[int] = []
        self.kept: dict[int, PendingPush] = {}

    def keep(self, push: Push, buffer: np.ndarray) -> None:
        """A push has come: let all others have it, and keep it until it is whole."""
        kept = self.kept[push.client] = PendingPush(push, buffer)
        header = copy_of(StoreOperation.PUSH, push.client, push)
        for backup in self.backups:
            held = np.empty(1)
            kept.waits.append(self.comm.iwait(held, backup, StoreTag.HELD))
            self.comm.ipush(as_message(header), backup, StoreTag.COPY)
            kept.waits.append(self.comm.ipush(buffer[: push.size], backup, StoreTag.COPIED))

    def held(self) -> bool:
        """Whether there is a push that all have, and whose client does not know it."""
        return any(not kept.told and all(each.done for each in kept.waits) for kept in self.kept.values())

    def acknowledge(self) -> bool:
        """Tell the clients of pushes that all have; whether there were any."""
        found = [kept for kept in self.kept.values() if not kept.told and all(each.done for each in kept.waits)]
        for kept in found:
            kept.told = True
            self.comm.ipush(np.array([float(kept.push.clock)]), kept.push.client, StoreTag.RECEIPT)
        return bool(found)

    def commit(self, client: int) -> None:
        """The last push of this client is whole: apply it, as all others will."""
        if commit(self.state, self.kept, client):
            self.tell(StoreOperation.COMMIT, client)

    def tell(self, operation: StoreOperation, client: int) -> None:
        """Let all others follow what has happened here."""
        for backup in self.backups:
            self.comm.ipush(
                as_message(new_header(COPY_HEADER, operation=operation, client=client)), backup, StoreTag.COPY
            )

    def note(self, noted: bytes, known: int) -> None:
        """Let all others know what the lead has noted, where there is one."""
        if not noted:
            return
        counted = self.state.clocks.counted
        for backup in self.backups:
            header = new_header(COPY_HEADER, operation=StoreOperation.NOTE, clock=counted, seen=known, stop=len(noted))
            self.comm.ipush(as_message(header), backup, StoreTag.COPY)
            self.comm.ipush(np.frombuffer(noted, np.uint8), backup, StoreTag.COPIED)

    def begin(self) -> None:
        """Send the slice as it is to those that are to follow it."""
        for backup in self.backups:
            for vector in vectors(self.state):
                self.comm.ipush(vector.copy(), backup, StoreTag.COPIED)


class SliceReplicas:
    """The replicas that a server holds, of the slices of other servers, by their ranks."""

    def __init__(self, comm: Communicator):
        self.comm, self.of = comm, {}  # type: Communicator, dict[int, Following]
        self.inbox: Inbox | None = None

    @property
    def open(self) -> bool:
        """Whether pushes may still come."""
        return any(each.clocks.open for each in self.of.values())

    def begin(self) -> None:
        """Receive the slices as they are."""
        for primary, replica in self.of.items():
            for vector in vectors(replica):
                self.comm.iwait(vector, primary, StoreTag.COPIED).wait(doze=True)
        self.inbox = Inbox(self.comm, StoreTag.COPY, self.of, len(COPY_HEADER), "f8")  # type: ignore[arg-type]

    def arrived(self) -> bool:
        """Whether anything has come for them."""
        return self.inbox is not None and bool(self.inbox.arrived())

    def attend(self) -> bool:
        """Follow what has come; whether there was anything."""
        if self.inbox is None or not (come := self.inbox.arrived()):
            return False
        for primary in come:
            self.follow(primary, self.inbox.take(primary).view(COPY_HEADER).reshape(()))
            if self.of[primary].clocks.open:
                self.inbox.listen(primary)
        return True

    def follow(self, primary: int, header: np.ndarray) -> None:
        """One event of this server's slice."""
        replica, operation, client = self.of[primary], header["operation"], int(header["client"])
        if operation == StoreOperation.PUSH:
            push, buffer = Push.read(header, client), replica.buffer()
            self.comm.iwait(buffer[: push.size], primary, StoreTag.COPIED).wait(doze=True)
            replica.kept[client] = PendingPush(push, buffer)
            self.comm.ipush(np.array([float(push.clock)]), primary, StoreTag.HELD)
        elif operation == StoreOperation.COMMIT:
            commit(replica, replica.kept, client)
        elif operation == StoreOperation.NOTE:
            noted = np.empty(int(header["stop"]), np.uint8)
            self.comm.iwait(noted, primary, StoreTag.COPIED).wait(doze=True)
            replica.note(noted.tobytes(), int(header["clock"]), int(header["seen"]))
        else:
            replica.clocks.closed(client)
        replica.end_steps()
        replica.taken += 1


def vectors(state: SliceState) -> list[np.ndarray]:
    """All that an update may change: the values, and the vectors of the update's state."""
    return [state.values, *getattr(state.update, "state", {}).values()]


def copy_of(operation: StoreOperation, client: int, push: Push) -> np.ndarray:
    """The header of a copy of a push."""
    numbers = {name: getattr(push, name) for name in ("clock", "seen", "version", "count", "total", "loss", "norm")}
    part = {"start": push.part.start, "stop": push.part.stop, "which": push.drawn}
    return new_header(COPY_HEADER, operation=operation, client=client, **numbers, **part)
