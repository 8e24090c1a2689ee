"""hpcdl/reports/figures.py and charts.py: pictures take the page's colours, stay small, and have ids of their own."""

import re

import numpy as np
import pytest

from hpcdl.reports import charts
from hpcdl.reports.charts import Curve, grouped
from hpcdl.reports.figures import COLOURS, STYLES, Key, Picture, drawing, inline, is_ours, look, save, short_path


def points(path):
    """The corners of a path in relative steps."""
    found, at, begun = [], np.zeros(2), np.zeros(2)
    for kind, numbers in re.findall(r"([MlhvzL])([^MlhvzL]*)", path):
        values = [float(each) for each in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", numbers)]
        if kind == "z":
            at = begun
            continue
        step = {"h": lambda v: (v[0], 0), "v": lambda v: (0, v[0])}.get(kind, lambda v: v)(values)
        at = np.array(step) if kind == "M" else at + step
        begun = at if kind == "M" else begun
        found.append(at)
    return np.array(found)


def test_short_paths_are_the_same_to_a_tenth():
    draw = np.random.default_rng(1)
    corners = draw.uniform(-300, 300, (200, 2))
    corners[50, 0], corners[90, 1] = corners[49, 0], corners[89, 1]  # up, and to the side
    path = "M {} {}".format(*corners[0]) + "".join("\nL {} {} ".format(*each) for each in corners[1:])
    assert np.abs(points(short_path(path)) - corners).max() <= 0.0501  # errors do not add up
    assert short_path("M 1 2 L 3.04 2 L 3 9 z M 0 0 L -0.26 0.31 ") == "M1 2h2v7zM0 0l-.3 .3"
    assert short_path("M 0.123 0 C 1 2 3 4 5 6 z") == "M 0.12 0.00 C 1.00 2.00 3.00 4.00 5.00 6.00 z"


def picture(**more):
    x = np.linspace(1, 100_000, 400)
    curve = Curve(x, np.exp(-x / 3e4), COLOURS[0], 1, np.exp(-x / 3e4) * 0.9, np.exp(-x / 3e4) * 1.1)
    draw = more.pop("draw", lambda axes: charts.curves(axes, [curve], "steps", "loss"))
    return Picture("a", 'Loss <"&', "Lower is better.", draw, [Key("a" * 200, COLOURS[0])], **more)


def test_a_picture_in_a_page_and_as_files(tmp_path):
    with drawing():
        one, other = inline(picture(), "a-"), inline(picture(), "b-")
        for name in ("a.png", "a.svg"):
            save(picture(), tmp_path / name)
            assert is_ours(tmp_path / name)
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (one, other)]
    assert ids[0] and ids[0].isdisjoint(ids[1])
    assert set(re.findall(r"url\(#([^)]*)\)", one)) | set(re.findall(r'href="#([^"]*)"', one)) == ids[0]
    assert len(one) < 20_000 and "var(--ink)" in one and "#1a1b1c" not in one and "Loss &lt;&quot;&amp;" in one
    assert ">thousands" not in one and ">steps (thousands)<" in one
    assert "#1a1b1c" in (tmp_path / "a.svg").read_text()  # as a file it has a ground of its own


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
