"""What the user can put right: one line that says what is wrong and what to do, and exit status 2."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

LONGEST = 300  # characters of what another's error says: some show all that they could not read


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


def reason(error: BaseException) -> str:
    """What an error says, in one line: of the system's its words alone, of one that says nothing its name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).strip()
    line = said.splitlines()[0] if said else type(error).__name__
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


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
        try:
            settings[key] = type(settings[key])(text)
        except ValueError:
            wanted = type(settings[key]).__name__
            raise UsageError(f"{kind} {spec!r}: {key} should be of type {wanted}, not {text!r}") from None
    return name, settings
