"""Errors that a program prints as one line with the problem and the remedy; bad input has the exit status 2."""

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

LONGEST_LINE = 1200  # characters of a printed line; longer ones lose their middle
LONGEST_REASON = 300  # characters of a library's error message: some contain all unread data
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class UsageError(Exception):
    """Bad input. A script prints the message as one line on rank 0, without a traceback, and exits with status 2."""


class AgreedError(UsageError):
    """Bad input that all ranks have detected together; all exit quietly. speaker: the rank that prints; None: none."""

    speaker: int | None = 0


class TrainingError(Exception):
    """An error, known to all ranks, that ends the run: rank `speaker` prints it as one line, with exit status 1."""

    speaker: int | None = 0


class AgreedExit(SystemExit):
    """The exit of all ranks, which have agreed on it; any other exit with a status ends the job (comm/failure.py)."""


class LoneError(Exception):
    """An error that ends the run, known to this rank only, which prints the message as one line and ends the job."""


def printable(text: object, allowed: str = "\n") -> str:
    """Return the text with unprintable characters escaped, except those in `allowed`."""
    return "".join(
        each if each.isprintable() or each in allowed else each.encode("unicode_escape").decode() for each in str(text)
    )


def line(text: object) -> str:
    """Return an error's text as one printable line; the middle of a long one is cut out."""
    text = printable(text, allowed="")
    half = LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[-half:]}"


def reason(error: BaseException) -> str:
    """Return why an error was raised: strerror of an OSError, else its message's first line, else its type's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).strip()
    line = said.splitlines()[0] if said else type(error).__name__
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}..."


@contextlib.contextmanager
def blamed_on(what: str, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Context that turns a library's error into one that reads "WHAT: REASON". `what` is like "FILE cannot be read".
    For errors caused by input (a file, a number, a full disk). Libraries raise many types for these: h5py raises eight.
    Errors of hpcdl pass unchanged. kind: the type of the raised error, whose cause is the library's error."""
    try:
        yield
    except (UsageError, TrainingError, LoneError):
        raise
    except Exception as error:
        raise kind(f"{what}: {reason(error)}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)", where NAME is the known name most like an unknown one; "" if none is like it."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name of this kind; it lists the known names and suggests the nearest one."""
    known = sorted(known)
    return UsageError(f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def refuse_beyond(what: str, needed: int, there: int) -> None:
    """Raise UsageError if `needed`, the bytes that `what` needs, is more than `there` (hpcdl.memory.available)."""
    if needed > there:
        raise UsageError(f"{what} needs at least {needed:,} bytes of memory, and this machine has {there:,}")


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


def parse_bytes(text: str, option: str = "--fit") -> int:
    """Parse 32GiB, 80GB, 1.5TiB, or a number of bytes. UsageError for another text of this option."""
    found = SIZE.fullmatch(text.strip())
    if not found or found[2] not in UNITS or not float(found[1]):
        raise UsageError(f"{option} {text}: write a number of bytes, as 32GiB, 80GB or 500MiB")
    return int(float(found[1]) * UNITS[found[2]])


PARSERS: dict[Any, Callable[[str], Any]] = {int: parse_integer}  # callers check floats, as they know the range


def parse_spec(kind: str, spec: str, defaults: dict) -> tuple[str, dict]:
    """Parse NAME or NAME:KEY=VALUE,... (as `adam:beta1=0.9,eps=1e-8`) into the name and its settings. defaults: the
    settings of each known name; values get their types. UsageError: unknown name of this `kind`, key, other type."""
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
