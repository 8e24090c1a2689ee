"""Small runs whose checkpoints are looked at."""

from small_runs import data, run  # noqa: F401
