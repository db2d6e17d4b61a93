"""``netsum status``: what a running switch is doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from netsum.cli.options import read_secret, seconds_us
from netsum.protocol.control import DEFAULT_CONTROL_PORT


def status_command(
    switch: Annotated[
        str, typer.Option(help="Control endpoint of the switch.", metavar="tcp://HOST:PORT")
    ] = f"tcp://127.0.0.1:{DEFAULT_CONTROL_PORT}",
    secret_file: Annotated[Path | None, typer.Option(help="File with the switch's secret, if it has one.")] = None,
    timeout: Annotated[str, typer.Option(help="How long to wait for an answer.", metavar="TIME")] = "2s",
    json_output: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
) -> None:
    """Show jobs, ranks, slots, counters and drops of a switch.

    Example: netsum status --switch tcp://10.0.0.1:48800 --json
    """
    from netsum.switch.status_client import request_status

    status = request_status(switch, read_secret(secret_file), seconds_us(timeout) / 1e6)
    typer.echo(json.dumps(status, indent=2) if json_output else _as_text(status))


def _as_text(status: dict[str, Any]) -> str:
    datapath = status["datapath"]
    lines = [
        f"switch {status['control']}, data {status['data']}, {datapath['name']} datapath, version {status['software_version']}, "
        f"up {status['uptime_s']:.0f} s",
        f"slots {status['slots_taken']} of {status['slots_total']} taken; up to {datapath['max_chunk_elems']} elements a packet",
        f"packets: {_pairs(datapath['counters'])}",
        f"drops: {_pairs(datapath['drops'])}",
    ]
    for job in status["jobs"]:
        lines += _job_lines(job)
    if not status["jobs"]:
        lines.append("no jobs")
    lines += [f"refused: {text}" for text in status["refused"]]
    return "\n".join(lines)


def _job_lines(job: dict[str, Any]) -> list[str]:
    here = len(job["members"])
    head = f"job {job['job']!r}: {job['phase']} for {job['age_s']:.0f} s, {here} of {job['world_size']} ranks"
    lines = [head]
    if job["missing_ranks"]:
        lines.append(f"  missing ranks: {_ranks(job['missing_ranks'])}")
    if "slots_in_use" in job:
        last = job["slot_base"] + job["slots"] - 1
        lines += [
            f"  number {job['job_number']}, epoch {job['epoch']}, slots {job['slot_base']}..{last} ({job['slots_in_use']} in use), "
            f"{job['chunk_elems']} elements a packet, results by {job['results'] or '(not decided)'}",
            f"  awaited ranks: {_ranks(job['awaited_ranks'])}",
            f"  packets: {_pairs(job['counters'])}",
            f"  drops: {_pairs(job['drops'])}",
        ]
    for member in job["members"]:
        state = "left" if member["left"] else f"heard {member['silent_s']:.1f} s ago"
        lines.append(
            f"  rank {member['rank']}: {member['data_address']} (host {member['host_name']}, pid {member['pid']}), {state}, "
            f"operations {member['operations_completed']} of {member['operations_started']}"
        )
    return lines


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def _pairs(counters: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counters.items() if count) or "none"
