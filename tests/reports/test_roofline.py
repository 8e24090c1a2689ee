"""The roofline's points: counted flops and bytes, some time; the picture; a run beside the machine."""

import json

import pytest

from hpcdl.errors import UsageError
from hpcdl.kernels.cases import CASES
from hpcdl.kernels.intensity import COSTS
from hpcdl.reports import roofline
from hpcdl.reports.roofline import Point, attainable, balance, kernel_points, layer_points, prepare, told

SHORT = 1e-4  # seconds


def test_a_point():
    point = Point("x", "kernel", 4e9, 2e9, 0.5)
    assert (point.intensity, point.gflops) == (2.0, 8.0)
    row = point.row()
    assert row["what"] == "point" and row["intensity"] == 2.0 and row["gflops"] == 8.0


def test_the_roof_of_the_papers_machine():
    """Opteron X2 of figure 1: 17.6 GFLOP/s and 15 GB/s meet at 17.6 / 15 flops for each byte."""
    ridge = 17.6 / 15
    assert attainable(ridge / 4, 17.6, 15.0) == pytest.approx(17.6 / 4)
    assert attainable(ridge, 17.6, 15.0) == pytest.approx(17.6)
    assert attainable(4 * ridge, 17.6, 15.0) == 17.6


def test_kernels():
    points = {point.name: point for point in kernel_points(4096, SHORT)}
    assert set(points) == {name for name, cost in COSTS.items() if name in CASES and cost.per_element}
    assert all(point.seconds > 0 and point.kind == "kernel" for point in points.values())
    assert points["add_into"].flops == 1024 and points["add_into"].bytes == 3 * 4096
    assert points["adam"].intensity == 17 / 28
    assert points["add_bfloat16"].intensity == 0.1


def test_layers_of_an_mlp():
    points = layer_points(prepare("mlp:16,8", "", 32), SHORT)
    layers = [(f"dense{k}", kind) for k in (1, 2, 3) for kind in ("forward", "backward")]
    assert [(p.name, p.kind) for p in points] == [*layers, ("loss", "forward")]
    assert points[0].flops == 2 * 32 * 64 * 16 + 2 * 32 * 16
    assert points[0].bytes == 4 * (32 * 64 + 64 * 16 + 32 * 16 + 2 * 32 * 16)
    assert all(p.seconds > 0 for p in points)


def test_layers_of_a_gpt_have_its_text():
    points = layer_points(prepare("gpt:layers=1,width=8,heads=2", "", 2), SHORT)
    assert [p.name for p in points[:3]] == ["embedding", "embedding", "block1.attention"] and points[-1].name == "loss"
    assert len(points) == 2 * 5 + 1


def test_models_that_are_not_counted():
    for model, said in (("svm", "the data has 10; use softmax or mlp"), ("mlq", "unknown model 'mlq'")):
        with pytest.raises(UsageError, match=said):
            prepare(model, "", 4)


@pytest.mark.parametrize("count", [0, 9])
def test_the_picture(tmp_path, count):
    pytest.importorskip("matplotlib")
    kinds = ["kernel", "forward", "backward"]
    points = [Point(f"p{k}", kinds[k % 3], 2.0 ** (k + 1), 8.0, 1e-9) for k in range(count)]
    paths = roofline.write(points, 100.0, {"L1": 300.0, "memory": 20.0}, "made here", tmp_path / "a.b")
    assert [path.name for path in paths] == ["a.b.png", "a.b.svg"] and all(path.stat().st_size > 3000 for path in paths)
    text = paths[1].read_text()
    assert "flops for each byte" in text and "memory" in text and "made here" in text
    assert ("layer forward" in text) == (count > 1) and text.count(">p") >= min(count, 3)


def test_names_do_not_stand_on_each_other(tmp_path):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set_xlim(0.1, 10)
    axes.set_ylim(0.1, 10)
    near = [Point("kernel", "kernel", 5, 1, 1e-9), Point("layer", "forward", 5, 1, 0.99e-9)]
    roofline.name_points(axes, [*near, Point("far", "kernel", 1, 1, 0.2e-9)])
    assert [text.get_text() for text in axes.texts] == ["layer", "far"]
    roofline.name_points(axes, near[1:])
    assert [text.get_text() for text in axes.texts] == ["layer", "far", "layer"]


SUMMARY = {"model": "mlp", "parameters": 1000, "steps": 10, "batch_size": 4, "bytes_sent_per_rank": [500, 700]}
SUMMARY |= {"compute_seconds_per_rank": [1.0, 3.0], "communication_seconds_per_rank": [4.0, 4.0]}
SUMMARY |= {"idle_seconds_per_rank": [0.0, 1.0], "strategy": "all_reduce", "ranks": 2}


def summary(folder, **changed):
    (folder / "summary.json").write_text(json.dumps(SUMMARY | changed))
    return folder


def test_a_run(tmp_path):
    row = balance(summary(tmp_path), peak=100.0, bandwidth=10.0)
    assert row["ranks"] == 2 and row["flops_per_rank"] == 6 * 1000 * 40 / 2
    assert (row["compute_seconds"], row["communication_seconds"], row["idle_seconds"]) == (2.0, 4.0, 0.5)
    assert row["flops_per_byte"] == 120000 / 600 and row["machine_flops_per_byte"] == 10
    assert balance(summary(tmp_path, model="gpt"), 1, 1)["flops_per_rank"] == 64 * 120000  # of a gpt also tokens
    assert balance(summary(tmp_path, model="gpt:layers=2,context=8"), 1, 1)["flops_per_rank"] == 8 * 120000
    text = told(row)
    assert "each 2 s computing, 4 s communicating (0.5 : 1)" in text and "200 flops for each byte" in text
    assert "computing would take longer, 20 : 1" in text


def test_a_run_that_sends_nothing(tmp_path):
    alone = {"bytes_sent_per_rank": [0], "compute_seconds_per_rank": [1.0], "communication_seconds_per_rank": [0.0]}
    row = balance(summary(tmp_path, **alone, idle_seconds_per_rank=[0.0]), 1, 1)
    assert row["flops_per_byte"] is None and "no communication" in told(row) and told(row).endswith("it sent nothing.")


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "is no folder of a run"),
        ("{", "is no JSON"),
        ("[]", "lacks strategy, ranks, parameters, steps"),
        (json.dumps(SUMMARY | {"steps": "many"}), "are no numbers"),
        (json.dumps(SUMMARY | {"bytes_sent_per_rank": ["a"]}), "are no numbers"),
    ],
)
def test_folders_without_a_run(tmp_path, text, words):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        balance(tmp_path, 1, 1)


def test_the_shortest_of_several():
    calls = []
    assert roofline.shortest(lambda: calls.append(1), 0.0) >= 0 and len(calls) == 2 + roofline.REPEATS
