"""All ranks of a program are told the same, by the same program and versions; else all refuse, before anything starts.

Ranks that differ would hang, or train what nobody asked for: an options file that was edited on one host, a job script
that starts two commands as one job, two installations.

    mine = {program, each option, each version}      digest of it -> all ranks       the same: go on
                                                     else: mine -> all ranks         name the option and the ranks
"""

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
from hpcdl.comm.progress import activity
from hpcdl.errors import AgreedError
from hpcdl.formatting import dashed
from hpcdl.launch.option_parser import CommandLine, parse
from hpcdl.launch.program import quiet
from hpcdl.machine.versions import versions

MOST = 3  # things that are named
PROGRAM = "the program"


@contextlib.contextmanager
def reading(world: MPI.Intracomm, reader: Callable[..., Any] = parse) -> Iterator[Callable[..., Any]]:
    """`with reading(world) as parse: options = parse(...)`: on all ranks the same options, or all refuse; collective.

    reader: `parse`, or `parse_command_line`. The body may check the options, and raise UsageError.
    """
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
    """What a rank was told, and by which program, in names and texts."""
    told = {PROGRAM: program}
    told |= {f"--{dashed(field.name)}": repr(getattr(options, field.name)) for field in dataclasses.fields(options)}
    return (
        told
        | {"the version of python": platform.python_version()}
        | {f"the version of {name}": text for name, text in versions().items()}
    )


def refuse_unlike(comm: MPI.Intracomm, mine: dict[str, str]) -> None:
    """Raise AgreedError, on all ranks, where `mine` is not the same on all of them; collective."""
    digest = hashlib.blake2b(json.dumps(mine, sort_keys=True).encode(), digest_size=16).digest()
    with activity.inside("compare the options"):
        same = len(set(comm.allgather(digest))) == 1
        everyone = [mine] if same else comm.allgather(mine)
    if same:
        return
    names = [name for name in dict.fromkeys(name for each in everyone for name in each)]
    unlike = [name for name in names if len({each.get(name) for each in everyone}) > 1]
    unlike = unlike[:1] if PROGRAM in unlike else unlike  # whose options are others
    told = "; ".join(f"{name} is {values_told([each.get(name) for each in everyone])}" for name in unlike[:MOST])
    more = f"; and {len(unlike) - MOST} more differ" if len(unlike) > MOST else ""
    raise AgreedError(f"the ranks are not told the same: {told}{more}; start all with the same program and options")


def values_told(values: list[str | None]) -> str:
    """0.1 on rank 0, 0.2 on ranks 1 and 2"""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("not known" if value is None else value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(of)}" for value, of in ranks.items())
