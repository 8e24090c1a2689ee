"""Hosts out of namespaces: python namespaces.py COUNT MBITS MS MTU FOLDER, for as long as its standard input is open.

    process     namespaces of its own              holds
    first       processes, mounts, network         the switch to which all hosts are linked
    host i      mounts, network, name, IPC         eth0 (10.77.0.i+1), /dev/shm

The switch is a bridge with a pair of virtual Ethernet devices to each host; MBITS > 0 shapes both directions of each
link, by a token bucket. With MS, the latency of one way, the switch is one in user space (switch.py); -1: the bridge.

When all is up, the process number of the first process is printed, and after it those of the hosts as that one sees
them. The kernel ends a namespace of processes with its first process, so all that runs on the hosts ends with it, and
it ends when the standard input does: when it is closed, or whoever holds it open has ended, in whatever way. Nothing
has a name outside but FOLDER, which is removed then. Only the standard library, for a quick start."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import switch

MOUNTS, NAME, IPC, PROCESSES, NETWORK = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000  # CLONE_NEW...
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_...
MAKE_DEVICE, TAP_ONLY_FRAMES = 0x400454CA, 0x1002  # TUNSETIFF, IFF_TAP | IFF_NO_PI
ADDRESS = "10.77.0."
BUCKET = "burst 64kb latency 400ms"
QUEUE = 20000  # frames that wait in a host for the switch in user space, which loses none
SETTINGS = {
    "ipv6/conf/default/disable_ipv6": "1",  # else the kernel looks for routers, and the counters would show it
    "ipv4/tcp_congestion_control": "reno",  # which all kernels have; the machine's may be one that paces
    "ipv4/tcp_slow_start_after_idle": "0",  # as clusters have it
}

libc = ctypes.CDLL(None, use_errno=True)


def main():
    """Start the first process, say what its number is, and end with it."""
    count, mbits, ms, mtu, folder = *map(float, sys.argv[1:5]), Path(sys.argv[5])
    told, tell = os.pipe()
    call("unshare", PROCESSES)
    first = os.fork()
    if first == 0:
        os.close(told)
        be_first(tell, int(count), mbits, ms, int(mtu), folder)
        os._exit(0)
    os.close(tell)
    hosts = os.read(told, 1 << 12).decode()
    if hosts:
        print(first, hosts, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    shutil.rmtree(folder, ignore_errors=True)  # who made it may have been killed
    sys.exit(status)


def be_first(tell: int, count: int, mbits: float, ms: float, mtu: int, folder: Path) -> None:
    """Bring the hosts up, and stay as long as they are wanted."""
    call("unshare", MOUNTS | NETWORK)
    mount("none", "/", flags=PRIVATE | RECURSIVE)
    mount("proc", "/proc", "proc")
    mount(str(folder / "hosts"), "/etc/hosts", flags=BIND)
    hosts = start_hosts(count)
    if ms >= 0:
        taps = [make_tap(host) for host in hosts]
        for number, host in enumerate(hosts):
            set_up(number, host, f"link set dev eth0 mtu {mtu} txqueuelen {QUEUE}")
    else:
        link_by_bridge(hosts, mbits, mtu, folder / "sys")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # bury orphans
    os.write(tell, " ".join(map(str, hosts)).encode())
    if ms >= 0:
        switch.serve(taps, mbits, ms, until=0)
    else:
        os.read(0, 1)


def call(name: str, *arguments) -> None:
    """Call a function of the C library. Raises OSError where it says that it failed."""
    if getattr(libc, name)(*(each.encode() if isinstance(each, str) else each for each in arguments)):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, where: str, kind: str | None = None, flags: int = 0) -> None:
    call("mount", source, where, kind, ctypes.c_ulong(flags), None)


def start_hosts(count: int) -> list[int]:
    """Start a process for each host; returns their numbers."""
    processes, ups = [], []
    for number in range(count):
        up, is_up = os.pipe()
        processes.append(os.fork())
        if processes[-1] == 0:
            be_host(number, is_up)
        os.close(is_up)
        ups.append(up)
    for number, up in enumerate(ups):
        if not os.read(up, 1):
            raise OSError(f"host{number} did not come up")
        os.close(up)
    return processes


def be_host(number: int, is_up: int) -> None:
    """Take name, memory and settings of a host, and stay until the first process ends."""
    try:
        call("unshare", MOUNTS | NAME | IPC | NETWORK)
        name = f"host{number}"
        call("sethostname", name, len(name))
        mount("tmpfs", "/dev/shm", "tmpfs")
        for name, value in SETTINGS.items():
            path = Path("/proc/sys/net", name)
            if path.exists():  # a kernel may do without IPv6
                path.write_text(value)
        os.write(is_up, b"!")
        os.closerange(0, 1 << 16)
        while True:
            signal.pause()
    except OSError as error:
        os.write(2, f"host{number}: {error}\n".encode())
    finally:
        os._exit(1)


def link_by_bridge(hosts: list[int], mbits: float, mtu: int, folder: Path) -> None:
    """Link the hosts by a bridge in the first process's network. Segments leave TCP one by one, as they would leave a
    network card, so that the counters show all headers."""
    ports, shape = [f"port{number}" for number in range(len(hosts))], f"root tbf rate {mbits}mbit {BUCKET}"
    lines = ["link add dev switch type bridge", "link set dev switch up"]
    for port, host in zip(ports, hosts, strict=True):
        end = f"eth0 mtu {mtu} gso_max_segs 1 netns {host}"
        lines.append(f"link add dev {port} mtu {mtu} gso_max_segs 1 type veth peer name {end}")
        lines.append(f"link set dev {port} master switch up")
    batch(["ip"], lines)
    keep_order(ports, folder)
    if mbits > 0:
        batch(["tc"], [f"qdisc add dev {port} {shape}" for port in ports])
    for number, host in enumerate(hosts):
        with network_of(host):
            keep_order(["eth0"], folder)
        set_up(number, host)
        if mbits > 0:
            batch([*inside(host), "tc"], [f"qdisc add dev eth0 {shape}"])


def keep_order(devices: list[str], folder: Path) -> None:
    """Have one core take what comes through these devices of the present network (receive packet steering).
    With several, frames of a connection overtake each other, and TCP sends again what it believes lost. folder: where
    the network's part of sysfs is seen meanwhile."""
    folder.mkdir(exist_ok=True)
    mount("sysfs", str(folder), "sysfs")
    for device in devices:
        for queue in (folder / "class/net" / device / "queues").glob("rx-*/rps_cpus"):
            queue.write_text("1")
    call("umount", str(folder))


