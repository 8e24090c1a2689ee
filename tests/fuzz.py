"""How many cases the fuzzers try: the same few hundred in each test run, with HPCDL_FUZZ=N N times as many new ones."""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("HPCDL_FUZZ", "0"))


def cases(number: int) -> settings:
    """Hypothesis' settings for so many cases in a test run."""
    return settings(
        max_examples=number * max(1, TIMES),
        derandomize=not TIMES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
