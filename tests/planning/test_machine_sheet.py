"""A machine's file: read, written, refused; and what is between two measurements."""

import pytest
import yaml

from hpcdl.errors import UsageError
from hpcdl.planning.machine_sheet import Machine, interpolate

SHEET = {"cores": 4, "latency": "2e-6", "bandwidth": 1e9, "flops": 1e10, "memory": 1e10, "start": 1e-4}
MODEL = {"model": "mlp:8", "data": "digits", "dtype": "float32", "optimizer": "momentum", "parameters": 610}
MODEL |= {"update": 1e-6, "rows": {1: {"draw": 1e-6, "gradient": 3e-5, "layers": [[1e-5, 2e-5]]}}}
SECTION = {"ranks": 2, "nodes": 1, "collectives": {"ring": {4096: 1e-5}}, "programs": {"train-grid": 1e-4}}
SECTION |= {"models": [MODEL]}
ODD = {"draw": 0, "gradient": 1, "layers": [[1]]}


def written(path, found):
    path.write_text(yaml.safe_dump(found))
    return str(path)


def test_a_data_sheet_is_read(tmp_path):
    found = Machine.read(written(tmp_path / "a.yaml", SHEET))
    assert (found.cores, found.links.latency, found.links.node_latency, found.flops) == (4, 2e-6, 2e-6, 1e10)
    assert found.links.ranks_per_node == 4 and found.measured == () and found.progress == 1
    assert [found.sharing(ranks) for ranks in (1, 4, 8)] == [1, 1, 1]  # 8 are on two nodes
    wider = Machine.of(SHEET | {"ranks_per_node": 6})
    assert [wider.sharing(ranks) for ranks in (4, 5, 12)] == [1, 1.25, 1.5]


def test_what_is_written_is_what_is_read(tmp_path):
    machine = Machine.of(SHEET | {"late": 5e-5, "progress": 0.25, "ranks_per_node": 8, "measured": [SECTION]})
    path = tmp_path / "b.yaml"
    machine.write(str(path))
    assert Machine.read(str(path)) == machine
    section = machine.section(2)
    assert section.collectives == {"ring": {4096: 1e-5}} and section.models[0].rows[1].layers == [(1e-5, 2e-5)]
    assert machine.section(3) is None and list(tmp_path.iterdir()) == [path]


REFUSED = {
    "no dictionary": ([1], "must hold lines"),
    "nothing": ({}, "lacks cores, latency"),
    "one is missing": ({name: value for name, value in SHEET.items() if name != "flops"}, "lacks flops"),
    "unknown name": (SHEET | {"latencie": 1}, "did you mean 'latency'"),
    "no number": (SHEET | {"flops": "many"}, "flops is a number"),
    "not finite": (SHEET | {"start": float("inf")}, "start is at least 0"),
    "negative": (SHEET | {"latency": -1e-6}, "latency is a number, at least 0"),
    "no flops": (SHEET | {"flops": 0}, "flops is more than 0"),
    "a truth": (SHEET | {"flops": True}, "flops is a number"),
    "half a core": (SHEET | {"cores": 0.5}, "cores is a whole number"),
    "no core": (SHEET | {"cores": 0}, "cores is at least 1"),
    "more than all": (SHEET | {"progress": 1.5}, "progress is a share"),
    "no list": (SHEET | {"measured": {"ranks": 1}}, "measured is a list"),
    "section of nobody": (SHEET | {"measured": [{"nodes": 1}]}, "measured lacks ranks"),
    "no ranks": (SHEET | {"measured": [SECTION | {"ranks": 0}]}, "ranks is a number, at least 1"),
    "empty curve": (SHEET | {"measured": [SECTION | {"collectives": {"ring": {}}}]}, "ring of collectives"),
    "bytes of no number": (SHEET | {"measured": [SECTION | {"collectives": {"ring": {"x": 1}}}]}, "bytes of ring"),
    "negative seconds": (SHEET | {"measured": [SECTION | {"programs": {"train-grid": -1}}]}, "train-grid is a number"),
    "model without rows": (SHEET | {"measured": [SECTION | {"models": [MODEL | {"rows": {}}]}]}, "rows of mlp:8"),
    "layer of one number": (SHEET | {"measured": [SECTION | {"models": [MODEL | {"rows": {1: ODD}}]}]}, "pairs of"),
}


@pytest.mark.parametrize(("found", "told"), REFUSED.values(), ids=REFUSED)
def test_what_no_machine_has_is_refused_in_a_line(tmp_path, found, told):
    path = written(tmp_path / "c.yaml", found)
    with pytest.raises(UsageError, match=told) as refused:
        Machine.read(path)
    assert str(refused.value).startswith(f"--machine {path}: ") and "\n" not in str(refused.value)


def test_files_that_are_none(tmp_path):
    for name, text in {"text": b"a: [", "bytes": b"\xff\xfe\x00"}.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UsageError, match="is not valid YAML"):
            Machine.read(str(tmp_path / name))
    with pytest.raises(UsageError, match="cannot be read"):
        Machine.read(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(UsageError, match="cannot be written"):
        Machine.of(SHEET).write(str(tmp_path / "none" / "d.yaml"))


def test_between_measurements():
    curve = {10: 1.0, 20: 3.0, 40: 4.0}
    assert [interpolate(curve, at) for at in (1, 10, 15, 20, 30, 60)] == [1, 1, 2, 3, 3.5, 5]
    assert interpolate({10: 1.0}, 5) == 1 and interpolate({10: 1.0}, 30) == 3
    assert interpolate({10: 2.0, 20: 1.0}, 40) == 1  # never less for more
