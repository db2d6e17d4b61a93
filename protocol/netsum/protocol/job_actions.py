"""What the job table wants done: replies to send and commands for the datapath, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from netsum.protocol.control import SwitchMessage


@dataclass(frozen=True, slots=True)
class DatapathFeatures:
    """What a datapath can do, as far as workers need to know it.

    ``multicast_prefix`` is "" or the first three parts of the groups ("239.1.2"): job number j has group ``239.1.2.j``.
    """

    data_host: str
    data_port: int
    max_world_size: int
    max_chunk_elems: int
    short_exponents: bool = True
    pending: bool = True
    multicast_prefix: str = ""
    multicast_port: int = 0
    receive_buffer_bytes: int = 0  # of the data socket, as granted; 0: no matter

    def multicast_group(self, job_number: int) -> tuple[str, int] | None:
        """(host, port) of the job's group, None where results go by unicast only."""
        return (f"{self.multicast_prefix}.{job_number}", self.multicast_port) if self.multicast_prefix else None


class Reply(NamedTuple):
    """Send ``message`` to the agent whose return address is ``identity``."""

    identity: bytes
    message: SwitchMessage


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Open a job on the datapath, then tell the table by :meth:`JobTable.opened` how that went."""

    job_number: int
    epoch: int
    slot_base: int
    slots: int
    chunk_elems: int
    workers: tuple[tuple[str, int], ...]  # data (host, port) by rank
    multicast: tuple[str, int] | None  # group (host, port)


@dataclass(frozen=True, slots=True)
class SetResults:
    """From now on results of the job go by multicast, or by unicast to each worker."""

    job_number: int
    multicast: bool


@dataclass(frozen=True, slots=True)
class CloseJob:
    """Free the job's slots and addresses."""

    job_number: int


class SendStatus(NamedTuple):
    """``identity`` may see the status: collect it and send it as a StatusReply."""

    identity: bytes


class Event(NamedTuple):
    """A line for the switch's log."""

    text: str


Action = Reply | OpenJob | SetResults | CloseJob | SendStatus | Event
