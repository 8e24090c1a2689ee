"""Several hosts on one machine, with a network between them, and MPI started across them. Needs root.

    with Hosts(4, mbits=200, ms=1) as hosts:
        hosts.mpiexec(4, 2, "-m", "hpcdl.cli", "train-allreduce")   2 ranks on each of 4 hosts
        hosts.on(0, "hostname")                                     one command on one host
        hosts.counters(0)                                           bytes that passed the link of host 0, each way

Each host is a set of namespaces (namespaces.py): its own network, name and /dev/shm; files are the same on all, as on a
cluster with a parallel file system. All that runs on them ends with the context, or with the process that made them.
ssh, by which a launcher starts its daemons on other hosts, is a script that enters the namespaces."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mpi4py import MPI

from hpcdl.machine.launcher import clean_environment, mpiexec

HERE = Path(__file__).parent
SSH = """#!/bin/sh
# ssh [OPTIONS] HOST COMMAND...
while :; do
  case $1 in
    -[bceilopFJLRSW]) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
host=${{1#*@}}
shift
exec nsenter --target "$(cat {folder}/"$host")" --net --uts --ipc --mount -- env --chdir="$PWD" /bin/sh -c "$*"
"""


class Hosts:
    """So many hosts, a context; they are called host0, host1, ...

    mbits: of each link, in either direction; 0: as fast as it goes. ms: latency of one way. mtu: bytes of a frame
    without its header. With `ms`, 0 included, every frame passes through a switch in user space, which is exact from
    the first frame on, but takes time for each: let there be few, by a large mtu. Without it the kernel's bridge joins
    the hosts, and its token buckets let 64 KiB pass at once after a pause. Raises OSError where there can be no hosts.
    """

    def __init__(self, count: int, mbits: float = 0, ms: float | None = None, mtu: int = 1500):
        self.count, self.shape = count, list(map(str, (mbits, -1 if ms is None else ms, mtu)))

    def __enter__(self):
        if os.geteuid() != 0:
            raise OSError("hosts of namespaces need root")
        for command in ("ip", "tc", "nsenter"):
            if shutil.which(command) is None:
                raise OSError(f"hosts of namespaces need the command {command}")
        self._up()
        return self

    def __exit__(self, *_):
        self._down()

    def _up(self):
        self.folder, self.keeper = Path(tempfile.mkdtemp(prefix="hosts-")), None
        try:
            names = [f"10.77.0.{number + 1} host{number}" for number in range(self.count)]
            (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            self.keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", HERE / "namespaces.py", str(self.count), *self.shape, self.folder],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            self.first, *processes = self.keeper.stdout.readline().split() or [""]
            if not self.first:
                raise OSError(self.keeper.communicate()[1].strip())
            for number, process in enumerate(processes):
                for name in (f"host{number}", f"10.77.0.{number + 1}"):
                    (self.folder / name).write_text(process)
            self.ssh = self.folder / "ssh"
            self.ssh.write_text(SSH.format(folder=self.folder))
            self.ssh.chmod(0o755)
        except BaseException:
            self._down()
            raise

    def _down(self):
        if self.keeper is not None:
            self.keeper.communicate()  # an end of its input
        shutil.rmtree(self.folder, ignore_errors=True)  # the keeper has done so, if it was there

    def on(self, host: int, *command, timeout=60, check=0, cwd=None, **environment) -> subprocess.CompletedProcess:
        """Run a command on a host. One that takes longer than `timeout` seconds ends with all that runs on any host.
        check: the status that it must end with, or None."""
        cwd = Path.cwd() if cwd is None else cwd
        enter = ["nsenter", f"--target={self.first}", "--pid", "--mount", "--", "env", f"--chdir={cwd}"]
        with subprocess.Popen(
            [*enter, self.ssh, f"host{host}", shlex.join(map(str, command))],
            env=clean_environment() | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            try:
                out, errors = process.communicate(timeout=timeout)
            except BaseException:
                self._down()
                print(*process.communicate(), sep="\n")
                self._up()
                raise
        assert check is None or process.returncode == check, f"status {process.returncode}\n{out}{errors}"
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def mpiexec(self, hosts: int, per_host: int, *command, first: int = 0, **options) -> subprocess.CompletedProcess:
        """Run Python with these arguments on `per_host` ranks of each of so many hosts, from host `first` on."""
        launch, environment = self.launch(hosts, per_host, first)
        return self.on(first, *launch, sys.executable, *command, **environment | options)

    def launch(self, hosts: int, per_host: int, first: int = 0) -> tuple[list, dict[str, str]]:
        """The launcher's words for `per_host` ranks on each of so many hosts, and what it needs in its environment."""
        names = [f"host{first + number}" for number in range(hosts)]
        if "Open MPI" in MPI.Get_library_version():
            where = ["--host", ",".join(f"{name}:{per_host}" for name in names), "--prtemca", "plm_ssh_agent", self.ssh]
            where += ["--map-by", f"ppr:{per_host}:node", "--bind-to", "none", "--prtemca", "prte_if_include", "eth0"]
            where += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "mpi_yield_when_idle", "1"]
            environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            # A daemon calls its folder by its number, which is that of one of before: what that has left ends it (213).
            environment["TMPDIR"] = str(self.folder)
        else:
            where = ["-launcher", "ssh", "-launcher-exec", self.ssh, "-iface", "eth0"]
            where += ["-hosts", ",".join(names), "-ppn", per_host]
            environment = {}
        return [mpiexec(), *where, "-n", hosts * per_host], environment

    def counters(self, host: int) -> tuple[int, int]:
        """Bytes that the link of a host has sent and received, headers included."""
        return link_counters(self.on(host, "cat", "/proc/net/dev").stdout)


def link_counters(text: str | None = None) -> tuple[int, int]:
    """Bytes that eth0 has sent and received, headers included; text: of the /proc/net/dev to read."""
    for line in (text or Path("/proc/net/dev").read_text()).splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == "eth0":
            received, *_, sent = counted.split()[:9]
            return int(sent), int(received)
    raise OSError("there is no eth0")
