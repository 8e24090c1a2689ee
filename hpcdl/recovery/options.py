"""Options that several programs have, whose runs can outlive a rank."""

from dataclasses import dataclass

from hpcdl.runs.options import Options, option


@dataclass(frozen=True)
class SurvivingOptions(Options):
    """The options of a program whose ranks may be lost (ulfm_recovery.py)."""

    survive: int = option(0, "ranks that may be lost: the others go on, under mpiexec --with-ft ulfm of Open MPI")
    respawn: bool = option(False, "with --survive: start as many ranks anew as are lost, which join the others")
