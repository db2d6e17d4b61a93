"""The data packet: SwitchML's UDP layout (SPEC.md section 1), packed and unpacked.

If you add a message type or a size code: also SPEC.md, ``native/include/netsum/wire.hpp``, ``scapy_layer.py`` and the P4 headers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

HEADER_BYTES = 8
BYTES_PER_EXPONENT_PAIR = 2
BLOCK_ELEMS = 256

#: Bytes that IPv4 (without options) and UDP put before a datagram's payload.
IP_UDP_HEADER_BYTES = 28

#: Elements by size code; the codes not listed are reserved.
CHUNK_ELEMS_BY_SIZE_CODE = {1: 64, 3: 256, 4: 512, 5: 1024, 6: 2048}
SIZE_CODE_BY_CHUNK_ELEMS = {elems: code for code, elems in CHUNK_ELEMS_BY_SIZE_CODE.items()}

NUMBER_BITS = 24
NUMBER_MASK = (1 << NUMBER_BITS) - 1
VERSION_BIT = 0x8000
SLOT_MASK = 0x7FFF

_HEADER = struct.Struct(">BBIH")


class MsgType(IntEnum):
    DATA = 1  # exponents and payload
    PENDING = 2  # switch's answer to a repeated contribution: who is missing
    EXPONENTS = 3  # exponents only; the payload is zeros that are not sent
    PROBE = 5  # is this path open, for datagrams of this size?


@dataclass(frozen=True, slots=True)
class Header:
    """The 8 bytes that every data packet starts with. Fields as in SPEC.md section 1."""

    msg_type: int
    size_code: int
    job_number: int
    tsi: int
    pool_index: int

    @property
    def epoch(self) -> int:
        return self.tsi >> NUMBER_BITS

    @property
    def number(self) -> int:
        """Running packet number modulo 2^24."""
        return self.tsi & NUMBER_MASK

    @property
    def version(self) -> int:
        return self.pool_index >> 15

    @property
    def slot(self) -> int:
        return self.pool_index & SLOT_MASK

    def pack(self) -> bytes:
        return _HEADER.pack(self.msg_type << 4 | self.size_code, self.job_number, self.tsi, self.pool_index)


def unpack_header(datagram: bytes | memoryview) -> Header:
    """The header of ``datagram``. Raises :class:`struct.error` below 8 bytes."""
    first, job_number, tsi, pool_index = _HEADER.unpack_from(datagram)
    return Header(first >> 4, first & 7, job_number, tsi, pool_index)


def exponent_pairs(chunk_elems: int) -> int:
    """Pairs (e0, e1) in a packet: one for each block, one for a part of a block."""
    return max(1, chunk_elems // BLOCK_ELEMS)


def exponents_bytes(chunk_elems: int) -> int:
    """Datagram bytes up to and including the exponents."""
    return HEADER_BYTES + BYTES_PER_EXPONENT_PAIR * exponent_pairs(chunk_elems)


def data_bytes(chunk_elems: int) -> int:
    """Datagram bytes of a DATA packet."""
    return exponents_bytes(chunk_elems) + 4 * chunk_elems


def pending_bytes(world_size: int) -> int:
    """Datagram bytes of a PENDING packet."""
    return HEADER_BYTES + (world_size + 7) // 8


def max_chunk_elems(mtu_bytes: int) -> int:
    """Largest chunk whose DATA packet fits an IPv4 packet of ``mtu_bytes``; 0 when none does."""
    fitting = [e for e in SIZE_CODE_BY_CHUNK_ELEMS if data_bytes(e) + IP_UDP_HEADER_BYTES <= mtu_bytes]
    return max(fitting, default=0)


def serial_less(a: int, b: int) -> bool:
    """``a`` is before ``b`` as 24-bit serial numbers (the idea of RFC 1982)."""
    return 1 <= (b - a) & NUMBER_MASK <= NUMBER_MASK >> 1
