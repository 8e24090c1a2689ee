"""Pipeline schedules: the order in which a stage does the forwards and backwards of its micro-batches.

A model is cut into p stages of consecutive layers, a batch into m micro-batches. The forward F of a micro-batch at one
stage needs that of the stage before, its backward B that of the stage after. Here B takes twice as long as F:

    gpipe
    0 |F0---F1---F2---F3---..............................B3========B2========B1========B0========
    1 |.....F0---F1---F2---F3---...............B3========B2========B1========B0========..........
    2 |..........F0---F1---F2---F3---B3========B2========B1========B0========....................

    1f1b
    0 |F0---F1---F2---....................B0========F3---B1========.....B2========.....B3========
    1 |.....F0---F1---..........B0========F2---B1========F3---B2========.....B3========..........
    2 |..........F0---B0========F1---B1========F2---B2========F3---B3========....................

    interleaved, 2 chunks per stage: A and a are F0 and B0, A1 and a1 the same through chunk 1
    0 |A-B-C-A1B1C1D-E-....a1==F-b1==D1c1==E1a===F1b===..c===..d1==..e1==..f1==d===e===f===
    1 |..A-B-C-A1B1C1..a1==D-b1==E-c1==F-a===D1b===E1c===F1d1==..e1==..f1==d===e===f===....
    2 |....A-B-C-A1a1==B1b1==C1c1==D-a===E-b===F-c===D1d1==E1e1==F1f1==d===e===f===........

idle: the idle share of all stages' time, if all stages are equally fast and messages take no time; that time is p
times the longest one from a stage's first start to its last end. in flight: the largest number of micro-batches between
F and the end of their backward at a stage, which keeps their activations.

    schedule      stage s of p, for m micro-batches             idle              in flight at stage s
    naive         F0 B0 F1 B1 ...: one at a time                (p-1) / p         1
    gpipe         all F, then all B, the last first             (p-1) / (m+p-1)   m
    1f1b          p-1-s F ahead, then F and B in turn           (p-1) / (m+p-1)   min(m, p-s)
    interleaved   2(p-1-s) + (v-1)p F ahead, then in turn;      (p-1) / (vm+p-1)  min(vm, 2(p-1-s) + (v-1)p + 1)
                  v chunks of the model per stage                                 chunks, each 1/v of a stage
    pipedream     as 1f1b, with an update after each B:         (p-1) / (m+p-1)   min(m, p-s), and as many versions
                  m is the whole run, or endless                                  of the weights

Interleaved: chunk c of stage s is virtual stage c p + s of v p; m is a multiple of p. PipeDream: at stage s, F and B of
micro-batch k use weights that lack the updates of the min(k, p-1-s) micro-batches before it. zb-h1, zb-h2,
zb-interleaved, zb-v and dualpipe-v, which divide B, are in zero_bubble.py.

(Huang et al., "GPipe", NeurIPS 2019. Narayanan et al., "PipeDream", SOSP 2019. 1f1b (PipeDream-Flush) and interleaved:
Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021)"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice

from hpcdl.errors import UsageError, unknown
from hpcdl.parallel.timetable import Action, Placement, Span, split_backwards
from hpcdl.runs.options import refuse
from hpcdl.strategies.zero_bubble import dualpipe_v, rounds, zb_h1, zb_h2, zb_interleaved, zb_v

# -- the schedules: what one stage does, in order -------------------------------------------------------------------


def naive(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield F and B of one micro-batch after another: no two stages ever work at once."""
    for k in range(microbatches):
        yield Action("F", k)
        yield Action("B", k)


