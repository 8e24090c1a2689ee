"""Zero-bubble schedules, action by action, against those of torch.distributed.pipelining."""

import pytest

from hpcdl.parallel.timetable import split_backwards
from hpcdl.strategies.pipeline_schedules import actions_of, placement

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_actions(kind, p, stage, m, **attributes):
    """(virtual stage, type, micro-batch) of each action of `stage`, of a schedule that no process group has made."""
    schedule = object.__new__(kind)
    for name, value in {"pp_group_size": p, "_n_microbatches": m, "_num_stages": 2 * p, "num_stages": 2 * p}.items():
        setattr(schedule, name, value)
    for name, value in attributes.items():
        setattr(schedule, name, value)
    found = [action for action in schedule._calculate_single_rank_operations(stage) if action is not None]
    flat = [each for action in found for each in (action.sub_actions or (action,))]
    return [(each.stage_index, each.computation_type, each.microbatch_index) for each in flat]


def own_actions(name, p, stage, m, v=1):
    found, where = list(actions_of(name, p, stage, m, v)), placement(name, p, v)
    split = split_backwards(found)

    def kind(action):
        if action.kind == "B" and action[1:] not in split:
            return theirs.FULL_BACKWARD
        return {"F": theirs.FORWARD, "B": theirs.BACKWARD_INPUT, "W": theirs.BACKWARD_WEIGHT}[action.kind]

    return [(where.virtual(stage, each.chunk), kind(each), each.microbatch) for each in found]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_orders_are_those_of_torch(p):
    for stage in range(p):
        for m in (1, p, 2 * p - 1, 2 * p, 3 * p + 1, 32):
            wanted = torch_actions(theirs.ScheduleZBVZeroBubble, p, stage, m)
            assert own_actions("zb-v", p, stage, m) == wanted, ("zb-v", stage, m)
            if m >= 2 * p:
                wanted = torch_actions(theirs.ScheduleDualPipeV, p, stage, m)
                assert own_actions("dualpipe-v", p, stage, m) == wanted, ("dualpipe-v", stage, m)
        for m in (p, 2 * p, 4 * p):
            for v in (1, 2, 3):
                how = {"n_local_stages": v, "microbatches_per_round": p, "rank": stage}
                wanted = torch_actions(theirs.ScheduleInterleavedZeroBubble, p, stage, m, **how)
                name = "zb-h1" if v == 1 else "zb-interleaved"  # torch's, with one chunk, is ZB-H1
                assert own_actions(name, p, stage, m, v) == wanted, (name, stage, m, v)
