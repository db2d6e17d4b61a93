"""The communication hook: one allreduce for each gradient bucket that DDP hands over.

DDP's buckets are not divided before the hook: the average is taken once, by the agent.
"""

from __future__ import annotations

import inspect
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
        """
        buffer = bucket.buffer()
        check_bucket(bucket.index(), buffer)
        state.connect()
        if buffer.is_sparse:
            return state.average_sparse(buffer)
        if buffer.device.type == "cpu":
            return _average(state, buffer, buffer)
        # The agent reads host memory. The copy waits for the stream that filled the bucket.
        return _average(state, buffer, buffer.cpu())


def _average(state: HookState, buffer: torch.Tensor, host: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Averages ``host``, a dense CPU tensor, and gives back ``buffer`` with the result: the same tensor, or one on a device."""
    devices: list[int | str | torch.device] = [] if host is buffer else [buffer.device]
    done: torch.futures.Future[torch.Tensor | BaseException] = torch.futures.Future(devices=devices)

    def finish(work: Work) -> None:
        # An exception in here would leave backward() waiting for ever.
        outcome: torch.Tensor | BaseException | None = work.exception()
        if outcome is None:
            try:
                if host is not buffer:
                    buffer.copy_(host)
                outcome = buffer
            except BaseException as error:
                outcome = error
        done.set_result(outcome)

    numbers = torch.view_as_real(host) if host.is_complex() else host
    state.agent.allreduce(numbers, op="avg", async_op=True).add_done_callback(finish)
    # DDP's C++ side understands errors of a callback, but not Future.set_exception.
    return done.then(_value_or_raise)


def _value_or_raise(done: torch.futures.Future[torch.Tensor | BaseException]) -> torch.Tensor:
    value = done.value()
    if isinstance(value, BaseException):
        raise value
    return value


allreduce_hook = AllreduceHook("allreduce_hook")
