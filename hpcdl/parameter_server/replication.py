"""Replicas of the slices of a parameter store: slice i on the servers i, i + 1, ..., i + R - 1 of a ring of S.

    worker               server i, the primary             server i + 1, a backup
      | push n, values ------> | stores it                      |
      |                        | copy of n, values -----------> | stores it
      |                        | <------------------------ held |
      | <-------------- receipt|                                |
      | (receipts of all slices have arrived: n is complete)    |
      | pull n + 1 ----------> | applies n                      |
      |                        | commit n --------------------> | applies n
      | <------- values after n|                                |

Primary-backup rather than a chain: a push is on all R servers after two messages whatever R, in a chain of R servers
after R; on a ring where each server is the primary of one slice and a backup of R - 1 the bytes of a server are the
same, R - 1 copies of what is pushed to it. The gradient travels, not what it makes of the slice: a backup does the same
updates in the same order, and so has the same bits (slice_state.py) of the values and of the optimizer's vectors,
of which there are up to three.

A push is applied only when its worker sends its next request, and so has all receipts. Until then no
server has applied it, from then on all servers have it: if one fails, each push is on all slices and is applied,
or it is dropped from all, and its worker recomputes it (hpcdl/recovery/server_failover.py). Its number is the
worker's clock; a store accepts only the next one, so none is applied twice.

Costs of a step, S servers, W workers, K values of k bytes: a server sends R - 1 copies of the W K k / S bytes that are
pushed to it, with headers of 96 bytes, and 8 bytes for each push as a backup and 8 as the primary. A push waits for two
more messages.

(Alsberg and Day, "A principle for resilient sharing of distributed resources", ICSE 1976; Li et al., OSDI 2014, whose
servers forward pushes along a chain, and who name what it saves to add up the pushes of a round before they are copied)
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.comm import Communicator
from hpcdl.comm.inbox import Inbox
from hpcdl.comm.requests import Request
from hpcdl.errors import TrainingError
from hpcdl.parameter_server.clocks import Clocks
from hpcdl.parameter_server.slice_state import SliceState
from hpcdl.parameter_server.store_messages import COPY_HEADER, Push, StoreOperation, StoreTag, as_message, new_header

if TYPE_CHECKING:
    from hpcdl.memory import Memory


def backups(primary: int, servers: int, replicas: int) -> list[int]:
    """Return the servers that hold replicas of the slice of server `primary`."""
    return [(primary + each) % servers for each in range(1, replicas)]


class Notes:
    """Recent notes of rank 0's run by step: the last one, and earlier ones of steps that are not known yet."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, bytes]] = deque()

    def add(self, step: int, noted: bytes, known: int) -> None:
        """Add the note after a step; steps up to `known` are known."""
        self.entries.append((step, noted))
        while len(self.entries) > 1 and self.entries[0][0] <= known:
            self.entries.popleft()


class PendingPush:
    """A push that is not complete yet. waits: requests for the replicas' acknowledgements."""

    def __init__(self, push: Push, buffer: np.ndarray):
        self.push, self.buffer = push, buffer
        self.waits: list[Request] = []
        self.receipted = False  # True once its client has the receipt


class SliceReplica(SliceState):
    """Replica of a slice: stores pushes until they are complete.

    led: True if the primary is rank 0 of a run, whose successor needs losses that are not noted. pending: push that is
    not applied yet, by client. taken: number of events followed. notes: the run's state for the successor.
    """

    def __init__(self, values: np.ndarray, clocks: Clocks, update: Callable, led: bool, memory: "Memory | None" = None):
        super().__init__(values, clocks, update, memory=memory)
        self.keeps_losses, self.taken, self.notes = led, 0, Notes()
        self.pending: dict[int, PendingPush] = {}

    def note(self, noted: bytes, step: int, known: int) -> None:
        """Store rank 0's note after a step: losses are kept until then."""
        self.notes.add(step, noted, known)
        for each in [each for each in self.losses if each < step]:
            del self.losses[each]


def commit(state: SliceState, kept: dict[int, PendingPush], client: int) -> bool:
    """Apply the pending push of this client; True if there was one. Raises TrainingError if it is not the next."""
    if client not in kept:
        return False
    push, buffer = kept[client].push, kept[client].buffer
    due = state.clocks.of_client[client]
    if push.clock != due:
        raise TrainingError(f"a server was to apply push {push.clock} of rank {client}, and push {due} is next")
    del kept[client]
    state.take_in(push, buffer)
    return True


