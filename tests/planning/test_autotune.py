"""What is fastest on machines that are made so; and that its command is one that can be run."""

import dataclasses

import pytest

from hpcdl.comm.compression import methods
from hpcdl.errors import UsageError
from hpcdl.launch.command_lines import read_command
from hpcdl.launch.option_parser import parse
from hpcdl.planning.autotune import NOMINAL, candidates, fastest_schedule, grid_lines, report
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.memory import forecast as memory
from hpcdl.planning.step_time import forecast_step
from hpcdl.planning.time_report import trust
from hpcdl.scripts.plan import case_of as read
from hpcdl.strategies.pipeline_schedules import INTERLEAVED, SCHEDULES

SHEET = {"cores": 1, "latency": 1e-6, "bandwidth": 1e10, "flops": 1e9, "memory": 1e9, "start": 1e-5}
MODEL = "--model mlp:64,64,64 --data digits --batch-size 64 --optimizer momentum"


def found(room=1 << 40, ranks=4, **more):
    return candidates(MODEL, ranks, room, Machine.of(SHEET | more), read)


def program(candidate):
    return candidate.forecast.line.replace(f" {MODEL}", "")


@pytest.mark.long
def test_they_are_in_order_and_all_fit():
    first, refused = found()
    rates = [each.forecast.parts.rate for each in first]
    assert rates == sorted(rates, reverse=True) and len(first) >= 11
    assert [text.partition(" --model")[0] for text in refused] == ["train-allreduce --compress onebit-adam"]
    assert {"train-allreduce", "train-fully-sharded --stage 3"} < set(map(program, first))
    room = sorted(each.bytes for each in first)[len(first) // 2]
    fewer, left_out = found(room)
    assert fewer and all(each.bytes <= room for each in fewer)
    whole = [{program(each) for each in of if "grid" not in program(each)} for of in (fewer, first)]
    assert whole[0] == whole[1] & {program(each) for each in first if each.bytes <= room}
    assert any("on a rank" in text for text in left_out)


@pytest.mark.long
def test_a_slow_network_prefers_few_bytes():
    slow, _ = found(bandwidth=1e5)
    fast, _ = found(bandwidth=1e12, latency=0)
    at = [[program(each) for each in of].index("train-local-sgd --sync-every 8") for of in (slow, fast)]
    assert at[0] < at[1] and not slow[0].same_steps
    same = [program(each) for each in slow if each.same_steps]
    stage = [program(each) for each in slow].index
    assert stage("train-fully-sharded --stage 3") > stage("train-allreduce")
    assert same[0].startswith("train-grid") and "pipeline" in same[0]  # activations are less than gradients
    assert {f"train-allreduce --compress {name}" for name in methods() if name != "onebit-adam"} < {
        program(each) for each in slow
    }
    order = [stage(f"train-allreduce --compress {name}") for name in ("sign", "qsgd", "int8", "float16")]
    assert order == sorted(order) and order[-1] < stage("train-allreduce")
    one = [program(each) for each in found(bandwidth=1e6)[0]].index
    assert one("train-allreduce") < one("train-parameter-server")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_its_command_can_be_run(ranks):
    first, refused = found(ranks=ranks)
    said = report(first, refused, ranks, MODEL)
    start = f"the fastest line: mpiexec -n {ranks} hpcdl "
    assert said[-1].startswith(start) and said[0] == f"{ranks} ranks, {MODEL}"
    for each in first:
        assert read(each.forecast.line, ranks).plan[0] == 64
    program, *words = said[-1].removeprefix(start).split()
    training = read_command(1, f"-n {ranks}: {program}", {}, ranks).training
    assert parse(training.strategy.options_class, program, "", words).model == "mlp:64,64,64"


def test_measurements_stand_beside():
    first, refused = found()
    seconds = [each.forecast.parts.seconds * times for each, times in zip(first, (8, 4, 2), strict=False)]
    lines = report(first, refused, 4, MODEL, seconds, "busy")
    assert [line.split("%")[0].split()[-1] for line in lines[2:5]] == ["-50", "-75", "-88"] and "%" not in lines[5]
    assert lines[-2:] == ["busy", f"the fastest line: mpiexec -n 4 hpcdl {first[2].forecast.line}"]
    assert lines[1].split()[:3] == ["line", "measured", "error"]


def test_how_much_to_trust_a_forecast():
    assert "40 such forecasts were off by 6 %" in trust(0.2, 2) and "busy" not in trust(0.2, 2)
    assert trust(1.5, 2).startswith("this machine is busy: other processes use 1.5 of 2 cores; ")


def test_nothing_fits():
    none, refused = found(room=1000)
    assert none == [] and report(none, refused, 4, MODEL)[0].startswith("nothing fits: train-allreduce")
    assert grid_lines(MODEL, 1, 1e12, read) == grid_lines(MODEL, 4, 1000, read) == []


WIDE = "--model mlp:64,64,64,64,64,64,64 --data digits --batch-size 1024 --microbatches 8 --pretend-compute 90"


def test_the_schedule_that_is_fastest_of_those_that_fit():
    planned = {}
    for name in SCHEDULES:
        if name != "pipedream":
            line = f"train-pipeline {WIDE} --schedule {name}{' --chunks 2' * (name in INTERLEAVED)}"
            case = read(line, 4)
            held = max(rank.total for rank in memory(case))
            planned[name] = forecast_step(case, NOMINAL).parts.seconds, held
    auto = read(f"train-pipeline {WIDE}", 4)

    def choose(fit):
        options = dataclasses.replace(auto.options, schedule="auto", fit=fit)
        return fastest_schedule(auto.strategy, options, 4)["schedule"]

    first = min(planned, key=planned.get)
    assert choose("") == first and first in ("zb-h2", "zb-v")
    room = planned[first][1] - 1
    second = min((name for name, (_, held) in planned.items() if held <= room), key=planned.get)
    assert choose(str(int(room))) == second != first
    with pytest.raises(UsageError, match=r"--fit 1KiB: no schedule needs less than .* take more stages"):
        choose("1KiB")


def test_grids_with_other_schedules_are_lines_too():
    lines = grid_lines(MODEL, 4, 1 << 40, read)
    assert any(line.endswith("--schedule zb-h1") for line in lines)
    assert not any("pipeline=1," in line for line in lines if "--schedule" in line)
