"""The handle of an operation in flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from netsum.host_agent.peer_messages import Description
from netsum.host_agent.tensors import HostTensor
from netsum.protocol.errors import NetsumError, PeersMissingError

log = logging.getLogger("netsum.host_agent")


class Work:
    """One allreduce. Finished exactly once, with or without an error; holds the tensor until then.

    Attributes:
        description: what was called: path, operation index on that path, numel, dtype, op.
    """

    def __init__(self, rank: int, description: Description, tensor: HostTensor) -> None:
        self.description = description
        self._rank = rank
        self._tensor: HostTensor | None = tensor
        self._error: NetsumError | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Work], None]] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the tensor holds the result; raises the operation's error.

        Without ``timeout_s`` the agent's own deadlines bound the wait: every operation ends by result or error. With it,
        :class:`PeersMissingError` is raised after that time and the operation goes on.
        """
        if not self._done.wait(timeout_s):
            raise PeersMissingError(
                f"{self.description} is still under way after {timeout_s:g} s; the operation goes on",
                rank=self._rank,
                operation=self.description.operation,
                phase=f"{self.description.path} data",
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """True when :meth:`wait` would return or raise at once."""
        return self._done.is_set()

    def exception(self) -> NetsumError | None:
        """The error of a finished operation; None while it runs or when it succeeded."""
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls ``callback(work)`` once, when done: in the finishing thread, or here and now. It must be quick."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: NetsumError | None = None) -> bool:
        """For the paths. True for the first call, which decides; later calls change nothing."""
        with self._lock:
            if self._done.is_set():
                return False
            tensor, self._tensor = self._tensor, None
            self._error = error
            if error is None and tensor is not None and tensor.write_back is not None:
                tensor.write_back()
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a done-callback of %s failed", self.description)
        return True
