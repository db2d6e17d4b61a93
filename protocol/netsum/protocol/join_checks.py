"""What can be wrong with a Join, taken by itself: checked before the table looks at any job."""

from __future__ import annotations

import ipaddress

from netsum.protocol.control import PROTOCOL_VERSION, Join
from netsum.protocol.job import describe_join
from netsum.protocol.wire import CHUNK_ELEMS_BY_SIZE_CODE, data_bytes

#: Longest text, in characters, of each field: what a member may occupy in the switch's memory.
MAX_FIELD_CHARS = {"job": 128, "run_id": 64, "host_name": 255, "software_version": 64, "data_host": 15}
MIN_CHUNK_ELEMS = min(CHUNK_ELEMS_BY_SIZE_CODE.values())
MIN_SLOTS = 4


class Refusal(Exception):  # noqa: N818  (a protocol answer, not a failure of ours)
    """Why somebody is refused; ``code`` is one of :data:`netsum.protocol.control.REFUSALS`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def check_join(join: Join, max_world_size: int, total_slots: int) -> None:
    """Raises :class:`Refusal`."""
    if join.protocol_version != PROTOCOL_VERSION:
        raise Refusal(
            "version",
            f"this switch speaks protocol version {PROTOCOL_VERSION}, the worker ({join.software_version[:64]}) speaks "
            f"{join.protocol_version}; install the same netsum on both",
        )
    for name, max_chars in MAX_FIELD_CHARS.items():
        value = getattr(join, name)
        if len(value) > max_chars or not value.isprintable():
            raise Refusal("malformed", f"{name} must be at most {max_chars} printable characters, it has {len(value)}")
    if not join.job or not join.run_id:
        raise Refusal("malformed", "job and run_id must not be empty")
    _check_address(join)
    if join.max_chunk_elems < MIN_CHUNK_ELEMS:
        raise Refusal(
            "malformed",
            f"{describe_join(join)}: its path carries {join.max_chunk_elems} elements a packet, at least {MIN_CHUNK_ELEMS} "
            "are needed; raise the MTU",
        )
    if not 0 <= join.slots_wanted <= total_slots:
        raise Refusal(
            "no_slots", f"{describe_join(join)} wants {join.slots_wanted} slots, the switch has {total_slots}"
        )
    if not 1 <= join.world_size <= max_world_size:
        raise Refusal(
            "world_size",
            f"{describe_join(join)} says the world size is {join.world_size}; this switch serves 1 to {max_world_size} workers",
        )
    if not 0 <= join.rank < join.world_size:
        raise Refusal(
            "rank_range",
            f"{describe_join(join)} is outside of world size {join.world_size}: ranks are 0 to {join.world_size - 1}",
        )


def _check_address(join: Join) -> None:
    """A switch that sends to a group or to everybody because a worker said so would be a weapon."""
    try:
        address = ipaddress.IPv4Address(join.data_host)
    except ValueError:
        raise Refusal("malformed", f"data_host {join.data_host!r} is not an IPv4 address") from None
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        raise Refusal("malformed", f"data_host {address} is not the address of one host")
    if not 1 <= join.data_port <= 65535:
        raise Refusal("malformed", f"data_port {join.data_port} is not in 1..65535")
    if join.pid < 0:
        raise Refusal("malformed", f"pid {join.pid} is negative")


def slots_for(wanted: int, default: int) -> int:
    """The power of two that serves ``wanted`` slots (0: ``default``)."""
    return max(MIN_SLOTS, 1 << ((wanted or default) - 1).bit_length())


def slots_that_fit(receive_buffer_bytes: int, world_size: int, chunk_elems: int) -> int:
    """Largest power of two of slots whose packets from all workers at once fit the socket's buffer; at least MIN_SLOTS.

    More would only be dropped there. Linux grants some 208 KB unless net.core.rmem_max is raised.
    """
    fitting = receive_buffer_bytes // (world_size * data_bytes(chunk_elems))
    return max(MIN_SLOTS, 1 << max(fitting.bit_length() - 1, 0))


def chunk_elems_for(limit: int) -> int:
    """Largest packet size, in elements, that is at most ``limit`` (≥ 64)."""
    return max(elems for elems in CHUNK_ELEMS_BY_SIZE_CODE.values() if elems <= limit)
