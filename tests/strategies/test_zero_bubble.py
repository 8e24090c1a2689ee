"""Zero-bubble schedules against the formulas of the papers: order, idle time, micro-batches that a stage holds."""

import inspect
import itertools
from fractions import Fraction

import pytest

from hpcdl.errors import UsageError
from hpcdl.parallel.timetable import Placement, split_backwards
from hpcdl.strategies import zero_bubble
from hpcdl.strategies.pipeline_schedules import actions_of, chart, longest, most_in_flight, placement, plan

STAGES, MICROBATCHES = range(2, 9), range(1, 33)
TIMES = [(1, 1, 1), (4, 4, 2), (3, 4, 2), (4, 3, 1)]  # of F, B and W, a W not the longest
TRIED = {"zb-v": 1, "dualpipe-v": 2}  # so many of the times, for which there is a formula


def cases():
    """(name, stages, micro-batches, chunks) of all that there are."""
    for p in STAGES:
        for m in MICROBATCHES:
            yield from ((name, p, m, 1) for name in ("zb-h1", "zb-h2", "zb-v"))
            yield from (("zb-interleaved", p, m, v) for v in (2, 3) if m % p == 0)
            yield from [("dualpipe-v", p, m, 1)] * (m >= 2 * p)


def as_text(found):
    return " ".join(map(str, found))


def test_orders_by_hand():
    first = "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert as_text(actions_of("zb-h1", 3, 0, 4)) == first
    assert as_text(actions_of("zb-h1", 3, 2, 4)) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    assert as_text(actions_of("zb-h2", 2, 0, 4)) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert as_text(actions_of("zb-h2", 2, 1, 4)) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    assert as_text(actions_of("zb-interleaved", 2, 1, 2, 2)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 W0.1 B0 W1.1 B1 W0 W1"
    first = "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0 W0 F2.1 B2.1 W2.1 B1 W1 B2 W2"
    assert as_text(actions_of("zb-v", 2, 0, 3)) == first
    last = "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 B2.1 B2 B3.1 B3 W3.1 W3"
    assert as_text(actions_of("dualpipe-v", 2, 1, 4)) == last


def test_each_micro_batch_goes_through_each_chunk_once_and_in_order():
    for name, p, m, v in cases():
        for stage in {0, p // 2, p - 1}:
            found = list(actions_of(name, p, stage, m, v))
            at = {action: i for i, action in enumerate(found)}
            split, chunks = split_backwards(found), placement(name, p, v).chunks
            assert len(found) == len(at) == 2 * m * chunks + len(split)
            assert name == "dualpipe-v" or len(split) == m * chunks
            for k, chunk in ((k, chunk) for k in range(m) for chunk in range(chunks)):
                assert at["F", k, chunk] < at["B", k, chunk]
                assert (k, chunk) not in split or at["B", k, chunk] < at["W", k, chunk]


def theory(name, p, m, v, f, b, w):
    """The idle time of a step; f, b, w: times of a micro-batch on a stage."""
    ramp = 2 * p - 1 if name in ("zb-h2", "zb-v") else p
    if m < ramp and name != "dualpipe-v":  # the pipeline is never full
        assert f == b == w
        return (2 * p - 1 - m) * f
    late = {"zb-h1": f + b - w, "zb-h2": f + b - 2 * w, "zb-v": 0}
    return (p - 1) * late.get(name, Fraction(f + b - w, 2 if name == "dualpipe-v" else v))


@pytest.mark.long
def test_idle_times_are_those_of_theory():
    for name, p, m, v in cases():
        for f, b, w in TIMES[: TRIED.get(name, 4)] if m in (2 * p, 4 * p) else TIMES[:1]:
            chunks = placement(name, p, v).chunks
            found = longest(plan(name, p, m, v, chunks * f, chunks * (b + w), 0, chunks * w))
            wanted = chunks * (m * (f + b + w) + theory(name, p, m, v, f, b, w))
            assert found == wanted, (name, p, m, v, f, b, w)


def test_micro_batches_that_a_stage_holds():
    """As many as the first stage of 1F1B: zb-h1, zb-interleaved and zb-v (in chunks); zb-h2 and dualpipe-v more."""
    for name, p, m, v in cases():
        full = {"zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p, "dualpipe-v": 2 * p + 1}.get(name, v * p)
        if name == "zb-v" and m < 2 * p - 1:
            continue
        wanted = min(m, full) if name in ("zb-h1", "zb-h2") else full
        for s in range(p):
            assert most_in_flight(actions_of(name, p, s, m, v)) == wanted, (name, p, s, m, v)


def test_placements_are_one_to_one_and_neighbours_are_near():
    for p in range(1, 8):
        for chunks, v_shaped in ((1, False), (3, False), (2, True), (4, True)):
            where = Placement(p, chunks, v_shaped)
            places = [where.place(virtual) for virtual in range(where.last + 1)]
            assert [where.virtual(*place) for place in places] == list(range(p * chunks))
            assert sorted(v for stage in range(p) for v in where.of(stage)) == list(range(p * chunks))
            far = max(abs(a - b) for (a, _), (b, _) in itertools.pairwise(places)) if p * chunks > 1 else 0
            assert far <= (1 if v_shaped else max(1, p - 1))
    assert [Placement(3, 2, True).of(stage) for stage in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_refusals():
    for arguments, words in {
        ("dualpipe-v", 3, 0, 5): "dualpipe-v on 3 stages needs at least 6 micro-batches, not 5",
        ("zb-v", 2, 0, 4, 3): "zb-v has 2 chunks per stage, not 3",
        ("zb-h1", 2, 0, 4, 2): "zb-h1 has 1 chunk per stage, not 2",
        ("zb-interleaved", 1, 0, 4, 2): "zb-interleaved needs at least 2 stages",
        ("zb-interleaved", 2, 0, 5, 2): "2 interleaved stages need a multiple of 2 micro-batches",
    }.items():
        with pytest.raises(UsageError, match=words):
            actions_of(*arguments)


def test_the_pictures_of_the_docstring_are_what_chart_draws():
    text = inspect.getdoc(zero_bubble)
    for case in (("zb-h1", 3, 5), ("zb-h2", 3, 5), ("zb-v", 3, 5), ("dualpipe-v", 3, 6)):
        *lines, legend = chart(plan(*case), 100).splitlines()
        assert "\n".join(f"    {line}" for line in lines) in text
        assert "weight gradients" in legend
