"""Grids that fit: all that do and no others, best first, and each holds what a forecast of it says."""

import pytest

from hpcdl.errors import UsageError, parse_bytes
from hpcdl.planning import fitting
from hpcdl.planning.dry_run import dry_run_step
from hpcdl.planning.fitting import fits, microbatch_counts, shapes
from hpcdl.planning.memory import forecast
from hpcdl.scripts.plan import case_of as case

LINE = "train-grid --model gpt:layers=4,width=64,heads=4 --data text --batch-size 32 --optimizer adam"


@pytest.fixture(scope="module")
def found():
    whole = case(f"{LINE} --grid data=4", 4)
    room = max(rank.total for rank in forecast(whole)) - 1_000_000
    return room, list(fits(whole, room))


def test_what_fits_holds_what_a_forecast_says(found):
    room, grids = found
    assert grids and [fit.order for fit in grids] == sorted(fit.order for fit in grids)
    for fit in grids[:: max(1, len(grids) // 8)]:
        ranks = forecast(case(f"{LINE} {fit.options}", 4))
        assert max(rank.total for rank in ranks) == pytest.approx(fit.bytes, abs=0.01 * fit.bytes)
        assert fit.bytes <= room


def test_what_does_not_fit_is_left_out(found):
    room, grids = found
    assert ((4, 1, 1, 1, 1), 0, 1, False) not in [fit[:4] for fit in grids]
    less = list(fits(case(f"{LINE} --grid data=4", 4), int(room) - 4_000_000))
    assert len(less) < len(grids) and {fit[:4] for fit in less} <= {fit[:4] for fit in grids}
    assert not list(fits(case(f"{LINE} --grid data=4", 4), 1000))


def test_the_first_grid_needs_the_dry_runs_of_its_shape_alone(monkeypatch):
    made = []
    monkeypatch.setattr(fitting, "dry_run_step", lambda *given: made.append(given) or dry_run_step(*given))
    assert next(fits(case(f"{LINE} --grid data=4", 4), 1 << 40)).shape == (4, 1, 1, 1, 1)
    assert [(rank, cut.shape, cut.zero, rows) for _, rank, cut, rows in made] == [
        (0, (4, 1, 1), 3, 1),  # the least state
        (0, (4, 1, 1), 0, 1),  # its own
        (0, (4, 1, 1), 0, 3),  # 8 micro-batches, of which 3 show the maximum
        (0, (4, 1, 1), 0, 6),  # 4
        (0, (4, 1, 1), 0, 8),  # 2
        (0, (4, 1, 1), 0, 8),  # 1
    ]


def test_sequences_are_cut_if_nothing_else_fits():
    """One row of 64 tokens on a rank: a grid without the axis context has more activations."""
    line = "train-grid --model gpt:layers=1,width=16,heads=1 --data text --batch-size 1 --microbatches 1 --grid data=4"
    whole = case(line, 4)
    tight = list(fits(whole, 1 << 40))
    assert tight and {fit.shape[2] for fit in tight} == {1}
    room = min(fit.bytes for fit in tight) - 1
    found = list(fits(whole, room))
    assert found and all(fit.shape[2] > 1 and fit.bytes <= room for fit in found)
    for fit in found[:2]:
        ranks = forecast(case(f"{line.partition(' --grid')[0]} {fit.options}", 4))
        assert max(rank.total for rank in ranks) == pytest.approx(fit.bytes, abs=0.01 * fit.bytes)


def test_experts_are_shared_by_a_number_of_ranks_that_divides_theirs():
    line = "train-grid --model gpt:layers=1,width=16,heads=1,experts=6 --data text --batch-size 8 --microbatches 1"
    found = list(fits(case(f"{line} --grid data=4", 4), 1 << 40))
    shared = [fit for fit in found if fit.shape[3] > 1]
    assert shared and {fit.shape[3] for fit in found} == {1, 2} and len(shared) < len(found)
    for fit in shared[:: max(1, len(shared) // 4)]:
        ranks = forecast(case(f"{line} {fit.options}", 4))
        assert max(rank.total for rank in ranks) == pytest.approx(fit.bytes, abs=0.01 * fit.bytes)


def test_what_cannot_be_cut_is_said():
    refused = []
    assert list(fits(case(f"{LINE} --grid data=8", 8), 1 << 40, refused=refused))
    assert refused and "8" in refused[-1] and "divided" in refused[-1]


def test_shapes_and_parts():
    pairs = (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)
    assert set(shapes(4)) == {(d, p, 1, 1, t) for d, p, t in pairs}
    assert set(shapes(4, cut=True)) == {
        (d, p, c, 1, t) for d, p, c, t in ((2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (1, 1, 4, 1))
    }
    shared = {(2, 1, 1, 2, 1), (1, 2, 1, 2, 1), (1, 1, 1, 2, 2)}
    assert set(shapes(4, owners=[1, 2])) == set(shapes(4)) | shared
    assert microbatch_counts(6) == [1, 2, 4, 6] and microbatch_counts(1) == [1]


def test_sizes_are_read():
    assert [parse_bytes(text) for text in ("32GiB", "80GB", "1.5 MiB", "100")] == [32 << 30, 80 * 10**9, 3 << 19, 100]
    for text in ("", "GiB", "-1GiB", "32gb", "0"):
        with pytest.raises(UsageError, match="number of bytes"):
            parse_bytes(text)
