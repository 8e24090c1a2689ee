"""hpcdl/search/ensemble.py and ensemble_scores.py: members that lie on several ranks predict as on one."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
from few import write_few

from hpcdl.comm import Communicator
from hpcdl.data import open_data
from hpcdl.data.schema import Schema
from hpcdl.errors import UsageError
from hpcdl.models import for_data
from hpcdl.optim import make_optimizer, make_schedule
from hpcdl.runs.options import Options
from hpcdl.runs.ownership import Whole
from hpcdl.runs.run import Run
from hpcdl.search import combining, ensemble_scores
from hpcdl.search.ensemble import Ensemble, EnsembleMember, Stacking, input_key

MEMBERS = [EnsembleMember(number, f"members/000{number}", f"seed={number}") for number in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three members of an ensemble that were hardly trained; each rank writes its own."""
    from mpi4py import MPI

    path = tmp_path_factory.mktemp("ensemble")
    write_few(path)
    for member in MEMBERS:
        comm = Communicator(MPI.COMM_SELF, "tree", ends_job=False)
        options = Options(model="softmax", seed=member.number, out=str(path / member.run), steps=3, progress="none")
        data = open_data(str(path / "few.h5"), seed=member.number)
        model = for_data("softmax", data, "float32")
        with Run(comm, options) as run:
            parameters = run.initial(model)
            parameters += np.random.default_rng(member.number).standard_normal(parameters.size).astype("f4")
            schedule = make_schedule("constant", 0.1, 3, 1, 4)
            optimizer = make_optimizer("sgd", model.layout.size, model.layout.dtype, schedule)
            run.begin("sequential", Whole(model, parameters, optimizer), data)
            for batch in run.batches(data, (0, 1)):
                run.record(1.0, batch.total)
                run.boundary()
        data.close()
        comm.free()
    return path


def naive(folder, rows=None):
    """What each member predicts for the test rows, or for these training rows, and their labels: (members, rows,
    classes), (rows,)."""
    from hpcdl.inference.trained_model import TrainedModel

    data = open_data(str(folder / "few.h5"))
    x, y = data.test.rows(0, data.test.examples) if rows is None else data.train.take(rows)
    data.close()
    runs = [TrainedModel(str(folder / member.run)) for member in MEMBERS]
    return np.array([run.model().predict(run.parameters, x) for run in runs], np.float64), y


def predicted(world, folder, combine="mean", stacking=None, members=MEMBERS, **how):
    """The ensemble, and what ensemble_scores.predict_all finds of the test rows."""
    ensemble = Ensemble(folder, members, combine, 0, stacking).open(world.rank, world.size)
    rows = ensemble.rows(str(folder / "few.h5"), "test", world.size)
    return ensemble, ensemble_scores.predict_all(world, ensemble, rows, **how)


def outputs_of(world, folder, **how):
    """The probabilities that are written, on rank 0, by one ensemble on all ranks."""
    file = f"{world.bcast(str(folder))}/p-{how.get('combine', 'mean')}.npz"
    predicted(world, folder, file=file, **how)
    with np.load(file) as found:
        return dict(found)


def test_the_mean_and_the_spread(world, folder):
    found, (p, _) = outputs_of(world, folder), naive(folder)
    assert found["output"] == pytest.approx(p.mean(axis=0), abs=1e-6)
    assert found["spread"] == pytest.approx(p.std(axis=0), abs=1e-6)
    assert found["row"].tolist() == [*range(6)]


def test_members_of_other_types_statistics_or_fills_see_other_rows():
    def seen(dtype="float32", mean=0.0, fill=1.0):
        schema = Schema(recipe={"columns": [{"fill": fill}]})
        return input_key(SimpleNamespace(dtype=dtype, statistics={"mean": np.array([mean])}, schema=schema))

    assert seen() == seen()
    assert len({seen(), seen(dtype="float64"), seen(mean=2.0), seen(fill=2.0)}) == 4


def test_votes_and_their_weights(world, folder):
    p, _ = naive(folder)
    assert outputs_of(world, folder, combine="vote")["output"] == pytest.approx(combining.votes(p).mean(axis=0))
    weights = np.array([0.5, 2.0, 1.0])
    members = [member._replace(weight=float(weight)) for member, weight in zip(MEMBERS, weights, strict=True)]
    wanted = np.tensordot(weights, combining.votes(p), 1) / weights.sum()
    assert outputs_of(world, folder, combine="vote", members=members)["output"] == pytest.approx(wanted)


def test_stacking(world, folder):
    p, _ = naive(folder)
    w, b = np.array([0.2, 1.0, -0.1]), np.array([0.3, -0.3, 0.0])
    wanted = combining.softmax(np.tensordot(w, combining.logs(p), 1) + b)
    found = outputs_of(world, folder, combine="stacking", stacking=Stacking(w, b))
    assert found["output"] == pytest.approx(wanted, abs=1e-6)


