"""Child processes that never outlive the demo, and whose output is read with a deadline."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from netsum.protocol.errors import NetsumError

_TERM_WAIT_S = 5.0
_KILL_WAIT_S = 5.0
_LOG_TAIL_LINES = 25


class ChildError(NetsumError):
    """A process of the demo failed or took too long; the text holds the end of its log."""


class Child:
    """A command with its standard output as lines and its standard error in ``log``. Leaving the context ends it and all it started."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()

    def read_line(self, deadline_s: float) -> str | None:
        """The next line of output, None at its end. Raises :class:`ChildError` at ``deadline_s`` of the monotonic clock."""
        try:
            return self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise ChildError(f"{self.name} said nothing in time{self._log_tail()}") from None

    def expect_success(self, deadline_s: float) -> None:
        """Waits for the end. Raises :class:`ChildError` when it comes late or is a failure."""
        try:
            status = self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self.name} did not end in time{self._log_tail()}") from None
        if status != 0:
            raise ChildError(f"{self.name} failed with status {status}{self._log_tail()}")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        family = [self._process.pid, *_descendants(self._process.pid)]
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_WAIT_S)
        if self._process.poll() is None or error is not None:
            # torchrun gives its workers half a minute to end; here nobody waits that long
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_WAIT_S)

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "; the end of its log:\n  " + "\n  ".join(lines) if lines else ""


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _descendants(pid: int) -> list[int]:
    """Children of ``pid``, theirs, and so on, from /proc; torchrun's workers are in sessions of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found
