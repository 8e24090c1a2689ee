"""Journals of searches that were never done, of any length, in no time; and what a journal may hold by accident."""

import json
import math
import random

from hypothesis import strategies as st

from hpcdl.search.search_log_reader import Trials

SPACE = [
    "lr=log:0.001..0.5",
    "batch-size=int:16..512:log",
    "model=mlp:64|mlp:256,128",
    "optimizer=sgd|momentum",
    "momentum:beta=0.8..0.99 if optimizer=momentum",
]
LONG = 10_000.0  # UNIX seconds at which it begins


def drawn(draw):
    """Values of the space above."""
    values = {"lr": 10 ** draw.uniform(-3, -0.3), "batch-size": draw.randrange(16, 513)}
    values |= {"model": draw.choice(["mlp:64", "mlp:256,128"]), "optimizer": draw.choice(["sgd", "momentum"])}
    return values | ({"momentum:beta": draw.uniform(0.8, 0.99)} if values["optimizer"] == "momentum" else {})


def score_of(values, amount, draw):
    """An accuracy that depends on the learning rate above all, and grows with the amount."""
    at = math.log10(values["lr"]) + 1.2
    return max(0.1, 0.97 - 0.12 * at * at - 0.25 / (1 + amount) + 0.01 * draw.random())


def settings_of(**more):
    """As in a journal's first line."""
    found = {"program": "train-allreduce --data digits --epochs 9", "options": {}, "space": SPACE, "method": "random"}
    found |= {"trials": 24, "seeds": 1, "seed": 0, "objective": "validation_accuracy", "maximize": True}
    return found | {"ranks_per_trial": 2, "least": 1.0, "most": 9.0, "eta": 3, "points": 4} | more


def events_of(trials=24, seeds=1, rungs=1, failing=(), groups=4, seed=0, **more):
    """The events of a search: a random one, or with several rungs of successive halving by 3, which has 1, 3, 9 epochs.
    failing: trials that diverge."""
    draw, now = random.Random(seed), [LONG + 0.5 * group for group in range(groups)]
    yield {"event": "search", "version": 1, "settings": settings_of(trials=trials, seeds=seeds, **more)}
    yield {"event": "leg", "ranks": 2 * groups, "groups": groups, "time": LONG}
    values = [drawn(draw) for _ in range(trials)]
    left = [*range(trials)]
    for rung in range(rungs):
        amount, scores = (3.0**rung if rungs > 1 else 0.0), {}
        for trial in left:
            for each in range(seeds):
                group = min(range(groups), key=lambda group: now[group])
                key = {"trial": trial, "rung": rung, "seed": each}
                about = {"values": values[trial], "amount": amount, "parent": None, "group": group}
                yield {"event": "begin", **key, **about, "time": now[group]}
                seconds = (amount or 9) * draw.lognormvariate(0, 0.5)
                now[group] += seconds
                score = score_of(values[trial], amount or 9, draw)
                failed = "its loss is not finite (step 17)" if trial in failing else None
                end = {"score": None if failed else score, "failed": failed, "seconds": seconds}
                steps = {"steps": int(45 * (amount or 9))}
                yield {"event": "end", **key, **end, "more": steps, "time": now[group]}
                scores.setdefault(trial, []).append(-math.inf if failed else score)
        left = sorted(scores, key=lambda trial: -sum(scores[trial]))[: len(left) // 3]


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400)
ODD = ODD | st.lists(ODD, max_size=2) | st.dictionaries(st.text(max_size=3), ODD, max_size=2)
ODD_SETTINGS = st.dictionaries(st.sampled_from([*settings_of()]), ODD)


def trials_of(points, **settings):
    """A search of so many (values, score), each ended; of a score of None it has failed."""
    found = Trials(settings_of(space=None) | settings)
    for trial, (values, score) in enumerate(points):
        key, failed = {"trial": trial, "rung": 0, "seed": 0}, "diverged" if score is None else None
        found.take({"event": "begin", **key, "values": values, "time": 10.0 * trial})
        found.take({"event": "end", **key, "score": score, "failed": failed, "time": 10.0 * trial + 5})
    return found


def write_journal(folder, events=None, **how):
    """Write a search's folder with these events; without them, with those of `events_of(**how)`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in (events_of(**how) if events is None else events))
    (folder / "journal.jsonl").write_text(text)
    return folder
