"""torch.distributed's all_reduce over hpcdl and gloo, between two hosts: python tests/cluster/torch_links.py (root)

Prints tables as those of docs/torch.md. The hosts are emulated (hosts.py), one rank on each; on links of each speed
they run `hpcdl bench-torch`. gloo is told to take the link (GLOO_SOCKET_IFNAME), as is MPI."""

import argparse

from hosts import Hosts

SIZES = "1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", default="1000,10000", help="speeds of the links, in Mbit/s, with commas between")
    parser.add_argument("--sizes", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds to spend on each size, at least 5 turns")
    options = parser.parse_args(arguments)
    command = ["-m", "hpcdl.cli", "bench-torch", "--models", "none", "--sizes", options.sizes]
    for mbits in options.mbits.split(","):
        with Hosts(2, float(mbits)) as pair:
            link = {"GLOO_SOCKET_IFNAME": "eth0"}
            done = pair.mpiexec(2, 1, *command, "--seconds", options.seconds, timeout=900, **link)
        print(f"{int(mbits):,} Mbit/s\n{done.stdout}", flush=True)


if __name__ == "__main__":
    main()
