"""The matrix of faults: every strategy is struck by every kind of fault: python tests/faults/matrix.py CASES SEED

Each case (cases.py) is a job of its own, which is run and judged (judging.py): it ends as it should, and leaves nothing
half-done. --only NUMBER runs one case, and shows what it says; --first NUMBER begins there; --jobs: so many at a time.
At the end stands how often each kind of fault had which outcome; what was wrong keeps its folder."""

import argparse
import collections
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.cases import FAULTS, draw
from faults.judging import Wrong, judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", type=int, nargs="?", default=100)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases) if options.only is None else [options.only]
    top, counts, wrong = Path(tempfile.mkdtemp(prefix="faults-")), collections.Counter(), []
    keep, begun, lock = {}, time.monotonic(), threading.Lock()

    def one(number: int) -> None:
        if time.monotonic() - begun > options.seconds:
            return
        case, start = draw(options.seed, number), time.monotonic()
        folder = top / str(number)
        try:
            ended = judge(case, folder, keep)
        except Wrong as error:
            ended = f"WRONG: {error}"
        except Exception as error:
            ended = f"WRONG: {type(error).__name__}: {error}"
        with lock:
            bad = ended.startswith("WRONG")
            counts[case.kind, "wrong" if bad else ended] += 1
            wrong.extend([number] * bad)
            what, took = f"{case.line}, {case.ranks} ranks, {case.inject}", time.monotonic() - start
            print(f"case {number}: {what}: {ended} ({took:.1f} s)", flush=True)
            if options.only is not None:
                print((folder / "said").read_text())
            elif not bad:
                shutil.rmtree(folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, numbers))
    table(counts)
    print(f"{sum(counts.values())} cases, {len(wrong)} wrong, in {time.monotonic() - begun:.0f} s", end="")
    print(f": {' '.join(map(str, sorted(wrong)))}; see {top}" if wrong else "")
    if not wrong:
        shutil.rmtree(top)
    sys.exit(bool(wrong))


def table(counts: collections.Counter) -> None:
    """How often which fault had which outcome."""
    for kind in FAULTS:
        found = {ended: number for (fault, ended), number in sorted(counts.items()) if fault == kind}
        if found:
            print(f"| {kind} | {sum(found.values())} | {'; '.join(f'{e}: {n}' for e, n in found.items())} |")


if __name__ == "__main__":
    main()
