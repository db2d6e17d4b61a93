"""What the environment says: the one place of the host agent that reads it.

=========================  =============================================================================================
variable                   meaning
=========================  =============================================================================================
NETSUM_SWITCH              control address of the switch, "tcp://host:port" (read by the DDP hook and the tools)
NETSUM_RENDEZVOUS          "host:port" where rank 0 listens for its peers
MASTER_ADDR, MASTER_PORT   torchrun's; the host of the rendezvous, and a part of the default port's hash
NETSUM_SECRET              shared secret of the job, when ``connect(secret=...)`` is not given
NETSUM_CONNECT_TIMEOUT_S   seconds until a switch that does not answer is given up (default 5)
NETSUM_CHUNK_ELEMS         elements in a packet: 64, 256, 512, 1024 or 2048 (default: the largest that the path MTU carries)
NETSUM_SLOTS               slots to ask the switch for (default 0: the switch chooses)
NETSUM_FAULTS              faults this agent injects into its own data path, both directions, for tests and demonstrations:
                           "loss=1%,duplicate=5%,reorder=25%,delay=0-20ms,corrupt=0.1%,seed=7"; each rank adds its rank to the seed
=========================  =============================================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from netsum.protocol.errors import UsageError
from netsum.protocol.wire import SIZE_CODE_BY_CHUNK_ELEMS

_N = TypeVar("_N", int, float)

CHUNK_ELEMS = tuple(SIZE_CODE_BY_CHUNK_ELEMS)
_TIME_UNITS_US = {"us": 1, "ms": 1_000, "s": 1_000_000}


@dataclass(frozen=True)
class Faults:
    """Seeded faults of the data path; rates are probabilities per datagram, 0..1, each way."""

    seed: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_min_us: int = 0
    delay_max_us: int = 0
    corrupt: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The environment, parsed. ``None`` and "" mean: not set."""

    switch: str = ""
    rendezvous: str = ""
    master_addr: str = ""
    master_port: str = ""
    secret: str | None = None
    connect_timeout_s: float = 5.0
    chunk_elems: int | None = None
    slots: int = 0
    faults: Faults | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
        """Raises :class:`UsageError` naming the variable and its value."""
        env = os.environ if environment is None else environment
        chunk_elems = _number(env, "NETSUM_CHUNK_ELEMS", int, None)
        if chunk_elems is not None and chunk_elems not in CHUNK_ELEMS:
            raise UsageError(f"NETSUM_CHUNK_ELEMS={chunk_elems}: must be one of {CHUNK_ELEMS}")
        connect_timeout_s = _number(env, "NETSUM_CONNECT_TIMEOUT_S", float, 5.0)
        if not connect_timeout_s or connect_timeout_s < 0:
            raise UsageError(f"NETSUM_CONNECT_TIMEOUT_S={connect_timeout_s}: must be above 0")
        faults = env.get("NETSUM_FAULTS", "")
        return Settings(
            switch=env.get("NETSUM_SWITCH", ""),
            rendezvous=env.get("NETSUM_RENDEZVOUS", ""),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=env.get("MASTER_PORT", ""),
            secret=env.get("NETSUM_SECRET") or None,
            connect_timeout_s=connect_timeout_s,
            chunk_elems=chunk_elems,
            slots=_number(env, "NETSUM_SLOTS", int, 0) or 0,
            faults=parse_faults(faults) if faults else None,
        )


def parse_faults(text: str) -> Faults:
    """``"loss=1%,delay=0-20ms,seed=7"`` as :class:`Faults`; raises :class:`UsageError`."""
    values: dict[str, float | int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        try:
            if name == "seed":
                values["seed"] = int(value)
            elif name == "delay":
                values["delay_min_us"], values["delay_max_us"] = _delay_us(value)
            elif name in ("loss", "duplicate", "reorder", "corrupt"):
                values[name] = _probability(value)
            else:
                raise ValueError("known are loss, duplicate, reorder, delay, corrupt, seed")
        except ValueError as error:
            raise UsageError(f"NETSUM_FAULTS={text!r}: {item!r}: {error}") from None
    return Faults(**values)  # type: ignore[arg-type]


def _probability(text: str) -> float:
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value <= 1:
        raise ValueError("a probability must be in 0..1 or 0%..100%")
    return value


def _delay_us(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:([\d.]+)-)?([\d.]+)(us|ms|s)", text)
    if not match:
        raise ValueError("a delay is written like 20ms or 0-20ms (us, ms, s)")
    unit = _TIME_UNITS_US[match[3]]
    longest = round(float(match[2]) * unit)
    shortest = longest if match[1] is None else round(float(match[1]) * unit)
    if shortest > longest:
        raise ValueError("the shorter delay comes first")
    return shortest, longest


def _number(env: Mapping[str, str], name: str, kind: type[_N], default: _N | None) -> _N | None:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name}={text!r}: not a number") from None
