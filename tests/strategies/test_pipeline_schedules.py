"""Pipeline schedules against theory: idle shares, micro-batches in flight, ages of weights; no deadlock; the chart."""

import inspect
from fractions import Fraction
from itertools import islice

import pytest

from hpcdl.errors import UsageError
from hpcdl.parallel.timetable import Action, Span
from hpcdl.strategies import pipeline_schedules
from hpcdl.strategies.pipeline_schedules import actions_of as actions
from hpcdl.strategies.pipeline_schedules import chart, idle_share, most_in_flight, plan, simulate

PLAIN = ["naive", "gpipe", "1f1b", "pipedream"]
DURATIONS = [(Fraction(1), Fraction(2)), (Fraction(1), Fraction(1)), (Fraction(3), Fraction(1))]


def cases():
    """(name, stages, micro-batches, chunks) of all that there are, up to 7 stages."""
    for p in range(1, 8):
        yield from ((name, p, m, 1) for name in PLAIN for m in range(1, 14))
        yield from (("interleaved", p, p * groups, v) for groups in (1, 2, 3) for v in (1, 2, 3, 4) if p > 1)


def as_text(found):
    return " ".join(map(str, found))


# -- orders --------------------------------------------------------------------------------------------------------


def test_orders_by_hand():
    assert as_text(actions("naive", 3, 1, 3)) == "F0 B0 F1 B1 F2 B2"
    assert as_text(actions("gpipe", 3, 1, 3)) == "F0 F1 F2 B2 B1 B0"
    assert as_text(actions("1f1b", 4, 0, 5)) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert as_text(actions("1f1b", 4, 2, 5)) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert as_text(actions("1f1b", 4, 3, 3)) == "F0 B0 F1 B1 F2 B2"
    assert as_text(actions("1f1b", 4, 0, 2)) == "F0 F1 B0 B1"
    first = "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    last = "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert [as_text(actions("interleaved", 2, stage, 4, 2)) for stage in (0, 1)] == [first, last]


def test_each_micro_batch_goes_through_each_chunk_once_and_forwards_first():
    for name, p, m, v in cases():
        for stage in range(p):
            found = list(actions(name, p, stage, m, v))
            assert len(found) == len(set(found)) == 2 * m * v  # no W: B is the whole backward
            for chunk in range(v):
                for k in range(m):
                    assert found.index(("F", k, chunk)) < found.index(("B", k, chunk))


def test_an_endless_run_begins_like_a_long_one():
    for stage in range(5):
        endless = list(islice(actions("pipedream", 5, stage, None), 200))
        assert endless == list(islice(actions("pipedream", 5, stage, 300), 200))
        assert list(islice(pipeline_schedules.pipedream(5, stage), 200)) == endless


# -- against theory ------------------------------------------------------------------------------------------------


def test_idle_shares_are_those_of_theory():
    for name, p, m, v in cases():
        wanted = Fraction(p - 1, p) if name == "naive" else Fraction(p - 1, v * m + p - 1)
        for forward, backward in DURATIONS:
            assert idle_share(plan(name, p, m, v, forward, backward)) == wanted, (name, p, m, v)


def test_the_idle_share_counts_all_stages_for_as_long_as_the_longest_one():
    first, second = Span(Action("F", 0), 0, 1), Span(Action("F", 0), 1, 4)
    assert idle_share([[first], [second]]) == 2 / 6
    assert idle_share([[first, second._replace(start=2)], [second]]) == 2 / 8  # the first one begins, and ends last
    assert idle_share([[], []]) == 0


def test_a_message_between_two_stages_delays_what_needs_it():
    m, p, message = 5, 4, Fraction(1, 3)
    found = plan("naive", p, m, 1, Fraction(1), Fraction(2), message)
    assert max(each[-1].stop for each in found) == m * (3 * p + 2 * (p - 1) * message)
    found = plan("gpipe", p, m, 1, Fraction(1), Fraction(2), message)
    assert max(each[-1].stop for each in found) == 3 * (m + p - 1) + 2 * (p - 1) * message
    assert plan("gpipe", 1, m, message=7) == plan("gpipe", 1, m)  # a stage sends nothing to itself


def test_micro_batches_in_flight():
    for name, p, m, v in cases():
        for s in range(p):
            ahead = 2 * (p - 1 - s) + (v - 1) * p
            wanted = {"naive": 1, "gpipe": m, "interleaved": min(m * v, ahead + 1)}.get(name, min(m, p - s))
            assert most_in_flight(actions(name, p, s, m, v)) == wanted, (name, p, s, m, v)


def test_pipedream_computes_with_weights_as_old_as_there_are_stages_behind():
    """One update after each backward: F of micro-batch k would have k of them if the stages took turns."""
    for p in range(1, 8):
        for s in range(p):
            updates = 0
            for kind, k, _ in islice(actions("pipedream", p, s, None), 300):
                if kind == "B":
                    assert k == updates
                    updates += 1
                else:
                    assert k - updates == min(k, p - 1 - s)


# -- plans ---------------------------------------------------------------------------------------------------------


