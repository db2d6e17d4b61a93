"""The control plane as a pure state machine (SPEC.md section 6): agents' messages in; replies and datapath commands out.

No socket, no clock, no thread. The daemon feeds it, carries out the :data:`Action` list in order, and reports each :class:`OpenJob`
back by :meth:`JobTable.opened`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from netsum.protocol.challenge import Challenger, Proof
from netsum.protocol.control import (
    AgentMessage,
    Challenge,
    Heartbeat,
    HeartbeatReply,
    JobFailed,
    Join,
    Leave,
    Left,
    Ready,
    Refused,
    Started,
    StatusRequest,
    join_proof,
    status_proof,
)
from netsum.protocol.job import Job, Member, Phase, describe_join, rank_list
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
from netsum.protocol.job_registry import MAX_NOTES, JobRegistry
from netsum.protocol.job_replies import join_timeout_text, waiting, welcome
from netsum.protocol.job_settings import JobTableSettings
from netsum.protocol.join_checks import Refusal, check_join, chunk_elems_for, slots_for, slots_that_fit

MAX_TEXT_CHARS = 500  # of what an agent says for others to read


class JobTable:
    """All jobs of a switch.

    Invariant: every job has a next event, so that none stays for ever unless its members keep it alive.

    ``awaited_ranks``: the datapath's answer for a job number. ``random_bytes``: source of tokens, nonces and first epochs.
    """

    def __init__(
        self,
        settings: JobTableSettings,
        datapath: DatapathFeatures,
        awaited_ranks: Callable[[int], Sequence[int]] = lambda _: [],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._datapath = datapath
        self._awaited_ranks = awaited_ranks
        self._random_bytes = random_bytes
        self._challenger = Challenger(settings.secret, random_bytes(32))
        self._jobs = JobRegistry(settings.total_slots, random_bytes)

    # -- in --------------------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, message: AgentMessage, peer_text: str, now_us: int) -> list[Action]:
        """One message of the agent behind ``identity``, connected from ``peer_text``."""
        try:
            match message:
                case Join():
                    return self._join(identity, message, peer_text, now_us)
                case StatusRequest():
                    return self._status_request(identity, message, now_us)
                case Ready() | Heartbeat() | Leave():
                    return self._member_message(identity, message, now_us)
        except Refusal as refusal:
            self.counters[f"refused_{refusal.code}"] += 1
            actions: list[Action] = [Reply(identity, Refused(refusal.code, refusal.text))]
            if isinstance(message, Join) and refusal.code not in ("malformed", "secret", "version"):
                actions += self._remember(message.job, refusal.text, now_us)
            return actions

    def malformed(self, identity: bytes, reason: str) -> list[Action]:
        """A frame from ``identity`` that is no message."""
        self.counters["refused_malformed"] += 1
        return [Reply(identity, Refused("malformed", f"not a message of this protocol: {reason[:MAX_TEXT_CHARS]}"))]

    def opened(self, job_number: int, error: str | None, now_us: int) -> list[Action]:
        """The datapath has carried out :class:`OpenJob`, or could not because of ``error``."""
        job = next((j for j in self._jobs if j.phase is Phase.OPENING and j.job_number == job_number), None)
        if job is None:
            return []
        if error is not None:
            return self._end(job, f"the switch's datapath cannot open the job: {error}", now_us)
        job.phase = Phase.PROBING
        job.next_event_us = now_us + self.settings.ready_timeout_us
        for member in job.members.values():
            member.heard_us = now_us
        return [Reply(m.identity, welcome(job, m, self._datapath, self.settings)) for m in job.active_members]

    def unreachable(self, identity: bytes, now_us: int) -> list[Action]:
        """The connection of ``identity`` is gone. Only a worker that still waits to join is given up for that; members have a lease."""
        actions: list[Action] = []
        for job in self._jobs:
            if job.phase is not Phase.JOINING:
                continue
            for rank, member in list(job.members.items()):
                if member.identity == identity:
                    del job.members[rank]
                    actions += self._remember(job.name, f"{member} joined and went away", now_us)
            if not job.members:
                actions += self._remove(job, now_us)
        return actions

    def tick(self, now_us: int) -> list[Action]:
        """Everything that is due."""
        actions: list[Action] = []
        for job in self._jobs:
            if job.next_event_us <= now_us and job in self._jobs:
                actions += self._tick_job(job, now_us)
        return actions

    def shut_down(self, reason: str) -> list[Action]:
        """The switch stops: everybody is told."""
        actions: list[Action] = []
        for job in self._jobs:
            if job.phase is not Phase.JOINING:
                actions.append(CloseJob(job.job_number))
            actions += [Reply(m.identity, JobFailed(reason)) for m in job.active_members]
        return actions

    # -- out -------------------------------------------------------------------------------------------------------

    @property
    def next_deadline_us(self) -> int | None:
        """When :meth:`tick` wants to be called at the latest."""
        return min((job.next_event_us for job in self._jobs), default=None)

    def status(self, now_us: int) -> dict[str, Any]:
        """JSON-able."""
        return {
            "jobs": [job.status(now_us) for job in self._jobs],
            "slots_total": self.settings.total_slots,
            "slots_taken": self._jobs.slot_ranges.slots_taken,
            "refused": self._jobs.refusals(),
            "counters": dict(sorted(self.counters.items())),
        }

    # -- joining ---------------------------------------------------------------------------------------------------

    def _join(self, identity: bytes, join: Join, peer_text: str, now_us: int) -> list[Action]:
        self.counters["joins"] += 1
        check_join(join, self._datapath.max_world_size, self.settings.total_slots)
        job = self._jobs.find(join.job, join.run_id)
        member = job.members.get(join.rank) if job else None
        if member is None or member.join != join:  # the very same Join was proven before
            proof = self._challenger.check(
                identity, join.proof, lambda secret, nonce: join_proof(secret, nonce, join), now_us
            )
            if proof is not Proof.VALID:
                return self._challenge(identity, proof, describe_join(join), now_us)
        if job is not None and join.world_size != job.world_size:
            raise Refusal(
                "world_size",
                f"{describe_join(join)} says the world size of job {join.job!r} is {join.world_size}, but {describe_join(job.first)}, "
                f"who came first, says {job.world_size}; start all workers with one world size",
            )
        if job is not None and member is not None:
            return self._join_again(job, member, identity, join, now_us)
        self._check_address_is_free(join)
        self._check_limits(join, job)
        if job is None:
            job = Job(join.job, join.run_id, join.world_size, join, now_us)
            job.next_waiting_us = now_us + self.settings.waiting_interval_us
            self._jobs.add(job)
        token = self._random_bytes(16).hex()
        job.members[join.rank] = Member(identity, join, peer_text, token, now_us, now_us)
        job.join_deadline_us = now_us + self.settings.join_timeout_us
        job.next_event_us = min(job.next_waiting_us, job.join_deadline_us)
        return self._open_if_complete(job, now_us) or [Reply(identity, waiting(job, self._jobs, self.settings, now_us))]

    def _join_again(self, job: Job, member: Member, identity: bytes, join: Join, now_us: int) -> list[Action]:
        if not member.is_same_worker(join) or member.left:
            state = "has left it already" if member.left else "has that rank"
            raise Refusal(
                "duplicate_rank",
                f"{describe_join(join)} wants to join job {join.job!r}, but {member} {state}; give each worker a rank of its own",
            )
        member.identity = identity
        member.join = msgspec.structs.replace(member.join, proof=join.proof)
        actions = self._heard(job, member, now_us)
        match job.phase:
            case Phase.JOINING:
                return [*actions, Reply(identity, waiting(job, self._jobs, self.settings, now_us))]
            case Phase.OPENING:
                return actions
            case _:
                return [*actions, Reply(identity, welcome(job, member, self._datapath, self.settings))]

    def _check_address_is_free(self, join: Join) -> None:
        holder = self._jobs.holder_of_address(join)
        if holder is not None:
            job, member = holder
            raise Refusal(
                "duplicate_rank",
                f"{describe_join(join)} wants to join job {join.job!r} with the data address of {member} of job {job.name!r}",
            )

    def _check_limits(self, join: Join, job: Job | None) -> None:
        jobs, members = len(self._jobs), self._jobs.member_count
        if job is None and jobs >= self.settings.max_jobs:
            raise Refusal("limits", f"{describe_join(join)}: the switch has {jobs} jobs, no more are allowed")
        if members >= self.settings.max_members:
            raise Refusal("limits", f"{describe_join(join)}: the switch has {members} workers, no more are allowed")

    def _open_if_complete(self, job: Job, now_us: int) -> list[Action]:
        """Number, epoch and slots for a job whose ranks are all here and whose older incarnations are gone."""
        if job.phase is not Phase.JOINING or job.missing_ranks or self._jobs.eldest(job.name) is not job:
            return []
        joins = [m.join for m in job.active_members]
        limit = min(self.settings.max_chunk_elems, self._datapath.max_chunk_elems, *(j.max_chunk_elems for j in joins))
        job.chunk_elems = chunk_elems_for(limit)
        default_slots = self.settings.slots_per_job
        if self._datapath.receive_buffer_bytes:
            fitting = slots_that_fit(self._datapath.receive_buffer_bytes, len(joins), job.chunk_elems)
            default_slots = min(default_slots, fitting)
        slots = slots_for(max(j.slots_wanted for j in joins), default_slots)
        if not self._jobs.activate(job, slots):
            taken = self._jobs.slot_ranges.slots_taken
            text = f"job {job.name!r} needs {slots} slots in a row; {taken} of {self.settings.total_slots} are taken by other jobs"
            return self._refuse_all(job, "no_slots", text, now_us)
        job.next_event_us = now_us + self.settings.ready_timeout_us
        workers = tuple((j.data_host, j.data_port) for j in joins)
        group = self._datapath.multicast_group(job.job_number)
        return [
            Event(
                f"job {job.name!r} run {job.run_id}: all {job.world_size} ranks are here; number {job.job_number}, epoch {job.epoch}, "
                f"slots {job.slot_base}..{job.slot_base + slots - 1}, {job.chunk_elems} elements a packet"
            ),
            OpenJob(job.job_number, job.epoch, job.slot_base, slots, job.chunk_elems, workers, group),
        ]

    # -- members ---------------------------------------------------------------------------------------------------

    def _member_message(self, identity: bytes, message: Ready | Heartbeat | Leave, now_us: int) -> list[Action]:
        found = self._jobs.member(message.member)
        if found is None:
            ended = self._jobs.why_ended(message.member)
            raise Refusal("unknown_member", ended or "no such member: the switch was restarted, or the job has ended")
        job, member = found
        member.identity = identity
        match message:
            case Heartbeat():
                actions = self._heard(job, member, now_us)
                self.counters["heartbeats"] += 1
                member.operations_started = message.operations_started
                member.operations_completed = message.operations_completed
                silent = job.silent_ranks(now_us, self.settings.silence_us)
                return [*actions, Reply(identity, HeartbeatReply(silent, list(self._awaited_ranks(job.job_number))))]
            case Ready():
                return self._heard(job, member, now_us) + self._ready(job, member, message, now_us)
            case Leave():
                return self._leave(job, member, now_us)

    def _heard(self, job: Job, member: Member, now_us: int) -> list[Action]:
        """A sign of life: it extends the lease, and it decides about incarnations of the job that came while this one lives."""
        member.heard_us = now_us
        return [a for younger in self._jobs.younger(job) for a in self._refuse_for_elder(younger, job, now_us)]

    def _ready(self, job: Job, member: Member, ready: Ready, now_us: int) -> list[Action]:
        if job.phase is Phase.RUNNING:
            return [Reply(member.identity, Started(job.results))]
        member.ready = Ready(ready.member, ready.data_ok, ready.multicast_ok, ready.text[:MAX_TEXT_CHARS])
        answers = [m.ready for m in job.active_members if m.ready is not None]
        if len(answers) < job.world_size:
            return []
        failed = [m for m in job.active_members if m.ready is not None and not m.ready.data_ok]
        if failed:
            reasons = "; ".join(f"{m}: {m.ready.text}" for m in failed[:MAX_NOTES] if m.ready is not None)
            ranks = rank_list(m.join.rank for m in failed)
            return self._end(job, f"the data path to the switch failed for {ranks}: {reasons}", now_us)
        multicast = self._datapath.multicast_group(job.job_number) is not None and all(r.multicast_ok for r in answers)
        job.results = "multicast" if multicast else "unicast"
        job.phase = Phase.RUNNING
        job.next_event_us = now_us + self.settings.lease_us
        for m in job.active_members:  # while probing a member had no lease to extend
            m.heard_us = now_us
        return [
            SetResults(job.job_number, multicast),
            *(Reply(m.identity, Started(job.results)) for m in job.active_members),
            Event(f"job {job.name!r} run {job.run_id}: running, results by {job.results}"),
        ]

    def _leave(self, job: Job, member: Member, now_us: int) -> list[Action]:
        member.left = True
        left: list[Action] = [Reply(member.identity, Left())]
        if job.phase is not Phase.RUNNING and job.active_members:
            return left + self._end(job, f"{member} left before the job started", now_us)
        if job.active_members:
            return left
        return [*left, Event(f"job {job.name!r} run {job.run_id}: all ranks have left"), *self._remove(job, now_us)]

    # -- time ------------------------------------------------------------------------------------------------------

    def _tick_job(self, job: Job, now_us: int) -> list[Action]:
        match job.phase:
            case Phase.JOINING:
                return self._tick_joining(job, now_us)
            case Phase.OPENING:
                return self._end(job, "the switch's datapath did not open the job in time", now_us)
            case Phase.PROBING:
                late = rank_list(m.join.rank for m in job.active_members if m.ready is None)
                timeout_s = self.settings.ready_timeout_us / 1e6
                return self._end(job, f"{late} did not say within {timeout_s:g} s whether the data path works", now_us)
            case Phase.RUNNING:
                return self._tick_running(job, now_us)

    def _tick_joining(self, job: Job, now_us: int) -> list[Action]:
        elder = self._jobs.eldest(job.name)
        # A connection that took two rounds of Waiting is alive; dead ones were reported as unreachable by then.
        elder_waits = elder is not None and elder is not job and elder.phase is Phase.JOINING
        if elder and elder_waits and now_us - job.created_us > 2 * self.settings.waiting_interval_us:
            return self._refuse_for_elder(job, elder, now_us)
        if now_us >= job.join_deadline_us:
            text = join_timeout_text(job, self._jobs, self.settings, now_us)
            return self._refuse_all(job, "join_timeout", text, now_us)
        job.next_waiting_us = now_us + self.settings.waiting_interval_us
        job.next_event_us = min(job.next_waiting_us, job.join_deadline_us)
        return [Reply(m.identity, waiting(job, self._jobs, self.settings, now_us)) for m in job.active_members]

    def _tick_running(self, job: Job, now_us: int) -> list[Action]:
        lease_us = self.settings.lease_us
        dead = [m for m in job.active_members if now_us - m.heard_us >= lease_us]
        if not dead:
            job.next_event_us = min(m.heard_us for m in job.active_members) + lease_us
            return []
        for member in dead:
            member.left = True
        text = "; ".join(f"{m} sent no heartbeat for {(now_us - m.heard_us) / 1e6:.1f} s" for m in dead[:MAX_NOTES])
        return self._end(job, text, now_us)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _end(self, job: Job, text: str, now_us: int) -> list[Action]:
        """The job fails: its remaining members are told, its slots come back."""
        self.counters["jobs_failed"] += 1
        told = job.active_members
        self._jobs.remember_end(job, text)
        return [
            Event(f"job {job.name!r} run {job.run_id}: failed: {text}"),
            *(Reply(m.identity, JobFailed(text)) for m in told),
            *self._remove(job, now_us),
        ]

    def _refuse_all(self, job: Job, code: str, text: str, now_us: int) -> list[Action]:
        """The end of a job that never started."""
        self.counters[f"refused_{code}"] += len(job.members)
        return [
            Event(f"job {job.name!r} run {job.run_id}: refused: {text}"),
            *(Reply(m.identity, Refused(code, text)) for m in job.active_members),
            *self._remove(job, now_us),
        ]

    def _refuse_for_elder(self, younger: Job, elder: Job, now_us: int) -> list[Action]:
        actions: list[Action] = []
        for member in younger.active_members:
            rival = elder.members.get(member.join.rank)
            code = "duplicate_rank" if rival else "job_running"
            holder = rival or elder.active_members[0]
            text = (
                f"{member} wants to join job {younger.name!r} as run {younger.run_id}, but {holder} is a live member of it in run "
                f"{elder.run_id} ({elder.phase.value}); use another job name, or end the other run"
            )
            self.counters[f"refused_{code}"] += 1
            actions += [Reply(member.identity, Refused(code, text)), *self._remember(elder.name, text, now_us)]
        return actions + self._remove(younger, now_us)

    def _remove(self, job: Job, now_us: int) -> list[Action]:
        """Forgets the job and gives back what it had; an incarnation that waited for its end may take its place."""
        closing: list[Action] = [] if job.phase is Phase.JOINING else [CloseJob(job.job_number)]
        self._jobs.remove(job)
        heir = self._jobs.eldest(job.name)
        return closing + self._open_if_complete(heir, now_us) if heir else closing

    # -- helpers --------------------------------------------------------------------------------------------------

    def _remember(self, name: str, text: str, now_us: int) -> list[Action]:
        known = not self._jobs.remember_refusal(name, text, now_us)
        return [] if known else [Event(f"job {name!r}: refused: {text}")]

    def _challenge(self, identity: bytes, proof: Proof, who: str, now_us: int) -> list[Action]:
        if proof is Proof.WRONG:
            raise Refusal("secret", f"{who}: the secret is not that of this switch")
        self.counters["challenges"] += 1
        return [Reply(identity, Challenge(self._challenger.nonce(identity, now_us)))]

    def _status_request(self, identity: bytes, request: StatusRequest, now_us: int) -> list[Action]:
        self.counters["status_requests"] += 1
        proof = self._challenger.check(identity, request.proof, status_proof, now_us)
        return [SendStatus(identity)] if proof is Proof.VALID else self._challenge(identity, proof, "status", now_us)
