"""Links of an emulated host, cut and mended: what --inject drop does to the network that a process sees.

A host that is emulated by namespaces has a network of its own, another one than the machine's first process. Only such
a link is cut: the machine's own would take with it whoever is logged in.
"""

import fcntl
import os
import socket
import struct
from pathlib import Path

FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
REQUEST = "16sh14x"  # struct ifreq: name and flags


def why_not(proc: Path = Path("/proc")) -> str:
    """Why no link may be cut here, or nothing."""
    try:
        if os.stat(proc / "self/ns/net").st_ino != os.stat(proc / "1/ns/net").st_ino:
            return ""
    except OSError as error:
        return f"this host is not known to be emulated ({error.strerror})"
    return "this host is not emulated, its network is the machine's own"


def names() -> list[str]:
    """The links of this host to others."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def turn(cut: list[str], up: bool) -> None:
    """Cut these links, or mend them. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in cut:
            flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, FLAGS, struct.pack(REQUEST, name.encode(), 0)))[1]
            flags = flags | UP if up else flags & ~UP
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack(REQUEST, name.encode(), flags))
