"""Versions of the packages that a run's numbers depend on."""

import functools
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("hpcdl", "numpy", "numba", "mpi4py", "h5py")


def versions() -> dict[str, str]:
    """Return each package's version; "unknown" if it is not installed, as for a folder on PYTHONPATH."""
    return {name: version_of(name) for name in PACKAGES}


@functools.cache  # reading takes a millisecond, and a job may have hundreds of runs
def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
