"""What the fuzzers share: how many cases they try, how files are damaged, what may come of it, and a run to change.

A run of the tests tries the same few hundred cases each time, without --long a quarter of them; with HPCDL_FUZZ=N, N
times as many new ones."""

import os

from few import write_few
from hypothesis import HealthCheck, settings
from in_process import ends

from hpcdl.errors import UsageError

TIMES = int(os.environ.get("HPCDL_FUZZ", "0"))
PARTS = 1 if TIMES or "HPCDL_TESTS" in os.environ else 4  # of which a run tries one


def cases(number: int) -> settings:
    """Hypothesis' settings for so many cases in a test run."""
    return settings(
        max_examples=max(1, number * max(1, TIMES) // PARTS),
        derandomize=not TIMES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def damaged(content: bytes, where: float, bits: int) -> bytes:
    """The bytes with these bits flipped in the one at the share `where` of all; 0 bits: cut off there."""
    at = int(where * len(content))
    if not bits or at == len(content):
        return content[:at]
    return content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :]


def damage(path, where, bits):
    """Damage a file."""
    path.write_bytes(damaged(path.read_bytes(), where, bits))


def tried(call, *arguments, **options):
    """What the call returns, or None where one line says what is wrong."""
    try:
        return call(*arguments, **options)
    except UsageError as error:
        said = str(error)
        assert said.isprintable() and 0 < len(said) < 1000, said
        return None


def small_run(folder, *options):
    """Write few.h5, and train three steps on it, into the folder `a`; returns the options that other runs take."""
    write_few(folder)
    small = ["--data", str(folder / "few.h5"), "--model", "mlp:4", "--batch-size", "10", "--progress=none"]
    assert ends("train_sequential", [*small, "--steps", "3", "--out", str(folder / "a"), *options])[0] == 0
    return small
