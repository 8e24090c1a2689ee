"""A real Slurm on this machine: slurmctld and one slurmd per node, without systemd or munge, in a temporary folder.

    slurmctld            the controller, on the machine itself
    n1, n2, ...          nodes: a host name, process numbers and a /dev/shm of their own (namespaces), and in them
                         slurmd, its slurmstepds and the ranks; all of it ends when the node's first process is killed

The nodes share the network and the files, as on a cluster with a parallel file system. All of it are children of this
process and die with it. Needs root (for the namespaces) on Debian, whose packages `install` fetches, and this file as a
program does ahead of the tests. `power_off` takes a node away as a lost power supply does: nothing on it is told, its
memory is gone."""

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
import uuid
from pathlib import Path

from hpcdl.machine.launcher import clean_environment

PACKAGES = ("slurmctld", "slurmd", "libpmix2")
PATIENCE = 180  # seconds; where kernels are compiled first, on a machine with much else to do, it takes many
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
CommunicationParameters=NoCtldInAddrAny
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=3600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
NODE = """
NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} Gres=gpu:{cpus} CPUs={cpus} Sockets=1 \
CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN"""


def install() -> str:
    """Fetch Debian's packages where they are missing; returns why there can be no Slurm here, or nothing."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    if subprocess.run(["unshare", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True).returncode:
        return "this root may not make namespaces"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "srun"))):
        if shutil.which("apt-get") is None:
            return "slurmctld is missing, and there is no apt-get to fetch it with"
        get = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], get):
            done = subprocess.run(command, env=quiet, capture_output=True, text=True)
        if done.returncode:
            return f"apt-get cannot fetch slurmctld: {done.stderr.strip().splitlines()[-1]}"
    for folder in Path("/usr/lib").glob("*/pmix2/lib"):  # Slurm's plugin looks for a name that only libpmix-dev ships
        if not (folder / "libpmix.so").exists():
            (folder / "libpmix.so").symlink_to("libpmix.so.2")
    return ""


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Slurm:
    """A Slurm of so many nodes with so many cores each, which may be more than there are; a context."""

    def __init__(self, folder: Path, nodes: int, cpus: int):
        self.folder, self.names, self.processes = folder, [f"n{i + 1}" for i in range(nodes)], {}
        port, *ports = free_ports(1 + nodes)
        (folder / "state").mkdir()
        # Ranks are bound to cores, where there are as many as a node claims to have.
        plugin = "task/affinity" if cpus <= os.cpu_count() else "task/none"
        text = CONFIGURATION.format(host=socket.gethostname().split(".")[0], port=port, folder=folder, plugin=plugin)
        for name, port in zip(self.names, ports, strict=True):
            text += NODE.format(name=name, port=port, cpus=cpus)
        (folder / "slurm.conf").write_text(text.lstrip())
        gpus = [folder / f"gpu{i}" for i in range(cpus)]  # Slurm counts device files
        for gpu in gpus:
            os.mknod(gpu, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null is
        (folder / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in gpus))
        strange = ("SLURM", "SBATCH", "SRUN")  # of a Slurm in which these tests may run themselves
        self.environment = {name: value for name, value in clean_environment().items() if not name.startswith(strange)}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for name in self.names:
                self.power_on(name)
            self.until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name, process in reversed(self.processes.items()):
            process.terminate() if name == "slurmctld" else process.kill()  # which ends a process of its own then, too
            process.wait()

    def _start(self, name: str, *command):
        log = (self.folder / f"{name}.out").open("a")
        with log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            dying = ["setpriv", "--pdeathsig", "KILL", *command]
            self.processes[name] = subprocess.Popen(dying, env=self.environment, **streams)

    def power_on(self, name: str) -> None:
        """Start a node."""
        for what in ("spool", "tmp"):
            (self.folder / f"{what}.{name}").mkdir(exist_ok=True)
        boot = self.folder / f"boot_id.{name}"  # by which MPI tells machines apart
        boot.write_text(f"{uuid.uuid4()}\n")
        inside = (
            'hostname "$1"; mount -t tmpfs tmpfs /dev/shm; mount --bind "$2" /proc/sys/kernel/random/boot_id;'
            'slurmd -D -N "$1" & wait'  # and the shell buries orphans
        )
        namespaces = ["--uts", "--pid", "--mount", "--ipc", "--mount-proc", "--fork", "--kill-child=KILL"]
        self._start(name, "unshare", *namespaces, "sh", "-c", inside, "sh", name, boot)

    def power_off(self, name: str) -> None:
        """Kill all that runs on a node, and what lies in its memory."""
        self.processes[name].kill()
        self.processes[name].wait()

    def run(self, *command, check=True, cwd=None, **environment) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        streams = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(list(map(str, command)), env=self.environment | environment, cwd=cwd, **streams)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def until(self, what: str, holds, seconds: float = PATIENCE, folder: Path | None = None) -> None:
        """Wait until holds()."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.logs(folder)}"
            time.sleep(0.1)

    def until_up(self) -> None:
        """Wait until all nodes can have jobs."""
        self.until("all nodes are up", lambda: set(self.run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})

    def logs(self, folder: Path | None = None) -> str:
        """The end of what Slurm, and the jobs in a folder, have written, for a test that fails."""
        text = ""
        for path in [*sorted(self.folder.glob("*.log")), *(sorted(folder.glob("*.log")) if folder else ())]:
            text += f"--- {path}\n" + "\n".join(path.read_text().splitlines()[-30:]) + "\n"
        return text

    def submit(self, *arguments, cwd: Path, **environment) -> "Job":
        """sbatch, in the folder `cwd`."""
        return Job(self, self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment).strip(), cwd)