def test_stacking_is_fitted_on_the_rows_that_are_held_out(world, folder):
    ensemble = Ensemble(folder, MEMBERS, "stacking", 0).open(world.rank, world.size)
    comm, held_out = Communicator(world, "tree"), np.array([2, 3, 11, 19])
    ensemble.stack(comm, str(folder / "few.h5"), held_out)
    p, y = naive(folder, held_out)
    w, b = combining.stack(combining.logs(p), y)
    assert ensemble.stacking.weights == pytest.approx(w, abs=1e-5)
    assert ensemble.stacking.bias == pytest.approx(b, abs=1e-5)
    comm.free()


def test_scores_of_members_and_of_the_whole(world, folder):
    ensemble, counts = predicted(world, folder)
    (rows, *_) = ensemble.rows(str(folder / "few.h5"), "test", world.size).values()
    found = ensemble_scores.evaluation_of(ensemble, rows, "test", counts)
    p, y = naive(folder)
    mean = p.mean(axis=0)
    assert found["scores"]["accuracy"] == pytest.approx((mean.argmax(axis=1) == y).mean())
    assert found["scores"]["loss"] == pytest.approx(-np.log(mean[np.arange(6), y]).mean(), rel=1e-5)
    for member, one in zip(found["members"], p, strict=True):
        assert member["scores"]["accuracy"] == pytest.approx((one.argmax(axis=1) == y).mean())
        assert member["scores"]["loss"] == pytest.approx(-np.log(one[np.arange(6), y]).mean(), rel=1e-5)
        assert 0 <= member["scores"]["calibration_error"] <= 1
    answers = p.argmax(axis=2)
    differ = np.mean([(answers[a] != answers[b]).mean() for a, b in ((0, 1), (0, 2), (1, 2))])
    assert found["disagreement"] == pytest.approx(differ) and found["rows"] == 6
    json.dumps(found)
    ensemble_scores.table(found)


def test_out_of_bag_scores_are_of_members_that_have_not_seen_a_row(world, folder):
    ensemble = Ensemble(folder, MEMBERS, "mean", 0).open(world.rank, world.size)
    unseen = np.random.default_rng(5).random((3, 20)) < 0.4
    unseen[:, 0] = False  # a row that all have seen counts nothing
    bags = {each.member.number: unseen[each.member.number] for each in ensemble.local_members}
    comm = Communicator(world, "tree")
    found = ensemble.out_of_bag(comm, str(folder / "few.h5"), bags)
    comm.free()
    p, y = naive(folder, np.arange(20))
    rows = unseen.any(axis=0)
    mean = (p * unseen[:, :, None]).sum(axis=0)[rows] / unseen.sum(axis=0)[rows, None]
    assert found["rows"] == rows.sum() < 20
    assert found["accuracy"] == pytest.approx((mean.argmax(axis=1) == y[rows]).mean())


@pytest.mark.mpi(min_size=2)
def test_only_probabilities_travel(world, folder):
    """Of each row 3 values of 8 bytes for each class, however many members there are; each block to another rank."""
    for members in (MEMBERS[:2], MEMBERS * 2):
        ensemble = Ensemble(folder, members, "mean", 0).open(world.rank, world.size)
        comm = Communicator(world, "tree")
        rows = ensemble.rows(str(folder / "few.h5"), "test", world.size)
        combined = [found for *_, found in ensemble.combined_blocks(comm, rows)]
        sent = world.allreduce(comm.traffic.sent_so_far[0])
        blocks = world.allreduce(sum(found is not None for found in combined))
        assert blocks == len(combined) > 1 and sum(found is not None for found in combined) <= -(-blocks // world.size)
        assert sent == (world.size - 1) * 6 * 3 * 3 * 8  # a tree: all but the root send once
        comm.free()


def test_a_csv_has_probabilities_and_spreads(world, folder):
    file = f"{world.bcast(str(folder))}/p.csv"
    predicted(world, folder, file=file, every=True)
    with open(file) as lines:
        header, *lines = csv.reader(lines)
    assert header[:7] == ["row", "label", "class", "probability", "p(0)", "p(1)", "p(2)"]
    assert header[7:] == ["spread", "spread(0)", "spread(1)", "spread(2)"]
    p, _ = naive(folder)
    for line, mean, spread in zip(lines, p.mean(axis=0), p.std(axis=0), strict=True):
        best = mean.argmax()
        assert int(line[2]) == best and [float(each) for each in line[4:7]] == pytest.approx(mean, abs=1e-5)
        assert float(line[7]) == pytest.approx(spread[best], abs=1e-5)


def test_what_is_no_ensemble(tmp_path):
    for text, said in (
        (None, "has not ended: take train-ensemble --resume"),
        ('{"members": 3}', "is no summary of an ensemble"),
        ('{"members": [], "combine": "mean", "stacking": null, "seed": 0}', "has no members"),
    ):
        if text is not None:
            (tmp_path / "summary.json").write_text(text)
        with pytest.raises(UsageError, match=said):
            Ensemble.read(str(tmp_path))
