"""hpcdl/search/ensemble_members.py: who trains what."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from made_search import settings_of, write_journal

from hpcdl.data import from_arrays
from hpcdl.data.resampling import Draw
from hpcdl.errors import UsageError
from hpcdl.launch.isolated_run import Outcome
from hpcdl.runs.options import Options
from hpcdl.search import ensemble_members


def test_options_in_turns():
    assert ensemble_members.variations(["a=1|2", "b_c=x"]) == [{"a": "1", "b-c": "x"}, {"a": "2", "b-c": "x"}]
    assert ensemble_members.variations([]) == [{}]
    with pytest.raises(UsageError, match="give an option once"):
        ensemble_members.variations(["a=1", "a=2"])
    assert ensemble_members.with_options("train-gossip --lr 1", {"data": "a b"}) == "train-gossip --lr 1 --data='a b'"


def planned(steps, count):
    data = SimpleNamespace(examples=4, steps_per_epoch=lambda batch: 1)
    return ensemble_members.snapshot_options(count, data, Options(steps=steps), 2)


def test_a_checkpoint_at_the_end_of_each_cycle():
    assert planned(30, 3).checkpoint_every == 10 and planned(31, 3).checkpoint_every == 11
    with pytest.raises(UsageError, match="9 steps are too few for so many cycles"):
        planned(9, 4)


def test_what_is_done(tmp_path):
    assert not ensemble_members.has_ended(tmp_path)
    for stopped, ended in (("finished", True), ("time limit", False), ("budget", True)):
        (tmp_path / "summary.json").write_text(json.dumps({"stopped": stopped}))
        assert ensemble_members.has_ended(tmp_path) == ended
    (tmp_path / "failed.json").write_text('{"why": "it diverged"}')
    assert ensemble_members.has_ended(tmp_path)


def test_out_of_bag_is_what_was_neither_drawn_nor_held_out():
    draw, held_out = Draw(0, 2, rows=True), np.array([1, 5])
    own = [SimpleNamespace(member=SimpleNamespace(number=2))]
    ensemble, specs = SimpleNamespace(local_members=own), {2: SimpleNamespace(draw=draw)}
    (found,) = ensemble_members.out_of_bag_masks(ensemble, specs, held_out, np.zeros(10), 0).values()
    kept = np.delete(np.arange(10), held_out)
    seen = set(kept[draw.examples(8)])
    assert set(np.flatnonzero(found)) == set(range(10)) - seen - {1, 5} and found.any()


def test_out_of_fold_is_the_fold_of_the_training():
    """Folds depend on the classes of the rows that are not held out."""
    y, held_out = np.arange(12) % 3 // 2, np.array([0, 5])
    kept = np.delete(np.arange(12), held_out)
    specs = {number: SimpleNamespace(draw=Draw(0, number, folds=2)) for number in range(2)}
    ensemble = SimpleNamespace(local_members=[SimpleNamespace(member=SimpleNamespace(number=each)) for each in specs])
    found = ensemble_members.out_of_bag_masks(ensemble, specs, held_out, y, 2)
    for number, mask in found.items():
        data = from_arrays(np.arange(12.0)[kept, None], y[kept], classes=2)
        drawn = specs[number].draw.resample(data).train.rows(0, 5)[0].ravel()
        assert sorted(np.flatnonzero(mask)) == sorted(set(kept) - set(drawn.astype(int)))


def test_the_best_of_a_search(tmp_path):
    with pytest.raises(UsageError, match=r"--from "):
        ensemble_members.best_of_search(str(tmp_path), 2)
    settings = settings_of(program="train-gossip --topology ring", space=["lr=log:0.1..1.0"])
    lines: list[dict] = [{"event": "search", "version": 1, "settings": settings}]
    for trial, (lr, score) in enumerate([(0.125, 0.5), (0.5, 0.75), (0.25, 0.625), (0.75, None)]):
        what = {"trial": trial, "rung": 0, "seed": 0}
        lines.append({"event": "begin", **what, "values": {"lr": lr}})
        lines.append({"event": "end", **what, "score": score, "failed": None if score else "it diverged"})
    write_journal(tmp_path, lines)
    program, found = ensemble_members.best_of_search(str(tmp_path), 2)
    assert program == "train-gossip --topology ring" and found == [{"lr": "0.5"}, {"lr": "0.25"}]
    with pytest.raises(UsageError, match="the search has only 3 trials with a score"):
        ensemble_members.best_of_search(str(tmp_path), 4)
    (tmp_path / "journal.jsonl").write_text('{"event": "search", "settings": {"space": 3}}\n')
    with pytest.raises(UsageError, match="names no program and space"):
        ensemble_members.best_of_search(str(tmp_path), 1)


def test_members_are_dealt_to_groups(world, tmp_path, monkeypatch):
    """Member m to group m mod G; what is done is left out; one that is stopped ends its group."""
    trained = []

    def train_one(comm, spec, folder):
        trained.append((spec.number, comm.size))
        return Outcome(stopped="signal" if spec.number == 4 else "finished")

    monkeypatch.setattr(ensemble_members, "train_one", train_one)
    monkeypatch.setattr(ensemble_members, "has_ended", lambda path: path.name == "0001")
    specs = [ensemble_members.MemberSpec(number, None, "", Draw(0, number)) for number in range(6)]
    for ranks in range(1, world.size + 1):
        trained.clear()
        groups = world.size // ranks
        never, on_end = lambda: False, lambda spec, ended: None
        stopped = ensemble_members.train_in_groups(world, specs, ranks, tmp_path, never, on_end)
        group = world.rank // ranks
        mine = [number for number in range(6) if number % groups == group and number != 1] if group < groups else []
        mine = mine[: mine.index(4) + 1] if 4 in mine else mine
        assert trained == [(number, ranks) for number in mine] and stopped
