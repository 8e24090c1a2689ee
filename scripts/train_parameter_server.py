"""Train with parameter servers: mpiexec -n 5 python scripts/train_parameter_server.py --servers 2 --consistency ssp"""

from hpcdl.launch.training import Training  # first: it takes over the signals before MPI starts

# isort: split
from dataclasses import dataclass
from typing import Literal

from hpcdl.errors import UsageError
from hpcdl.parameter_server.consistency import Consistency
from hpcdl.parameter_server.parameter_store import check_settings, refuse_no_replicas
from hpcdl.recovery.server_failover import ServedSurvivor
from hpcdl.runs.options import Options, option
from hpcdl.strategies.parameter_server import touched_rows, train


@dataclass
class ServerOptions(Options):
    servers: int = option(1, "how many ranks hold the parameters, a slice each; the other ranks are workers")
    servers_on_workers: bool = option(False, "every rank is a worker and holds a slice, instead of --servers")
    consistency: Literal["bsp", "ssp", "async"] = option(
        "bsp", "bsp: in rounds; ssp: workers may be --staleness clocks ahead; async: no worker waits for another"
    )
    staleness: int = option(0, "ssp: by how many clocks a worker may be ahead of the slowest; 0: as bsp")
    broadcast_every: int = option(0, "servers send after so many clocks (async: versions), unasked; 0: when asked")
    staleness_aware: bool = option(False, "divide the learning rate of a gradient by 1 + its staleness")
    sparse_push: bool = option(False, "sparse data: send only what a batch touches of the first layer's weight")
    replicas: int = option(1, "on how many servers each slice is, so that one that is gone is outlived")
    survive: int = option(0, "--replicas: ranks that may be lost, under mpiexec --with-ft ulfm of Open MPI; 0: any")
    fixed_delay: int = option(0, "apply each gradient so many versions late, to see where training diverges")

    def __post_init__(self):
        super().__post_init__()
        if self.servers_on_workers and self.servers > 1:
            raise UsageError("give --servers or --servers-on-workers, not both: there, every rank is a server")
        self.servers = 0 if self.servers_on_workers else self.servers
        for name in ("broadcast_every", "fixed_delay"):
            self._refuse_negative(name)
        self.chosen.checked()
        if self.consistency == "async" and (self.partition != "iid" or self.placement == "partitioned"):
            raise UsageError(
                "async draws batches of all rows: --partition and --placement partitioned are for bsp and ssp"
            )
        if self.consistency == "async" and self.batch_per_rank:
            self.batch_size, self.batch_per_rank = self.batch_per_rank, 0  # an update is one rank's
        if self.fixed_delay and self.checkpoint_every:
            raise UsageError("--fixed-delay: what is delayed is in no checkpoint; leave out --checkpoint-every")
        if self.sparse_push and self.broadcast_every:
            raise UsageError("--broadcast-every sends all parameters, unasked: leave it out with --sparse-push")
        if self.sparse_push and self.device != "cpu":
            raise UsageError("--sparse-push finds what travels in the memory of the host: leave out --device")
        if self.replicas < 1:
            raise UsageError(f"--replicas {self.replicas}: each slice is on 1 server or more")
        if self.survive and self.replicas == 1:
            raise UsageError("--survive: what a server holds would be gone with it; give --replicas 2 as well")
        if self.replicas > 1:
            unfit = self.servers_on_workers, self.sparse_push, self.broadcast_every, self.fixed_delay
            refuse_no_replicas(self.servers, self.replicas, *unfit)
        if self.servers_on_workers and self.device != "cpu":
            raise UsageError("--servers-on-workers keeps slices in the memory of the host; use --servers with a GPU")

    @property
    def chosen(self) -> Consistency:
        return Consistency(self.consistency, self.staleness)


def check_servers(options: ServerOptions, ranks: int, model) -> None:
    """Raise UsageError where so many ranks cannot serve this model so."""
    units = model.layout.size // (touched_rows(model).width if options.sparse_push else 1)
    sizes = ranks, units, options.servers, options.servers_on_workers
    check_settings(*sizes, options.chosen, options.broadcast_every, options.fixed_delay)


def start(comm, model, data, optimizer, run):
    options = run.options
    train(
        comm,
        model,
        data,
        optimizer,
        run,
        servers=options.servers,
        on_workers=options.servers_on_workers,
        consistency=options.chosen,
        broadcast_every=options.broadcast_every,
        aware=options.staleness_aware,
        delay=options.fixed_delay,
        sparse_push=options.sparse_push,
        replicas=options.replicas,
    )


TRAINING = Training(
    "train-parameter-server", ServerOptions, __doc__, start, check=check_servers, survivor=ServedSurvivor
)
main = TRAINING.main


if __name__ == "__main__":
    main()