class Job:
    """A job of a Slurm, or a member of an array; `name` is how Slurm's commands call it: 7, 7_2."""

    def __init__(self, slurm: Slurm, name: str, folder: Path):
        self.slurm, self.name, self.folder = slurm, name, folder

    def member(self, index: int) -> "Job":
        """One of the array that this job is."""
        return Job(self.slurm, f"{self.name}_{index}", self.folder)

    def show(self) -> dict[str, str]:
        """What Slurm says of it: JobState, Restarts, ExitCode, NodeList, ..."""
        words = self.slurm.run("scontrol", "-o", "show", "job", self.name).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes(self) -> list[str]:
        """The names of its nodes."""
        return self.slurm.run("scontrol", "show", "hostnames", self.show()["NodeList"]).split()

    def until(self, *states: str, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until it is in one of these states; returns what Slurm then says of it."""
        self.slurm.until(f"{self.name} is {states}", lambda: self.show()["JobState"] in states, seconds, self.folder)
        return self.show()

    def ended(self, status: int = 0) -> dict[str, str]:
        """Wait until it has ended, with this exit status."""
        found = self.until(*ENDED)
        assert found["ExitCode"] == f"{status}:0", f"{found}{self.slurm.logs(self.folder)}"
        return found

    def again(self) -> None:
        """Wait until it was requeued, and let it start soon: nodes refuse it within the second of its end."""
        self.slurm.until(f"{self.name} is requeued", lambda: self.show()["Restarts"] == "1", folder=self.folder)
        self.until("PENDING")
        self.slurm.run("scontrol", "update", f"jobid={self.name}", "starttime=now+1")

    def signal(self, name: str) -> None:
        """Send its batch shell a signal, as --signal=B:... does before the time limit."""
        self.slurm.run("scancel", "--batch", "-s", name, self.name)

    def cancel(self) -> None:
        """Cancel it, and wait until nothing of it runs any more."""
        self.slurm.run("scancel", self.name, check=False)
        self.slurm.until(f"{self.name} is gone", lambda: not self.slurm.run("squeue", "-h", "-j", self.name))

    @property
    def log(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*-{self.name}.log")))


if __name__ == "__main__":
    print(install() or "Slurm is installed")
