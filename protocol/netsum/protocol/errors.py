"""Errors of netsum, by whose they are.

========================  =======================================================================================
class                     whose
========================  =======================================================================================
:class:`UsageError`       the caller's: a wrong argument; nothing was sent, nothing changed
:class:`PeerError`        another process's: a peer or the switch refused, died, disagreed or aborted
:class:`NetsumIOError`    the machine's or the network's: a port is taken, nothing answers
:class:`IntegrityError`   nobody's we can name: the data was damaged on its way
========================  =======================================================================================

Every text says who, what, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class NetsumError(Exception):
    """Base of all errors that netsum raises on purpose."""


class UsageError(NetsumError, ValueError):
    """The caller asked for something that cannot be done."""


class UnsupportedError(UsageError):
    """A dtype, device, layout or operation that netsum does not carry; the text names the alternative."""


class PeerError(NetsumError):
    """Another process of the job, or the switch, did something that stops this one."""


class JoinRefusedError(PeerError):
    """The switch or rank 0 refused this worker.

    Attributes:
        code: machine-readable cause, one of :data:`netsum.protocol.control.REFUSALS`.
    """

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class NetsumIOError(NetsumError, OSError):
    """A socket, a port or the network failed."""


class SwitchUnreachableError(NetsumIOError):
    """No usable switch at the address given (with ``required=True``; otherwise the ring takes over)."""


class RendezvousError(NetsumIOError):
    """The peers of the job could not meet in time."""


class OperationError(NetsumError):
    """An operation failed on this rank; its tensor is not to be used.

    Attributes:
        rank: this rank.
        operation: index of the operation on its path, 0, 1, 2, …
        phase: what was going on: "switch data", "ring", "peer abort", …
        missing_ranks: ranks that were waited for, as far as known.
    """

    def __init__(self, text: str, *, rank: int, operation: int, phase: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(f"rank {rank}, operation {operation}, {phase}: {text}")
        self.rank = rank
        self.operation = operation
        self.phase = phase
        self.missing_ranks = tuple(missing_ranks)


class SwitchSilentError(OperationError, NetsumIOError):
    """The switch stopped answering in mid-operation."""


class PeersMissingError(OperationError, PeerError):
    """One or more ranks did not contribute within the timeout."""


class AbortedError(OperationError, PeerError):
    """Another rank failed and told us, or the agent was closed with work outstanding."""


class MismatchError(OperationError, PeerError):
    """The ranks called different operations: size, dtype, op or order differ."""


class IntegrityError(OperationError):
    """The integrity element of an operation does not fit its result: damaged data, or contributions that do not belong together."""


class OverflowDetectedError(IntegrityError):
    """A sum is larger than honest contributions can make it."""
