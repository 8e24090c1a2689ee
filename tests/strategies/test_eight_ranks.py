"""What holds on few ranks holds on 6 and 8, where graphs are no longer complete: the narrowest of their identities."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
IDENTITIES = [
    "complete_graph and metropolis and momentum",
    "hypercube and nesterov",
    "detag-ring-iid",
    "one_local_step and nesterov",
    *(f"draw{number}" for number in (23, 29, 31, 39)),
    "uneven_tensors",
]


@pytest.mark.long
def test_identities_on_8_ranks(launch):
    """With the groups of the first 6 and 8 ranks."""
    files = [HERE / f"test_{name}.py" for name in ("gossip", "local_sgd", "random_grids")]
    command = ["-m", "pytest", "-q", "--all", *files, "-k", " or ".join(IDENTITIES)]
    done = launch(8, *command, cwd=HERE.parents[1], timeout=240, RANKS="6,8")
    assert done.returncode == 0 and "10 passed" in done.stdout, done.stdout + done.stderr
