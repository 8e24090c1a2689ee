"""From a command line to a training run: what all training scripts share.

`Training(STRATEGY).main(arguments)` parses the options, divides the ranks into roles, opens the data, makes the model
and the run, and calls `train(comm, model, data, optimizer, run)` on the ranks that train: workers and parameter
servers. Data servers serve batches. A job of several trainings calls `run` for each, on its ranks. Exit status, after
one line on rank 0: 2 for bad input, 1 for a run that cannot continue; 85 for a run that a signal stopped."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from mpi4py import MPI

from hpcdl.comm import Communicator, refuse_together
from hpcdl.comm.allreduce import algorithm
from hpcdl.comm.node_memory import ranks_of_node
from hpcdl.data import Data, open_data
from hpcdl.data.class_balance import class_weights, count_classes, rare_class
from hpcdl.data.format import find_data_file, read_info
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
from hpcdl.plugins import is_plugin, of_torch
from hpcdl.recovery.respawn import is_new
from hpcdl.recovery.ulfm_recovery import by_messages, losable, outlived, refuse_no_survival, survive, warn_no_survival
from hpcdl.runs import signals
from hpcdl.runs.accumulated import accumulated
from hpcdl.runs.context import RunContext
from hpcdl.runs.evaluation import check_scores
from hpcdl.runs.options import Options
from hpcdl.runs.run import Run
from hpcdl.strategies.description import Strategy

log = logging.getLogger("hpcdl")
FAILED, REFUSED = 1, 2  # exit statuses of a run that cannot continue, and of bad input


@dataclass(frozen=True)
class Training:
    """Trains by a strategy: `main` as a whole program, `run` as one training of a job."""

    strategy: Strategy

    def main(self, arguments: list[str]) -> None:
        """Run the program: parse, train on all ranks, and exit."""
        world = MPI.COMM_WORLD
        with outlived(), ended(self.strategy.program, world.rank) as remarks:
            if self.strategy.ranks is None:
                check_world(world)
            with reading(world, parse_command_line) as read:
                line = read(self.strategy.options_class, self.strategy.program, "", arguments)
                options = line.options
                if is_new():  # the job that it joins has checked its options
                    refuse_no_survival(options, world.size)
                else:
                    remarks.append(remark(line.before))
                    self.refuse(options, world.size)
            if not is_new():
                warn_no_survival(options, world.rank)
            starting = partial(warn, world, self.strategy.ranks is None, options.progress == "none")
            run: Callable[..., Run] = partial(self.run, starting=starting)
            if losable(options, world.size):
                run = partial(survive, run, survivor=resolve_name(self.strategy.survivor)())
            if run(world, options).stopped == "signal":
                raise AgreedExit(signals.STATUS)

    def refuse(self, options: Options, size: int) -> None:
        """Raise UsageError if the options do not fit so many ranks; checks with model and data come later."""
        if self.strategy.ranks is not None and options.data_servers:
            raise UsageError("--data-servers: this strategy runs on one rank, which holds the examples itself")
        if self.strategy.ranks not in (None, size):
            raise UsageError(
                f"this strategy runs on {counted(self.strategy.ranks, 'rank')}, not on {size}: start it without mpiexec"
            )
        divide(size, getattr(options, "servers", 0), options.data_servers)
        algorithm(options.allreduce)
        inject.check(options, size)
        refuse_no_survival(options, size)

    def refuse_no_chain(self, options: Options, world: MPI.Intracomm) -> None:
        """Raise UsageError on rank 0, before rows are read, if layers are cut and the module is no chain of layers."""
        assert self.strategy.cut is not None
        cut = self.strategy.cut(options, world.size - options.data_servers)
        if world.rank == 0 and (cut.schedule or cut.tensor) and not is_plugin(options.data):
            info = read_info(find_data_file(options.data))
            shape = {"features": info.features, "classes": info.classes, "outputs": info.outputs}
            require_chain: Any = resolve_name("hpcdl.torch.module_factory:require_chain")  # PyTorch, only here
            require_chain(options.model, shape | {"dtype": options.dtype, "class_weights": None})

    def with_schedule(self, options: Options, world: MPI.Intracomm) -> Options:
        """Return the options, with the schedule that rank 0 chooses in the place of --schedule auto; collective."""
        if getattr(options, "schedule", "") != "auto" or self.strategy.cut is None:
            return options
        chosen: Any = None
        with refuse_together(world):
            if world.rank == 0:
                fastest: Any = resolve_name("hpcdl.planning.autotune:fastest_schedule")  # forecasts, only here
                chosen = fastest(self.strategy, options, world.size)
        chosen = world.bcast(chosen)
        if world.rank == 0:
            log.info("--schedule auto takes %s", chosen["schedule"])
        return replace(options, fit="", **chosen)  # type: ignore[call-arg]

    def run(
        self,
        world: MPI.Intracomm,
        options: Options,
        context: RunContext | None = None,
        opened: list | None = None,
        starting: Callable[[], None] = lambda: None,
    ) -> Run:
        """Open data, make model and run, train, and finish on all ranks of `world`; collective. Returns the ended run.
        opened: takes functions that release resources if the run fails and the job continues (isolated_run.py).
        starting: is called when all is checked, before the run's first leg."""
        opened, context = [] if opened is None else opened, context or RunContext()
        options = by_messages(options, world.size)
        options = self.with_schedule(options, world)
        roles = divide(world.size, getattr(options, "servers", 0), options.data_servers)
        role, survivor = roles.of(world.rank), context.survivor
        everyone = open_communicator(world, options, role == "worker", opened, survivor is not None)
        if survivor is not None:
            survivor.everyone, survivor.serves = everyone, role == "data server"
        comm = everyone.split(int(role == "data server"), name="training") if options.data_servers else everyone
        if of_torch(options.model) and self.strategy.cut:
            with refuse_together(world):
                self.refuse_no_chain(options, world)
        data = open_for(role, roles, options, everyone, context)
        if not isinstance(data, RemoteData):
            opened.append(data.close)
        if context.prepare is not None:
            with refuse_together(world):
                data, options = context.prepare(data, options, len(roles.workers))
        run = Run(comm, options, replace(context, everyone=everyone, workers=len(roles.workers)))
        counts = count_classes(world, data, roles.workers[0])
        if world.rank == roles.workers[0]:
            rare = None if options.class_weight else rare_class(data, counts, "class_weight" not in options.unused)
            for coming in filter(None, (scale_warning(data.scales), rare)):
                log.warning("%s", coming)
        with refuse_together(world):
            weights = class_weights(options.class_weight, data, counts)
            model = for_data(options.model, data, options.dtype, everyone.device, options.loss, weights)
            check_scores(options, data, model)
            if options.initial and not options.resume:
                load_initial_values(model, options.initial)
            if self.strategy.check is not None and not run.outlived:  # surviving ranks continue
                self.strategy.check(options, world.size - options.data_servers, model)
            if self.strategy.cut:
                options.refuse_too_large(model, world.size - options.data_servers)
            optimizer = run.make_optimizer(model, data, 0 if self.strategy.cut else None)
            model = accumulated(with_stragglers(model, options, everyone.rank, roles.workers), options.accumulate)
        if not run.outlived:
            starting()
        if role == "data server":
            assist(everyone, data, roles.clients(world.rank), run)
        else:
            with run:
                try:
                    self.strategy.start(comm, model, data, optimizer, run)
                except (TrainingError, AgreedError) as error:
                    refused = isinstance(error, AgreedError)
                    if isinstance(data, RemoteData):  # the data servers do not know of the error yet
                        data.close(REFUSED if refused else FAILED)
                        error.speaker = 0 if roles.servers else roles.workers[0]
                    raise
                data.close()
        everyone.free()
        return run


