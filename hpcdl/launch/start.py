"""How a program of several ranks starts: a script's `main` does the following in order; nothing starts at import.

    --help                 printed without MPI, by the launcher's first process
    signals                handled before MPI starts, since an early signal would kill it
    MPI                    by machine/world.py, which first looks for what would make MPI end with its own message
    the end of all ranks   from here on an error ends all ranks (comm/failure.py)

Only then the code that trains is imported, since its import starts MPI. A script that trains by a strategy is

    main = TrainingProgram(STRATEGY, __doc__)"""

import contextlib
import dataclasses
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcdl.errors import UsageError
from hpcdl.launch.help import HELP, HELP_ALL, parser
from hpcdl.launch.option_parser import program_defaults
from hpcdl.launch.program import ended, quiet
from hpcdl.machine.world import start
from hpcdl.programs import first_process, reader_may_leave
from hpcdl.runs import signals
from hpcdl.runs.options import kinds_of
from hpcdl.strategies.description import Strategy

if TYPE_CHECKING:
    from hpcdl.launch.training import Training


@dataclass
class Program:
    """A program of several ranks, run by a call. description: the script's docstring. body(world, arguments): its work;
    it imports what it needs. stoppable: signals stop a run in good order. status: exit status if MPI cannot start."""

    name: str
    options_class: type
    description: str
    body: Callable[[Any, list[str]], None]
    stoppable: bool = True
    status: int = 2

    def __call__(self, arguments: list[str] | None = None) -> None:
        """Print help, or start MPI and run with these arguments; None: those of the process."""
        arguments = sys.argv[1:] if arguments is None else arguments
        if {*HELP, HELP_ALL} & {*arguments}:
            self.print_help(arguments)
        with start_mpi(self.stoppable, self.status):
            from mpi4py import MPI

            with ended(self.name, MPI.COMM_WORLD.rank):
                self.body(MPI.COMM_WORLD, arguments)

    @property
    def own_options(self) -> dict[str, type]:
        """The type of each option's default, by the option's name."""
        return {field.name: type(field.default) for field in dataclasses.fields(self.options_class)}

    def print_help(self, arguments: list[str]) -> None:
        """Print help and exit; return if the words before --help are invalid, which `reading` refuses on all ranks."""
        kinds, printed = kinds_of(self.options_class), False
        made = parser(self.options_class, kinds, program_defaults(kinds), self.name, self.description)
        with quiet(not first_process()), contextlib.suppress(UsageError), reader_may_leave():
            try:
                made.parse_args(arguments)
            except SystemExit:  # reader_may_leave would swallow it
                printed = True
        if printed:
            raise SystemExit(0)


class TrainingProgram(Program):
    """A program that trains by a strategy. runner: module:name of the class that trains. description: as of Program."""

    def __init__(self, strategy: Strategy, description: str, runner: str = "hpcdl.launch.training:Training"):
        self.strategy, self.runner = strategy, runner
        super().__init__(
            strategy.program, strategy.options_class, description, lambda _, own: self.training().main(own)
        )

    @property
    def own_options(self) -> dict[str, type]:
        return self.strategy.own_options

    def training(self) -> "Training":
        """Return the object that trains by the strategy; the import starts MPI, unless it has started."""
        return pkgutil.resolve_name(self.runner)(self.strategy)  # type: ignore[no-any-return]


def start_mpi(stoppable: bool = True, status: int = 2) -> contextlib.AbstractContextManager[None]:
    """Handle signals if `stoppable`, start MPI, make errors end all ranks; return the context failure.job()."""
    if stoppable:
        signals.install()
    start(status)
    from hpcdl.comm import failure  # here: its import starts MPI

    failure.install()
    return failure.job()
