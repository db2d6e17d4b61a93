"""Where the peers of a job meet, and whom rank 0 lets in. Pure: no socket in here."""

from __future__ import annotations

import hmac
import ipaddress
import zlib
from dataclasses import dataclass

from netsum.host_agent.peer_messages import Hello, Refused, hello_proof
from netsum.host_agent.settings import Settings
from netsum.protocol.errors import UsageError

_FIRST_PORT = 20_000
_PORTS = 10_000


@dataclass(frozen=True)
class Identity:
    """Who this worker says it is."""

    job: str
    rank: int
    world_size: int
    secret: str | None = None


def default_port(job: str, master_port: str = "") -> int:
    """The job's own rendezvous port: 20000 + CRC-32 of job and MASTER_PORT modulo 10000. All ranks compute the same."""
    return _FIRST_PORT + zlib.crc32(f"{job}\0{master_port}".encode()) % _PORTS


def rendezvous_address(
    rendezvous: str | None, job: str, switch_host: str | None, settings: Settings
) -> tuple[str, int]:
    """(host, port) where rank 0 listens.

    In this order: the argument, NETSUM_RENDEZVOUS, MASTER_ADDR with the job's own port, and 127.0.0.1 with that port when
    everything is on one machine as far as we can see (no switch, or a switch on loopback). Raises :class:`UsageError`.
    """
    given = rendezvous or settings.rendezvous
    if given:
        return parse_host_port(given, "rendezvous")
    port = default_port(job, settings.master_port)
    if settings.master_addr:
        return settings.master_addr, port
    if switch_host is None or is_loopback(switch_host):
        return "127.0.0.1", port
    raise UsageError(
        f"the switch is at {switch_host}, so the ranks may be on several machines, and nothing says where rank 0 is: "
        'pass rendezvous="host:port" or set NETSUM_RENDEZVOUS (or MASTER_ADDR) to an address of rank 0\'s machine'
    )


def parse_host_port(text: str, what: str) -> tuple[str, int]:
    """("host", port) of "host:port", "tcp://" allowed in front; raises :class:`UsageError` naming ``what``."""
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{what} {text!r} is not of the form host:port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Registry:
    """Rank 0's list of who has come. Decides; the caller talks.

    ``member`` is any token for the connection that a worker came by: a worker that leaves before the job is complete frees its rank.
    """

    def __init__(self, identity: Identity, host: str, port: int, host_name: str, pid: int) -> None:
        self._identity = identity
        own = Hello(identity.job, 0, identity.world_size, host, port, host_name, pid)
        self._members: dict[int, tuple[object, Hello, str]] = {0: (None, own, f"{host}:{port}")}
        self.notes: list[str] = []  # refused attempts, oldest first

    @property
    def missing_ranks(self) -> list[int]:
        return [r for r in range(self._identity.world_size) if r not in self._members]

    @property
    def complete(self) -> bool:
        return not self.missing_ranks

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Listening address of each rank; only when complete."""
        return [
            (hello.host, hello.port) for _, hello, _ in (self._members[r] for r in range(self._identity.world_size))
        ]

    def members(self) -> list[object]:
        """The tokens of all but rank 0."""
        return [member for member, _, _ in self._members.values() if member is not None]

    def admit(self, member: object, hello: Hello, remote: str, nonce: bytes) -> Refused | None:
        """Enters a worker, or says why not. ``remote``: the address that it comes from."""
        refused = self._judge(hello, remote, nonce)
        if refused is None:
            self._members[hello.rank] = (member, hello, remote)
        else:
            self.notes.append(refused.text)
        return refused

    def forget(self, member: object) -> int | None:
        """The worker's connection is gone: its rank, or None when it was not entered."""
        for rank, (known, _, _) in self._members.items():
            if known is member and member is not None:
                del self._members[rank]
                return rank
        return None

    def _judge(self, hello: Hello, remote: str, nonce: bytes) -> Refused | None:
        me = self._identity
        holder = self._describe(0)
        who = f"rank {hello.rank} at {remote} ({hello.host_name}, pid {hello.pid})"
        if me.secret is not None and not hmac.compare_digest(hello.proof, hello_proof(me.secret, nonce, hello)):
            return Refused("secret", f"{who} does not know the secret of job {me.job!r}; {holder} refuses it")
        if hello.job != me.job:
            return Refused(
                "other_job",
                f"{who} is of job {hello.job!r}, but the rendezvous belongs to {holder} of job {me.job!r}: "
                "use one job name, or one rendezvous for each job",
            )
        if hello.world_size != me.world_size:
            return Refused(
                "world_size",
                f"{who} says the world size is {hello.world_size}, {holder} says it is {me.world_size}",
            )
        if not 0 <= hello.rank < me.world_size:
            return Refused(
                "rank_range", f"{who} is not in 0..{me.world_size - 1}: {holder} says the world size is {me.world_size}"
            )
        if hello.rank in self._members:
            return Refused(
                "duplicate_rank",
                f"rank {hello.rank} is there twice: {self._describe(hello.rank)} has it, {who} wants it; "
                f"the world size is {me.world_size}, each rank must be started once",
            )
        return None

    def _describe(self, rank: int) -> str:
        _, hello, remote = self._members[rank]
        return f"rank {rank} at {remote} ({hello.host_name}, pid {hello.pid})"
