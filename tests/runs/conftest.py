"""Small runs for the tests of this room."""

from small_runs import data, run  # noqa: F401
