"""Drives a job table in tests: workers by name, a model of the datapath that refuses what a real one would, time by hand."""

from __future__ import annotations

import random
from typing import TypeVar

from netsum.protocol import control
from netsum.protocol.job_actions import (
    Action,
    CloseJob,
    DatapathFeatures,
    Event,
    OpenJob,
    Reply,
    SendStatus,
    SetResults,
)
from netsum.protocol.job_settings import JobTableSettings
from netsum.protocol.job_table import JobTable

FEATURES = DatapathFeatures(
    "127.0.0.1", 48864, max_world_size=64, max_chunk_elems=2048, multicast_prefix="239.1.2", multicast_port=50000
)
SECOND_US = 1_000_000

Kind = TypeVar("Kind", bound=control.Message)


def join(rank: int = 0, world_size: int = 2, **fields: object) -> control.Join:
    values: dict[str, object] = {
        "protocol_version": control.PROTOCOL_VERSION,
        "software_version": "test",
        "job": "train",
        "run_id": "run-a",
        "rank": rank,
        "world_size": world_size,
        "data_host": "127.0.0.1",
        "data_port": 4000 + rank,
        "max_chunk_elems": 2048,
        "slots_wanted": 0,
        "host_name": f"host{rank}",
        "pid": 100 + rank,
    }
    return control.Join(**(values | fields))


class Driver:
    """``open_jobs``: what the datapath has now, by job number. ``inbox``: messages to each identity that were not taken yet."""

    def __init__(self, features: DatapathFeatures = FEATURES, **settings: object) -> None:
        rng = random.Random(7)
        self.table = JobTable(
            JobTableSettings(**settings), features, awaited_ranks=lambda number: [number], random_bytes=rng.randbytes
        )
        self.now_us = 5_000_000
        self.inbox: dict[bytes, list[control.Message]] = {}
        self.open_jobs: dict[int, OpenJob] = {}
        self.opened: list[OpenJob] = []
        self.results: dict[int, bool] = {}
        self.status_sent_to: list[bytes] = []
        self.events: list[str] = []
        self.open_error: str | None = None
        self.gone: set[bytes] = set()

    # -- steps -----------------------------------------------------------------------------------------------------

    def send(self, identity: bytes, message: control.AgentMessage) -> None:
        frame = control.encode(message)
        self.run(self.table.handle(identity, control.decode_from_agent(frame), "127.0.0.1", self.now_us))

    def advance(self, duration_us: int, beating: tuple[tuple[bytes, str], ...] = ()) -> None:
        """Time passes; the table is ticked at each of its deadlines; members in ``beating`` send their heartbeats."""
        end_us = self.now_us + duration_us
        interval_us = self.table.settings.heartbeat_interval_us
        next_beat_us = self.now_us + interval_us if beating else end_us + 1
        while True:
            deadline_us = self.table.next_deadline_us
            step_us = min(end_us, next_beat_us, end_us if deadline_us is None else max(deadline_us, self.now_us))
            self.now_us = step_us
            if step_us == next_beat_us:
                next_beat_us += interval_us
                for identity, token in beating:
                    self.send(identity, control.Heartbeat(token, 0, 0))
            self.run(self.table.tick(self.now_us))
            if step_us == end_us:
                return

    def run(self, actions: list[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case Reply(identity, message):
                    if identity in self.gone:
                        todo += self.table.unreachable(identity, self.now_us)
                    else:
                        decoded = control.decode_from_switch(control.encode(message))
                        self.inbox.setdefault(identity, []).append(decoded)
                case OpenJob() as job:
                    todo += self.table.opened(job.job_number, self._open(job), self.now_us)
                case SetResults(job_number=number, multicast=multicast):
                    self.results[number] = multicast
                case CloseJob(job_number=number):
                    self.open_jobs.pop(number, None)
                case SendStatus(identity):
                    self.status_sent_to.append(identity)
                case Event(text):
                    self.events.append(text)

    def _open(self, job: OpenJob) -> str | None:
        if self.open_error is not None:
            return self.open_error
        assert job.job_number not in self.open_jobs
        taken = {
            slot for other in self.open_jobs.values() for slot in range(other.slot_base, other.slot_base + other.slots)
        }
        assert not taken & set(range(job.slot_base, job.slot_base + job.slots))
        assert not {w for other in self.open_jobs.values() for w in other.workers} & set(job.workers)
        self.open_jobs[job.job_number] = job
        self.opened.append(job)
        return None

    # -- looks -----------------------------------------------------------------------------------------------------

    def take(self, identity: bytes) -> list[control.Message]:
        return self.inbox.pop(identity, [])

    def last(self, identity: bytes, kind: type[Kind]) -> Kind:
        """The newest message to ``identity``, which must be of ``kind``; empties the inbox."""
        message = self.take(identity)[-1]
        assert isinstance(message, kind), message
        return message

    # -- scripts ---------------------------------------------------------------------------------------------------

    def join_all(self, world_size: int = 2, prefix: bytes = b"w", **fields: object) -> dict[bytes, str]:
        """All ranks join; {identity: token}."""
        names = [prefix + str(rank).encode() for rank in range(world_size)]
        for rank, name in enumerate(names):
            self.send(name, join(rank, world_size, **fields))
        return {name: self.last(name, control.Welcome).member for name in names}

    def start_all(self, world_size: int = 2, prefix: bytes = b"w", **fields: object) -> dict[bytes, str]:
        """All ranks join and are ready; {identity: token} of the running job."""
        members = self.join_all(world_size, prefix, **fields)
        for name, token in members.items():
            self.send(name, control.Ready(token, True, True, ""))
        for name in members:
            self.last(name, control.Started)
        return members
