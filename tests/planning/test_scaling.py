"""Fits find what made the numbers: Amdahl's and Gustafson's laws, their intervals, and where lost seconds went."""

import json
import math

import numpy as np
import pytest

from hpcdl.errors import UsageError
from hpcdl.planning.scaling import report, scaling, student


@pytest.fixture
def written(tmp_path):
    """A function: folders of runs on these ranks, whose step takes step(p); the batch is batch(p)."""

    def write(ranks, step, batch=lambda p: 64, name="run", **more):
        folders = []
        for number, p in enumerate(ranks):
            folder = tmp_path / f"{name}{number}"
            folder.mkdir(exist_ok=True)
            steps, seconds = 10, 10 * step(p)
            found = {"strategy": "all_reduce", "ranks": p, "workers": p, "seconds": seconds, "steps": steps}
            found |= {"batch_size": batch(p), "model": "mlp", "data": "digits", "parameters": 9610}
            found["compute_seconds_per_rank"] = [0.5 * seconds] * p
            found["communication_seconds_per_rank"] = [0.4 * seconds] * p
            found["idle_seconds_per_rank"] = [0.3 * seconds] * p
            found["data_seconds_per_rank"] = [0.05 * seconds] * p
            for key, value in more.items():
                found[key] = value(p) if callable(value) else value
            (folder / "summary.json").write_text(json.dumps(found))
            folders.append(folder)
        return folders

    return write


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.3, 1.0])
def test_amdahls_fraction_is_found(written, serial):
    found = scaling(written([1, 2, 4, 8], lambda p: 2 * (serial + (1 - serial) / p)), 2)
    assert found.serial == pytest.approx(serial, abs=1e-9) and not found.weak
    for size in found.sizes:
        assert size.speed_up == pytest.approx(1 / (serial + (1 - serial) / size.ranks))
        assert size.ranks == 1 or size.karp_flatt == pytest.approx(serial, abs=1e-9)
    assert [size.ranks for size in found.predicted] == [16, 32]
    for size in found.predicted:
        assert size.speed_up == pytest.approx(1 / (serial + (1 - serial) / size.ranks))
        assert size.interval == pytest.approx((size.speed_up, size.speed_up), rel=1e-6)
    assert serial == 0 or found.limit == pytest.approx(1 / serial)


def test_gustafsons_fraction_is_found(written):
    folders = written([1, 2, 4, 8], lambda p: 2 * p / (p - 0.1 * (p - 1)), batch=lambda p: 16 * p)
    found = scaling(folders, 1)
    assert found.weak and found.serial == pytest.approx(0.1)
    assert found.sizes[-1].speed_up == pytest.approx(8 - 0.1 * 7) == found.sizes[-1].gustafson
    assert found.predicted[0].speed_up == pytest.approx(16 - 0.1 * 15)
    assert "weak" in report(found)[0]


@pytest.mark.parametrize("weak", [False, True])
def test_95_of_100_intervals_hold_the_truth(written, weak):
    random, held, turns = np.random.default_rng(3), 0, 200

    def truth(p):
        return 2 * p / (p - 0.1 * (p - 1)) if weak else 2 * (0.1 + 0.9 / p)

    def step(p):
        return truth(p) * (1 + 0.02 * random.standard_normal())

    for _ in range(turns):
        found = scaling(written([1, 2, 4, 8, 16], step, lambda p: 16 * p if weak else 64), 1)
        low, high = found.predicted[0].interval
        held += low <= (32 if weak else 1) * found.sizes[0].step / step(32) <= high
    assert 0.85 * turns <= held <= turns


def test_two_sizes_leave_no_interval_and_the_smallest_stands_for_one_rank(written):
    found = scaling(written([2, 4], lambda p: 2 / p), 1)
    assert [size.speed_up for size in found.sizes] == pytest.approx([2, 4])
    assert found.predicted[0].interval is None and found.predicted[0].speed_up == pytest.approx(8)
    assert student(0) is None and student(1) > student(5) > student(100) > 2


def test_super_linear_speed_up_is_said(written):
    found = scaling(written([1, 2], lambda p: {1: 2.0, 2: 0.8}[p]), 1)
    assert found.sizes[1].speed_up == pytest.approx(2.5) and found.sizes[1].karp_flatt < 0 and found.serial == 0
    assert any("super-linear on 2 ranks" in line for line in report(found))


def test_lost_seconds_go_where_the_summary_says(written):
    def uneven(p):
        return [5.0] if p == 1 else [4.0, 2.0]

    folders = written(
        [1, 2],
        lambda p: 1.0 if p == 1 else 0.6,
        compute_seconds_per_rank=uneven,
        communication_seconds_per_rank=lambda p: [0.0] if p == 1 else [1.0, 3.0],
        idle_seconds_per_rank=lambda p: [0.0] if p == 1 else [0.5, 2.5],
        data_seconds_per_rank=lambda p: [0.0] * p,
        idle_share=lambda p: 0.0 if p == 1 else 0.05,
    )
    lost = scaling(folders).lost[2]
    assert sum(lost.values()) == pytest.approx(1)
    seconds = {name: 12 * value for name, value in lost.items()}  # 2 ranks, 10 steps of 0.6 s
    wanted = {"useful": 5, "slower": 1, "communication": 1, "imbalance": 2, "bubble": 0.6, "idle": 0.4, "data": 0}
    assert {name: seconds[name] for name in wanted} == pytest.approx(wanted) and seconds["rest"] == pytest.approx(2)


def test_bad_input(written, tmp_path):
    good = written([1, 2], lambda p: 1 / p)
    for name, more, words in (
        ("model", {"model": "gpt"}, "differ in model"),
        ("batch", {"batch": lambda p: 100}, "one --batch-size"),
        ("lacks", {"seconds": None}, "lacks seconds; train again"),
        ("none", {"steps": 0}, "took no step"),
        ("broken", {"idle_seconds_per_rank": [None] * 4}, "the seconds of some ranks"),
    ):
        with pytest.raises(UsageError, match=words):
            scaling([*good, *written([4], lambda p: 1, name=name, **more)])
    with pytest.raises(UsageError, match="at least two numbers of ranks"):
        scaling(good[:1])
    with pytest.raises(UsageError, match="is no folder of a run"):
        scaling([*good, tmp_path / "nowhere"])
    (good[0] / "summary.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        scaling(good)
    assert math.isinf(scaling(written([1, 2], lambda p: 1 / p, lambda p: 8 * p, name="w")).limit)
