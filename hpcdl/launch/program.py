"""What all programs of several ranks share: how they end, and that one rank prints for all."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator

from hpcdl.errors import AgreedError, AgreedExit, TrainingError, line


@contextlib.contextmanager
def ended(program: str, rank: int) -> Iterator[list[str]]:
    """Turn an error that all ranks share into one line, on rank 0 or who speaks for it, and an exit status on all.

    Yields a list: what the body puts there is added to the line of a refusal.

    Any other error goes on to hpcdl/comm/failure.py, which ends all ranks, for they do not know of it.
    """
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
    """Silence help texts and notes on all ranks but one."""
    with contextlib.ExitStack() as stack:
        if silent:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        yield
