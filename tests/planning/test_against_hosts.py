"""The simulated all-reduce beside the measured one: the table of docs/scaling.md, of emulated hosts.

The latency is what the ring takes for 4 kB on as many hosts, a step: with what a message costs the processors, which
the hosts share. The bandwidth is the links' own, 200 Mbit/s."""

import re
from pathlib import Path

import numpy as np

from hpcdl.comm.allreduce import ALGORITHMS
from hpcdl.planning.cluster import Cluster
from hpcdl.planning.simulated_comm import simulate

PAGE = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
TABLE = re.compile(r"^([\d.]+ [kM]B), latency (\d+) ms \(alpha = [\d.]+ ms\)\n\n((?:\|.*\n)+)", re.MULTILINE)
BANDWIDTH = 25e6
NAMES = ("naive", "ring", "tree", "recursive")


def measured():
    """{(bytes, ms, hosts): {algorithm: seconds}} of the page."""
    found = {}
    for size, ms, table in TABLE.findall(PAGE):
        amount, unit = size.split()
        header, _, *lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
        for line in lines:
            cells = dict(zip(header, line, strict=True))
            times = {name: float(re.match(r"[\d.,]+", cells[name])[0].replace(",", "")) / 1e3 for name in NAMES}
            found[round(float(amount) * {"kB": 1e3, "MB": 1e6}[unit]), int(ms), int(cells["hosts"])] = times
    return found


def errors():
    """Simulated / measured - 1, by (bytes, ms)."""
    table, found = measured(), {}
    for (bytes, ms, hosts), times in table.items():
        step = table[4000, ms, hosts]["ring"] / (2 * (hosts - 1))
        cluster = Cluster(latency=step - 4000 / hosts / BANDWIDTH, bandwidth=BANDWIDTH)
        later = "recursive" if hosts & (hosts - 1) else ""  # measured in another run, beside other load
        for name, seconds in ((name, seconds) for name, seconds in times.items() if name != later):
            simulated = simulate(ALGORITHMS[name].steps, cluster, hosts, bytes).max()
            found.setdefault((bytes, ms), []).append(simulated / seconds - 1)
    return {key: np.abs(values) for key, values in found.items()}


def test_it_is_near_to_what_was_measured(alone):
    found = errors()
    assert len(found) == 9 and sum(map(len, found.values())) > 150
    for (bytes, ms), error in found.items():
        if bytes > 4000 or ms:  # 4 kB without latency: nothing but processors' time
            assert np.median(error) <= 0.1 and np.quantile(error, 0.9) <= 0.16, (bytes, ms)
    together = np.concatenate([error for (bytes, ms), error in found.items() if bytes > 4000 or ms])
    assert np.median(together) < 0.04 and np.quantile(together, 0.9) < 0.15 and together.max() < 0.25