def gpipe(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards; the last micro-batch turns round first."""
    for k in range(microbatches):
        yield Action("F", k)
    for k in reversed(range(microbatches)):
        yield Action("B", k)


def one_f_one_b(stages: int, stage: int, microbatches: int) -> Iterator[Action]:
    """Yield as many forwards ahead as there are stages after this one, then one forward and one backward in turn."""
    yield from _in_turn(_actions("F", range(microbatches)), _actions("B", range(microbatches)), stages - 1 - stage)


def interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Yield 1F1B with `chunks` chunks per stage: p micro-batches through chunk 0, the same p through chunk 1, ..."""
    forwards, backwards = (rounds(kind, stages, microbatches, chunks) for kind in "FB")
    yield from _in_turn(forwards, backwards, 2 * (stages - 1 - stage) + (chunks - 1) * stages)


def pipedream(stages: int, stage: int, microbatches: int | None = None) -> Iterator[Action]:
    """Yield 1F1B over all micro-batches of a run (None: without end): the stages fill up once."""
    numbers = range(microbatches) if microbatches is not None else None
    yield from _in_turn(_actions("F", numbers), _actions("B", numbers), stages - 1 - stage)


def _actions(kind: str, numbers: range | None) -> Iterator[Action]:
    return (Action(kind, k) for k in (count() if numbers is None else numbers))


def _in_turn(forwards: Iterator[Action], backwards: Iterator[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards (warm-up), a forward and a backward in turn (steady), the backwards left (cool-down)."""
    yield from islice(forwards, ahead)
    for action in forwards:
        yield action
        yield next(backwards)
    yield from backwards


SCHEDULES: dict[str, Callable[..., Iterator[Action]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "pipedream": pipedream,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-interleaved": zb_interleaved,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
INTERLEAVED = ("interleaved", "zb-interleaved")  # with any number of chunks per stage, in turn
V_SHAPED = ("zb-v", "dualpipe-v")  # with 2 chunks per stage


def placement(name: str, stages: int, chunks: int = 1) -> Placement:
    """Return where a schedule has its chunks. chunks: per stage, for interleaved ones; others have 1 or, in a V, 2."""
    return Placement(stages, 2, True) if name in V_SHAPED else Placement(stages, chunks)


def actions_of(name: str, stages: int, stage: int, microbatches: int | None, chunks: int = 1) -> Iterator[Action]:
    """Return the actions of `stage` of `stages`, in order. Raises UsageError if the arguments do not fit together.
    microbatches: in a batch; for pipedream in the run, None: endless. chunks: per stage, for interleaved schedules."""
    if name == "auto":
        raise UsageError(f"--schedule auto is chosen when a training starts; here, name one: {', '.join(SCHEDULES)}")
    if name not in SCHEDULES:
        raise unknown("pipeline schedule", name, SCHEDULES)
    count, several, alone = microbatches or 0, name in INTERLEAVED, stages < 2
    lower = count // max(1, stages) * stages
    endless = f"the schedule {name} needs a number of micro-batches, those of a batch"
    uneven = f"{stages} interleaved stages need a multiple of {stages} micro-batches, not {count}; take "
    uneven += f"{lower} or {lower + stages}" if lower else f"{stages}"
    own = 2 if name in V_SHAPED else 1
    wrong = f"the schedule {name} has {own} chunk{'s' * (own > 1)} per stage, not {chunks}; take interleaved"
    few = (
        f"the schedule dualpipe-v on {stages} stages needs at least {2 * stages} micro-batches, not {count}; take zb-v"
    )
    refuse(
        (stages < 1, f"a pipeline has at least 1 stage, not {stages}"),
        (not 0 <= stage < stages, f"there is no stage {stage} in a pipeline of {stages} (0 to {stages - 1})"),
        (microbatches is None and name != "pipedream", endless),
        (microbatches is not None and count < 1, f"a pipeline needs at least 1 micro-batch, not {count}"),
        (chunks < 1, f"a stage holds at least 1 chunk of the model, not {chunks}"),
        (not several and chunks not in (1, own), wrong),
        (several and alone, f"the schedule {name} needs at least 2 stages; with 1 there is nothing to interleave"),
        (several and count % max(1, stages), uneven),
        (name == "dualpipe-v" and count < 2 * stages, few),
    )
    return SCHEDULES[name](stages, stage, microbatches, *([chunks] if several else []))


# -- when each action is done ----------------------------------------------------------------------------------------


def plan(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    message: float = 0,
    weights: float | None = None,
) -> list[list[Span]]:
    """Return each stage's spans if F and the whole backward of a micro-batch take `forward` and `backward`; of a chunk
    1/chunks of it. weights: the part of `backward` that a W takes, by default half. message: time of an output to the
    next stage; both stages may compute meanwhile. Fractions give exact times."""
    if microbatches is None:
        raise UsageError("a plan needs a number of micro-batches")
    orders = [list(actions_of(name, stages, stage, microbatches, chunks)) for stage in range(stages)]
    where = placement(name, stages, chunks)
    apart = backward / 2 if weights is None else weights
    times = {"F": forward, "B": backward - apart, "W": apart}
    return simulate(orders, {kind: time / where.chunks for kind, time in times.items()}, message, where)


def simulate(
    orders: list[list[Action]], durations: dict[str, float], message: float = 0, where: Placement | None = None
) -> list[list[Span]]:
    """Return each stage's spans if it does its actions (`orders`) strictly in order, each once what it needs is there.
    durations: by kind of action; a B without a W takes both times. message: as in `plan`. where: the chunks, by default
    in turn. RuntimeError, with the waiting actions, on a deadlock."""
    stages = len(orders)
    where = where or Placement(stages, 1 + max((action.chunk for order in orders for action in order), default=0))
    split = [split_backwards(order) for order in orders]
    done: dict[tuple[str, int, int], float] = {}
    plans: list[list[Span]] = [[] for _ in orders]
    clocks: list[float] = [0] * stages
    waiting = {stage: order[0] for stage, order in enumerate(orders) if order}
    while waiting:
        before = len(done)
        for stage in list(waiting):
            while stage in waiting:
                action = waiting[stage]
                needed = needs(action, stage, where)
                if not all(each in done for each in needed):
                    break
                arrivals = [done[each] + (message if where.place(each[2])[0] != stage else 0) for each in needed]
                start = max([clocks[stage], *arrivals])
                whole = action.kind == "B" and action[1:] not in split[stage]
                stop = clocks[stage] = start + durations[action.kind] + (durations.get("W", 0) if whole else 0)
                done[action.kind, action.microbatch, where.virtual(stage, action.chunk)] = stop
                plans[stage].append(Span(action, start, stop))
                if len(plans[stage]) == len(orders[stage]):
                    del waiting[stage]
                else:
                    waiting[stage] = orders[stage][len(plans[stage])]
        if len(done) == before:
            stuck = ", ".join(f"stage {stage} for what {action} needs" for stage, action in waiting.items())
            raise RuntimeError(f"deadlock: the stages wait for each other: {stuck}")
    return plans


def needs(action: Action, stage: int, where: Placement) -> list[tuple[str, int, int]]:
    """Return what the action waits for: (kind, micro-batch, virtual stage)."""
    virtual = where.virtual(stage, action.chunk)
    if action.kind == "F":
        return [("F", action.microbatch, virtual - 1)] if virtual > 0 else []
    if action.kind == "W":
        return [("B", action.microbatch, virtual)]
    behind = [("B", action.microbatch, virtual + 1)] if virtual < where.last else []
    return [("F", action.microbatch, virtual), *behind]


# -- what a plan, or a measured run, shows ----------------------------------------------------------------------------


def idle_share(spans: list[list[Span]]) -> float:
    """Return the idle share of all stages' time, which is the longest one from a stage's first start to its last end.
    Stages of which the first to begin ends last, as those of 1F1B do, take the time from 0 to the end."""
    whole = len(spans) * longest(spans)
    busy = sum(stop - start for each in spans for _, start, stop in each)
    return (whole - busy) / whole if whole else 0.0


def longest(spans: list[list[Span]]) -> float:
    """Return the longest time from a stage's first start to its last end: a step, if no update waits for all stages."""
    return max((each[-1].stop - each[0].start for each in spans if each), default=0)


def most_in_flight(actions: Iterable[Action]) -> int:
    """Return the most micro-batches, each chunk counted, that a stage holds at once by its actions: from F to B or, if
    B leaves the gradients by the weights to a W, to W. (After such a B, a part of the activations is free.)"""
    actions = list(actions)
    split = split_backwards(actions)
    now = most = 0
    for kind, *which in actions:
        now += 1 if kind == "F" else -(kind == "W" or tuple(which) not in split)
        most = max(most, now)
    return most


def chart(spans: list[list[Span]], width: int = 120, unit: str = "") -> str:
    """Return spans as text of at most `width` columns: a line for each stage, time from 0 to the right.
    F0 is the forward of micro-batch 0, B0 its backward, W0 its gradients by the weights, F0.1 the forward through chunk
    1; with little room A, B, ... are forwards of micro-batches 0, 1, ..., a, b, ... their backwards, and ~ is any W.
    unit: of time, for the last line, the legend."""
    number = len(str(max(len(spans) - 1, 0)))
    scale = _scale(spans, width - number - 2)
    columns = max(1, round(_end(spans) * scale))
    cells = []  # (stage, action, first column, number of columns)
    for stage, each in enumerate(spans):
        for action, start, stop in each:
            left = min(round(start * scale), columns - 1)
            cells.append((stage, action, left, max(1, round(stop * scale) - left)))
    short = 10 * sum(len(str(action)) > length for _, action, _, length in cells) > len(cells)
    lines = [["."] * columns for _ in spans]
    for stage, action, left, length in cells:
        lines[stage][left : left + length] = _cell(action, length, short)
    picture = [f"{stage:{number}} |{''.join(line)}" for stage, line in enumerate(lines)]
    return "\n".join([*picture, _legend(spans, short, unit)])


def pictures(name: str, stages: int, microbatches: int, chunks: int, measured: list[list[Span]] | None) -> str:
    """Return charts of a schedule as planned, and of a step as it was; "" if measured is None.
    measured: the spans of each stage, in seconds from the first start."""
    if measured is None:
        return ""
    spans = [[Span(action, 1e3 * start, 1e3 * stop) for action, start, stop in each] for each in measured]
    number = max((action.microbatch for each in spans for action, *_ in each), default=0) + 1
    planned = chart(plan(name, stages, number if name == "pipedream" else microbatches, chunks))
    real = chart(spans, unit="ms")
    return f"{name}, as planned, a backward taking twice a forward:\n{planned}\n\nas the last step was:\n{real}"


def _scale(spans: list[list[Span]], room: int) -> float:
    """Return columns per unit of time: as many as fit `room`; if possible, such that actions fill whole columns."""
    end = _end(spans)
    if not end:
        return 0.0
    shortest = min((stop - start for each in spans for _, start, stop in each if stop > start), default=end)
    scale = int(room * shortest / end + 1e-9) / shortest
    edges = [float(edge * scale) for each in spans for _, *edges in each for edge in edges]
    return scale if scale and all(abs(edge - round(edge)) < 1e-6 for edge in edges) else room / end


def _cell(action: Action, length: int, short: bool) -> str:
    """Return an action's label (short: A, a, ...), or one letter if that does not fit, padded to `length` columns."""
    fill, label = {"F": "-", "B": "=", "W": "~"}[action.kind], str(action)
    if short and action.kind == "W":
        label = sign = fill
    elif short:
        sign = chr(ord("A" if action.kind == "F" else "a") + action.microbatch % 26)
        label = f"{sign}{action.chunk or ''}"
    else:
        sign = action.kind
    return (label if len(label) <= length else sign).ljust(length, fill)


def _legend(spans: list[list[Span]], short: bool, unit: str) -> str:
    chunked = any(action.chunk for each in spans for action, *_ in each)
    apart = any(action.kind == "W" for each in spans for action, *_ in each)
    if short:
        meaning = "A B C... forward of micro-batch 0 1 2..., a b c... backward" + ", A1: chunk 1" * chunked
        meaning += ", ~ weight gradients" * apart
    else:
        meaning = "F0 forward of micro-batch 0, B0 backward" + ", W0 weight gradients" * apart
        meaning += ", F0.1: chunk 1" * chunked
    whole = f"{float(_end(spans)):.4g}" + f" {unit}" * bool(unit)
    return f"{meaning}; . idle, {float(100 * idle_share(spans)):.1f} %; {whole} in all"


def _end(spans: list[list[Span]]) -> float:
    return max((stop for each in spans for _, _, stop in each), default=0)
