"""--survive N: when a rank is gone, the others go on in the job, from what they hold in memory.

    a call of MPI's raises on some rank, for a rank that it needs is gone            ULFM: PROC_FAILED
    it revokes the communicators of the run: what the others wait in raises, too     revoke
    all that are left say whether they have come to the end of the run               agree
    they make a new world of those that are left, whoever is furthest first          shrink
    where silent ones may go on elsewhere, and are more, these here end               quorum
    with --respawn, new ranks come to it, which have nothing                         respawn.py
    its rank 0 has the state, the others take it, and the step is done again         recovery/survivor.py

This needs an MPI that hands failures to the program: Open MPI from 5.0 on, started by `mpiexec --with-ft ulfm`. Sums
travel by messages: a rank that waits in the memory of a node for one that is gone would wait for ever.

Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability: design and
rationale", Int. J. High Performance Computing Applications 2013.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from hpcdl.comm.diagnostics.call_signature import format_ranks
from hpcdl.comm.progress import LONGEST, activity
from hpcdl.errors import AgreedError, LoneError, TrainingError, UsageError
from hpcdl.formatting import counted
from hpcdl.machine.world import OPEN_MPI, library
from hpcdl.recovery import respawn
from hpcdl.recovery.survivor import Survivor
from hpcdl.runs.context import RunContext
from hpcdl.runs.options import Options
from hpcdl.runs.run import Run
from hpcdl.shared_memory import remove_mapped

log = logging.getLogger("hpcdl")
ENABLED = "OMPI_MCA_mpi_ft_enable"  # what mpiexec --with-ft ulfm sets
DETECTOR = "OMPI_MCA_mpi_ft_detector"
SET = ("1", "true")
BY_MESSAGES = "recursive"  # in the place of auto, which may share memory
HEARD = 5.0  # seconds within which a rank that a call has failed on learns why
worlds: list[MPI.Intracomm] = []  # those that have outlived a rank


def handed_over() -> bool:
    """Whether this library hands failures to the program."""
    return library() == OPEN_MPI and os.environ.get(ENABLED) in SET


def silence_counts() -> bool:
    """Whether a rank that says nothing for a while is taken for gone."""
    return os.environ.get(DETECTOR) in SET


def losable(options: Options, size: int) -> int:
    """How many of so many ranks a run of these options may lose: with replicas of what servers hold, any number."""
    if getattr(options, "replicas", 1) > 1 and handed_over():
        return getattr(options, "survive", 0) or size
    return getattr(options, "survive", 0)


def warn_no_survival(options: Options, rank: int) -> None:
    """Say, on rank 0, where replicas are kept for nothing: the library ends all ranks with the one that is gone."""
    replicas = getattr(options, "replicas", 1)
    if rank == 0 and replicas > 1 and not handed_over():
        log.warning(
            "--replicas %d: slices have replicas, but this %s ends all ranks when one is gone; outliving it needs Open "
            "MPI from 5.0 on, started with mpiexec --with-ft ulfm",
            replicas,
            library(),
        )


def refuse_no_survival(options: Options, size: int) -> None:
    """Raise UsageError where a run of these options cannot outlive a rank."""
    ranks = getattr(options, "survive", 0)
    if ranks < 0:
        raise UsageError(f"--survive {ranks}: it is how many ranks may be lost, at least 0")
    if ranks and not handed_over():
        raise UsageError(
            f"--survive {ranks}: this {library()} ends all ranks when one is gone; it needs Open MPI from 5.0 on, "
            "started with mpiexec --with-ft ulfm"
        )
    if getattr(options, "respawn", False) and not ranks:
        raise UsageError("--respawn starts anew what --survive outlives: say how many ranks may be lost")
    ranks = losable(options, size)
    if not ranks:
        return
    if options.allreduce in ("shared", "hierarchical"):
        raise UsageError(
            f"--survive {ranks}: in the memory of a node ({options.allreduce}) nobody sees that a rank is gone; take "
            f"--allreduce {BY_MESSAGES}, ring, tree or mpi"
        )
    if options.data_servers and getattr(options, "replicas", 1) > 1:
        raise UsageError("--replicas: beside servers that are outlived a data server is not; leave out --data-servers")
    if options.timeout:
        raise UsageError("--timeout ends all ranks, and --survive is to go on: give one of them")


def by_messages(options: Options, size: int) -> Options:
    """The options of a run on so many ranks; where it may lose some, `auto` is an all-reduce by messages."""
    if options.allreduce == "auto" and losable(options, size):
        return replace(options, allreduce=BY_MESSAGES)
    return options


def survive(
    run: Callable[[MPI.Intracomm, Options, RunContext], Run],
    world: MPI.Intracomm,
    options: Options,
    survivor: Survivor,
) -> Run:
    """Call run(comm, options, context) on the ranks of `world`, and again on those that are left when some are gone.

    A rank that fails alone from now on is gone. Ranks that are gone before a leg's first step are not outlived. Raises
    TrainingError, on all that are left, when more are gone than --survive says.
    """
    activity.survive()
    try:
        return in_legs(run, None if respawn.is_new() else world.Dup(), options, survivor)
    except (TrainingError, AgreedError) as error:
        if error.speaker is not None:  # among those that are left; rank 0 of all may be gone
            error.speaker = world.rank if survivor.number == error.speaker else None
        raise


def in_legs(
    run: Callable[[MPI.Intracomm, Options, RunContext], Run],
    comm: MPI.Intracomm | None,
    options: Options,
    survivor: Survivor,
) -> Run:
    """What `survive` does, as long as there are enough ranks in `comm`; None: of a rank that was started anew."""
    most, hosts = 0, list[str]()
    if comm is not None:
        most, hosts = losable(options, comm.size), comm.allgather(host())
        if comm.rank == 0 and (together := neighbours(hosts)):
            said = "--survive: %s; where it vanishes the others would wait for ever: mpiexec --rank-by node"
            log.warning(said, together)
    failed = begun = time.monotonic()
    while True:
        if comm is None:
            with going_on():
                worlds.append(respawn.joined())
                comm, gone = survivor.hand_over(worlds[-1], None)
        else:
            survivor.number, survivor.run, done, begun = comm.rank, None, None, time.monotonic()
            try:
                done = run(comm, options, RunContext(survivor=survivor))
            except Exception as error:
                if survivor.run is None or not some_failed(comm, isinstance(error, MPI.Exception)):
                    raise
                log.info("a call has failed: %s", error)
                assert survivor.everyone is not None
                survivor.everyone.revoke()
                comm.Revoke()
            failed = time.monotonic()
            if all_done(comm, done is not None):
                assert done is not None
                return done
            activity.abandon()
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
            most, hosts = comm.bcast(most), comm.allgather(host())
        survivor.lost += len(gone)
        if survivor.lost > most:
            raise TrainingError(f"{survivor.told(gone)}: {survivor.lost} in all, and --survive says {most}")
        survivor.since = failed
        assert survivor.handover is not None
        change: dict[str, Any] = {"out": survivor.handover.folder or "none", "resume": "", "force": False}
        if options.batch_per_rank:  # a step has as many examples as before
            change |= {"batch_size": survivor.handover.batch, "batch_per_rank": 0}
        if options.time_limit:
            change["time_limit"] = max(1e-3, options.time_limit - (failed - begun))
        options = replace(survivor.adapt(options), **change)


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """The body prepares the next leg. Raises LoneError where another rank is lost meanwhile."""
    try:
        yield
    except MPI.Exception as error:
        raise LoneError(
            f"another rank is lost before the first step of those that are left ({error}): start the run again, with "
            "--resume where it has a checkpoint"
        ) from None


def host() -> str:
    """Where this rank is."""
    return MPI.Get_processor_name()


def neighbours(hosts: list[str]) -> str:
    """Ranks next to each other that are on one of several hosts, in words, where the detector needs others.

    Each rank watches the one before it. Of two that are gone at once, one of which has watched the other, Open MPI
    5.0.11 does not end an agreement, as seen.
    """
    if silence_counts() and len(set(hosts)) > 1:
        for rank, where in enumerate(hosts):
            if where == hosts[rank - 1]:
                both = format_ranks(sorted([rank, (rank - 1) % len(hosts)]))
                return f"{both}, of which one watches the other, are both on {where}"
    return ""


def refuse_minority(hosts: list[str], left: list[int]) -> None:
    """Raise TrainingError, on all that are left, where others may go on elsewhere, who are more.

    hosts: of each rank of a leg. Where a link is cut, each side takes the other for gone, and two runs would write one
    folder. Whoever is gone while others of its host are left is gone; with a whole host it may be on the other side.
    Then the larger one goes on; of two that are as large, the one with the lowest rank.
    """
    apart = [rank for rank, where in enumerate(hosts) if where not in {hosts[each] for each in left}]
    if apart and (len(apart), -apart[0]) > (len(left), -min(left)):
        names = ", ".join(sorted({hosts[rank] for rank in apart}))
        raise TrainingError(
            f"{format_ranks(apart)} ({names}) cannot be reached, and may go on by themselves: this side, of "
            f"{counted(len(left), 'rank')}, is not the larger one, and ends"
        )


def some_failed(comm: MPI.Intracomm, wait: bool) -> bool:
    """Whether ranks of `comm` are gone, as far as this rank knows, or others have seen that; wait: for a while."""
    until = time.monotonic() + HEARD * wait
    while True:
        comm.Ack_failed()
        group = comm.Get_failed()
        known = group.size > 0 or comm.Is_revoked()
        group.Free()
        if known or time.monotonic() >= until:
            return known
        try:
            comm.Iprobe()  # for MPI learns of it only while somebody calls it
        except MPI.Exception:
            return True
        time.sleep(LONGEST)


def all_done(comm: MPI.Intracomm, done: bool) -> bool:
    """Whether all ranks that are left have done it; collective over these."""
    while True:
        comm.Ack_failed()
        with contextlib.suppress(MPI.Exception):  # one is gone that was not known to be: on all alike
            all_have = bool(comm.Agree(int(done)))
            if all_have and some_failed(comm, False):  # behind its last step
                worlds.append(comm)
            return all_have


@contextlib.contextmanager
def outlived() -> Iterator[None]:
    """The program of a rank: MPI_Finalize may wait for those that are gone, and so it leaves without."""
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
        remove_mapped()  # who is gone has left some, too
        respawn.tell_the_launcher()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
