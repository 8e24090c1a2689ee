"""--survive N: when ranks are lost, the others continue in the job, from what they hold in memory.

    a call of MPI raises on a rank, as a rank that the call needs is lost               ULFM: PROC_FAILED
    this rank revokes the communicators of the run: calls of the others raise, too      revoke
    the survivors tell each other whether they have reached the end of the run          agree
    they make a new world; of the ranks that train, the one furthest comes first        shrink
    if unreachable ranks may continue elsewhere, and are more, the ranks here end       quorum
    with --respawn, new ranks join, which have no state                                 respawn.py
    the first rank that trains has the state; the others take it, and repeat the step   recovery/survivor.py

This needs Open MPI from 5.0 on, started by `mpiexec --with-ft ulfm`. Sums travel by messages: in the shared memory of a
node a rank would wait for a lost one for ever. (Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery
of MPI communication capability: design and rationale", Int. J. High Performance Computing Applications 2013)"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from hpcdl.comm import progress
from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.comm.progress import LONGEST
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError
from hpcdl.formatting import counted
from hpcdl.machine.world import OPEN_MPI, library
from hpcdl.recovery import respawn
from hpcdl.recovery.survivor import Survivor
from hpcdl.runs.context import RunContext
from hpcdl.runs.options import Options
from hpcdl.runs.run import Run
from hpcdl.shared_memory import unlink_mapped

log = logging.getLogger("hpcdl")
ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by mpiexec --with-ft ulfm
DETECTOR = "OMPI_MCA_mpi_ft_detector"
SET = ("1", "true")
BY_MESSAGES = "recursive"  # replaces auto, which may use shared memory
HEARD = 5.0  # seconds within which a rank learns why a call has failed
worlds: list[MPI.Intracomm] = []  # worlds after a loss of ranks


def handed_over() -> bool:
    """True if this MPI library reports lost ranks to the program instead of ending it."""
    return library() == OPEN_MPI and os.environ.get(ENABLED) in SET


def silence_counts() -> bool:
    """True if the MPI library takes a rank that is silent for a while for lost."""
    return os.environ.get(DETECTOR) in SET


def losable(options: Options, size: int) -> int:
    """Return how many of `size` ranks a run may lose: with replicas of servers' slices, any number by default."""
    if getattr(options, "replicas", 1) > 1 and handed_over():
        return getattr(options, "survive", 0) or size
    return getattr(options, "survive", 0)


def warn_no_survival(options: Options, rank: int) -> None:
    """Warn, on rank 0, if replicas are of no use: the library ends all ranks when one is lost."""
    replicas = getattr(options, "replicas", 1)
    if rank == 0 and replicas > 1 and not handed_over():
        what = "--replicas %d is of no use: this %s ends all ranks when one is lost. To outlive a rank, take "
        log.warning(f"{what}Open MPI from 5.0 on, started with mpiexec --with-ft ulfm", replicas, library())


def refuse_no_survival(options: Options, size: int) -> None:
    """Raise UsageError if the options ask to outlive lost ranks, and the MPI library or another option prevents it."""
    ranks = getattr(options, "survive", 0)
    if ranks < 0:
        raise UsageError(f"--survive is the number of ranks that may be lost, at least 0, not {ranks}")
    if ranks and not handed_over():
        raise UsageError(
            f"--survive {ranks}: this {library()} ends all ranks when one is lost; --survive needs Open MPI from 5.0 "
            "on, started with mpiexec --with-ft ulfm"
        )
    if getattr(options, "respawn", False) and not ranks:
        raise UsageError("--respawn replaces lost ranks: add --survive N, the number of ranks that may be lost")
    ranks = losable(options, size)
    if not ranks:
        return
    if options.allreduce in ("shared", "hierarchical"):
        raise UsageError(
            f"--survive {ranks}: in shared memory (--allreduce {options.allreduce}) no rank sees that another is "
            f"lost; take --allreduce {BY_MESSAGES}, ring, tree or mpi"
        )
    if options.data_servers and getattr(options, "replicas", 1) > 1:
        raise UsageError("--replicas: a run outlives parameter servers, but no data server; leave out --data-servers")
    if options.timeout:
        raise UsageError("--timeout ends all ranks, but this run is to outlive lost ranks: leave out --timeout")


def by_messages(options: Options, size: int) -> Options:
    """Return the options, in which an all-reduce by messages replaces `auto` if the run may lose ranks."""
    if options.allreduce == "auto" and losable(options, size):
        return replace(options, allreduce=BY_MESSAGES)
    return options


def survive(
    run: Callable[[MPI.Intracomm, Options, RunContext], Run], world: MPI.Intracomm, options: Options, survivor: Survivor
) -> Run:
    """Call run(comm, options, context) on the ranks of `world`, and again on the survivors whenever ranks are lost.
    From now on a rank that fails alone counts as lost. A loss before a leg's first step ends the run. Raises
    TrainingError, on all survivors, if more ranks are lost than --survive allows."""
    progress.survive()
    try:
        return in_legs(run, None if respawn.is_new() else world.Dup(), options, survivor)
    except (TrainingError, AgreedError) as error:
        if error.speaker is not None:  # a rank among the survivors; rank 0 of the world may be lost
            error.speaker = world.rank if survivor.number == error.speaker else None
        raise


