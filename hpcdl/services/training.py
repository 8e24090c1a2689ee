"""From a command line to a training run: what all training scripts share.

    training("train-allreduce", Options, __doc__, arguments, train)

parses the options, divides the ranks into roles, opens the data, makes the model and the run, and calls
`train(comm, model, data, optimizer, run)` on the ranks that train: workers and parameter servers. Data servers serve.

Bad input ends all ranks with one line on rank 0 and status 2; a run that cannot go on with one line and status 1; a
run that a signal stopped with status 85.
"""

from hpcdl.machine.world import one_world, start
from hpcdl.runs import signals

signals.install()  # before MPI starts
start()

from hpcdl.comm import failure  # noqa: E402

failure.install()  # what fails from here on ends all ranks

import logging  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from mpi4py import MPI  # noqa: E402

from hpcdl.comm import Communicator, refuse_together  # noqa: E402
from hpcdl.comm.allreduce import algorithm  # noqa: E402
from hpcdl.comm.node import ranks_of_node  # noqa: E402
from hpcdl.data import Data, open_data  # noqa: E402
from hpcdl.data.order import named  # noqa: E402
from hpcdl.data.scales import unlike  # noqa: E402
from hpcdl.errors import AgreedError, TrainingError, UsageError  # noqa: E402
from hpcdl.kernels.device import open_device  # noqa: E402
from hpcdl.machine.doctor import warn  # noqa: E402
from hpcdl.models import for_data  # noqa: E402
from hpcdl.own import is_own  # noqa: E402
from hpcdl.runs.accumulated import accumulated  # noqa: E402
from hpcdl.runs.alike import reading  # noqa: E402
from hpcdl.runs.legs import measured  # noqa: E402
from hpcdl.runs.options import Options, remark  # noqa: E402
from hpcdl.runs.program import ended  # noqa: E402
from hpcdl.runs.run import Run  # noqa: E402
from hpcdl.runs.straggler import slowed  # noqa: E402
from hpcdl.runs.summary import conclude  # noqa: E402
from hpcdl.services.data_server import introduce, serve  # noqa: E402
from hpcdl.services.remote_data import RemoteData  # noqa: E402
from hpcdl.services.roles import ROLES, Roles, divide  # noqa: E402
from hpcdl.words import counted  # noqa: E402

log = logging.getLogger("hpcdl")
FAILED, REFUSED = 1, 2  # the exit statuses of a run that cannot go on, and of bad input


def training(
    program: str,
    options_class: type,
    description: str,
    arguments: list[str] | None,
    train: Callable,
    ranks: int | None = None,
    check: Callable | None = None,
    cut: bool = False,
) -> None:
    """Parse, open, build, run and finish.

    ranks: how many ranks the strategy works on, when it is not any number. An options class with a field `servers`
    has that many parameter servers. check(options, ranks, model): raises UsageError where these do not go together.
    cut: no rank holds the whole model: the optimizer that `train` is given is of size 0, for `of_size`.
    """
    world = MPI.COMM_WORLD
    with ended(program, world.rank) as remarks:
        if ranks is None:
            one_world(world)
        with reading(world) as parse:
            options = parse(options_class, program, description, arguments)
            remarks.append(remark(options.before))
            if ranks is not None and options.data_servers:
                raise UsageError("--data-servers: this strategy has one rank, which holds the examples itself")
            if ranks not in (None, world.size):
                raise UsageError(
                    f"this strategy runs on {counted(ranks, 'rank')}, not on {world.size}: start it without mpiexec"
                )
            roles = divide(world.size, getattr(options, "servers", 0), options.data_servers)
        with refuse_together(world):
            algorithm(options.allreduce)
        warn(world, ranks is None)
        role, number = roles.of(world.rank), local_rank(world)
        with refuse_together(world):
            device = open_device(options.device if role == "worker" else "cpu", number)
        spans = 0 if options.out == "none" else options.trace
        everyone = Communicator(world, options.allreduce, options.timeout, spans, device)
        comm = everyone.split(int(role == "data server"), name="training") if options.data_servers else everyone
        data = open_for(role, roles, options, everyone)
        run = Run(comm, options, everyone, len(roles.workers))
        if world.rank == roles.workers[0] and (coming := unlike(data.scales)):
            log.warning("%s", coming)
        with refuse_together(world):
            model = for_data(options.model, data, options.dtype, device, options.loss, options.from_file("model"))
            if check is not None:
                check(options, world.size - options.data_servers, model)
            if cut:
                options.refuse_too_large(model, world.size - options.data_servers)
            optimizer = run.make_optimizer(model, data, 0 if cut else None)
            model = accumulated(slowed(model, options, everyone.rank, roles.workers), options.accumulate)
        if role == "data server":
            stopped = assist(everyone, data, roles.clients(world.rank), run)
        else:
            with run:
                try:
                    train(comm, model, data, optimizer, run)
                except (TrainingError, AgreedError) as error:
                    refused = isinstance(error, AgreedError)
                    if isinstance(data, RemoteData):  # the servers do not know yet
                        data.close(REFUSED if refused else FAILED)
                        error.speaker = 0 if roles.servers else roles.workers[0]
                    raise
                data.close()
            stopped = run.stopped
        everyone.free()
        if stopped == "signal":
            raise SystemExit(signals.STATUS)


def open_for(role: str, roles: Roles, options: Options, everyone: Communicator) -> Data:
    """The data as a rank of this role sees them; collective. UsageErrors are agreed on by all ranks."""
    part: Any = everyone.mpi.Split(ROLES.index(role), everyone.rank)  # those that hold them in the same way
    how: dict[str, Any] = {"placement": options.placement, "partition": options.partition}
    if role == "parameter server" and not is_own(options.data):
        how = {"placement": "streamed"}  # it only reads what it scores
    elif role == "data server" and options.placement == "partitioned":
        how["parts"] = [roles.workers.index(each) for each in roles.clients(everyone.rank)], len(roles.workers)
    data: Any = None
    remote = role == "worker" and bool(options.data_servers)
    with refuse_together(everyone.mpi):
        if not remote:
            data = open_data(
                options.data,
                comm=part,
                dtype=options.dtype,
                seed=options.seed,
                validation=options.validation,
                augment=options.augment,
                standardize=options.standardized,
                from_file=options.from_file("data"),
                **how,
            )
    part.Free()
    if role == "parameter server":  # a run asks its rank 0 in which order the workers see the rows
        block = getattr(data.train.source, "block", 1)
        data.order = named(options.placement, options.partition, data.classes, block)
    if role == "data server":
        introduce(everyone, data, roles.clients(everyone.rank))
    return RemoteData(everyone, roles.data_server(everyone.rank)) if remote else data


def assist(everyone: Communicator, data: Data, clients: list[int], run: Run) -> str | None:
    """What a data server does for a run; returns why the run ended."""
    with run.stopwatch.step("serve"):
        status = serve(everyone, data, clients)
    data.close()
    if status in (FAILED, REFUSED):  # the workers have said why
        raise SystemExit(status)
    _, stopped = conclude(everyone, measured(run))
    run.bookkeeping.free()
    return stopped


def local_rank(comm: MPI.Intracomm) -> int:
    """The number of this rank among those of its machine; collective."""
    node = ranks_of_node(comm)
    rank = node.rank
    node.Free()
    return rank
