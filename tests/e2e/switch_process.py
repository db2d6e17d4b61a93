"""`netsum switch` as a process, for tests."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

NETSUM = [sys.executable, "-m", "netsum.cli"]
LOOPBACK = ["--control", "tcp://127.0.0.1:0", "--data", "127.0.0.1:0"]
START_S = 20.0


def run_netsum(*arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*NETSUM, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


class SwitchProcess:
    """``ready``: the fields of its ready line. Killed, if need be, at the end of the ``with`` block."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*NETSUM, "switch", "--json", *(arguments or LOOPBACK)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            self.process.kill()
            raise AssertionError(f"the switch did not start: {self.process.communicate()[1]}")
        self.ready: dict[str, Any] = json.loads(line)

    @property
    def control(self) -> str:
        return str(self.ready["control"])

    @property
    def data(self) -> str:
        return str(self.ready["data"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """(exit status, what it wrote to stderr)."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors

    def __enter__(self) -> SwitchProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=10)
