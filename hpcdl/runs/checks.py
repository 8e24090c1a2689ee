"""What --check asks for: collectives (diagnostics/collective_checker.py), replicas=STEPS (agreeing_replicas.py)."""

from typing import NamedTuple

from hpcdl.errors import UsageError, nearest, parse_integer

KNOWN = ("collectives", "replicas=STEPS")


class Checks(NamedTuple):
    """collectives: whether what ranks call together is compared. replicas: after so many steps what they hold, or 0."""

    collectives: bool = False
    replicas: int = 0

    @property
    def asked(self) -> bool | None:
        """As `Communicator` takes it: None leaves it to the environment."""
        return self.collectives or None

    @classmethod
    def read(cls, text: str) -> "Checks":
        """From the option, as collectives,replicas=10. Raises UsageError."""
        found = cls()
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if item == "collectives":
                found = found._replace(collectives=True)
            elif name == "replicas":
                found = found._replace(replicas=steps_of(value))
            else:
                near = nearest(name, ("collectives", "replicas"))
                raise UsageError(f"--check: unknown check {item!r}{near}; known: {', '.join(KNOWN)}")
        return found


def steps_of(text: str) -> int:
    try:
        steps = parse_integer(text)
    except ValueError:
        steps = 0
    if steps < 1:
        raise UsageError(f"--check replicas=STEPS takes a number of steps, as replicas=10, not {text!r}")
    return steps
