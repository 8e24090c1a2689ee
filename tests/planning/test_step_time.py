"""Forecasts of a step's time, exactly by theory on a machine of round numbers."""

import importlib
import math
import pkgutil

import pytest

import hpcdl.strategies
from hpcdl.errors import UsageError
from hpcdl.planning import memory
from hpcdl.planning.compute_time import StepParts, slowest
from hpcdl.planning.cut_time import messages
from hpcdl.planning.dry_run import cut_of
from hpcdl.planning.machine_sheet import Machine
from hpcdl.planning.message_time import RankGroup
from hpcdl.planning.step_time import calibrate_start, exposed_seconds, forecast_step, program_name
from hpcdl.planning.surveying import rows_of, small_line
from hpcdl.runs.options import Options
from hpcdl.scripts.plan import case_of as read
from hpcdl.strategies.description import Strategy

L, B, A = 1e-5, 1e8, 1e9  # seconds, bytes a second, bytes added a second
SHEET = {"cores": 1, "latency": L, "bandwidth": B, "adding": A, "flops": 1e10, "memory": 1e10, "start": 0}
MODEL = "--model mlp:32,32,32"
K = (64 * 32 + 32 + 2 * (32 * 32 + 32) + 32 * 10 + 10) * 4  # bytes
UPDATE, DRAW = 3e-4, 2e-6
ROWS = {n: {"draw": DRAW * n, "gradient": 1e-4 * n, "layers": [[5e-6 * n, 15e-6 * n]] * 5} for n in (1, 64)}
MEASURED = {"model": "mlp:32,32,32", "data": "digits", "dtype": "float32", "optimizer": "momentum"}
MEASURED |= {"parameters": K // 4, "update": UPDATE, "rows": ROWS}
RULES = "muon", "adamw"
SECTION = {"ranks": 1, "nodes": 1, "models": [MEASURED]}


def machine(**more):
    return Machine.of(SHEET | {"measured": [SECTION]} | more)


def case(line, ranks):
    return read(f"{line} {MODEL} --lr 0.1", ranks)


def parts(line, ranks, **more):
    return forecast_step(case(line, ranks), machine(**more)).parts


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_after_the_gradient(ranks):
    found = parts("train-allreduce --allreduce ring --batch-size 48", ranks)
    assert found.messages == pytest.approx(2 * (ranks - 1) * (L + K / ranks / B) + (ranks - 1) * K / ranks / A)
    assert found.compute == pytest.approx(1e-4 * 48 / ranks + UPDATE)
    assert found.start == pytest.approx(DRAW * 48 / ranks)
    assert found.hidden == found.bubble == found.queue == 0
    assert found.seconds == pytest.approx(found.compute + found.messages + found.start)
    assert found.rate == pytest.approx(48 / found.seconds)


def test_each_algorithm_and_16_bits():
    def told(more):
        return parts(f"train-allreduce {more}", 4).messages

    assert told("--allreduce tree") == pytest.approx(2 * (2 * (L + K / B) + K / A))
    assert told("--allreduce direct") == pytest.approx(L + 3 * (K / B + K / A))
    assert told("--allreduce recursive") == pytest.approx(2 * (2 * L + 0.75 * K / B) + 0.75 * K / A - 0.75 * 0 * L)
    assert told("--compress bfloat16") == pytest.approx(2 * (L + 0.375 * K / B) + 3 * K / A)
    each = [told(f"--allreduce {name}") for name in ("ring", "tree", "recursive", "hierarchical")]
    assert told("--allreduce auto") == told("--allreduce mpi") == min(each)


def test_compressed_messages_are_those_of_the_method_and_take_its_computing():
    def told(spec, **more):
        return parts(f"train-allreduce --compress {spec}", 4, **more).messages

    n, coded = K // 4, 3 * K / A
    selected = round(0.01 * n)
    assert told("topk:0.01") == pytest.approx(4 * L + 3 * (8 * selected / 4 + 8 * selected + 16) / B + coded)
    assert told("topk:0.9") == pytest.approx(4 * L + 3 * (8 * round(0.9 * n) / 4 + n / 4 * 4 + 16) / B + coded)
    assert told("randomk:0.01") == pytest.approx(4 * L + 1.5 * 4 * selected / B + coded)
    assert told("terngrad") == pytest.approx(3 * L + 3 * (4 + n / 4 / 8 * (2 + 4)) / B + coded)
    epochs = [told(f"topk:{fraction}") for fraction in (0.25, 0.0625, 0.02)]
    assert told("dgc:0.02 --epochs 2") == pytest.approx(sum(epochs[:2]) / 2)
    assert told("dgc:0.02,warmup=2 --epochs 10") == pytest.approx(sum(epochs[:2]) / 10 + 0.8 * epochs[2])
    plain = parts("train-allreduce", 4).messages
    assert told("onebit-adam:0.3 --optimizer adam") == pytest.approx(0.3 * plain + 0.7 * told("sign"))
    near = {"ranks": 4, "nodes": 1, "collectives": {"topk": {1: 0.5, K: 0.5}, "powersgd": {1: 0.25, K: 0.25}}}
    assert told("topk:0.2", measured=[SECTION, near]) - told("topk:0.2") == pytest.approx(0.5 - coded)
    factors = told("powersgd:rank=1 --allreduce ring", measured=[SECTION, near]) - 0.25
    assert factors == pytest.approx(told("powersgd:rank=1 --allreduce ring") - coded)
    for spec in ("powersgd:rank=1", "dgc:0.02", "sign"):  # several calls of a bucket
        buckets = parts(f"train-allreduce --overlap --bucket-mib 0.001 --compress {spec}", 4)
        assert buckets.hidden > 0 and buckets.messages + buckets.hidden >= told(spec)  # more latencies
    assert 0 < factors < 0.5 * parts("train-allreduce --allreduce ring", 4).messages


def test_local_sgd_by_factors_sends_what_all_reduce_does_every_so_often():
    more = "--allreduce ring --compress powersgd:rank=1"
    each = parts(f"train-allreduce {more}", 4).messages
    assert parts(f"train-local-sgd --sync-every 2 {more}", 4).messages == pytest.approx(each / 2)


def test_what_was_measured_on_as_many_ranks_stands_above_theory():
    curve = {"ranks": 4, "nodes": 4, "collectives": {"ring": {1000: 1e-3, 2 * K: 1e-3 + 2 * K - 1000}}}
    found = parts("train-allreduce --allreduce ring", 4, measured=[SECTION, curve])
    assert found.messages == pytest.approx(1e-3 + K - 1000)
    assert parts("train-allreduce --allreduce ring", 3, measured=[SECTION, curve]).messages < 1
    two = {"ranks": 2, "nodes": 2, "collectives": {"auto": {1: 1e-3}, "elsewhere": {1: 2e-3, 10**9: 2e-3}}}
    lines = [f"train-tensor-parallel --allreduce {name}" for name in ("auto", "ring")]
    auto, ring = (parts(line, 2, measured=[SECTION, two]).messages for line in lines)
    assert auto == pytest.approx(3 * 2e-3) and ring < auto  # activations lie in no window


def test_buckets_pass_beside_the_backward_pass():
    assert exposed_seconds([1, 2, 3], [0.5, 0.5, 0.5], 3) == 0.5  # all but the last are hidden
    assert exposed_seconds([1, 2, 3], [2, 2, 2], 3) == 4  # the wire is busy from the first on
    assert exposed_seconds([3], [2], 3) == 2
    line = "train-allreduce --allreduce ring --overlap --bucket-mib 0.001"
    whole, none, half = (parts(line, 2, progress=share) for share in (1, 0, 0.5))
    assert none.hidden == 0 and 0 < half.hidden == pytest.approx(whole.hidden / 2)
    assert whole.messages + whole.hidden == pytest.approx(none.messages)
    last = (64 * 32 + 32) * 4  # the first layer's bucket is complete when nothing is left to compute
    assert whole.messages == pytest.approx(2 * (L + last / 2 / B) + last / 2 / A)
    one = parts(line.replace("0.001", "1"), 2)
    assert one.hidden == pytest.approx(0, abs=1e-12)
    assert one.messages == pytest.approx(parts("train-allreduce --allreduce ring", 2).messages)


def test_local_steps_share_an_average():
    once = parts("train-allreduce --allreduce ring", 4).messages
    assert parts("train-local-sgd --sync-every 8 --allreduce ring", 4).messages == pytest.approx(once / 8)
    more = parts("train-local-sgd --sync-every 8 --allreduce ring --local-momentum average", 4).messages
    assert more == pytest.approx(2 * once / 8)


def test_gossip_by_the_graph():
    ring = parts("train-gossip --topology ring", 4)
    assert ring.messages == pytest.approx(L + 2 * (K / B + K / A))
    assert parts("train-gossip --topology complete", 4).messages == pytest.approx(L + 3 * (K / B + K / A))
    beside = parts("train-gossip --topology ring --method dpsgd", 4)
    assert beside.messages + beside.hidden == pytest.approx(ring.messages)
    assert beside.hidden == pytest.approx(min(ring.messages, 1e-4 * 8))
    assert parts("train-gossip --method gradient-tracking", 4, progress=0).messages > 1.9 * ring.messages


def test_servers_in_rounds_serve_one_after_another():
    line, wire = "train-parameter-server --servers 2 --batch-size 64", K / 2 / B
    found = parts(line, 6, start=1e-3)
    service = wire + K / 2 / A + 1e-3
    assert found.compute == pytest.approx(1e-4 * 16)
    assert found.messages == pytest.approx(2 * L + max(service, 2 * wire) + 2 * wire + UPDATE / 2)
    assert found.queue == pytest.approx(3 * (service + wire))
    assert parts(line, 3, start=1e-3).queue == 0  # one worker waits for nobody


def test_asynchronous_servers_take_what_their_ports_take():
    line, wire = "train-parameter-server --consistency async --batch-size 1", K / B
    found = parts(line, 9)
    service = ((wire + K / A + UPDATE) + wire) / 2  # of each port: the queue has one for each way
    assert found.seconds == pytest.approx(service, rel=0.02) and found.examples == 1
    slow = forecast_step(case("train-parameter-server --consistency async --pretend-compute 1000", 3), machine()).parts
    alone = 2 * L + wire + K / A + UPDATE + wire
    assert slow.seconds == pytest.approx((1 + alone + DRAW * 32) / 2, rel=1e-3) and slow.queue < 1e-3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "many"), [(2, 4), (4, 4), (3, 8)])
