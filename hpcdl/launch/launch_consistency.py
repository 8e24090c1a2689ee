"""All ranks of a program get the same options, program and versions; else all refuse, before anything starts.

Ranks that differ would hang, or train what nobody asked for, as if an options file was edited on one host only.

    mine = {program, each option, each version}      digest of it -> all ranks       the same: go on
                                                     else: mine -> all ranks         name the option and the ranks"""

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from hpcdl.comm import refuse_together
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.comm.progress import inside
from hpcdl.errors import AgreedError
from hpcdl.formatting import dashed
from hpcdl.launch.option_parser import CommandLine, parse
from hpcdl.launch.program import quiet
from hpcdl.machine.versions import versions

MOST = 3  # differences named in the message
PROGRAM = "the program"


@contextlib.contextmanager
def reading(world: MPI.Intracomm, reader: Callable[..., Any] = parse) -> Iterator[Callable[..., Any]]:
    """Yield a parser: `with reading(world) as parse`. All ranks get the same options, or all refuse; collective.
    reader: `parse`, or `parse_command_line`. The body may check the options, and raise UsageError."""
    read: list[tuple[str, Any]] = []

    def read_one(options_class: type, program: str, description: str, arguments: list[str] | None = None) -> Any:
        found = reader(options_class, program, description, arguments)
        read.append((program, found.options if isinstance(found, CommandLine) else found))
        return found

    with refuse_together(world), quiet(world.rank > 0):
        yield read_one
    for program, options in read:
        refuse_unlike(world, described(program, options))


def described(program: str, options: Any) -> dict[str, str]:
    """Return this rank's program, options and versions, as texts by name."""
    return (
        {PROGRAM: program}
        | {f"--{dashed(field.name)}": repr(getattr(options, field.name)) for field in dataclasses.fields(options)}
        | {"the version of python": platform.python_version()}
        | {f"the version of {name}": text for name, text in versions().items()}
    )


def refuse_unlike(comm: MPI.Intracomm, mine: dict[str, str]) -> None:
    """Raise AgreedError on all ranks if `mine` differs between them; collective."""
    digest = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).digest()
    with inside("compare the options"):
        same = len(set(comm.allgather(digest))) == 1
        everyone = [mine] if same else comm.allgather(mine)
    if same:
        return
    names = dict.fromkeys(name for each in everyone for name in each)
    unlike = [name for name in names if len({each.get(name) for each in everyone}) > 1]
    unlike = unlike[:1] if PROGRAM in unlike else unlike  # different programs have different options
    told = "; ".join(f"{name} is {values_told([each.get(name) for each in everyone])}" for name in unlike[:MOST])
    more = f"; and {len(unlike) - MOST} more differ" if len(unlike) > MOST else ""
    raise AgreedError(f"the ranks were started differently: {told}{more}; start all with the same program and options")


def values_told(values: list[str | None]) -> str:
    """Return a text as "0.1 on rank 0, 0.2 on ranks 1 and 2" of the value on each rank; None: "not known"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("not known" if value is None else value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(of)}" for value, of in ranks.items())
