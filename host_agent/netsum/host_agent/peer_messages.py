"""Messages of the peer channel: what the ranks of a job tell each other over TCP.

A frame is a length (uint32, big-endian) and that many bytes of msgpack, a tagged struct. Whoever accepts a connection speaks first:
:class:`Greeting` tells a netsum peer from anything else that listens, and carries the nonce for the proof.

A worker dials rank 0 with :class:`Hello` and gets :class:`Waiting` (again and again), :class:`Refused` or, when all are there,
:class:`Table`. Then everyone dials the ranks below with :class:`PeerHello`. After that a connection carries the last group, any time.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

PEER_PROTOCOL = "netsum-peers-1"
MAX_FRAME_BYTES = 1 << 20


class PeerMessage(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of the messages between peers."""


class Greeting(PeerMessage, frozen=True, tag="greeting"):
    protocol: str
    nonce: bytes


class Hello(PeerMessage, frozen=True, tag="hello"):
    """A worker presents itself to rank 0. ``host``, ``port``: where it listens for the ranks above it."""

    job: str
    rank: int
    world_size: int
    host: str
    port: int
    host_name: str
    pid: int
    proof: bytes = b""


class Waiting(PeerMessage, frozen=True, tag="waiting"):
    missing_ranks: list[int]
    notes: list[str]


class Refused(PeerMessage, frozen=True, tag="refused"):
    code: str
    text: str


class Table(PeerMessage, frozen=True, tag="table"):
    """All are there. ``addresses[r]``: where rank r listens. ``run_id`` names this incarnation of the job."""

    run_id: str
    addresses: list[tuple[str, int]]


class PeerHello(PeerMessage, frozen=True, tag="peer_hello"):
    """Opens a connection of the mesh ("control") or the ring's data connection to the next rank ("ring")."""

    run_id: str
    rank: int
    purpose: str


class Accepted(PeerMessage, frozen=True, tag="accepted"):
    """Answers :class:`PeerHello`; only then does the dialling side send anything else."""


class Description(msgspec.Struct, frozen=True):
    """One operation as one rank called it. ``call`` counts over both paths, ``operation`` on its path ("switch" or "ring")."""

    call: int
    path: str
    operation: int
    numel: int
    dtype: str
    op: str

    def __str__(self) -> str:
        return f"{self.op} of {self.numel} {self.dtype}"


class PathVote(PeerMessage, frozen=True, tag="path_vote"):
    """Could this rank reach the switch, control and data? ``text``: why not."""

    switch_ok: bool
    text: str


class Abort(PeerMessage, frozen=True, tag="abort"):
    """An operation failed at the sender, or it gives up; nothing it has not completed will ever complete."""

    reason: str
    description: Description | None
    missing_ranks: list[int]


class Where(PeerMessage, frozen=True, tag="where"):
    """Have you called this operation too? Asked when it takes long, and when it failed."""

    description: Description


class Here(PeerMessage, frozen=True, tag="here"):
    """Answers :class:`Where`: the same operation as this rank called it, None if it has not."""

    call: int
    description: Description | None


class Bye(PeerMessage, frozen=True, tag="bye"):
    """A clean end; how many operations the sender has completed on each path."""

    switch_operations: int
    ring_operations: int


class Ping(PeerMessage, frozen=True, tag="ping"):
    pass


AnyPeerMessage = (
    Greeting | Hello | Waiting | Refused | Table | PeerHello | Accepted | PathVote | Abort | Where | Here | Bye | Ping
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyPeerMessage)


def encode_frame(message: PeerMessage) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode_body(body: bytes | bytearray | memoryview) -> AnyPeerMessage:
    """Raises :class:`msgspec.DecodeError` on anything else than a peer's message."""
    return _decoder.decode(body)


def hello_proof(secret: str, nonce: bytes, hello: Hello) -> bytes:
    """HMAC-SHA256 of the nonce and all fields of ``hello`` but the proof."""
    fields = _encoder.encode(msgspec.structs.replace(hello, proof=b""))
    return hmac.new(secret.encode(), nonce + fields, hashlib.sha256).digest()
