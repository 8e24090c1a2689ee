"""How a program of several ranks starts. Nothing does at import: a script's `main` calls what is here first.

    --help                 printed without MPI, by the process that its launcher calls the first
    signals                taken over before MPI starts, which an early signal would otherwise kill
    MPI                    by machine/world.py, which looks first at what ends MPI in words of its own
    the end of all ranks   what fails from here on ends all (comm/failure.py)

Only then is imported what trains, for to import mpi4py.MPI starts MPI. A script that trains by a strategy is

    main = TrainingProgram(STRATEGY, __doc__)
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcdl.errors import UsageError
from hpcdl.launch.help import parser
from hpcdl.launch.option_parser import program_defaults
from hpcdl.machine.world import start
from hpcdl.programs import first_process, reader_may_leave
from hpcdl.runs import signals
from hpcdl.runs.options import kinds_of
from hpcdl.strategies.description import Strategy, named

if TYPE_CHECKING:
    from hpcdl.launch.training import Training


@dataclass(frozen=True)
class Program:
    """A program of several ranks; to call it runs it.

    description: the script's docstring. body(arguments): what it runs, which imports what it needs. stoppable: it takes
    over the signals that end a run in good order. status: that with which it leaves where MPI cannot start.
    """

    name: str
    options_class: type
    description: str
    body: Callable[[list[str]], None]
    stoppable: bool = True
    status: int = 2

    def __call__(self, arguments: list[str] | None = None) -> None:
        """Start, with these arguments or the process's own, and run."""
        arguments = sys.argv[1:] if arguments is None else arguments
        with begin(self.name, self.options_class, self.description, arguments, self.stoppable, self.status):
            self.body(arguments)

    @property
    def own_options(self) -> dict[str, type]:
        """The types of the defaults of its options."""
        return {field.name: type(field.default) for field in dataclasses.fields(self.options_class)}


@dataclass(frozen=True)
class TrainingProgram:
    """A program that trains by a strategy. description: the script's docstring; runner: who trains, by name."""

    strategy: Strategy
    description: str
    runner: str = "hpcdl.launch.training:Training"

    def __call__(self, arguments: list[str] | None = None) -> None:
        """Start, with these arguments or the process's own, and train on all ranks."""
        arguments = sys.argv[1:] if arguments is None else arguments
        with begin(self.strategy.program, self.strategy.options_class, self.description, arguments):
            self.training().main(arguments)

    @property
    def options_class(self) -> type:
        """That of the strategy."""
        return self.strategy.options_class

    @property
    def own_options(self) -> dict[str, type]:
        """The types of the defaults of the options that it adds to the common ones."""
        return self.strategy.own_options

    def training(self) -> "Training":
        """Who trains by the strategy; the import starts MPI, if nothing has done so."""
        return named(self.runner)(self.strategy)  # type: ignore[no-any-return]


def begin(
    program: str,
    options_class: type,
    description: str,
    arguments: list[str],
    stoppable: bool = True,
    status: int = 2,
) -> contextlib.AbstractContextManager[None]:
    """Print help and leave, where it is asked for; else start MPI, and return the context of the program."""
    if {"-h", "--help"} & {*arguments}:
        print_help(program, options_class, description, arguments)
    return start_mpi(stoppable, status)


def start_mpi(stoppable: bool = True, status: int = 2) -> contextlib.AbstractContextManager[None]:
    """Take over signals, if `stoppable`, start MPI, and have what fails end all ranks.

    Returns the context of a program of several ranks, `failure.job`.
    """
    if stoppable:
        signals.install()
    start(status)
    from hpcdl.comm import failure  # here: its import starts MPI

    failure.install()
    return failure.job()


def print_help(program: str, options_class: type, description: str, arguments: list[str]) -> None:
    """Print help and leave, unless what stands before --help is refused: by `reading`, on all ranks together."""
    kinds, printed = kinds_of(options_class), False
    made = parser(options_class, kinds, program_defaults(kinds), program, description)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if first_process() else nowhere),
        contextlib.suppress(UsageError),
        reader_may_leave(),
    ):
        try:
            made.parse_args(arguments)
        except SystemExit:
            printed = True
    if printed:
        raise SystemExit(0)
