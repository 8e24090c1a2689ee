"""Network faults (--inject drop): cut and restore the links of an emulated host.
A host emulated by namespaces has a network of its own. Other links are never cut: this would disconnect users."""

import fcntl
import os
import socket
import struct
from pathlib import Path

FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
REQUEST = "16sh14x"  # struct ifreq: name and flags


def obstacle(proc: Path = Path("/proc")) -> str:
    """Return the reason why no link may be cut here; empty if there is none."""
    try:
        if os.stat(proc / "self/ns/net").st_ino != os.stat(proc / "1/ns/net").st_ino:
            return ""
    except OSError as error:
        return f"this host is not known to be emulated ({error.strerror})"
    return "this host is not emulated, its network is the machine's own"


def set_links(cut: list[str], up: bool) -> None:
    """Cut the links with the names in `cut`, or restore them if `up`. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in cut:
            flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, FLAGS, struct.pack(REQUEST, name.encode(), 0)))[1]
            flags = flags | UP if up else flags & ~UP
            fcntl.ioctl(any_socket, SET_FLAGS, struct.pack(REQUEST, name.encode(), flags))
