"""The status of a switch as one JSON-able tree: what `netsum status` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from netsum.protocol.control import PROTOCOL_VERSION
from netsum.switch.datapaths.base import Datapath

DROP_PREFIX = "drop_"


@dataclass(frozen=True, slots=True)
class StatusSource:
    """What the status is made of. ``table``: :meth:`netsum.protocol.job_table.JobTable.status`."""

    software_version: str
    uptime_us: int
    control_endpoint: str
    datapath: Datapath
    table: dict[str, Any]
    control_counters: dict[str, int]


def collect_status(source: StatusSource) -> dict[str, Any]:
    """Counters never go down; ``drops`` are by reason (SPEC.md section 4), without those that are 0."""
    datapath, features = source.datapath, source.datapath.features
    return {
        "software_version": source.software_version,
        "protocol_version": PROTOCOL_VERSION,
        "uptime_s": round(source.uptime_us / 1e6, 3),
        "control": source.control_endpoint,
        "data": f"{features.data_host}:{features.data_port}",
        "datapath": {
            "name": datapath.name,
            "max_chunk_elems": features.max_chunk_elems,
            "max_world_size": features.max_world_size,
            "multicast_groups": f"{features.multicast_prefix}.0/24" if features.multicast_prefix else "",
            "receive_buffer_bytes": datapath.receive_buffer_bytes,
            **_split(datapath.counters()),
        },
        "slots_total": source.table["slots_total"],
        "slots_taken": source.table["slots_taken"],
        "jobs": [_job_status(job, datapath) for job in source.table["jobs"]],
        "refused": source.table["refused"],
        "control_counters": {**source.table["counters"], **source.control_counters},
    }


def _job_status(job: dict[str, Any], datapath: Datapath) -> dict[str, Any]:
    number = job["job_number"]
    if job["phase"] not in ("probing", "running"):
        return job
    return {
        **job,
        "slots_in_use": datapath.slots_in_use(number),
        "awaited_ranks": list(datapath.awaited_ranks(number)),
        **_split(datapath.job_counters(number)),
    }


def _split(counters: dict[str, int]) -> dict[str, dict[str, int]]:
    drops = {k.removeprefix(DROP_PREFIX): v for k, v in counters.items() if k.startswith(DROP_PREFIX) and v}
    return {"counters": {k: v for k, v in counters.items() if not k.startswith(DROP_PREFIX)}, "drops": drops}