def open_communicator(
    world: MPI.Intracomm, options: Options, computes: bool, opened: list, survives: bool = False
) -> Communicator:
    """Return the communicator of all ranks, with the device of --device on a rank that computes; collective. survives:
    True if ranks that survive a failure continue, so that a failure does not end the job."""
    number = local_rank(world)
    with refuse_together(world):
        device = open_device(options.device if computes else "cpu", number)
    spans = 0 if options.out == "none" else options.trace
    how = options.allreduce, options.timeout, spans, device, not survives, options.checks.collectives or None
    everyone = Communicator(world, *how)
    opened.append(everyone.free)
    return everyone


def open_for(role: str, roles: Roles, options: Options, everyone: Communicator, context: RunContext) -> Data:
    """Return the data as a rank of this role sees them; collective. A UsageError of one rank is raised on all ranks."""
    part: Any = everyone.mpi.Split(ROLES.index(role), everyone.rank)  # ranks with the same kind of access to the data
    how: dict[str, Any] = {name: getattr(options, name) for name in ("placement", "partition", "shuffle_window")}
    if role == "parameter server" and not is_plugin(options.data):
        how = {"placement": "streamed", "shuffle_window": 1}  # it only reads the rows that it scores
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
                validation_by=options.validation_by,
                augment=options.augment,
                standardize=options.standardized,
                data_seed=context.data_seed,
                keep=context.survivor is not None,
                **how,
            )
    part.Free()
    if role == "parameter server":  # a run asks its rank 0 in which order the workers see the rows
        data.order = data.order_under(options.placement, options.partition, options.shuffle_window)
    if role == "data server":
        introduce(everyone, data, roles.clients(everyone.rank))
    return RemoteData(everyone, roles.data_server(everyone.rank)) if remote else data


def assist(everyone: Communicator, data: Data, clients: list[int], run: Run) -> None:
    """Serve `clients` as a data server. If they fail, raises their kind of error, without text: they report it."""
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
    """Return this rank's number on its node; collective."""
    node = ranks_of_node(comm)
    rank = node.rank
    node.Free()
    return rank
