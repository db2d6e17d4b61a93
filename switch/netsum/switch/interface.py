"""The network interface that holds an address, and what it can carry."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from array import array
from typing import NamedTuple

from netsum.protocol.errors import NetsumIOError

# Linux, <linux/sockios.h>; the socket module has no names for them.
SIOCGIFCONF = 0x8912
SIOCGIFMTU = 0x8921
_IFREQ_BYTES = 40  # on 64-bit Linux: a name of 16 bytes, then a union that starts with a sockaddr_in here
_MAX_ADDRESSES = 1024


class Interface(NamedTuple):
    name: str
    mtu_bytes: int


def interface_of(host: str) -> Interface:
    """The interface with the IPv4 address ``host``. Raises :class:`NetsumIOError` when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        names = _names_by_address(probe)
        name = names.get(host)
        if name is None and ipaddress.IPv4Address(host).is_loopback:  # all of 127/8 is the loopback interface's
            name = names.get("127.0.0.1")
        if name is None:
            known = ", ".join(f"{address} ({interface})" for address, interface in sorted(names.items()))
            raise NetsumIOError(f"no interface of this machine has the address {host}; it has {known}")
        request = struct.pack(f"16s{_IFREQ_BYTES - 16}x", name.partition(":")[0].encode())
        answer = fcntl.ioctl(probe, SIOCGIFMTU, request)
        return Interface(name, struct.unpack_from("i", answer, 16)[0])


def _names_by_address(probe: socket.socket) -> dict[str, str]:
    """Secondary addresses included."""
    buffer = array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    address, length = buffer.buffer_info()
    answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iL", length, address))
    (used,) = struct.unpack_from("i", answer)
    entries = bytes(buffer[:used])
    names = {}
    for start in range(0, used, _IFREQ_BYTES):
        name = entries[start : start + 16].split(b"\0", 1)[0].decode()
        names[socket.inet_ntoa(entries[start + 20 : start + 24])] = name
    return names