def test_stages_that_wait_for_each_other_are_named():
    first, second = [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)], [Action("F", 1), Action("F", 0)]
    with pytest.raises(RuntimeError, match=r"deadlock.* stage 0 for what B0 needs, stage 1 for what F1 needs"):
        simulate([first, second], {"F": 1, "B": 1})
    with pytest.raises(RuntimeError, match="stage 0 for what B0 needs"):
        simulate([[Action("B", 0), Action("F", 0)]], {"F": 1, "B": 1})


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpipe", 0, 0, 4), "at least 1 stage"),
        (("gpipe", 2, 2, 4), "no stage 2 in a pipeline of 2"),
        (("gpipe", 2, -1, 4), "no stage -1"),
        (("pipedream", 2, 0, 0), "at least 1 micro-batch, not 0"),
        (("1f1b", 2, 0, None), "a number of micro-batches"),
        (("interleaved", 2, 0, None, 2), "a number of micro-batches"),
        (("interleaved", 2, 0, 4, 0), "at least 1 chunk"),
        (("interleaved", 4, 0, 6, 2), "multiple of 4 micro-batches, not 6; take 4 or 8"),
        (("interleaved", 4, 0, 3, 2), "multiple of 4 micro-batches, not 3; take 4$"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(UsageError, match=words) as caught:
        actions(*arguments)  # at once, not when the first action is asked for
    assert "\n" not in str(caught.value)


def test_a_plan_ends():
    with pytest.raises(UsageError, match="a plan needs"):
        plan("pipedream", 2, None)


# -- the chart -----------------------------------------------------------------------------------------------------


def test_chart_with_labels():
    wanted = """\
0 |F0-F1-......B0====F2-B1====...B2====
1 |...F0-B0====F1-B1====F2-B2====......
F0 forward of micro-batch 0, B0 backward; . idle, 25.0 %; 12 in all"""
    assert chart(plan("1f1b", 2, 3), width=40) == wanted


def test_chart_with_letters_and_chunks():
    wanted = """\
0 |A-B-A1B1C-..a1==D-b1==C1a===D1b===..c1==..d1==c===d===
1 |..A-B-A1a1==B1b1==C-a===D-b===C1c1==D1d1==c===d===....
A B C... forward of micro-batch 0 1 2..., a b c... backward, A1: chunk 1; . idle, 11.1 %; 13.5 in all"""
    assert chart(plan("interleaved", 2, 4, 2), width=60) == wanted
    wanted = """\
0 |F0--F1--F0.1F1.1........B0.1====....B1.1====B0======B1======
1 |....F0--F1--F0.1B0.1====F1.1B1.1====B0======B1======........
F0 forward of micro-batch 0, B0 backward, F0.1: chunk 1; . idle, 20.0 %; 7.5 in all"""
    assert chart(plan("interleaved", 2, 2, 2), width=70) == wanted


def test_chart_of_measured_spans():
    """Gaps, uneven lengths, labels that find no room, an action that is over at once, a stage that did nothing."""
    actions = [("F0", 0.1, 0.3), ("F1", 0.32, 0.5), ("B0", 0.7, 1.2), ("F10", 1.2, 1.3), ("B1", 1.3, 1.9), ("F9", 2, 2)]
    uneven = [Span(Action(label[0], int(label[1:])), start, stop) for label, start, stop in actions]
    wanted = """\
0 |..A---B---....a=========K-b===========.J
1 |........................................
A B C... forward of micro-batch 0 1 2..., a b c... backward; . idle, 58.4 %; 2 s in all"""
    assert chart([uneven, []], width=43, unit="s") == wanted
    even = [Span(Action("B", k % 10), k / 10, (k + 1) / 10) for k in range(20)]
    wanted = """\
0 |..F0--F1--....B0========F-B1==========.F
1 |........................................
2 |B0B1B2B3B4B5B6B7B8B9B0B1B2B3B4B5B6B7B8B9
F0 forward of micro-batch 0, B0 backward; . idle, 40.3 %; 2 s in all"""
    assert chart([uneven, [], even], width=43, unit="s") == wanted
    assert chart([uneven, even[:12]], width=43).startswith("0 |..A-")  # 2 of 18 labels are too long


def test_charts_fit_their_width_and_show_every_step():
    for name, chunks in [*((name, 1) for name in PLAIN if name != "naive"), ("interleaved", 2)]:
        *lines, legend = chart(plan(name, 8, 16, chunks)).splitlines()
        assert len(lines) == 8 and all(len(line) <= 120 for line in [*lines, legend])
        for line in lines:
            for k in range(16):
                for letter in (chr(ord("A") + k), chr(ord("a") + k)):
                    assert line.count(letter) == chunks
    assert chart(plan("gpipe", 1, 28), width=87).startswith("0 |ABCDEFGHIJKLMNOPQRSTUVWXYZABb=a=z=y=")
    tenths, whole = (chart(plan("gpipe", 3, 4, 1, t, 2 * t), width=39).splitlines() for t in (0.1, 1))
    assert tenths[:3] == whole[:3]  # columns of equal actions are equal, whatever is rounded
    assert chart([[], []]).splitlines()[:2] == ["0 |.", "1 |."]


def test_the_pictures_of_the_docstring_are_what_chart_draws():
    text = inspect.getdoc(pipeline_schedules)
    for case in (("gpipe", 3, 4), ("1f1b", 3, 4), ("interleaved", 3, 6, 2)):
        lines = chart(plan(*case), 100).splitlines()[:-1]
        assert "\n".join(f"    {line}" for line in lines) in text
