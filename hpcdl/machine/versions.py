"""The versions of the packages on which the numbers of a run depend."""

import functools
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("hpcdl", "numpy", "numba", "mpi4py", "h5py")


def versions() -> dict[str, str]:
    """Each package's version; "unknown" where it is not installed, as in a folder on PYTHONPATH."""
    return {name: version_of(name) for name in PACKAGES}


@functools.cache  # reading it takes a millisecond, and a job may hold hundreds of runs
def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
