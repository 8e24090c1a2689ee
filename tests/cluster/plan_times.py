"""Forecasts of time beside runs on emulated hosts (hosts.py): python tests/cluster/plan_times.py (as root)

    machine     computing, and what programs cost beyond, as this machine measures them; of the hosts' network no more
                than the latency and the bandwidth of one link, by ping-pong between two of them
    messages    by theory alone (hpcdl/planning/message_time.py): no collective is measured

One rank on each of 4 hosts, which pretend to compute, as they share the cores of one machine. For each rate and latency
of the links the table of `hpcdl plan check`, and at the end the errors of all together."""

import argparse
import dataclasses
import sys

import numpy as np
from hosts import Hosts

from hpcdl.errors import LoneError, UsageError
from hpcdl.launch.command_lines import read_command
from hpcdl.launch.option_parser import parse
from hpcdl.planning import forecast_error
from hpcdl.planning.probe_jobs import run
from hpcdl.planning.surveying import survey
from hpcdl.strategies.workload import Workload

HOSTS, JUMBO = 4, 9000  # bytes of a frame
NETWORKS = ((1000, 1), (200, 1), (200, 10))  # Mbit/s, ms
MODEL = "--model mlp:256,128 --pretend-compute 50"
LINES = [
    f"train-allreduce {MODEL} --allreduce ring",
    f"train-allreduce {MODEL} --allreduce tree",
    f"train-allreduce {MODEL} --allreduce naive",
    f"train-allreduce {MODEL} --allreduce recursive",
    f"train-allreduce {MODEL} --compress bfloat16",
    f"train-local-sgd {MODEL} --sync-every 4 --allreduce ring",
    f"train-gossip {MODEL} --topology ring",
    f"train-fully-sharded {MODEL} --stage 1",
    f"train-parameter-server {MODEL}",
    f"train-parameter-server {MODEL} --servers 2",
    f"train-parameter-server {MODEL} --consistency async",
    "train-pipeline --model mlp:256,128,128 --pretend-compute 50 --microbatches 4 --schedule gpipe",
]


def case_of(text, ranks):
    """A line on so many ranks."""
    return Workload.of(read_command(1, f"-n {ranks}: {text}", {}, ranks), parse)


def main():
    asked = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    asked.add_argument("--repeat", type=int, default=3, help="how often each line is run")
    asked.add_argument("--seconds", type=float, default=2.0, help="about how long a run takes")
    options = asked.parse_args()

    def say(text):
        print(text, file=sys.stderr, flush=True)

    try:
        here, errors = survey([(text, HOSTS) for text in LINES], case_of, say=say, whole=False), []
        for mbits, ms in NETWORKS:
            with Hosts(HOSTS, mbits=mbits, ms=ms, mtu=JUMBO) as hosts:

                def start(ranks, arguments, hosts=hosts):
                    return hosts.mpiexec(ranks, 1, *arguments, timeout=600)

                found = run(2, {"models": [], "operations": []}, start)["measured"]["far"]
                links = dataclasses.replace(here.links, ranks_per_node=1, latency=found[0], bandwidth=found[1])
                machine = dataclasses.replace(here, links=links)
                told = forecast_error.make_forecasts([(HOSTS, text) for text in LINES], machine, case_of)
                checked = forecast_error.measure_forecasts(told, options.repeat, options.seconds, start, say)
            errors += [abs(each.error) for each in checked if not each.failed]
            print(f"\n{mbits} Mbit/s, {ms} ms: {found[0] * 1e3:.2f} ms and {found[1] * 8e-6:.0f} Mbit/s by ping-pong\n")
            print("\n".join(forecast_error.report(checked)), flush=True)
    except (UsageError, LoneError, OSError) as error:
        sys.exit(f"plan_times: {error}")
    middle, most = 100 * np.median(errors), 100 * np.quantile(errors, 0.9)
    print(f"\nall {len(errors)}: median error {middle:.0f} %, 9 of 10 within {most:.0f} %")


if __name__ == "__main__":
    main()
