"""Who holds a port, as far as /proc tells: for the text of "address in use"."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_LISTEN = "0A"  # st column of /proc/net/tcp


def port_holder(protocol: Literal["tcp", "udp"], port: int) -> str:
    """ " (held by pid 123, python3)", or "" when /proc does not tell (no such socket, or another user's process)."""
    inodes = _socket_inodes(protocol, port)
    for process in Path("/proc").iterdir() if inodes else ():
        if not process.name.isdigit():
            continue
        try:
            links = {os.readlink(fd) for fd in (process / "fd").iterdir()}
            name = (process / "comm").read_text().strip()
        except OSError:  # gone meanwhile, or not ours to look at
            continue
        if links & inodes:
            return f" (held by pid {process.name}, {name})"
    return ""


def _socket_inodes(protocol: str, port: int) -> set[str]:
    """ "socket:[inode]" of the sockets bound to ``port``; for TCP, of those that listen."""
    inodes = set()
    for table in (f"/proc/net/{protocol}", f"/proc/net/{protocol}6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and (protocol == "udp" or fields[3] == _LISTEN):
                inodes.add(f"socket:[{fields[9]}]")
    return inodes
