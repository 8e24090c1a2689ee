"""Errors that users can correct: one line with the problem and the remedy, and exit status 2."""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LONGEST_LINE = 1200  # characters of a printed line; longer ones lose their middle
LONGEST_REASON = 300  # characters of a library's error message: some contain all unread data


class UsageError(Exception):
    """Bad input. A script prints the message as one line on rank 0, without a traceback, and exits with status 2."""


class AgreedError(UsageError):
    """Bad input that all ranks have detected together, so that all can exit quietly.

    speaker: the rank that prints.
    """

    speaker: int | None = 0


class TrainingError(Exception):
    """An error that ends the run, known to all ranks. A script prints the message as one line and exits with status 1.

    speaker: the rank that prints.
    """

    speaker: int | None = 0


class AgreedExit(SystemExit):
    """The exit of all ranks, which have agreed on it; another exit with a status ends the job (comm/failure.py)."""


class LoneError(Exception):
    """An error that ends the run and that only this rank knows: it prints the message as one line and ends the job."""


def printable(text: object, allowed: str = "\n") -> str:
    """Return the text with characters escaped that are not printable, as in users' names.

    allowed: exceptions.
    """
    return "".join(
        each if each.isprintable() or each in allowed else each.encode("unicode_escape").decode() for each in str(text)
    )


def line(text: object) -> str:
    """Return an error's text as one printable line; a long one loses its middle."""
    text = printable(text, allowed="")
    half = LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[-half:]}"


def reason(error: BaseException) -> str:
    """Return an error's message in one line: a system error's text alone, or the type's name for an empty message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).strip()
    line = said.splitlines()[0] if said else type(error).__name__
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."


@contextlib.contextmanager
def blamed_on(what: str, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Context that turns any error of a library into one line: `what`, as "FILE cannot be read", and the reason.

    It is for errors caused by input (a file, a number, a full disk): libraries raise many types for them, h5py eight
    and zipfile NotImplementedError. Our own errors pass unchanged. kind: the type of the raised error; the library's
    error is its cause.
    """
    try:
        yield
    except (UsageError, TrainingError, LoneError):
        raise
    except Exception as error:
        raise kind(f"{what}: {reason(error)}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the suggestion of a similar known name for a message on an unknown one; empty if there is none."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, which lists the known ones and suggests the nearest."""
    known = sorted(known)
    return UsageError(f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def refuse_beyond(what: str, needed: int, there: int) -> None:
    """Raise UsageError if `what` needs more than the available bytes (hpcdl.memory.available) of this machine."""
    if needed > there:
        raise UsageError(f"{what} needs {needed:,} bytes at least, and there are {there:,} on this machine")


def parse_integer(text: str) -> int:
    """Parse an integer of 64 bits. Raises ValueError."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def parse_finite(text: str) -> float:
    """Parse a finite number. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


PARSERS: dict[Any, Callable[[str], Any]] = {int: parse_integer}  # floats are checked by their users, who know the range


def parse_spec(kind: str, spec: str, defaults: dict) -> tuple[str, dict]:
    """Read NAME or NAME:KEY=VALUE,... (as in `adam:beta1=0.9,eps=1e-8`) into the name and its settings.

    defaults: for each known name its settings with their default values; a value has its default's type.
    Raises UsageError for an unknown name or key, and for a value of another type.
    """
    name, _, rest = spec.partition(":")
    if name not in defaults:
        raise unknown(kind, name, defaults)
    settings = dict(defaults[name])
    for item in filter(None, rest.split(",")):
        key, equals, text = item.partition("=")
        if key not in settings or not equals:
            known = ", ".join(settings) or "none"
            raise UsageError(f"{kind} {name!r} has no setting {key!r}; write NAME:KEY=VALUE with one of: {known}")
        wanted = type(settings[key])
        try:
            settings[key] = PARSERS.get(wanted, wanted)(text)
        except ValueError:
            raise UsageError(f"{kind} {spec!r}: {key} should be of type {wanted.__name__}, not {text!r}") from None
    return name, settings
