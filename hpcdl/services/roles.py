"""Which ranks of a run do what: parameter servers first, then data servers, then workers.

rank      0 ... S-1             S ... S+D-1       S+D ... N-1
role      parameter servers     data servers      workers
"""

from typing import NamedTuple

from hpcdl.errors import UsageError


class Roles(NamedTuple):
    """The ranks of each role, as ranges that together cover all ranks."""

    servers: range
    data_servers: range
    workers: range


def divide(size: int, servers: int = 0, data_servers: int = 0) -> Roles:
    """The roles of `size` ranks; UsageError where no worker is left."""
    for name, count in (("servers", servers), ("data-servers", data_servers)):
        if count < 0:
            raise UsageError(f"--{name} must not be negative, and is {count}")
    first = servers + data_servers
    if first >= size:
        asked = [(servers, "parameter server"), (data_servers, "data server")]
        named = " and ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in asked if count)
        raise UsageError(f"no worker is left over: {named} of {size} ranks; start at least {first + 1} ranks")
    return Roles(range(servers), range(servers, first), range(first, size))
