"""Parts of all programs of several ranks: how they end, and that one rank prints for all."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

from hpcdl.errors import AgreedError, AgreedExit, TrainingError, line


@contextlib.contextmanager
def ended(program: str, rank: int) -> Iterator[list[str]]:
    """Context that turns an error known to all ranks into one line, on the rank that speaks, and an exit status on all.
    Yields a list of texts that are added to the line of a refusal. Any other error goes on to hpcdl/comm/failure.py,
    which ends all ranks, since the other ranks do not know of it."""
    remarks: list[str] = []
    try:
        yield remarks
    except (AgreedError, TrainingError) as error:
        sys.stdout.flush()
        refused = isinstance(error, AgreedError)
        if rank == error.speaker:
            said = "".join([str(error), *(remarks if refused else [])])
            print(f"{program}: error: {line(said)}", file=sys.stderr, flush=True)
        raise AgreedExit(2 if refused else 1) from None


@contextlib.contextmanager
def quiet(silent: bool) -> Iterator[None]:
    """Context that silences stdout and stderr if `silent`, so that one rank prints help texts and notes."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere if silent else sys.stdout),
        contextlib.redirect_stderr(nowhere if silent else sys.stderr),
        warnings.catch_warnings(),
    ):
        yield
