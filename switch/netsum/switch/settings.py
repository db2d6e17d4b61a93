"""Settings of a switch process, read once at its start."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from netsum.protocol.control import DEFAULT_CONTROL_PORT, DEFAULT_DATA_PORT
from netsum.protocol.errors import NetsumIOError, UsageError
from netsum.protocol.job_settings import JobTableSettings

DEFAULT_CONTROL_ENDPOINT = f"tcp://127.0.0.1:{DEFAULT_CONTROL_PORT}"
DEFAULT_DATA_ADDRESS = f"127.0.0.1:{DEFAULT_DATA_PORT}"


@dataclass(frozen=True, slots=True)
class SwitchSettings:
    """``control`` and ``data`` say "tcp://host:port" and "host:port"; port 0 takes a free one.

    The data host must be the address of one interface: workers accept results from the address that they send to.
    """

    control: str = DEFAULT_CONTROL_ENDPOINT
    data: str = DEFAULT_DATA_ADDRESS
    datapath: str = "native"
    jobs: JobTableSettings = field(default_factory=JobTableSettings)
    receive_buffer_bytes: int = 4 << 20
    multicast: bool = True


def parse_control_endpoint(endpoint: str) -> tuple[str, int]:
    """(IPv4 host, port) of "tcp://host:port". Raises :class:`UsageError`."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme != "tcp":
        raise UsageError(f"control endpoint {endpoint!r} must look like tcp://127.0.0.1:{DEFAULT_CONTROL_PORT}")
    return parse_address(rest)


def parse_address(address: str) -> tuple[str, int]:
    """(IPv4 host, port) of "host:port"; names are resolved. Raises :class:`UsageError` or :class:`NetsumIOError`."""
    host, separator, port_text = address.rpartition(":")
    if not separator or not host or not port_text.isdecimal() or int(port_text) > 65535:
        raise UsageError(f"address {address!r} must look like 127.0.0.1:{DEFAULT_DATA_PORT}")
    try:
        return socket.gethostbyname(host), int(port_text)
    except OSError as error:
        raise NetsumIOError(f"host {host!r} of address {address!r} cannot be resolved: {error}") from error
