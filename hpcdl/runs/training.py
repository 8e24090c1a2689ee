"""From a command line to a training run: what all training scripts share.

    with training("all_reduce", Options, __doc__) as (comm, model, data, optimizer, run):
        train(comm, model, data, optimizer, run)

Bad input ends all ranks with one line on rank 0 and status 2; a run that cannot go on with one line and status 1; a
run that a signal stopped with status 85.
"""

from hpcdl.runs import signals

signals.install()  # before the next import starts MPI

import contextlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

from mpi4py import MPI  # noqa: E402

from hpcdl.comm import Communicator, agreement  # noqa: E402
from hpcdl.comm.allreduce import algorithm  # noqa: E402
from hpcdl.data import open_data  # noqa: E402
from hpcdl.errors import TrainingError, UsageError  # noqa: E402
from hpcdl.models import make_model  # noqa: E402
from hpcdl.runs.options import parse  # noqa: E402
from hpcdl.runs.run import Run  # noqa: E402
from hpcdl.runs.straggler import slowed  # noqa: E402


@contextlib.contextmanager
def training(program: str, options_class: type, description: str, arguments: list[str] | None = None, ranks=None):
    """Parse, open, build, run and finish; yields (comm, model, data, optimizer, run).

    ranks: how many ranks the strategy works on, when it is not any number.
    """
    world = MPI.COMM_WORLD
    with ended(program, world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(options_class, program, description, arguments)
            if ranks not in (None, world.size):
                raise UsageError(f"this strategy runs on {ranks} rank, not on {world.size}: start it without mpiexec")
        with agreement(world):
            algorithm(options.allreduce)
        comm = Communicator(world, options.allreduce, options.timeout, 0 if options.out == "none" else options.trace)
        data = open_data(
            options.data,
            comm=world,
            placement=options.placement,
            partition=options.partition,
            dtype=options.dtype,
            seed=options.seed,
            validation=options.validation,
            augment=options.augment,
        )
        run = Run(comm, options)
        with agreement(world):
            model = make_model(options.model, data.features, data.classes, options.dtype)
            optimizer = run.make_optimizer(model, data)
            model = slowed(model, options, comm.rank, comm.size)
        with run:
            yield comm, model, data, optimizer, run
        data.close()
        comm.free()
        if run.stopped == "signal":
            sys.exit(signals.STATUS)


@contextlib.contextmanager
def ended(program: str, rank: int):
    """Turn an error that all ranks share into one line on rank 0 and an exit status on all."""
    try:
        yield
    except (UsageError, TrainingError) as error:
        sys.stdout.flush()
        if rank == 0:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


@contextlib.contextmanager
def quiet(silent: bool):
    """Silence the help text on all ranks but one."""
    with contextlib.ExitStack() as stack:
        if silent:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(warnings.catch_warnings())
        yield
