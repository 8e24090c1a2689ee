"""From a command line to a training run: what all training scripts share.

    training("train-allreduce", Options, __doc__, arguments, train)

parses the options, divides the ranks into roles, opens the data, makes the model and the run, and calls
`train(comm, model, data, optimizer, run)` on the ranks that train: workers and parameter servers. Data servers serve.

Bad input ends all ranks with one line on rank 0 and status 2; a run that cannot go on with one line and status 1; a
run that a signal stopped with status 85.
"""

from hpcdl.runs import signals

signals.install()  # before the next import starts MPI

from collections.abc import Callable  # noqa: E402

from mpi4py import MPI  # noqa: E402

from hpcdl.comm import Communicator, agreement  # noqa: E402
from hpcdl.comm.allreduce import algorithm  # noqa: E402
from hpcdl.comm.node import ranks_of_node  # noqa: E402
from hpcdl.data import open_data  # noqa: E402
from hpcdl.errors import UsageError  # noqa: E402
from hpcdl.kernels.device import open_device  # noqa: E402
from hpcdl.models import make_model  # noqa: E402
from hpcdl.runs.options import parse  # noqa: E402
from hpcdl.runs.program import ended, quiet  # noqa: E402
from hpcdl.runs.run import Run  # noqa: E402
from hpcdl.runs.straggler import slowed  # noqa: E402
from hpcdl.services.roles import divide  # noqa: E402


def training(
    program: str,
    options_class: type,
    description: str,
    arguments: list[str] | None,
    train: Callable,
    ranks: int | None = None,
    check: Callable | None = None,
) -> None:
    """Parse, open, build, run and finish.

    ranks: how many ranks the strategy works on, when it is not any number. An options class with a field `servers`
    has that many parameter servers. check(options, ranks, model): raises UsageError where these do not go together.
    """
    world = MPI.COMM_WORLD
    with ended(program, world.rank):
        with agreement(world), quiet(world.rank > 0):
            options = parse(options_class, program, description, arguments)
            if ranks not in (None, world.size):
                raise UsageError(f"this strategy runs on {ranks} rank, not on {world.size}: start it without mpiexec")
            roles = divide(world.size, getattr(options, "servers", 0))
        with agreement(world):
            algorithm(options.allreduce)
        number = local_rank(world)
        with agreement(world):
            serves = world.rank in roles.servers
            device = open_device("cpu" if serves else options.device, number)  # parameters on servers lie on the host
        spans = 0 if options.out == "none" else options.trace
        everyone = comm = Communicator(world, options.allreduce, options.timeout, spans, device)
        part = world.Split(int(serves), world.rank)  # those that hold data in the same way
        with agreement(world):
            data = open_data(
                options.data,
                comm=part,
                placement="streamed" if serves else options.placement,  # a server reads what it scores
                partition="iid" if serves else options.partition,
                dtype=options.dtype,
                seed=options.seed,
                validation=options.validation,
                augment=options.augment,
            )
        run = Run(comm, options, everyone, len(roles.workers))
        with agreement(world):
            model = make_model(options.model, data.features, data.classes, options.dtype, device)
            if check is not None:
                check(options, comm.size, model)
            optimizer = run.make_optimizer(model, data)
            model = slowed(model, options, everyone.rank, roles.workers)
        with run:
            train(comm, model, data, optimizer, run)
            data.close()
        part.Free()
        comm.free()
        if run.stopped == "signal":
            raise SystemExit(signals.STATUS)


def local_rank(comm: MPI.Intracomm) -> int:
    """The number of this rank among those of its machine; collective."""
    node = ranks_of_node(comm)
    rank = node.rank
    node.Free()
    return rank
