"""scripts/search.py: trials in rungs, and populations of them, which pause, go on, and begin from each other."""

import json
from pathlib import Path

import numpy as np
from searched import BATCH, LR, TRAINING, events

from hpcdl.checkpoint.checkpoint_file import Checkpoint


def test_rungs_pause_and_go_on(search, few):
    """A trial that came to its end by rungs is, to the bit, the one that never paused; the others cost less."""
    common = [*TRAINING, *LR, "--seeds", "2", "--trials", "6", "--progress=none"]
    search(1, *common, "--method", "random", "--out", "whole", check=0)
    search(2, *common, "--method", "asha", "--least", "1", "--eta", "2", "--out", "asha", check=0)
    ended = events(few / "asha")
    last = {(each["trial"], each["seed"]): each for each in sorted(ended, key=lambda each: each["rung"])}
    whole = {(each["trial"], each["seed"]): each for each in events(few / "whole")}
    rungs = [each["rung"] for each in last.values()]
    assert max(rungs) == 2 and rungs.count(2) < 6 * 2
    for key, each in last.items():
        assert each["more"]["epochs"] == 2 ** each["rung"]
        if each["rung"] == 2:
            path = Path("trials", f"{key[0]:04d}", f"seed-{key[1]}")
            one, other = (Checkpoint.read(few / name / path).vectors["parameters"] for name in ("asha", "whole"))
            assert np.array_equal(one, other) and each["score"] == whole[key]["score"]


def test_a_population_goes_on_from_the_best_of_it(search, few):
    search(2, *TRAINING, *LR, *BATCH, "--method", "pbt", "--trials", "4", "--seed", "3", "--out", "p", check=0)
    begun = {(each["trial"], each["rung"]): each for each in events(few / "p", "begin")}
    heirs = [each for each in begun.values() if each["parent"] is not None]
    assert heirs and all(each["failed"] is None for each in events(few / "p"))
    for each in heirs:
        path = few / "p" / "trials" / f"{each['trial']:04d}" / "seed-0"
        assert (path / "piece").exists()
        kept = Checkpoint.read(path / f"until-{each['amount']!r}.h5").attributes
        assert kept["epoch"] == each["amount"] and len(kept["legs"]) == round(each["amount"])
        last = json.loads((path / "summary.json").read_text())
        if each["amount"] == 4:
            assert last["options"]["lr"] == each["values"]["lr"] and last["epochs"] == 4
