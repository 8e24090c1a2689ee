"""What the user can put right: one line that says what is wrong and what to do, and exit status 2."""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LONGEST_LINE = 1200  # characters of a line that is printed: of a name of five thousand, both ends tell enough
LONGEST_REASON = 300  # characters of what another's error says: some show all that they could not read


class UsageError(Exception):
    """Bad input. A script prints the message as one line on rank 0, without a traceback, and exits with status 2."""


class AgreedError(UsageError):
    """Bad input that all ranks have agreed on: each knows that the others stop, too, so all can leave quietly.

    speaker: the rank that prints.
    """

    speaker: int | None = 0


class TrainingError(Exception):
    """A run that cannot go on, as every rank knows. A script prints the message as one line and exits with status 1.

    speaker: the rank that prints.
    """

    speaker: int | None = 0


class LoneError(Exception):
    """A run that cannot go on, as only this rank knows: the message is printed as one line, and the job is ended."""


def printable(text: object, kept: str = "\n") -> str:
    """The text as a terminal may get it: what is no printable character, for all we know of a user's names, is escaped.

    kept: of those, what stays.
    """
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in str(text)
    )


def line(text: object) -> str:
    """An error's text as the one line that is printed: nothing in it moves a terminal; a long one lacks its middle."""
    text = printable(text, kept="")
    half = LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[-half:]}"


def reason(error: BaseException) -> str:
    """What an error says, in one line: of the system's its words alone, of one that says nothing its name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).strip()
    line = said.splitlines()[0] if said else type(error).__name__
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."


@contextlib.contextmanager
def blamed_on(what: str, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Whatever a library raises in the body becomes one line: `what`, as "FILE cannot be read", and the reason.

    For what goes wrong by what a user gave us (a file, a number, a full disk): libraries raise anything at such, h5py
    eight kinds and zipfile NotImplementedError. Our own errors pass as they are. kind: of the error that is raised, of
    which what the library raised is the cause.
    """
    try:
        yield
    except (UsageError, TrainingError, LoneError):
        raise
    except Exception as error:
        raise kind(f"{what}: {reason(error)}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """What a message on a wrong name adds where one of the known ones is near; else nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among the known ones; it lists them and suggests the nearest."""
    known = sorted(known)
    return UsageError(f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def refuse_beyond(what: str, needed: int, there: int) -> None:
    """Raise UsageError where `what` needs more bytes than there are (hpcdl.memory.available) on this machine."""
    if needed > there:
        raise UsageError(f"{what} needs {needed:,} bytes at least, and there are {there:,} on this machine")


def whole(text: str) -> int:
    """The whole number that a text says, one of 64 bits: what is more counts nothing. Else ValueError."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def finite(text: str) -> float:
    """The number that a text says, neither infinite nor NaN. Else ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


READ: dict[Any, Callable[[str], Any]] = {int: whole}  # of floats, whose range matters, each is checked


def parse_spec(kind: str, spec: str, defaults: dict) -> tuple[str, dict]:
    """Read NAME or NAME:KEY=VALUE,... (as in `adam:beta1=0.9,eps=1e-8`) into the name and its settings.

    defaults: for each known name its settings with their default values; a value is read as its default's type.
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
            settings[key] = READ.get(wanted, wanted)(text)
        except ValueError:
            raise UsageError(f"{kind} {spec!r}: {key} should be of type {wanted.__name__}, not {text!r}") from None
    return name, settings