@contextlib.contextmanager
def network_of(host: int):
    """In the network of a host."""
    with open("/proc/self/ns/net") as own, open(f"/proc/{host}/ns/net") as its:
        call("setns", its.fileno(), NETWORK)
        try:
            yield
        finally:
            call("setns", own.fileno(), NETWORK)


def make_tap(host: int) -> int:
    """A TAP device eth0 on a host; returns the file through which its frames go."""
    with network_of(host):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, MAKE_DEVICE, struct.pack("16sH22x", b"eth0", TAP_ONLY_FRAMES))
    return tap


def set_up(number: int, host: int, *more: str) -> None:
    """Give a host its address, and to its eth0 one that tells the number, too."""
    lines = [
        "link set dev lo up",
        f"link set dev eth0 address 02:00:00:00:00:{number:02x}",
        *more,
        f"address add {ADDRESS}{number + 1}/24 dev eth0",
        "link set dev eth0 up",
    ]
    batch([*inside(host), "ip"], lines)


def inside(host: int) -> list[str]:
    """What runs a command in a host's network."""
    return ["nsenter", f"--net=/proc/{host}/ns/net"]


def batch(command: list[str], lines: list[str]) -> None:
    """Have `ip` or `tc` do all of the lines."""
    done = subprocess.run([*command, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error}")
