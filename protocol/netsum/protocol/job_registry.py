"""What is taken on a switch: job names, job numbers and their epochs, slots, data addresses, members' tokens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from netsum.protocol.control import Join
from netsum.protocol.job import Job, Member, Phase
from netsum.protocol.job_settings import JOB_NUMBERS
from netsum.protocol.slot_ranges import SlotRanges

MAX_NOTES = 8  # of a job, in one message
MAX_REMEMBERED = 256  # refused attempts of all jobs; tokens of ended jobs


class JobRegistry:
    """Invariants: an active job's number and slots are its own; of the incarnations of a name only the eldest is ever active.

    A job number is reused as late as possible and under its next epoch. First epochs are random: another switch process may have
    run at this address a moment ago, and its datagrams may still be on their way.
    """

    def __init__(self, total_slots: int, random_bytes: Callable[[int], bytes]) -> None:
        self.slot_ranges = SlotRanges(total_slots)
        self._incarnations: dict[str, list[Job]] = {}  # by job name, eldest first
        self._tokens: dict[str, tuple[Job, Member]] = {}  # of active jobs
        self._ended: OrderedDict[str, str] = OrderedDict()  # token of a failed job → why
        self._refused: deque[tuple[str, int, str]] = deque(maxlen=MAX_REMEMBERED)  # (job name, when, text)
        self._free_numbers = deque(range(JOB_NUMBERS))
        self._epochs = list(random_bytes(JOB_NUMBERS))

    # -- jobs ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Job]:
        """All jobs; a snapshot, so that jobs may go while one iterates."""
        return iter([job for incarnations in self._incarnations.values() for job in incarnations])

    def __contains__(self, job: Job) -> bool:
        return any(job is known for known in self._incarnations.get(job.name, ()))

    def __len__(self) -> int:
        return sum(map(len, self._incarnations.values()))

    @property
    def member_count(self) -> int:
        return sum(len(job.members) for job in self)

    def find(self, name: str, run_id: str) -> Job | None:
        return next((job for job in self._incarnations.get(name, ()) if job.run_id == run_id), None)

    def add(self, job: Job) -> None:
        self._incarnations.setdefault(job.name, []).append(job)

    def eldest(self, name: str) -> Job | None:
        """The incarnation that has the name; others wait for its end."""
        return next(iter(self._incarnations.get(name, ())), None)

    def younger(self, job: Job) -> list[Job]:
        """Incarnations that wait for the end of ``job``."""
        incarnations = self._incarnations[job.name]
        return incarnations[1:] if incarnations[0] is job else []

    def activate(self, job: Job, slots: int) -> bool:
        """Gives the job a number, an epoch and ``slots`` slots; False when there are not enough in a row."""
        slot_base = self.slot_ranges.allocate(slots)
        if slot_base is None:
            return False
        job.phase = Phase.OPENING
        job.slot_base, job.slots = slot_base, slots
        job.job_number = self._free_numbers.popleft()
        job.epoch = self._epochs[job.job_number] = (self._epochs[job.job_number] + 1) % 256
        self._tokens.update({member.token: (job, member) for member in job.members.values()})
        return True

    def remove(self, job: Job) -> None:
        """Forgets the job and takes back what it had."""
        if job.phase is not Phase.JOINING:
            self.slot_ranges.free(job.slot_base, job.slots)
            self._free_numbers.append(job.job_number)
            for member in job.members.values():
                del self._tokens[member.token]
        incarnations = [other for other in self._incarnations.pop(job.name) if other is not job]
        if incarnations:
            self._incarnations[job.name] = incarnations

    # -- members ---------------------------------------------------------------------------------------------------

    def member(self, token: str) -> tuple[Job, Member] | None:
        return self._tokens.get(token)

    def holder_of_address(self, join: Join) -> tuple[Job, Member] | None:
        """Who has the data address that ``join`` brings.

        Other incarnations of its job do not count: a restarted worker may well have the port of its predecessor.
        """
        for job in self:
            if job.name == join.job and job.run_id != join.run_id:
                continue
            for member in job.active_members:
                if (member.join.data_host, member.join.data_port) == (join.data_host, join.data_port):
                    return job, member
        return None

    # -- memory for texts ------------------------------------------------------------------------------------------

    def remember_end(self, job: Job, text: str) -> None:
        """Why the job failed, for members that ask later."""
        for member in job.members.values():
            self._ended[member.token] = text
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def why_ended(self, token: str) -> str | None:
        return self._ended.get(token)

    def remember_refusal(self, name: str, text: str, now_us: int) -> bool:
        """For those who wait in job ``name``. False when the same was known already."""
        if any((name, text) == (known, known_text) for known, _, known_text in self._refused):
            return False
        self._refused.append((name, now_us, text))
        return True

    def refusals(self, name: str | None = None, since_us: int | None = None) -> list[str]:
        """The latest texts, at most 8, of one job or of all."""
        texts = [
            text
            for known, when_us, text in self._refused
            if (name is None or known == name) and (since_us is None or when_us >= since_us)
        ]
        return texts[-MAX_NOTES:]
