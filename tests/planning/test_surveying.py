"""From what ranks measure to a machine, with ranks that are not there; and a matrix of lines."""

import json
import subprocess

import pytest

from hpcdl.errors import UsageError
from hpcdl.planning import forecast_error
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.measuring import all_operations
from hpcdl.planning.probe_jobs import ANSWER
from hpcdl.planning.step_time import forecast_step
from hpcdl.planning.surveying import ON_ONE_NODE, small_line, survey
from hpcdl.scripts.plan import case_of as read


class Ranks:
    """Ranks that answer by what a machine of these numbers would measure; a step of each program takes 5 ms."""

    def __init__(self, nodes=1, bandwidth=1e9):
        self.jobs, self.nodes, self.near = {}, nodes, [1e-6, bandwidth]

    def __call__(self, ranks, arguments):
        job = json.loads(arguments[-1])
        self.jobs[ranks] = job
        collectives = {name: {256: 1e-5, 1 << 21: 1e-3} for name in job["operations"]} if ranks > 1 else {}
        models = []
        for text, rows in job["models"]:
            of = read(text, ranks)
            layers = [[1e-5, 2e-5]] * len(of.model.layers)
            each = {n: {"draw": 1e-6, "gradient": 1e-4 * n, "layers": layers} for n in rows}
            told = {"model": of.spec, "data": of.options.data, "dtype": of.options.dtype, "parameters": of.length}
            models.append(told | {"optimizer": of.options.optimizer, "update": 1e-6, "rows": each})
        section = {"ranks": ranks, "nodes": self.nodes, "collectives": collectives, "programs": {}, "models": models}
        measured = {"section": section, "cores": 2, "adding": 1e9, "flops": 1e9, "memory": 1e9, "late": 1e-5 * ranks}
        measured |= {"progress": 0.5 if ranks > 1 else None, "near": self.near if ranks > 1 else None}
        measured |= {"far": [5e-5, 1e8] if self.nodes > 1 else None}
        answer = {"measured": measured, "runs": [[4e-3, 5e-3, 9e-3] for _ in job["lines"]]}
        return subprocess.CompletedProcess([], 0, f"{ANSWER}{{}}\n[0] {ANSWER}{json.dumps(answer)}[0]\nend\n", "")


LINES = [("train-allreduce --allreduce tree --batch-size 64", 2), ("train-gossip --batch-size 64", 2),
         ("train-sequential", 1)]  # fmt: skip


def test_each_program_is_foretold_to_take_what_its_small_training_took():
    ranks, said = Ranks(), []
    machine = survey(LINES, read, ranks, 0, said.append)
    assert len(said) == 2 and sorted(ranks.jobs) == [1, 2]
    for text, many in (("train-allreduce", 2), ("train-gossip", 2), ("train-sequential", 1)):
        small = read(small_line(read(text, many), text), many)
        assert forecast_step(small, machine).parts.seconds == pytest.approx(5e-3, rel=1e-6)
    assert set(machine.section(2).programs) == {"train-allreduce", "train-gossip"}
    assert machine.start == sorted(start for each in machine.measured for start in each.programs.values())[1]
    assert (machine.cores, machine.late, machine.progress) == (2, 2e-5, 0.5)
    assert machine.links.ranks_per_node == ON_ONE_NODE and machine.sharing(4) == 2
    rows = dict(ranks.jobs[2]["models"])["train-allreduce --allreduce tree --batch-size 64"]
    assert rows == [1, 8, 32]


def test_only_what_is_asked_is_measured_unless_it_is_written():
    some, all_of_them = Ranks(), Ranks()
    survey(LINES, read, some, 0, lambda text: None, whole=False)
    assert set(some.jobs[2]["operations"]) == {"auto", "tree", "message", "exchange"}
    survey(LINES, read, all_of_them, 0, lambda text: None)
    assert all_of_them.jobs[2]["operations"] == all_operations()
    some, lines = Ranks(), [f"train-allreduce --compress {spec}" for spec in ("topk:0.1", "powersgd", "dgc:0.2")]
    survey([(line, 2) for line in lines], read, some, 0, lambda text: None, whole=False)
    assert {"powersgd", "topk:0.1", "topk:0.2"} < set(some.jobs[2]["operations"])
    own, name = Ranks(), "hpcdl.comm.allreduce.ring:ring_all_reduce"
    survey([(f"train-allreduce --allreduce {name}", 2)], read, own, 0, lambda text: None)
    assert own.jobs[2]["operations"] == [*all_operations(), name]


