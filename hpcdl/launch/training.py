"""From a command line to a training run: what all training scripts share.

    Training(STRATEGY).main(arguments)

parses the options, divides the ranks into roles, opens the data, makes the model and the run, and calls
`train(comm, model, data, optimizer, run)` on the ranks that train: workers and parameter servers. Data servers serve.
A job of several trainings calls `run` for each, on the ranks that it gives to it.

Bad input ends all ranks with one line on rank 0 and status 2; a run that cannot go on with one line and status 1; a
run that a signal stopped with status 85.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.data import Data, open_data
from hpcdl.data.sampler import order_name
from hpcdl.data.scale_warning import scale_warning
from hpcdl.data_server.batch_server import introduce, serve
from hpcdl.data_server.remote_data import RemoteData
from hpcdl.errors import AgreedError, AgreedExit, TrainingError, UsageError
from hpcdl.faults import inject
from hpcdl.faults.straggler import with_stragglers
from hpcdl.formatting import counted
from hpcdl.inference.pretrained import load_initial_values
from hpcdl.kernels.device import open_device
from hpcdl.launch.launch_consistency import reading
from hpcdl.launch.option_parser import parse_command_line, remark
from hpcdl.launch.program import ended
from hpcdl.machine.doctor import warn
from hpcdl.machine.world import check_world
from hpcdl.models import for_data
from hpcdl.parameter_server.roles import ROLES, Roles, divide
from hpcdl.plugins import is_plugin
from hpcdl.recovery.respawn import is_new
from hpcdl.recovery.survivor import Survivor
from hpcdl.recovery.ulfm_recovery import by_messages, losable, outlived, refuse_no_survival, survive, warn_no_survival
from hpcdl.runs import signals
from hpcdl.runs.accumulated import accumulated
from hpcdl.runs.context import RunContext
from hpcdl.runs.options import Options
from hpcdl.runs.run import Run
from hpcdl.strategies.description import Strategy

log = logging.getLogger("hpcdl")
FAILED, REFUSED = 1, 2  # the exit statuses of a run that cannot go on, and of bad input


@dataclass(frozen=True)
class Training:
    """A program that trains by a strategy."""

    strategy: Strategy

    def main(self, arguments: list[str]) -> None:
        """The program: parse, train on all ranks, and leave."""
        world = MPI.COMM_WORLD
        with outlived(), ended(self.strategy.program, world.rank) as remarks:
            if self.strategy.ranks is None:
                check_world(world)
            with reading(world, parse_command_line) as read:
                line = read(self.strategy.options_class, self.strategy.program, "", arguments)
                options = line.options
                if is_new():  # the job that it joins was told so
                    refuse_no_survival(options, world.size)
                else:
                    remarks.append(remark(line.before))
                    self.refuse(options, world.size)
            if not is_new():
                warn(world, self.strategy.ranks is None)
                warn_no_survival(options, world.rank)
            run: Callable[..., Run] = self.run
            if losable(options, world.size):
                run = partial(survive, self.run, survivor=(self.strategy.survivor or Survivor)())
            if run(world, options).stopped == "signal":
                raise AgreedExit(signals.STATUS)

    def refuse(self, options: Options, size: int) -> None:
        """Raise UsageError where so many ranks cannot be told so; what only model and data show comes later."""
        if self.strategy.ranks is not None and options.data_servers:
            raise UsageError("--data-servers: this strategy has one rank, which holds the examples itself")
        if self.strategy.ranks not in (None, size):
            raise UsageError(
                f"this strategy runs on {counted(self.strategy.ranks, 'rank')}, not on {size}: start it without mpiexec"
            )
        divide(size, getattr(options, "servers", 0), options.data_servers)
        algorithm(options.allreduce)
        inject.check(options, size)
        refuse_no_survival(options, size)

    def run(
        self,
        world: MPI.Intracomm,
        options: Options,
        context: RunContext | None = None,
        opened: list | None = None,
    ) -> Run:
        """Open, build, train and finish on all ranks of `world`; collective. Returns the run, which has ended.

        context: of the run; its `everyone` and `workers` are found here. opened: is given what has to be given back
        where the run cannot go on, and the job does (isolated_run.py).
        """
        opened, context = [] if opened is None else opened, context or RunContext()
        options = by_messages(options, world.size)
        roles = divide(world.size, getattr(options, "servers", 0), options.data_servers)
        role, number = roles.of(world.rank), local_rank(world)
        with refuse_together(world):
            device = open_device(options.device if role == "worker" else "cpu", number)
        spans = 0 if options.out == "none" else options.trace
        survivor = context.survivor  # who goes on where ranks are gone is not ended by what ends jobs
        how = options.allreduce, options.timeout, spans, device, survivor is None, options.checks.asked
        everyone = Communicator(world, *how)
        if survivor is not None:
            survivor.everyone, survivor.serves = everyone, role == "data server"
        opened.append(everyone.free)
        comm = everyone.split(int(role == "data server"), name="training") if options.data_servers else everyone
        data = open_for(role, roles, options, everyone, context)
        if not isinstance(data, RemoteData):
            opened.append(data.close)
        if context.prepare is not None:
            with refuse_together(world):
                data, options = context.prepare(data, options, len(roles.workers))
        run = Run(comm, options, replace(context, everyone=everyone, workers=len(roles.workers)))
        if world.rank == roles.workers[0] and (coming := scale_warning(data.scales)):
            log.warning("%s", coming)
        with refuse_together(world):
            model = for_data(options.model, data, options.dtype, device, options.loss)
            if options.initial and not options.resume:
                load_initial_values(model, options.initial)
            if self.strategy.check is not None and not run.outlived:  # who is left goes on
                self.strategy.check(options, world.size - options.data_servers, model)
            if self.strategy.cut:
                options.refuse_too_large(model, world.size - options.data_servers)
            optimizer = run.make_optimizer(model, data, 0 if self.strategy.cut else None)
            model = accumulated(with_stragglers(model, options, everyone.rank, roles.workers), options.accumulate)
        if role == "data server":
            assist(everyone, data, roles.clients(world.rank), run)
        else:
            with run:
                try:
                    self.strategy.start(comm, model, data, optimizer, run)
                except (TrainingError, AgreedError) as error:
                    refused = isinstance(error, AgreedError)
                    if isinstance(data, RemoteData):  # the servers do not know yet
                        data.close(REFUSED if refused else FAILED)
                        error.speaker = 0 if roles.servers else roles.workers[0]
                    raise
                data.close()
        everyone.free()
        return run


def open_for(role: str, roles: Roles, options: Options, everyone: Communicator, context: RunContext) -> Data:
    """The data as a rank of this role sees them; collective. UsageErrors are agreed on by all ranks."""
    part: Any = everyone.mpi.Split(ROLES.index(role), everyone.rank)  # those that hold them in the same way
    how: dict[str, Any] = {"placement": options.placement, "partition": options.partition}
    if role == "parameter server" and not is_plugin(options.data):
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
                data_seed=context.data_seed,
                keep=context.survivor is not None,
                **how,
            )
    part.Free()
    if role == "parameter server":  # a run asks its rank 0 in which order the workers see the rows
        block = getattr(data.train.source, "block", 1)
        data.order = order_name(options.placement, options.partition, data.classes, block)
    if role == "data server":
        introduce(everyone, data, roles.clients(everyone.rank))
    return RemoteData(everyone, roles.data_server(everyone.rank)) if remote else data


def assist(everyone: Communicator, data: Data, clients: list[int], run: Run) -> None:
    """What a data server does for a run. Raises, where that cannot go on, what the workers raise, who say why."""
    inject.arm(run)
    if run.survivor is not None:
        run.survivor.run = run
    with run.stopwatch.step("serve"):
        status = serve(everyone, data, clients)
    data.close()
    if status in (FAILED, REFUSED):
        error = TrainingError("") if status == FAILED else AgreedError("")
        error.speaker = None
        raise error
    run.leave()


def local_rank(comm: MPI.Intracomm) -> int:
    """The number of this rank among those of its machine; collective."""
    node = ranks_of_node(comm)
    rank = node.rank
    node.Free()
    return rank
