"""The software switch in C++: packets never meet the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from netsum.native import NativeSwitch
from netsum.protocol.fixed_point import MAX_WORLD_SIZE
from netsum.protocol.job_actions import DatapathFeatures, OpenJob
from netsum.switch.datapaths.base import DatapathSettings, random_multicast_group


class NativeDatapath:
    """See :class:`netsum.switch.datapaths.base.Datapath`."""

    name = "native"

    def __init__(self, settings: DatapathSettings) -> None:
        self._switch = NativeSwitch(settings.host, settings.port, settings.receive_buffer_bytes, settings.multicast)
        host, port = self._switch.address
        prefix, group_port = random_multicast_group() if settings.multicast else ("", 0)
        self._features = DatapathFeatures(
            data_host=host,
            data_port=port,
            max_world_size=MAX_WORLD_SIZE,
            max_chunk_elems=settings.max_chunk_elems,
            multicast_prefix=prefix,
            multicast_port=group_port,
            receive_buffer_bytes=self.receive_buffer_bytes,
        )

    @property
    def features(self) -> DatapathFeatures:
        return self._features

    @property
    def receive_buffer_bytes(self) -> int:
        return int(self._switch.receive_buffer_granted_bytes)

    def open_job(self, job: OpenJob) -> None:
        self._switch.open_job(
            job_number=job.job_number,
            epoch=job.epoch,
            slot_base=job.slot_base,
            slots=job.slots,
            chunk_elems=job.chunk_elems,
            workers=list(job.workers),
            multicast=job.multicast,
        )

    def set_results(self, job_number: int, multicast: bool) -> None:
        self._switch.set_results(job_number, multicast)

    def close_job(self, job_number: int) -> None:
        self._switch.close_job(job_number)

    def counters(self) -> dict[str, int]:
        return dict(self._switch.counters())

    def job_counters(self, job_number: int) -> dict[str, int]:
        return dict(self._switch.job_counters(job_number))

    def slots_in_use(self, job_number: int) -> int:
        return int(self._switch.slots_in_use(job_number))

    def awaited_ranks(self, job_number: int) -> Sequence[int]:
        return list(self._switch.awaited_ranks(job_number))

    def close(self) -> None:
        self._switch.close()