class ReplicaSender:
    """Messages of a server to the replicas of its slice on `backups`.

    careful: True if pushes are acknowledged and wait until they are complete; otherwise there are no backups.
    """

    def __init__(self, comm: Communicator, state: SliceState):
        self.comm, self.state = comm, state
        self.careful = False
        self.backups: list[int] = []
        self.pending: dict[int, PendingPush] = {}
        self.notes = Notes()

    def keep(self, push: Push, buffer: np.ndarray) -> None:
        """Send a new push to all replicas, and store it until it is complete."""
        pending = self.pending[push.client] = PendingPush(push, buffer)
        header = copy_of(StoreOperation.PUSH, push.client, push)
        for backup in self.backups:
            acknowledgement = np.empty(1)
            pending.waits.append(self.comm.iwait(acknowledgement, backup, StoreTag.HELD))
            self.comm.ipush(as_message(header), backup, StoreTag.COPY)
            pending.waits.append(self.comm.ipush(buffer[: push.size], backup, StoreTag.COPIED))

    def held(self) -> bool:
        """True if all replicas have a push whose client has no receipt."""
        return any(not push.receipted and all(each.done for each in push.waits) for push in self.pending.values())

    def acknowledge(self) -> bool:
        """Send the receipts that are due; True if there were any."""
        complete = [
            each for each in self.pending.values() if not each.receipted and all(request.done for request in each.waits)
        ]
        for each in complete:
            each.receipted = True
            self.comm.ipush(np.array([float(each.push.clock)]), each.push.client, StoreTag.RECEIPT)
        return bool(complete)

    def commit(self, client: int) -> None:
        """Apply the last push of this client, here and on all replicas."""
        if commit(self.state, self.pending, client):
            self.tell(StoreOperation.COMMIT, client)

    def tell(self, operation: StoreOperation, client: int) -> None:
        """Send an event of this slice to all replicas."""
        for backup in self.backups:
            self.comm.ipush(
                as_message(new_header(COPY_HEADER, operation=operation, client=client)), backup, StoreTag.COPY
            )

    def note(self, noted: bytes, known: int) -> None:
        """Keep the note of rank 0's run, and send it to all replicas; steps up to `known` are known."""
        counted = self.state.clocks.counted
        self.notes.add(counted, noted, known)
        for backup in self.backups:
            header = new_header(COPY_HEADER, operation=StoreOperation.NOTE, clock=counted, seen=known, stop=len(noted))
            self.comm.ipush(as_message(header), backup, StoreTag.COPY)
            self.comm.ipush(np.frombuffer(noted, np.uint8), backup, StoreTag.COPIED)

    def begin(self) -> None:
        """Send the whole slice to its replicas."""
        for backup in self.backups:
            for vector in vectors(self.state):
                self.comm.ipush(vector.copy(), backup, StoreTag.COPIED)


class SliceReplicas:
    """The replicas on a server of other servers' slices, by rank."""

    def __init__(self, comm: Communicator):
        self.comm, self.of = comm, {}  # type: Communicator, dict[int, SliceReplica]
        self.inbox: Inbox | None = None

    @property
    def open(self) -> bool:
        """True if pushes may still arrive."""
        return any(each.clocks.open for each in self.of.values())

    def begin(self) -> None:
        """Receive the whole slices."""
        for primary, replica in self.of.items():
            for vector in vectors(replica):
                self.comm.iwait(vector, primary, StoreTag.COPIED).wait(doze=True)
        self.inbox = Inbox(self.comm, StoreTag.COPY, self.of, len(COPY_HEADER), "f8")  # type: ignore[arg-type]

    def arrived(self) -> bool:
        """True if any message has arrived for them."""
        return self.inbox is not None and bool(self.inbox.arrived())

    def attend(self) -> bool:
        """Process the messages that have arrived; True if there were any."""
        if self.inbox is None or not (senders := self.inbox.arrived()):
            return False
        for primary in senders:
            self.follow(primary, self.inbox.take(primary).view(COPY_HEADER).reshape(()))
            if self.of[primary].clocks.open:
                self.inbox.listen(primary)
        return True

    def follow(self, primary: int, header: np.ndarray) -> None:
        """Process one event of this server's slice."""
        replica, operation, client = self.of[primary], header["operation"], int(header["client"])
        if operation == StoreOperation.PUSH:
            push, buffer = Push.read(header, client), replica.buffer()
            self.comm.iwait(buffer[: push.size], primary, StoreTag.COPIED).wait(doze=True)
            replica.pending[client] = PendingPush(push, buffer)
            self.comm.ipush(np.array([float(push.clock)]), primary, StoreTag.HELD)
        elif operation == StoreOperation.COMMIT:
            commit(replica, replica.pending, client)
        elif operation == StoreOperation.NOTE:
            noted = np.empty(int(header["stop"]), np.uint8)
            self.comm.iwait(noted, primary, StoreTag.COPIED).wait(doze=True)
            replica.note(noted.tobytes(), int(header["clock"]), int(header["seen"]))
        else:
            replica.clocks.closed(client)
        for _ in replica.end_steps():
            pass
        replica.taken += 1


def vectors(state: SliceState) -> list[np.ndarray]:
    """Return all vectors that an update may change: the values and the update's state."""
    return [state.values, *getattr(state.update, "state", {}).values()]


def copy_of(operation: StoreOperation, client: int, push: Push) -> np.ndarray:
    """Return the header of a copy of a push."""
    numbers = {name: getattr(push, name) for name in ("clock", "seen", "version", "count", "total", "loss", "norm")}
    part = {"start": push.part.start, "stop": push.part.stop, "which": push.drawn}
    return new_header(COPY_HEADER, operation=operation, client=client, **numbers, **part)
