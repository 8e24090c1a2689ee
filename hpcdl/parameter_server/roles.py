"""Which ranks of a run do what: parameter servers first, then data servers, then workers.

rank      0 ... S-1             S ... S+D-1       S+D ... N-1
role      parameter servers     data servers      workers"""

from typing import NamedTuple

from hpcdl.errors import UsageError
from hpcdl.formatting import counted

ROLES = ("parameter server", "data server", "worker")


class Roles(NamedTuple):
    """The ranks of each role, as ranges that together cover all ranks."""

    servers: range
    data_servers: range
    workers: range

    def of(self, rank: int) -> str:
        """Return the role of a rank, a name of ROLES."""
        return next(name for name, ranks in zip(ROLES, self, strict=True) if rank in ranks)

    def data_server(self, worker: int) -> int:
        """Return the data server of a worker; workers are assigned to data servers in turn."""
        return self.data_servers[self.workers.index(worker) % len(self.data_servers)]

    def clients(self, server: int) -> list[int]:
        """Return the workers of a data server."""
        return [worker for worker in self.workers if self.data_server(worker) == server]


def divide(size: int, servers: int = 0, data_servers: int = 0) -> Roles:
    """Return the roles of `size` ranks. Raises UsageError for a negative number, or if no worker is left."""
    for name, count in (("servers", servers), ("data-servers", data_servers)):
        if count < 0:
            raise UsageError(f"--{name} must not be negative, and is {count}")
    first = servers + data_servers
    if first >= size:
        asked = [(servers, "parameter server"), (data_servers, "data server")]
        named = " and ".join(counted(count, what) for count, what in asked if count)
        raise UsageError(
            f"no worker is left over: {named} of {counted(size, 'rank')}; start at least {first + 1} ranks"
        )
    return Roles(range(servers), range(servers, first), range(first, size))
