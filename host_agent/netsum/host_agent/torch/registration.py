"""What the hook can carry, and how it finds the model when it is registered."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netsum.protocol.errors import UnsupportedError

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16),  # through the switch; complex64 as pairs of float32
    *(torch.float64, torch.complex64, torch.complex128),  # 64-bit types: exactly, between the peers
)
DEVICES = ("cpu", "cuda")
_SEARCHED_FRAMES = 12


def registering_ddp() -> tuple[DistributedDataParallel, Any] | None:
    """The model and the state of the ``register_comm_hook`` call that we are in, or None.

    DDP gives a hook no way to see the model before the first bucket, which is too late for a good error. But it asks for the hook's
    signature inside ``register_comm_hook(self, state, hook)``, so the two are local variables a few frames up. Nothing else depends
    on this: where it finds nothing, :func:`check_bucket` still refuses, without the parameter's name.
    """
    frame = inspect.currentframe()
    for _ in range(_SEARCHED_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "register_comm_hook":
            ddp = frame.f_locals.get("self")
            if isinstance(ddp, DistributedDataParallel) and "state" in frame.f_locals:
                return ddp, frame.f_locals["state"]
        frame = frame.f_back
    return None


def check_model(module: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedError` naming every parameter with a gradient that the hook could not carry."""
    problems = [
        f"{name} ({problem})"
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and (problem := _problem(parameter.dtype, parameter.device))
    ]
    if problems:
        raise UnsupportedError(
            f"allreduce_hook cannot carry the gradients of {', '.join(problems)}. Supported are {_names()}; "
            "convert these parameters, freeze them, or train without the hook"
        )


def check_bucket(index: int, buffer: torch.Tensor) -> None:
    """The same for a gradient bucket, whose type the model need not have (mixed precision, compressing wrappers)."""
    problem = _problem(buffer.dtype, buffer.device)
    if problem is None and buffer.layout not in (torch.strided, torch.sparse_coo):
        problem = f"layout {buffer.layout}"
    if problem:
        raise UnsupportedError(
            f"allreduce_hook cannot carry gradient bucket {index} ({problem}). Supported are {_names()}"
        )


def _problem(dtype: torch.dtype, device: torch.device) -> str | None:
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if device.type not in DEVICES:
        return f"device {device}"
    return None


def _names() -> str:
    return f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)} on {' and '.join(DEVICES)}"
