"""hpcdl/search/library.py: a search over a Python function, on any number of ranks, killed and gone on with."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from searching import ends, events

from hpcdl.errors import AgreedError
from hpcdl.runs import signals
from hpcdl.search import SearchResult, search
from hpcdl.search.journal import NAME

SPACE = ["lr=log:0.001..0.5", "optimizer=sgd|momentum", "momentum=0.8..0.99 if optimizer=momentum"]


def loss(trial, comm):
    return abs(np.log(trial["lr"] / 0.1)) + trial.values.get("momentum", 0.0) + trial.seed / 1000


def best_of(found):
    return min((each for each in found.rows if each.score is not None), key=lambda each: each.score)


@pytest.mark.parametrize("method", ["random", "random:sobol", "grid"])
def test_the_same_on_any_number_of_ranks(each_group, method):
    alone = []

    def body(comm):
        found = search(comm, SPACE, loss, method, trials=8, points=2, seeds=2, seed=7)
        assert isinstance(found, SearchResult) and comm.allgather(found) == [found] * comm.size
        assert (found.values, found.score) == (best_of(found).task.values, best_of(found).score)
        assert [row.task.trial for row in found.rows] == [*range(len(found.rows))] and len(found.rows) >= 6
        alone.append([(row.task, row.score) for row in found.rows])
        assert alone[0] == alone[-1]

    each_group(body, least=1)


@pytest.mark.least(1)
def test_the_trial_knows_its_group_and_folder(comm, mpi_tmp_path):
    ranks = min(2, comm.size)
    seen = []

    def objective(trial, group):
        seen.append((trial.number, trial.seed, group.size))
        assert trial.folder == mpi_tmp_path / f"size-{comm.size}/trials/{trial.number:04d}/seed-{trial.seed - 5}"
        assert trial.folder.is_dir() and trial.before is None and trial.rung == 0
        return float(group.rank == 0) if group.rank == 0 else None

    folder = mpi_tmp_path / f"size-{comm.size}"
    found = search(comm, SPACE, objective, trials=4, seed=5, seeds=2, folder=folder, ranks_per_trial=ranks)
    assert [row.score for row in found.rows] == [1.0] * 4 and {size for *_, size in seen} <= {ranks}
    numbers = {each[:2] for group in comm.allgather(seen) for each in group}
    assert numbers == {(trial, seed) for trial in range(4) for seed in (5, 6)}
    if comm.rank == 0:
        assert len(ends(events(folder / NAME))) == 8


@pytest.mark.least(1)
def test_what_fails_is_a_row(comm):
    def objective(trial, comm):
        if trial.number == 1:
            raise ZeroDivisionError("a mistake")
        if trial.number == 2:
            sys.exit(3)
        return {3: None, 4: float("nan"), 5: "good", 6: np.float32(0.25)}.get(trial.number, 1.0)

    found = search(comm, SPACE, objective, trials=8, ranks_per_trial=min(2, comm.size))
    why = {row.task.trial: row.failed for row in found.rows if row.failed}
    assert re.match(r"ZeroDivisionError: a mistake \(test_library.py, line \d+\)", why[1])
    assert "leaves the program, with status 3" in why[2] and why[4] == "its score is nan"
    assert "returned None, which is no number" in why[3] and "returned 'good'" in why[5]
    assert {*why} == {1, 2, 3, 4, 5} and found.score == 0.25 and len(found.rows) == 8


def test_the_largest_is_the_best_where_asked_and_where_all_fail_none(world):
    found = search(world, SPACE, lambda trial, comm: 1 / 0, trials=3)
    assert (found.values, found.score, len(found.rows)) == (None, None, 3)
    found = search(world, ["x=0.0..1.0"], lambda trial, comm: trial["x"], trials=9, maximize=True)
    assert found.score == max(row.score for row in found.rows) == found.values["x"]


@pytest.mark.least(1)
def test_trials_of_rungs_go_on_in_their_folder(comm, mpi_tmp_path):
    def objective(trial, group):
        assert trial.amount == 3**trial.rung and (trial.before == trial.folder) == (trial.rung > 0)
        assert group.allreduce((trial.folder / "state").exists()) == (group.size if trial.rung else 0)
        group.Barrier()
        (trial.folder / "state").touch()
        return trial["lr"]

    folder = mpi_tmp_path / str(comm.size)
    found = search(comm, SPACE, objective, "asha", trials=9, least=1, most=9, folder=folder)
    assert {row.task.rung for row in found.rows} == {0, 1, 2}
    assert found.score == min(row.score for row in found.rows if row.task.rung == 2)


@pytest.mark.least(1)
def test_it_is_gone_on_with(comm, mpi_tmp_path):
    done, folder = [], mpi_tmp_path / f"on-{comm.size}"

    def objective(trial, group):
        done.append(trial.number)
        return loss(trial, group)

    first = search(comm, SPACE, objective, trials=5, folder=folder)
    done.clear()
    again = search(comm, SPACE, objective, trials=5, folder=folder, resume=True)
    assert again == first and not done
    with pytest.raises(AgreedError, match="its trials is 5, not 6"):
        search(comm, SPACE, objective, trials=6, folder=folder, resume=True)
    with pytest.raises(AgreedError, match="holds a search already"):
        search(comm, SPACE, objective, trials=5, folder=folder)
    anew = search(comm, SPACE, objective, trials=5, folder=folder, force=True)
    assert [row.score for row in anew.rows] == [row.score for row in first.rows]
    assert sum(comm.allgather(len(done))) == 5


@pytest.mark.least(1)
def test_a_signal_ends_it_in_good_order(comm, monkeypatch, mpi_tmp_path):
    monkeypatch.setattr(signals, "received", [])

    def objective(trial, group):
        if trial.number >= 2 and comm.rank == 0:
            signals.received.append("SIGUSR1")
        return loss(trial, group)

    folder = mpi_tmp_path / f"stop-{comm.size}"
    found = search(comm, SPACE, objective, trials=500, folder=folder)
    assert found.stopped and 1 <= len(found.rows) < 500
    signals.received.clear()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"space": ["lr=log:0..1"]}, "lr"),
        ({"seeds": 0}, "seeds should be 1 or more"),
        ({"controller": "both"}, "'shared' or 'own'"),
        ({"ranks_per_trial": 9}, "start mpiexec -n 9 or more"),
        ({"folder": "/dev/null/no"}, "cannot be written"),
    ],
)
def test_bad_input_is_one_line_on_all_ranks(world, options, told):
    given = {"space": SPACE, "trials": 3} | options
    with pytest.raises(AgreedError, match=told) as found:
        search(world, given.pop("space"), loss, **given)
    assert "\n" not in str(found.value)


@pytest.mark.least(1)
def test_two_searches_in_one_folder(comm, mpi_tmp_path):
    """The second is refused while the first one runs, and does no harm to it."""
    folder = mpi_tmp_path / f"one-{comm.size}"

    def objective(trial, group):
        with pytest.raises(AgreedError, match=f"another job is writing to {folder}"):
            search(MPI.COMM_SELF, SPACE, loss, trials=3, folder=folder, resume=True)
        return 1.0

    assert [row.score for row in search(comm, SPACE, objective, trials=3, folder=folder).rows] == [1.0] * 3


def test_the_lines_of_the_page(run_on, tmp_path):
    """docs/search.md as printed: ten lines."""
    page = (Path(__file__).parents[2] / "docs/search.md").read_text()
    code = re.search(r"## As a library\n.*?```python\n(.*?)```", page, re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "printed.py").write_text(code)
    assert run_on(3, tmp_path / "printed.py", check=0).stdout == "0.09 at x=3.13, y=-1.27\n"
    assert "It prints `0.09 at x=3.13, y=-1.27`" in page


@pytest.mark.parametrize("lone, code", [(0, "raise KeyError('alone')"), (1, "exit(9)")])
def test_a_rank_that_raises_alone_ends_the_job(launch, tmp_path, lone, code):
    """Of either of two groups, with the controller's thread or without; what has ended stays ended."""
    (tmp_path / "alone.py").write_text(
        "from mpi4py import MPI\n"
        "from hpcdl.search import library\n"
        "library.PATIENCE = 0.2\n"
        "def objective(trial, comm):\n"
        f"    if trial.number == 3 and MPI.COMM_WORLD.rank in ({lone}, {lone} + 2): {code}\n"
        "    comm.Barrier()\n"
        "    return trial['x']\n"
        "library.search(MPI.COMM_WORLD, ['x=0.0..1.0'], objective, trials=4, ranks_per_trial=2, folder='found')\n"
    )
    done = launch(4, tmp_path / "alone.py")
    assert done.returncode != 0 and re.search("KeyError: 'alone'|it leaves the program, with status 9", done.stderr)
    assert "would wait for ever" not in done.stderr
    assert {trial for trial, *_ in ends(events(tmp_path / "found" / NAME))} <= {0, 1, 2}