def test_the_bubble_of_a_pipeline(schedule, stages, many):
    line = f"train-pipeline --schedule {schedule} --microbatches {many} --pretend-compute 90"
    found = parts(line, stages, latency=0, bandwidth=1e30)
    whole = found.compute + found.bubble - UPDATE / stages
    assert whole == pytest.approx(0.09 * (many + stages - 1))
    assert found.bubble / whole == pytest.approx((stages - 1) / (many + stages - 1))
    assert found.messages == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("schedule, late", [("zb-h1", 1 / 3), ("zb-h2", 0), ("zb-v", 0), ("dualpipe-v", 1 / 6)])
def test_the_bubble_of_a_zero_bubble_pipeline(schedule, late):
    """F, B and W take 30 ms each; the idle time is p - 1 times `late` of a micro-batch's 90 ms."""
    line = f"train-pipeline --schedule {schedule} --microbatches 8 --pretend-compute 90"
    found = parts(line, 2, latency=0, bandwidth=1e30)
    assert found.bubble == pytest.approx(0.09 * late, abs=1e-9)
    waits = parts(f"{line} --clip-norm 1", 2, latency=0, bandwidth=1e30)  # also for stages that end later
    later = {"zb-h2": 1 / 3, "zb-v": 1 / 6}.get(schedule, late)
    assert waits.bubble == pytest.approx(0.09 * later)


