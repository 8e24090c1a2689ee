"""A program of hpcdl on emulated hosts, on links of several speeds, as root:

    python tests/cluster/on_links.py --mbits 200,1000 --hosts 2 bench-torch --models none --sizes 1KiB,1MiB
    python tests/cluster/on_links.py --mbits 10 --hosts 4 compare --target accuracy=0.87 "train-allreduce" ...

The hosts are those of hosts.py, with --per-host ranks on each. gloo is told to take the link (GLOO_SOCKET_IFNAME), as
is MPI."""

import argparse
import tempfile

from hosts import Hosts


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", default="1000", help="speeds of the links, in Mbit/s, with commas between")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--minutes", type=float, default=15, help="most minutes for each speed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program of hpcdl, with its options")
    options = parser.parse_args(arguments)
    command = ["-m", "hpcdl.cli", *options.command]
    for mbits in options.mbits.split(","):
        with Hosts(options.hosts, float(mbits)) as hosts, tempfile.TemporaryDirectory() as cache:
            link = {"GLOO_SOCKET_IFNAME": "eth0", "HPCDL_CACHE": cache}  # a table of `auto` for each speed
            done = hosts.mpiexec(options.hosts, options.per_host, *command, timeout=60 * options.minutes, **link)
        print(f"{int(mbits):,} Mbit/s\n{done.stdout}", flush=True)


if __name__ == "__main__":
    main()
