"""``netsum switch``: runs a software switch until it is stopped."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from netsum.cli.options import read_secret, seconds_us
from netsum.protocol.control import DEFAULT_CONTROL_PORT, DEFAULT_DATA_PORT
from netsum.protocol.job_settings import JobTableSettings

_DEFAULTS = JobTableSettings()


def switch_command(
    control: Annotated[
        str, typer.Option(help="Where agents reach the switch; port 0 takes a free one.", metavar="tcp://HOST:PORT")
    ] = f"tcp://127.0.0.1:{DEFAULT_CONTROL_PORT}",
    data: Annotated[
        str, typer.Option(help="UDP address of the packets, of one interface.", metavar="HOST:PORT")
    ] = f"127.0.0.1:{DEFAULT_DATA_PORT}",
    datapath: Annotated[str, typer.Option(help="native (fast) or python (readable).", metavar="NAME")] = "native",
    slots: Annotated[
        int, typer.Option(help="Aggregator slots of all jobs together: a power of two, at most 32768.")
    ] = _DEFAULTS.total_slots,
    slots_per_job: Annotated[
        int, typer.Option(help="Slots of a job whose workers ask for no number: a power of two.")
    ] = _DEFAULTS.slots_per_job,
    max_chunk_elems: Annotated[
        int, typer.Option(help="Largest packet, in elements; the interface's MTU may lower it.")
    ] = _DEFAULTS.max_chunk_elems,
    secret_file: Annotated[
        Path | None, typer.Option(help="Only workers that know the secret in this file may join.")
    ] = None,
    lease: Annotated[
        str, typer.Option(help="How long a worker may be silent before its job ends: 3s, 500ms.", metavar="TIME")
    ] = f"{_DEFAULTS.lease_us / 1e6:g}s",
    multicast: Annotated[bool, typer.Option(help="Offer results by IP multicast; used where it works.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Run a software switch until SIGTERM or Ctrl-C. It listens on loopback unless told otherwise.

    Prints one line to stdout when it is ready, with the real addresses; logs to stderr.

    Example: netsum switch --control tcp://10.0.0.1:48800 --data 10.0.0.1:48864
    """
    from netsum.switch.daemon import run_daemon
    from netsum.switch.settings import SwitchSettings

    lease_us = seconds_us(lease)
    jobs = JobTableSettings(
        software_version=version("netsum"),
        total_slots=slots,
        slots_per_job=slots_per_job,
        max_chunk_elems=max_chunk_elems,
        secret=read_secret(secret_file),
        lease_us=lease_us,
        heartbeat_interval_us=min(_DEFAULTS.heartbeat_interval_us, max(1, lease_us // 6)),
    )
    settings = SwitchSettings(control=control, data=data, datapath=datapath, jobs=jobs, multicast=multicast)
    raise typer.Exit(run_daemon(settings, json_output))