def test_other_schedules():
    def whole(more, stages=4):
        return parts(f"train-pipeline --pretend-compute 90 {more}", stages, latency=0, bandwidth=1e30).seconds

    rest = UPDATE / 4 + DRAW * 32
    assert whole("--schedule naive --microbatches 3") == pytest.approx(0.09 * 4 * 3 + rest)
    assert whole("--schedule pipedream") == pytest.approx(0.09 + rest)
    two = whole("--schedule interleaved --chunks 2 --microbatches 4", 2)
    assert two == pytest.approx(0.09 * (4 + 1 / 2) + UPDATE / 2 + DRAW * 32)  # (p - 1) / v beyond m
    again = whole("--schedule gpipe --microbatches 4 --recompute")
    assert again == pytest.approx(0.12 * 7 + rest)  # a third more
    once, twice = (parts(f"train-pipeline --microbatches 1 {more}", 1).compute for more in ("", "--recompute"))
    assert twice - once == pytest.approx(5 * 5e-6 * 32)  # the forward of five layers


def test_a_message_between_stages():
    free = parts("train-pipeline --schedule gpipe --microbatches 4 --pretend-compute 90", 2, latency=0, bandwidth=1e30)
    found = parts("train-pipeline --schedule gpipe --microbatches 4 --pretend-compute 90", 2)
    hop = L + 8 * 32 * 4 / B  # 8 rows of 32 values, there and back once beyond what others hide
    assert found.messages == pytest.approx(2 * hop) and found.bubble == pytest.approx(free.bubble)