def test_links_are_those_that_were_measured():
    near, far = Ranks(), Ranks(nodes=2)
    one = survey([("train-sequential", 1)], read, near, 0, lambda text: None)
    assert sorted(near.jobs) == [1, 2] and near.jobs[2]["lines"] == []  # of one rank alone there are no links
    assert one.links.latency == one.links.node_latency == 1e-6
    both = survey(LINES[:2], read, far, 0, lambda text: None)
    assert (both.links.latency, both.links.bandwidth, both.links.ranks_per_node) == (5e-5, 1e8, 1)
    assert both.links.node_latency == 1e-6
    quick = survey(LINES[:1], read, Ranks(bandwidth=1e15), 0, lambda text: None)
    assert quick.links.bandwidth == pytest.approx(2 * (1 << 21) / 1e-3)


def test_what_cannot_be_measured_is_a_line():
    with pytest.raises(UsageError, match=r"100 ranks are too many .* 2 cores: give .* --machine"):
        survey([("train-allreduce", 100)], read, Ranks(), 2)

    idle = Ranks()
    with pytest.raises(UsageError, match="no forecast of the time on a GPU"):
        survey([("train-allreduce --device cuda", 2)], read, idle, 2)
    assert idle.jobs == {}  # before anything is measured


def test_errors_of_a_matrix():
    told = forecast_error.make_forecasts([(2, LINES[0][0]), (2, LINES[1][0])], Machine.of(SHEET), read)
    seconds = [each.parts.seconds for each in told]
    found = [forecast_error.CheckedForecast(told[0], [2 * seconds[0], seconds[0] / 1.1, seconds[0] / 1.2])]
    found.append(forecast_error.CheckedForecast(told[1], [], "it is not finite"))
    assert found[0].error == pytest.approx(0.1)
    said = forecast_error.report(found)
    assert said[1].endswith("+10 %") and "it is not finite" in said[2]
    assert said[-1] == "1 line: median error 10 %, 9 of 10 within 10 %"
    steps = [forecast_error.steps_for(told[0], seconds) for seconds in (1e9, 1e-9)]
    assert steps == [forecast_error.MOST, forecast_error.FEWEST]


SHEET = {"cores": 2, "latency": 1e-5, "bandwidth": 1e9, "flops": 1e10, "memory": 1e10, "start": 1e-4}


def test_the_matrix_holds_forty_lines_of_all_kinds():
    assert len(forecast_error.MATRIX) == 40 and {ranks for ranks, _ in forecast_error.MATRIX} == {1, 2, 3, 4}
    machine = Machine.of(SHEET | {"ranks_per_node": 4})
    told = forecast_error.make_forecasts(forecast_error.MATRIX, machine, read)
    assert all(each.parts.seconds > 0 for each in told)
    asleep = [bool(each.case.options.pretend_compute) for each in told]
    assert asleep == [ranks > 2 for ranks, _ in forecast_error.MATRIX]


def test_lines_are_placed(tmp_path):
    assert forecast_error.parse_placement("-n 3: train-gossip --x") == (3, "train-gossip --x")
    assert forecast_error.parse_placement("train-gossip", 2) == (2, "train-gossip")
    for text in ("train-gossip", "-n 0: train-gossip"):
        with pytest.raises(UsageError):
            forecast_error.parse_placement(text)
    path = tmp_path / "m.yaml"
    for text in ("a: b", "[]", "- 1", "[", "- train-gossip"):
        path.write_text(text)
        with pytest.raises(UsageError):
            forecast_error.read_matrix(str(path))
    path.write_text('- "-n 2: train-gossip"\n')
    assert forecast_error.read_matrix(str(path)) == [(2, "train-gossip")]
