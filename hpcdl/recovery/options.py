"""Options of several programs whose runs can outlive a rank."""

from dataclasses import dataclass

from hpcdl.runs.options import Options, option


@dataclass(frozen=True)
class SurvivingOptions(Options):
    """The options of a program whose ranks may be lost (ulfm_recovery.py)."""

    survive: int = option(0, "number of ranks that may be lost; the others go on (mpiexec --with-ft ulfm of Open MPI)")
    respawn: bool = option(False, "with --survive: start a new rank for each lost one, to join the others")