def test_the_stages_of_zero_send_what_they_should():
    def sent(stage):
        of = case(f"train-fully-sharded --stage {stage} --batch-size 8", 4)
        return messages(of, 0, cut_of(of))["data"]

    def bytes_of(stage, name):
        return sum(bytes for operation, bytes in sent(stage) if operation == name)

    for stage in (1, 2):
        assert bytes_of(stage, "reduce_scatter") == K and bytes_of(stage, "all_gather") == K
    assert bytes_of(3, "reduce_scatter") == K
    assert 1.5 * K < bytes_of(3, "all_gather") <= 2 * K  # the last layer is there when backward begins with it
    found = parts("train-fully-sharded --stage 1 --batch-size 8", 4)
    assert found.messages == pytest.approx(2 * (2 * L + 3 * K / 4 / B) + 3 * K / 4 / A)  # all are under way at once
    group, by_layer = RankGroup(machine(), 4), parts("train-fully-sharded --stage 3 --batch-size 8", 4)
    assert by_layer.messages == pytest.approx(sum(getattr(group, name)(n) for name, n in sent(3)))
    assert found.compute == pytest.approx(1e-4 * 2 + UPDATE / 4)


def test_tensor_parallelism_counts_its_all_reduces():
    of = "train-tensor-parallel --model gpt:layers=3,width=16,heads=2 --data text --batch-size 4"
    told = read(of, 2)
    said = messages(told, 0, cut_of(told))["tensor"]
    block = 4 * 64 * 16 * 4  # rows, tokens, width, bytes
    assert sum(bytes == block for _, bytes in said) == 4 * 3 + 2
    found = parts("train-tensor-parallel --batch-size 64", 2)
    assert found.compute == pytest.approx(1e-4 * 32 + UPDATE / 2) and found.examples == 64


def test_ranks_that_outnumber_cores_share_them():
    own, shared = (parts("train-allreduce", 4, ranks_per_node=n) for n in (1, 4))
    assert shared.compute == pytest.approx(4 * own.compute) and shared.start == pytest.approx(4 * own.start)
    asleep = parts("train-allreduce --pretend-compute 50", 4, ranks_per_node=4, late=1e-3)
    assert asleep.compute == pytest.approx(0.05 + 1e-3 + 4 * UPDATE)
    stages = [parts("train-pipeline --microbatches 4", 4, ranks_per_node=4, cores=n, latency=0) for n in (1, 4)]
    assert stages[0].seconds > stages[1].seconds  # four stages on a core take turns
    assert stages[0].compute + stages[0].bubble > 1e-4 * 32


def test_accumulated_and_straggling():
    once, twice = (parts(f"train-allreduce --accumulate {n} --pretend-compute 20", 2) for n in (1, 2))
    assert twice.compute - once.compute == pytest.approx(0.02)
    assert parts("train-allreduce --straggler 1:3", 2).compute == pytest.approx(3 * 16e-4 + UPDATE)
    assert slowest("random:0.5:3", range(2)) == pytest.approx(1 + 0.75 * 2)
    assert slowest("", range(2)) == 1 and slowest("1:4", range(3)) == 4


def test_theory_where_nothing_was_measured():
    found = forecast_step(case("train-allreduce --batch-size 64", 2), Machine.of(SHEET))
    assert not found.exact and found.parts.compute > 0
    work = 2 * 32 * (64 * 32 + 32 * 32 * 2 + 32 * 10) * 3 / 1e10  # three products of each layer
    assert found.parts.compute == pytest.approx(work, rel=0.5)
    assert forecast_step(case("train-sequential", 1), machine()).exact
    assert StepParts(0, 0, 0, 0, 0, 0, 1).rate == math.inf