def in_legs(
    run: Callable[[MPI.Intracomm, Options, RunContext], Run],
    comm: MPI.Intracomm | None,
    options: Options,
    survivor: Survivor,
) -> Run:
    """Call `run` for leg after leg, as long as enough ranks are left. comm: None on a rank that was started anew."""
    most, hosts = 0, list[str]()
    if comm is not None:
        most, hosts = losable(options, comm.size), comm.allgather(MPI.Get_processor_name())
        if comm.rank == 0 and (pair := neighbours(hosts)):
            log.warning("--survive: %s; if it vanishes, all others may wait for ever: mpiexec --rank-by node", pair)
    failed = begun = time.monotonic()
    while True:
        if comm is None:
            with going_on():
                worlds.append(respawn.joined())
                comm, gone = survivor.hand_over(worlds[-1], None)
        else:
            survivor.number, survivor.run, begun = comm.rank, None, time.monotonic()
            done: Any = None
            try:
                done = run(comm, options, RunContext(survivor=survivor))
            except Exception as error:
                if survivor.run is None or not some_failed(comm, isinstance(error, MPI.Exception)):
                    raise
                log.info("a call has failed: %s", error)
                survivor.everyone.revoke()
                comm.Revoke()
            failed = time.monotonic()
            if all_done(comm, done is not None):
                return done
            progress.abandon()
            left: Any = comm.Shrink()
            worlds.append(left)
            survivor.number, number = left.rank, comm.size - left.size
            if silence_counts():
                refuse_minority(hosts, left.group.Translate_ranks(range(left.size), comm.group))
            with going_on():
                if getattr(options, "respawn", False) and 0 < number <= most - survivor.lost:
                    worlds[-1] = left = respawn.brought_back(left, number)
                comm, gone = survivor.hand_over(left, comm)
        worlds[-1], survivor.number = comm, comm.rank
        with going_on():
            most, hosts = comm.bcast(most), comm.allgather(MPI.Get_processor_name())
        survivor.lost += len(gone)
        if survivor.lost > most:
            raise TrainingError(f"{survivor.told(gone)}: {survivor.lost} in all, more than --survive {most}")
        survivor.since = failed
        change: dict[str, Any] = {"out": survivor.handover.folder or "none", "resume": "", "force": False}
        if options.batch_per_rank:  # a step has as many examples as before
            change |= {"batch_size": survivor.handover.batch, "batch_per_rank": 0}
        if options.time_limit:
            change["time_limit"] = max(1e-3, options.time_limit - (failed - begun))
        options = replace(survivor.adapt(options), **change)


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """Context in which ranks prepare the next leg. Raises LoneError if another rank is lost meanwhile."""
    try:
        yield
    except MPI.Exception as error:
        raise LoneError(
            f"another rank is lost before the first step of the surviving ranks ({error}): start the run again, with "
            "--resume if it has a checkpoint"
        ) from None


def neighbours(hosts: list[str]) -> str:
    """Return a text on two neighbouring ranks on one of several hosts; "" if none. hosts: of each rank. A rank watches
    the one before it: if both are lost at once, Open MPI 5.0.11 does not end an agreement (observed)."""
    if silence_counts() and len(set(hosts)) > 1:
        for rank, where in enumerate(hosts):
            if where == hosts[rank - 1]:
                both = format_ranks(sorted([rank, (rank - 1) % len(hosts)]))
                return f"{both}, of which one watches the other, are both on {where}"
    return ""


def refuse_minority(hosts: list[str], left: list[int]) -> None:
    """Raise TrainingError, on all survivors, if the ranks out of reach may continue elsewhere, and are more. hosts: the
    host of each rank of a leg. left: the survivors' ranks in that leg. If a link is cut, each side takes the other for
    lost, and two runs would write one folder. The larger side (of equal ones, that with the lowest rank) continues.
    Only whole hosts are taken for another side."""
    apart = [rank for rank, where in enumerate(hosts) if where not in {hosts[each] for each in left}]
    if apart and (len(apart), -apart[0]) > (len(left), -min(left)):
        names = ", ".join(sorted({hosts[rank] for rank in apart}))
        raise TrainingError(
            f"{format_ranks(apart)} ({names}) cannot be reached, and may go on by themselves: this side, of "
            f"{counted(len(left), 'rank')}, is not the larger one, and ends"
        )


def some_failed(comm: MPI.Intracomm, wait: bool) -> bool:
    """True if this rank knows of lost ranks of `comm`, or another has revoked it. wait: up to HEARD seconds."""
    until = time.monotonic() + HEARD * wait
    while True:
        comm.Ack_failed()
        group = comm.Get_failed()
        known = group.size > 0 or comm.Is_revoked()
        group.Free()
        if known or time.monotonic() >= until:
            return known
        try:
            comm.Iprobe()  # MPI learns of failures only within calls
        except MPI.Exception:
            return True
        time.sleep(LONGEST)


def all_done(comm: MPI.Intracomm, done: bool) -> bool:
    """True if `done` is true on all survivors; collective over them."""
    while True:
        comm.Ack_failed()
        with contextlib.suppress(MPI.Exception):  # an unknown loss of a rank raises on all alike
            all_have = bool(comm.Agree(int(done)))
            if all_have and some_failed(comm, False):  # a rank is lost after its last step
                worlds.append(comm)
            return all_have


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """Context of a rank's program. After a loss of ranks, it exits without MPI_Finalize, which may wait for these."""
    status = 0
    try:
        yield
    except SystemExit as left:
        if not worlds:
            raise
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    if worlds:
        with contextlib.suppress(MPI.Exception):
            worlds[-1].Barrier()
        unlink_mapped(".*")  # those of lost ranks, too
        respawn.tell_the_launcher()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
