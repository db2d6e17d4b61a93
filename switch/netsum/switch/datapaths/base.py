"""What the control plane needs of a datapath: the place where the slots live."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from netsum.protocol.errors import UsageError
from netsum.protocol.job_actions import DatapathFeatures, OpenJob


class Datapath(Protocol):
    """A running datapath. Any thread may call; no call waits for the network.

    Counters never go down; drops are ``drop_<reason>`` with the reasons of SPEC.md section 4.
    """

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> DatapathFeatures:
        """With the address that datagrams go to."""
        ...

    @property
    def receive_buffer_bytes(self) -> int:
        """What the kernel granted."""
        ...

    def open_job(self, job: OpenJob) -> None:
        """Results go by unicast until :meth:`set_results`. Raises :class:`ValueError` when the job cannot be opened."""
        ...

    def set_results(self, job_number: int, multicast: bool) -> None: ...

    def close_job(self, job_number: int) -> None:
        """Unknown numbers are ignored."""
        ...

    def counters(self) -> dict[str, int]: ...

    def job_counters(self, job_number: int) -> dict[str, int]: ...

    def slots_in_use(self, job_number: int) -> int:
        """Slots that are claimed and incomplete."""
        ...

    def awaited_ranks(self, job_number: int) -> Sequence[int]:
        """Ranks that the oldest incomplete slot waits for."""
        ...

    def close(self) -> None:
        """Frees the port. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class DatapathSettings:
    """``host``: the address of one interface; ``port`` 0 takes a free one; ``mtu_bytes`` that of the interface."""

    host: str
    port: int
    mtu_bytes: int
    max_chunk_elems: int
    receive_buffer_bytes: int = 4 << 20
    multicast: bool = True


def random_multicast_group() -> tuple[str, int]:
    """(prefix of three parts, port) for the groups of one switch.

    Groups are of the administratively scoped block 239/8, which routers keep inside; random, so that several switches on a network
    do not send into each other's groups.
    """
    return f"239.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}", 49152 + secrets.randbelow(16384)


def datapath_factory(name: str) -> Callable[[DatapathSettings], Datapath]:
    """Raises :class:`UsageError`. A new datapath is a file beside this one and a case here."""
    match name:
        case "native":
            from netsum.switch.datapaths.native import NativeDatapath

            return NativeDatapath
        case "python":
            from netsum.switch.datapaths.python import PythonDatapath

            return PythonDatapath
    raise UsageError(f"datapath {name!r}: known are native, python")
