"""Small runs that faults strike."""

from small_runs import data, run  # noqa: F401
