"""The fuzzers, with as many new cases as docs/reliability.md tells of: python tests/faults/fuzzers.py [SEED [TIMES]]

Each is a file of tests, which tries fewer cases in each run of the tests; HPCDL_FUZZ, or TIMES for all, says how many
times as many."""

import subprocess
import sys
import time

from hpcdl.machine.launcher import clean_environment

STORE = "tests/parameter_server/test_fuzz_servers.py"
FUZZERS = [  # file, tests of it, how many times as many cases as in a run of the tests, and how many these are
    ("tests/launch/test_fuzz_options.py", "", 7, 2_100),
    ("tests/data/test_fuzz.py", "", 4, 2_040),
    ("tests/runs/test_fuzz_checkpoints.py", "", 4, 1_000),
    ("tests/runs/test_fuzz_pieces.py", "", 2, 200),
    ("tests/reports/test_fuzz_folders.py", "", 2, 314),
    (STORE, "not job", 3, 1_800),
    (STORE, "job", 34, 204),
]


def main(seed: str = "1", factor: str = "") -> None:
    for file, chosen, times, cases in FUZZERS:
        begun, wanted = time.monotonic(), int(factor or times)
        command = [sys.executable, "-m", "pytest", "-q", "--all", "--color=no", "--no-header"]
        command += [f"--hypothesis-seed={seed}", *(["-k", chosen] if chosen else []), file]
        if subprocess.run(command, env=clean_environment() | {"HPCDL_FUZZ": str(wanted)}).returncode:
            sys.exit(f"fuzzers: {file} has found something")
        tried = f"{cases // times * wanted:,} cases"
        print(f"fuzzers: {file} {chosen}: {tried} in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
