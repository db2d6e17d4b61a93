"""What a rank knows about the operations of the job, and how the ranks fail together.

Every operation of this rank is entered here, on both paths. The first cause of failure, ours or a peer's, decides what every
unfinished operation raises; after it the agent does no more. Rules:

- When an operation fails here, the peers are asked what they know of it (:class:`Where`, :class:`Here`), then told
  (:class:`Abort`). If their descriptions of it differ, the ranks called different things, and everyone raises
  :class:`MismatchError`.
- A connection that ends without :class:`Bye` is a dead rank. A rank that said Bye has completed so many operations; none
  after these can complete.
- An operation that takes long is asked about (:class:`Where`): who has not called it yet is logged, and a mismatch found early.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netsum.host_agent.peer_messages import Abort, Bye, Description, Here, PeerMessage, Where
from netsum.host_agent.work import Work
from netsum.protocol.errors import (
    AbortedError,
    IntegrityError,
    MismatchError,
    OperationError,
    OverflowDetectedError,
    PeersMissingError,
    SwitchSilentError,
)

log = logging.getLogger("netsum.host_agent")

_REMEMBERED = 1024  # descriptions kept for answers to peers that fail later than we finish
_STALLED_S = 1.5
_ANSWERS_S = 0.5

_ERRORS: dict[str, type[OperationError]] = {
    "switch_silent": SwitchSilentError,
    "peers_missing": PeersMissingError,
    "integrity": IntegrityError,
    "overflow": OverflowDetectedError,
    "mismatch": MismatchError,
    "aborted": AbortedError,
    "failed": OperationError,
}


@dataclass(frozen=True)
class Cause:
    """Why nothing more completes: the error class and text that unfinished operations raise."""

    kind: type[OperationError]
    text: str
    phase: str
    missing_ranks: tuple[int, ...] = ()


class Coordinator:
    """Implements :class:`netsum.host_agent.mesh.PeerEvents`. All methods may be called from any thread."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._changed = threading.Condition(threading.RLock())
        self._descriptions: OrderedDict[int, Description] = OrderedDict()
        self._outstanding: OrderedDict[int, tuple[Work, float]] = OrderedDict()
        self._started = {"switch": 0, "ring": 0}
        self._completed = {"switch": 0, "ring": 0}
        self._left: dict[int, dict[str, int]] = {}
        self._answers: dict[int, dict[int, Description | None]] = {}
        self._asked: tuple[int, set[int]] | None = None  # the operation asked about, and who has not answered
        self._asked_s = 0.0
        self._cause: Cause | None = None
        self._stop_paths: list[Callable[[str], None]] = []
        self._send: Callable[[int, PeerMessage], None] = lambda rank, message: None
        self._peers: Callable[[], list[int]] = list

    def attach(self, send: Callable[[int, PeerMessage], None], peers: Callable[[], list[int]]) -> None:
        """The mesh: sends to a rank; lists the connected ranks."""
        self._send, self._peers = send, peers

    def on_failure(self, stop: Callable[[str], None]) -> None:
        """``stop(text)`` ends a path: its unfinished operations come back to :meth:`finish_failed`. It must not block."""
        with self._changed:
            self._stop_paths.append(stop)
            cause = self._cause
        if cause is not None:
            stop(cause.text)

    # -- this rank's operations ------------------------------------------------------------------------------------

    def started(self, path: str) -> int:
        return self._started[path]

    def completed(self, path: str) -> int:
        return self._completed[path]

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def failure(self) -> str:
        return "" if self._cause is None else self._cause.text

    def check(self, description: Description) -> None:
        """Raises when the operation could not complete anyhow."""
        with self._changed:
            cause = self._cause or self._left_before(description)
        if cause is not None:
            self.fail(cause)
            raise self._error(description, cause)

    def enter(self, work: Work) -> None:
        """Before the operation is handed to its path."""
        call = work.description.call
        with self._changed:
            self._started[work.description.path] += 1
            self._descriptions[call] = work.description
            if len(self._descriptions) > _REMEMBERED:
                self._descriptions.popitem(last=False)
            self._outstanding[call] = (work, time.monotonic())

    def finish(self, work: Work) -> None:
        """The operation succeeded."""
        with self._changed:
            self._outstanding.pop(work.description.call, None)
            self._completed[work.description.path] += 1
        work.finish()
        self._stop_if_left()

    def finish_failed(self, work: Work, error_name: str, detail: str, missing_ranks: Sequence[int] = ()) -> None:
        """The operation failed; ``error_name`` as the native agent says it, or "mismatch" with all the detail.

        The first failure is told to the peers, and their answers are waited for (half a second) to name the cause.
        """
        description = work.description
        if error_name == "aborted":
            cause = self._cause or Cause(AbortedError, detail, f"{description.path} data")
        else:
            own = self._investigate(description, error_name, detail, tuple(missing_ranks))
            if self.fail(own):
                reason = f"{error_name.replace('_', ' ')}: {own.text}"
                self._tell(Abort(reason, description, list(own.missing_ranks)))
            # What is seen here says more than that a peer has failed, but less than who died or called something else.
            cause = self._cause if self._cause is not None and self._cause.kind is not AbortedError else own
        with self._changed:
            self._outstanding.pop(work.description.call, None)
        work.finish(self._error(description, cause))

    def wait_failure(self, timeout_s: float) -> bool:
        """Gives the peer channel a moment to say why a data connection broke. True when there is a cause."""
        with self._changed:
            return self._changed.wait_for(lambda: self._cause is not None, timeout_s)

    def fail(self, cause: Cause) -> bool:
        """The first cause counts, and ends the paths: True if it was this one."""
        with self._changed:
            if self._cause is not None:
                return False
            self._cause = cause
            stops = list(self._stop_paths)
            self._changed.notify_all()
        for stop in stops:
            stop(cause.text)
        return True

    def fail_and_tell(self, reason: str) -> None:
        """Something outside of any operation went wrong here (the switch ended the job): all ranks are to know."""
        if self.fail(Cause(AbortedError, reason, "switch control")):
            self._tell(Abort(reason, None, []))

    def close(self, reason: str) -> None:
        """This rank gives up: unfinished operations fail here and at the peers.

        After a failure the peers are told of it once more: our leaving may reach them before they have noticed it themselves.
        """
        if self._cause is not None:
            self._tell(Abort(self._cause.text, None, list(self._cause.missing_ranks)))
        else:
            with self._changed:
                oldest = next((work.description for work, _ in self._outstanding.values()), None)
            if oldest is not None:
                self._tell(Abort(reason, oldest, []))
        self.fail(Cause(AbortedError, reason, "close"))

    def abandon(self, reason: str) -> None:
        """Like :meth:`close`, told to the peers also when nothing is under way here (an exception is ending this rank)."""
        if self._cause is None:
            self._tell(Abort(reason, None, []))

    def bye(self) -> Bye:
        return Bye(self._completed["switch"], self._completed["ring"])

    def _error(self, description: Description, cause: Cause) -> OperationError:
        return cause.kind(
            f"{description}: {cause.text}",
            rank=self._rank,
            operation=description.operation,
            phase=cause.phase,
            missing_ranks=cause.missing_ranks,
        )

    def _investigate(self, own: Description, error_name: str, detail: str, missing: tuple[int, ...]) -> Cause:
        """The cause, as far as the peers know more than we: asks them about the operation, half a second at most."""
        phase = f"{own.path} data"
        answers = {} if error_name == "mismatch" or self._cause is not None else self._ask(own)
        for rank, theirs in sorted(answers.items()):
            if theirs is not None and theirs != own:
                error_name, detail = "mismatch", self._mismatch(own, rank, theirs)
                break
        if error_name == "peers_missing" and answers:
            absent = {r for r in range(self._world_size) if r != self._rank and answers.get(r) is None}
            missing = tuple(sorted(absent)) or missing
        if missing:
            detail = f"waited for ranks {list(missing)}: {detail}"
        return Cause(_ERRORS[error_name], detail, phase, missing)

    def _ask(self, own: Description) -> dict[int, Description | None]:
        with self._changed:
            self._answers[own.call] = {}
        peers = set(self._peers())
        self._tell(Where(own))

        def enough() -> bool:
            decided = self._cause is not None and self._cause.kind is not AbortedError
            return decided or peers <= set(self._answers[own.call])

        with self._changed:
            self._changed.wait_for(enough, _ANSWERS_S)
            return self._answers.pop(own.call)

    def _mismatch(self, own: Description, rank: int, theirs: Description) -> str:
        return (
            f"the ranks call different operations as {own.path} operation {own.operation}: "
            f"rank {self._rank} {own}, rank {rank} {theirs}"
        )

    def _tell(self, message: PeerMessage) -> None:
        for rank in self._peers():
            self._send(rank, message)

    # -- peers (the mesh's thread) ---------------------------------------------------------------------------------

    def abort_received(self, rank: int, message: Abort) -> None:
        theirs = message.description
        if theirs is None:
            missing = tuple(message.missing_ranks)
            kind = PeersMissingError if missing else AbortedError
            self.fail(Cause(kind, f"rank {rank} gave up: {message.reason}", "peer abort", missing))
            return
        if self._differs(rank, theirs):
            return
        text = f"rank {rank} failed in {theirs.path} operation {theirs.operation} ({theirs}): {message.reason}"
        self.fail(Cause(AbortedError, text, "peer abort", tuple(message.missing_ranks)))

    def where_received(self, rank: int, message: Where) -> None:
        theirs = message.description
        with self._changed:
            own = self._descriptions.get(theirs.call)
        self._send(rank, Here(theirs.call, own))
        self._differs(rank, theirs)

    def _differs(self, rank: int, theirs: Description) -> bool:
        """Fails the job when this rank called something else as the same operation."""
        with self._changed:
            own = self._descriptions.get(theirs.call)
        if own is None or own == theirs:
            return False
        text = self._mismatch(own, rank, theirs)
        if self.fail(Cause(MismatchError, text, f"{own.path} data")):
            self._tell(Abort(text, own, []))
        return True

    def here_received(self, rank: int, message: Here) -> None:
        call = message.call
        with self._changed:
            if call in self._answers:
                self._answers[call][rank] = message.description
                self._changed.notify_all()
                return
            if self._asked is not None and self._asked[0] == call:
                self._asked[1].discard(rank)
            own = self._descriptions.get(call)
            if call not in self._outstanding or own is None:
                return
        if message.description is None:
            log.warning(
                "rank %d waits for rank %d in %s operation %d (%s)", self._rank, rank, own.path, own.operation, own
            )
        else:
            self._differs(rank, message.description)

    def peer_left(self, rank: int, message: Bye) -> None:
        with self._changed:
            self._left[rank] = {"switch": message.switch_operations, "ring": message.ring_operations}
        self._stop_if_left()

    def peer_lost(self, rank: int, reason: str) -> None:
        if rank not in self._left:
            text = f"rank {rank} died ({reason})"
            self.fail(Cause(PeersMissingError, text, "peer channel", (rank,)))

    def tick(self) -> None:
        """About twice a second: asks about an operation that takes long, and logs who does not answer."""
        now_s = time.monotonic()
        with self._changed:
            asked, self._asked = self._asked, None
            unanswered = asked[1] if asked is not None and asked[0] in self._outstanding else set()
            stalled = [work.description for work, since_s in self._outstanding.values() if now_s - since_s > _STALLED_S]
            due = stalled and self._cause is None and now_s - self._asked_s >= _STALLED_S
            if due:
                self._asked_s = now_s
                self._asked = stalled[0].call, set(self._peers())
        if unanswered and asked is not None:
            log.warning("rank %d: ranks %s do not answer (operation %d)", self._rank, sorted(unanswered), asked[0])
        if due:
            self._tell(Where(stalled[0]))

    def _stop_if_left(self) -> None:
        """A rank that left ends the operations it has not completed, once those that it has are done here too."""
        with self._changed:
            causes = [self._left_before(work.description) for work, _ in self._outstanding.values()]
        if causes and causes[0] is not None and all(causes):
            self.fail(causes[0])

    def _left_before(self, own: Description) -> Cause | None:
        path = own.path
        for rank, completed in self._left.items():
            if own.operation >= completed[path]:
                text = f"rank {rank} left the job after {completed[path]} operations on the {path} path"
                return Cause(PeersMissingError, text, "peer channel", (rank,))
        return None
