"""hpcdl/reports/figures.py and charts.py: pictures take the page's colours, stay small, and have ids of their own."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcdl.reports import charts
from hpcdl.reports.charts import Curve, grouped
from hpcdl.reports.figures import COLOURS, STYLES, Key, Picture, drawing, inline, is_ours, look, save


def picture(**more):
    x = np.linspace(1, 100_000, 400)
    curve = Curve(x, np.exp(-x / 3e4), COLOURS[0], 1, np.exp(-x / 3e4) * 0.9, np.exp(-x / 3e4) * 1.1)
    draw = more.pop("draw", lambda axes: charts.curves(axes, [curve], "steps", "loss"))
    return Picture("a", 'Loss <"&', "Lower is better.", draw, [Key("a" * 200 + " = run 1", COLOURS[0])], **more)


def test_a_picture_in_a_page_and_as_files(tmp_path):
    with drawing():
        one, other = inline(picture(), "a-"), inline(picture(), "b-")
        for name in ("a.png", "a.svg"):
            save(picture(), tmp_path / name)
            assert is_ours(tmp_path / name)
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (one, other)]
    assert ids[0] and ids[0].isdisjoint(ids[1])
    assert set(re.findall(r"url\(#([^)]*)\)", one)) | set(re.findall(r'href="#([^"]*)"', one)) == ids[0]
    assert len(one) < 25_000 and "var(--ink)" in one and "#1a1b1c" not in one and "Loss &lt;&quot;&amp;" in one
    assert ">thousands" not in one and ">steps (thousands)<" in one
    file = (tmp_path / "a.svg").read_text()
    assert "#1a1b1c" in file and ("a" * 38 + " ... " + "a" * 7 + " = run 1") in file  # of its own ground and legend


def test_a_colour_for_each_and_then_a_style():
    looks = [look(index) for index in range(len(COLOURS) * len(STYLES))]
    assert len(set(looks)) == len(looks) == 28 and {style for _, style in looks[:7]} == {0}
    assert not {"#000000", "#f0e442"} & set(COLOURS)


@pytest.mark.parametrize("count, names", [(1, ["0"]), (24, None), (25, None), (1000, None)])
def test_many_ranks_are_grouped(count, names):
    values = [None if rank == 3 else float(rank) for rank in range(count)]
    found, means = grouped(values)
    assert len(found) == len(means) <= charts.GROUPS and (names is None or found == names)
    if count == 1000:
        assert found[0] == "0-41" and found[-1] == "966-999" and means[-1] == 982.5
        assert means[0] == np.mean([rank for rank in range(42) if rank != 3])


@pytest.mark.parametrize(
    "largest, label", [(2e-5, "time (µs)"), (0.5, "time (ms)"), (40, "time (s)"), (1e5, "time (h)")]
)
def test_units_suit_the_values(largest, label):
    assert charts.with_unit("seconds", charts.scale(np.array([0, largest]), "seconds")[1]) == label


def numbers_at(axis, low, high, log):
    """The labels of the ticks of an axis from low to high in the page's picture, and the picture."""

    def draw(axes):
        axes.set_xticks([])
        axes.set_yticks([])
        getattr(axes, f"set_{axis}scale")("log" if log else "linear")
        getattr(axes, f"set_{axis}lim")(low, high)
        charts.ticks(axes, axis, log)

    svg = inline(picture(draw=draw), "a-")
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg), svg


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(st.sampled_from("xy"), st.floats(-12, 12), st.floats(-9, 12), st.booleans(), st.booleans())
@example("y", np.log10(80.415), -4.2, False, False)  # 80.42, 80.42, 80.42
@example("y", -3.3, 3.4, True, False)  # from 0.001, which was written as 0
@example("x", 0.0, -1.0, True, False)  # within a decade, without a power of ten
@example("y", 2.0, 0.0, False, True)
@example("y", -29.0, 59.0, True, False)
def test_labels_tell_ticks_apart(axis, least, span, log, below):
    """Of an axis from 10^least to 10^least (1 + 10^span); below: from the same number below 0."""
    low, high = 10.0**least, 10.0**least * (1 + 10.0**span)
    low = -high if below and not log else low
    with drawing():
        labels, svg = numbers_at(axis, low, high, log)
    values = [float(label) for label in labels]
    assert 2 <= len(values) <= 8 and values == sorted(set(values)), labels
    margin = 1e-2 * (high - low)
    ends = (low * 0.99, high * 1.01) if log else (low - margin, high + margin)
    assert ends[0] <= values[0] and values[-1] <= ends[1]
    if not log:
        np.testing.assert_allclose(np.diff(values), np.diff(values).mean(), rtol=2e-3)
    if axis == "y":  # no label is cut off at the left
        right = float(re.search(r'text-anchor: end[^>]* x="([\d.]+)"', svg)[1])
        assert right - 5.8 * max(map(len, labels)) > 0
