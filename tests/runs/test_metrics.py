"""What metrics.jsonl says of each step, and that it can be read whatever the numbers were."""

import math

import pytest
from written_runs import steps

from hpcdl.machine.display import Display
from hpcdl.runs.agreement import Step
from hpcdl.runs.folder import Folder
from hpcdl.runs.metrics import Metrics
from hpcdl.runs.progress import Progress
from hpcdl.strategies import all_reduce

pytestmark = pytest.mark.four


@pytest.mark.parametrize("schedule", ["cosine:warmup=1", "step:every=1,factor=0.5"])
def test_each_step_has_the_learning_rate_of_its_update(run, world, mpi_tmp_path, schedule):
    """As the rule was given it, also where a run is gone on with."""
    out, rates = mpi_tmp_path / "a", []

    def train(comm, model, data, optimizer, running):
        apply = optimizer.apply

        def note(w, g, rate, scale):
            rates.append(rate)
            apply(w, g, rate, scale)

        optimizer.apply = note
        all_reduce.train(comm, model, data, optimizer, running)

    run(train=train, out=str(out), schedule=schedule, epochs=3, lr=0.3)
    assert [line["learning_rate"] for line in steps(out)] == rates and len(set(rates)) > 2 == len(steps(out)) - 10
    rates.clear()
    run(train=train, out=str(out), resume=str(out), schedule=schedule, epochs=4, lr=0.3)
    assert [line["learning_rate"] for line in steps(out)][12:] == rates and len(rates) == 4


def test_a_rate_that_is_no_finite_number_is_null(alone, tmp_path):
    folder, metrics = Folder(tmp_path, 0), Metrics(Display("none", 0))
    (tmp_path / "logs").mkdir()
    folder.open(0)
    metrics.open(folder, 4, lambda step: math.inf if step else 0.5)
    metrics.record(1, [Step(3.0, 6, 0.1), Step(3.0, 6, 0.2)], Progress(2), 9, 1.0)
    folder.close()
    assert [line["learning_rate"] for line in steps(tmp_path)] == [0.5, None]
