"""The switch as a process: start, say where, serve until SIGTERM or SIGINT, leave nothing behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from types import FrameType

from netsum.switch.server import SwitchServer
from netsum.switch.settings import SwitchSettings

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 1.0  # how often the main thread looks whether the server still lives


def run_daemon(settings: SwitchSettings, json_output: bool = False) -> int:
    """Returns the exit status: 0 after a stop that was asked for, 1 when the server failed. Call from the main thread.

    The ready line goes to stdout once both ports are open; the log goes to stderr. Raises what :class:`SwitchServer` raises.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        with SwitchServer(settings) as server:
            print(ready_line(server, json_output), flush=True)
            while not stop.wait(_LOOK_S) and not server.stopped.is_set():
                pass
        return 0 if server.failure is None else 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ready_line(server: SwitchServer, json_output: bool) -> str:
    """One line with the real addresses: ports may have been chosen by the system."""
    features = server.datapath.features
    if json_output:
        return json.dumps(
            {
                "event": "ready",
                "pid": os.getpid(),
                "software_version": server.settings.jobs.software_version,
                "control": server.control_endpoint,
                "data": server.data_address,
                "datapath": server.datapath.name,
                "max_chunk_elems": features.max_chunk_elems,
                "receive_buffer_bytes": server.datapath.receive_buffer_bytes,
            }
        )
    return (
        f"netsum switch ready: control {server.control_endpoint}, data {server.data_address}, {server.datapath.name} datapath, "
        f"up to {features.max_chunk_elems} elements a packet"
    )
