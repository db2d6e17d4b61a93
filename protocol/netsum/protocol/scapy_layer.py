"""The data packet as a scapy layer, written from SPEC.md section 1 and sharing no code with the other codecs.

Tests build and read packets with it; people look at captures with it::

    >>> from scapy.utils import rdpcap                       # doctest: +SKIP
    >>> bind_port(48864); rdpcap("capture.pcap").show()      # doctest: +SKIP

Elements stay raw bytes in dissection (scapy is slow on long lists); :func:`elements_of` turns them into integers.
"""

from __future__ import annotations

import struct
from typing import Any, cast

from scapy.fields import (
    BitEnumField,
    BitField,
    ByteField,
    ConditionalField,
    FieldListField,
    SignedByteField,
    StrField,
    StrLenField,
    X3BytesField,
)
from scapy.layers.inet import UDP
from scapy.packet import Packet, bind_layers

_TYPES = {1: "DATA", 2: "PENDING", 3: "EXPONENTS", 5: "PROBE"}
_ELEMENTS = {1: 64, 3: 256, 4: 512, 5: 1024, 6: 2048}


def _elements(packet: Packet) -> int:
    return _ELEMENTS.get(packet.size_code, 0)


class NetsumPacket(Packet):
    """Header, exponents, payload. ``number`` is the low 24 bits of tsi, ``epoch`` its high 8; ``slot`` excludes the version bit.

    ``exponents`` is the list e0, e1, e0, e1, …; ``elements`` the big-endian int32 as bytes; ``missing`` the bitmap of PENDING.
    """

    name = "netsum"
    fields_desc = [  # noqa: RUF012 - scapy's way
        BitEnumField("msg_type", 1, 4, _TYPES),
        BitField("unused", 0, 1),
        BitField("size_code", 3, 3),
        ByteField("job_number", 0),
        ByteField("epoch", 0),
        X3BytesField("number", 0),
        BitField("version", 0, 1),
        BitField("slot", 0, 15),
        ConditionalField(
            FieldListField(
                "exponents",
                cast("Any", [-128, 0]),
                SignedByteField("exponent", 0),
                count_from=lambda packet: 2 * max(1, _elements(packet) // 256),
            ),
            lambda packet: packet.msg_type in (1, 3),
        ),
        ConditionalField(
            StrLenField("elements", b"", length_from=lambda packet: 4 * _elements(packet)),
            lambda packet: packet.msg_type == 1,
        ),
        ConditionalField(StrField("missing", b""), lambda packet: packet.msg_type == 2),
    ]

    def mysummary(self) -> str:
        """One line for ``packet.summary()``."""
        kind = _TYPES.get(self.msg_type, str(self.msg_type))
        return f"netsum {kind} job {self.job_number} epoch {self.epoch} number {self.number} slot {self.slot}v{self.version}"


_new_packet: Any = NetsumPacket  # scapy makes keyword arguments of its fields


def bind_port(port: int) -> None:
    """Dissects UDP datagrams from and to ``port`` as netsum packets (the published ports 48864..48879 are bound already)."""
    bind_layers(UDP, NetsumPacket, dport=port)
    bind_layers(UDP, NetsumPacket, sport=port)


def elements_of(packet: Any) -> list[int]:
    """The int32 elements of a DATA packet."""
    raw: bytes = packet.elements
    return list(struct.unpack(f">{len(raw) // 4}i", raw))


def data_packet(*, elements: list[int], size_code: int, exponents: list[int], **fields: int) -> NetsumPacket:
    """A DATA packet; ``fields`` are header fields by name."""
    packet: NetsumPacket = _new_packet(
        msg_type=1,
        size_code=size_code,
        exponents=exponents,
        elements=struct.pack(f">{len(elements)}i", *elements),
        **fields,
    )
    return packet


for _port in range(0xBEE0, 0xBEF0):
    bind_port(_port)
