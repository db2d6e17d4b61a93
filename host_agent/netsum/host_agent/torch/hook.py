"""The communication hook: one allreduce for each gradient bucket that DDP hands over.

DDP's buckets are not divided before the hook: the average is taken once, by the agent.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from netsum.host_agent.torch.registration import check_bucket, registering_ddp
from netsum.host_agent.torch.state import HookState
from netsum.protocol.errors import UsageError

if TYPE_CHECKING:
    from netsum.host_agent.work import Work

# DDP compares annotations by value, so they cannot be the strings that `from __future__ import annotations` makes.
_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("state", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HookState),
        inspect.Parameter("bucket", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=GradBucket),
    ],
    return_annotation=torch.futures.Future[torch.Tensor],
)


class AllreduceHook:
    """What :data:`allreduce_hook` is: a callable that DDP takes for a function, and that looks at the model when it is registered."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = name

    @property
    def __signature__(self) -> inspect.Signature:
        """DDP reads this in ``register_comm_hook``, the one moment when the whole model can be judged before training starts."""
        registering = registering_ddp()
        if registering is not None:
            ddp, state = registering
            if not isinstance(state, HookState):
                raise UsageError(f"{self.__name__} needs a HookState as its state, not {type(state).__name__}")
            state.attach(ddp)
        return _SIGNATURE

    def __reduce__(self) -> str:
        return self.__name__

    def __call__(self, state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages the bucket over the ranks, in place.

        Returns a future of the bucket's own buffer. It is completed by the agent's thread while backward goes on; an operation that
        fails makes ``backward()`` raise with the agent's text. Raises :class:`UnsupportedError` for a bucket that cannot be carried.

        Blocks of 256 elements share an exponent, so the bits of a result depend on what lies next to each other, and DDP changes its
        buckets after the first step. Under ``torch.use_deterministic_algorithms(True)``, on all ranks alike, every parameter is an
        operation of its own: then a run resumed from a checkpoint has the bits of one that was never stopped.
        """
        buffer = bucket.buffer()
        check_bucket(bucket.index(), buffer)
        state.connect()
        if buffer.is_sparse:
            return state.average_sparse(buffer)
        # The agent reads host memory. The copy from a device waits for the stream that filled the bucket.
        host = buffer if buffer.device.type == "cpu" else buffer.cpu()
        numbers = torch.view_as_real(host) if host.is_complex() else host
        pieces: Sequence[torch.Tensor] = [numbers]
        if torch.are_deterministic_algorithms_enabled():
            pieces = numbers.split([parameter.numel() for parameter in bucket.parameters()])  # type: ignore[no-untyped-call]
        return _average(state, buffer, host, pieces)


def _average(
    state: HookState, buffer: torch.Tensor, host: torch.Tensor, pieces: Sequence[torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """Averages ``pieces``, the parts of the dense CPU tensor ``host``, and gives back ``buffer`` with the result.

    ``buffer`` is ``host``, or its origin on a device.
    """
    devices: list[int | str | torch.device] = [] if host is buffer else [buffer.device]
    done: torch.futures.Future[torch.Tensor | BaseException] = torch.futures.Future(devices=devices)
    lock = threading.Lock()
    unfinished = len(pieces)
    failure: BaseException | None = None

    def finish(work: Work) -> None:
        nonlocal unfinished, failure
        with lock:
            unfinished -= 1
            failure = failure or work.exception()
            if unfinished:
                return
        # An exception from here on would leave backward() waiting for ever.
        outcome: torch.Tensor | BaseException = failure or buffer
        if failure is None and host is not buffer:
            try:
                buffer.copy_(host)
            except BaseException as error:
                outcome = error
        done.set_result(outcome)

    for piece in pieces:
        state.agent.allreduce(piece, op="avg", async_op=True).add_done_callback(finish)
    # DDP's C++ side understands errors of a callback, but not Future.set_exception.
    return done.then(_value_or_raise)


def _value_or_raise(done: torch.futures.Future[torch.Tensor | BaseException]) -> torch.Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


allreduce_hook = AllreduceHook("allreduce_hook")