STRATEGIES = [
    getattr(importlib.import_module(each.name), "STRATEGY", None)
    for each in pkgutil.iter_modules(hpcdl.strategies.__path__, "hpcdl.strategies.")
]
MODES = [(each, mode) for each in STRATEGIES if each is not None for mode in ("", *each.modes)]


@pytest.mark.parametrize(
    ("strategy", "mode"), MODES, ids=lambda value: (value or "-") if isinstance(value, str) else value.program
)
def test_each_strategy_has_forecasts_and_what_it_costs_beyond_is_found_from_a_run(strategy, mode, rows_file):
    ranks = strategy.ranks or 2
    small = strategy.small.format(ranks=ranks, widths="8,8,8,8", data=rows_file(classes=0), model="linear")
    line = small_line(read(f"{strategy.program} {small}", ranks), f"{strategy.program} {mode}".rstrip())
    of = read(line, ranks)
    assert program_name(of) == f"{strategy.program} {mode or strategy.mode(of.options)}".rstrip()
    assert 1 in rows_of(of) and all(rank.bytes["parameters"] > 0 for rank in memory.forecast(of))
    sheet = Machine.of(SHEET)
    told, least = forecast_step(of, sheet, 1e-3).parts.seconds, forecast_step(of, sheet, 0.0).parts
    assert told > least.seconds > least.messages >= 0 < least.compute
    assert calibrate_start(of, sheet, told) == pytest.approx(1e-3, rel=1e-3)
    assert calibrate_start(of, sheet, 0.0) == 0.0


def test_names_of_those_that_pretend_to_compute():
    for text in ("train-gossip", "train-pipeline"):
        of = case(f"{text} --pretend-compute 4", 2)
        assert program_name(of) == f"{text} asleep" and small_line(of, program_name(of)).endswith(" 4")


def test_a_strategy_without_a_forecast_is_refused():
    with pytest.raises(TypeError, match="train-new has no forecast"):
        Strategy("train-new", Options, print)
    with pytest.raises(TypeError, match="give held and step, or cut"):
        Strategy("train-new", Options, print, held=print)


def test_layers_that_were_not_measured_are_refused():
    with pytest.raises(UsageError, match="not measured one by one"):
        bare = {n: {"draw": 0, "gradient": 1e-3} for n in (1, 64)}
        parts("train-pipeline", 2, measured=[SECTION | {"models": [MEASURED | {"rows": bare}]}])


def test_long_broadcasts_between_nodes_go_along_a_chain():
    """In s = sqrt((N - 2) K / 25 kB) = 72 segments and N - 2 + s steps; within a node in the 6 steps of a tree."""
    bytes = 72**2 * 25_000 / 32
    apart, near = (RankGroup(Machine.of(SHEET | {"ranks_per_node": many}), 34) for many in (1, 64))
    assert apart.broadcast(bytes) == pytest.approx(104 * (L + bytes / 72 / B))
    assert apart.reduce(bytes) == pytest.approx(104 * (L + bytes / 72 * (1 / B + 1 / A)))
    assert near.broadcast(bytes) == pytest.approx(6 * (L + bytes / B))


def test_matrices_of_muon_are_multiplied_on_their_owners_and_travel_there_and_back():
    """Beside adamw's step: the messages of the tests of train-grid, and the owner's share of the products' flops."""
    grid = "train-grid --grid data=2,tensor=2 --optimizer"
    muon = read(f"{grid} muon {MODEL}", 4)
    sent = [messages(muon, rank, cut_of(muon))["matrices"] for rank in range(4)]
    n, hidden = 64 * 32 + 2 * 32 * 32, muon.model.layout.hidden
    assert n == sum(math.prod(each.shape) for each in hidden)
    assert sum(size for each in sent for _, size in each) == 4 * n * (2 + 1 - 2 / 2)
    both = [forecast_step(read(f"train-sequential --optimizer {name} {MODEL}", 1), machine()) for name in RULES]
    alone, adamw = (each.parts for each in both)
    flops = 5 * 2 * (2 * 32 * 32 * 64 + 32**3 + 2 * 3 * 32**3)
    assert alone.compute - adamw.compute == pytest.approx(flops / SHEET["flops"])
