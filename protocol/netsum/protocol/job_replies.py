"""What the job table tells those who join."""

from __future__ import annotations

from netsum.protocol.control import Waiting, Welcome
from netsum.protocol.job import Job, Member, rank_list
from netsum.protocol.job_actions import DatapathFeatures
from netsum.protocol.job_registry import MAX_NOTES, JobRegistry
from netsum.protocol.job_settings import JobTableSettings


def welcome(job: Job, member: Member, datapath: DatapathFeatures, settings: JobTableSettings) -> Welcome:
    group = datapath.multicast_group(job.job_number) or ("", 0)
    return Welcome(
        member=member.token,
        job_number=job.job_number,
        epoch=job.epoch,
        slot_base=job.slot_base,
        slots=job.slots,
        chunk_elems=job.chunk_elems,
        short_exponents=datapath.short_exponents,
        pending=datapath.pending,
        data_host=datapath.data_host,
        data_port=datapath.data_port,
        multicast_host=group[0],
        multicast_port=group[1],
        heartbeat_interval_us=settings.heartbeat_interval_us,
        lease_us=settings.lease_us,
        software_version=settings.software_version,
    )


def waiting(job: Job, jobs: JobRegistry, settings: JobTableSettings, now_us: int) -> Waiting:
    return Waiting(job.missing_ranks, notes(job, jobs, settings, now_us))


def notes(job: Job, jobs: JobRegistry, settings: JobTableSettings, now_us: int) -> list[str]:
    """Why the job still waits, as far as the switch has seen: refused attempts, an older incarnation."""
    sentences = jobs.refusals(job.name, job.created_us - settings.join_timeout_us)
    elder = jobs.eldest(job.name)
    if elder is not None and elder is not job:
        silent = rank_list(elder.silent_ranks(now_us, settings.silence_us) or elder.members)
        sentences.append(
            f"job {job.name!r} is still {elder.phase.value} as run {elder.run_id}; waiting for a sign of life of its {silent}, or for "
            f"the end of their lease of {settings.lease_us / 1e6:g} s"
        )
    return sentences


def join_timeout_text(job: Job, jobs: JobRegistry, settings: JobTableSettings, now_us: int) -> str:
    missing = rank_list(job.missing_ranks) if job.missing_ranks else "the end of an older incarnation"
    here = ", ".join(map(str, job.active_members[:MAX_NOTES]))
    text = f"job {job.name!r}: waited {settings.join_timeout_us / 1e6:g} s for {missing} of world size {job.world_size}; here: {here}"
    return "; ".join([text, *notes(job, jobs, settings, now_us)])
