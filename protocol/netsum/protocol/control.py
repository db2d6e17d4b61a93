"""Messages of the control channel between an agent and a switch (SPEC.md section 6).

One message is one ZeroMQ frame: msgpack of a tagged struct. The agent's DEALER talks to the switch's ROUTER; the identity of the
DEALER is the return address. The switch answers each request; :class:`Waiting`, :class:`Started` and :class:`JobFailed` also come unasked.

========================================  =======================================================================
agent → switch                            switch → agent
========================================  =======================================================================
:class:`Join`                             :class:`Challenge`, :class:`Waiting` (again and again), :class:`Refused`, :class:`Welcome`
:class:`Ready`                            :class:`Started` or :class:`JobFailed`, once all ranks are ready
:class:`Heartbeat`                        :class:`HeartbeatReply`, or :class:`Refused` with ``unknown_member``
:class:`Leave`                            :class:`Left`
:class:`StatusRequest`                    :class:`StatusReply`
========================================  =======================================================================
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec

PROTOCOL_VERSION = 1
DEFAULT_CONTROL_PORT = 48800
DEFAULT_DATA_PORT = 0xBEE0  # of the published range 0xBEE0..0xBEEF
MAX_CONTROL_MESSAGE_BYTES = 1 << 16

#: Causes of a refusal.
REFUSALS = (
    "version",  # protocol versions differ
    "malformed",  # not a message of this protocol, or a field out of range
    "secret",  # the proof is missing or wrong
    "rank_range",  # rank is not in 0..world_size-1
    "other_job",  # rank 0 only: the rendezvous belongs to a job of another name
    "world_size",  # differs from what the job's first member said, or more than the datapath can do
    "duplicate_rank",  # the rank is taken by a live member
    "job_running",  # the job of that name is running in another incarnation
    "no_slots",  # the slots or job numbers are used up
    "limits",  # a configured limit: jobs, members, message size
    "join_timeout",  # the job did not become complete in time
    "unknown_member",  # heartbeat, ready or leave of somebody who is not (or no longer) a member
)


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of the control messages."""


class Join(Message, frozen=True, tag="join"):
    """A worker wants to be ``rank`` of ``world_size`` in ``job``. Repeated (same member fields) until answered.

    ``run_id`` names the incarnation of the job: rank 0 draws it, peers share it. ``proof`` answers a :class:`Challenge`.
    """

    protocol_version: int
    software_version: str
    job: str
    run_id: str
    rank: int
    world_size: int
    data_host: str  # IPv4 address the worker's datagrams come from
    data_port: int
    max_chunk_elems: int  # largest the worker's path MTU carries
    slots_wanted: int  # 0: the switch chooses
    host_name: str
    pid: int
    proof: bytes = b""


class Challenge(Message, frozen=True, tag="challenge"):
    """Ask again with ``proof = join_proof(secret, nonce, join)``, or ``status_proof(secret, nonce)`` for the status."""

    nonce: bytes


class Waiting(Message, frozen=True, tag="waiting"):
    """The join is accepted; these ranks are not here yet. ``notes``: refused attempts and other reasons, as sentences."""

    missing_ranks: list[int]
    notes: list[str]


class Refused(Message, frozen=True, tag="refused"):
    code: str
    text: str


class Welcome(Message, frozen=True, tag="welcome"):
    """All ranks are here. Probe the data port, then send :class:`Ready`."""

    member: str  # token that names this member from now on
    job_number: int
    epoch: int
    slot_base: int
    slots: int
    chunk_elems: int
    short_exponents: bool
    pending: bool  # the datapath answers duplicates with PENDING
    data_host: str
    data_port: int
    multicast_host: str  # "" when results go by unicast only
    multicast_port: int
    heartbeat_interval_us: int
    lease_us: int
    software_version: str


class Ready(Message, frozen=True, tag="ready"):
    member: str
    data_ok: bool
    multicast_ok: bool
    text: str  # why not, when data_ok is False


class Started(Message, frozen=True, tag="started"):
    results: str  # "multicast" or "unicast"


class JobFailed(Message, frozen=True, tag="job_failed"):
    """The job cannot run on this switch (or no longer): all members are released."""

    text: str


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    member: str
    operations_started: int
    operations_completed: int


class HeartbeatReply(Message, frozen=True, tag="heartbeat_reply"):
    silent_ranks: list[int]  # members whose heartbeats stopped
    awaited_ranks: list[int]  # ranks that the oldest incomplete slot waits for


class Leave(Message, frozen=True, tag="leave"):
    member: str


class Left(Message, frozen=True, tag="left"):
    pass


class StatusRequest(Message, frozen=True, tag="status_request"):
    proof: bytes = b""


class StatusReply(Message, frozen=True, tag="status_reply"):
    status: dict[str, Any]


AgentMessage = Join | Ready | Heartbeat | Leave | StatusRequest
SwitchMessage = Challenge | Waiting | Refused | Welcome | Started | JobFailed | HeartbeatReply | Left | StatusReply

_encoder = msgspec.msgpack.Encoder()
_agent_decoder = msgspec.msgpack.Decoder(AgentMessage)
_switch_decoder = msgspec.msgpack.Decoder(SwitchMessage)


def encode(message: Message) -> bytes:
    """The frame for ``message``."""
    return _encoder.encode(message)


def decode_from_agent(frame: bytes) -> AgentMessage:
    """Raises :class:`msgspec.DecodeError` (or its subclass ValidationError) on anything else than an agent's message."""
    if len(frame) > MAX_CONTROL_MESSAGE_BYTES:
        raise msgspec.DecodeError(f"{len(frame)} bytes, at most {MAX_CONTROL_MESSAGE_BYTES} are allowed")
    return _agent_decoder.decode(frame)


def decode_from_switch(frame: bytes) -> SwitchMessage:
    """Raises :class:`msgspec.DecodeError` (or its subclass ValidationError) on anything else than a switch's message."""
    return _switch_decoder.decode(frame)


def join_proof(secret: str, nonce: bytes, join: Join) -> bytes:
    """HMAC-SHA256 of the nonce and all fields of ``join`` but the proof: who does not know ``secret`` cannot make it."""
    fields = msgspec.msgpack.encode(msgspec.structs.replace(join, proof=b""))
    return hmac.new(secret.encode(), nonce + fields, hashlib.sha256).digest()


def status_proof(secret: str, nonce: bytes) -> bytes:
    """The same for a :class:`StatusRequest`."""
    return hmac.new(secret.encode(), nonce + msgspec.msgpack.encode(StatusRequest()), hashlib.sha256).digest()
