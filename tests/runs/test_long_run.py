"""What a run holds does not grow with its steps; the full length is tests/soak/long.py's, in docs/reliability.md."""

from pathlib import Path

import pytest
from mpi4py import MPI

LONG = Path(__file__).parents[1] / "soak" / "long.py"


@pytest.mark.long
@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason="it starts ranks of its own")
def test_files_shared_memory_and_communicators_stay_as_they_are(launch):
    done = launch(2, LONG, "2000", "250", timeout=120)
    assert done.returncode == 0 and "long: flat" in done.stdout, done.stdout + done.stderr
    assert "metrics.jsonl: 2,023 lines" in done.stdout and "trace.json: 2,000 spans" in done.stdout
