"""What the caller hands in, as a flat numpy array over the same memory. torch tensors are recognized by shape, not by import."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netsum.protocol.dtypes import DType
from netsum.protocol.errors import UnsupportedError, UsageError

#: Element types that the switch path and the fixed-point ring carry.
SWITCH_DTYPES = {
    "float32": DType.FLOAT32,
    "float16": DType.FLOAT16,
    "bfloat16": DType.BFLOAT16,
    "int32": DType.INT32,
}

#: All types, in the order of their codes in the ring's comparison of descriptions.
DTYPE_NAMES = (
    *SWITCH_DTYPES,
    *("float64", "longdouble", "complex64", "complex128"),
    *("int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@dataclass(frozen=True)
class HostTensor:
    """A tensor to be reduced.

    Attributes:
        flat: 1-D contiguous; the caller's memory, or a copy of it where that is strided or byte-swapped. bfloat16 as uint16.
        dtype_name: one of :data:`DTYPE_NAMES`.
        owner: the caller's object; referenced so that its memory stays.
        write_back: copies ``flat`` to the caller's memory; None where ``flat`` is that memory.
    """

    flat: NDArray[Any]
    dtype_name: str
    owner: object
    write_back: Callable[[], None] | None = None

    @property
    def switch_dtype(self) -> DType | None:
        """None: the exact ring carries it."""
        return SWITCH_DTYPES.get(self.dtype_name)

    @property
    def is_inexact(self) -> bool:
        return "float" in self.dtype_name or "double" in self.dtype_name or "complex" in self.dtype_name

    @property
    def pointer(self) -> int:
        return int(self.flat.ctypes.data)

    def poison(self) -> None:
        """NaN over the whole tensor, where the type has one: a part of a sum must never look like a result."""
        if self.dtype_name == "bfloat16":
            self.flat.fill(0x7FC0)
        elif self.is_inexact:
            self.flat.fill(np.nan)


def host_tensor(tensor: Any) -> HostTensor:
    """``tensor``: a numpy array, or a CPU torch tensor; of any shape and strides.

    Raises :class:`UnsupportedError` for a dtype, device or layout we do not carry, :class:`UsageError` for anything else than a
    tensor and for read-only memory.
    """
    if isinstance(tensor, np.ndarray):
        return _from_numpy(tensor)
    if all(hasattr(tensor, name) for name in ("data_ptr", "is_contiguous", "element_size", "device")):
        return _from_torch(tensor)
    raise UsageError(f"allreduce takes a numpy array or a torch tensor, not {type(tensor).__name__}")


def _from_numpy(array: NDArray[Any]) -> HostTensor:
    name = array.dtype.name
    if name == np.dtype(np.longdouble).name and name not in DTYPE_NAMES:
        name = "longdouble"
    _check_dtype(name)
    if not array.flags.writeable:
        raise UsageError("the array is read-only; allreduce works in place: pass a copy")
    _check_strides(array.shape, array.strides)
    native = array.dtype.isnative
    in_place = array.flags.c_contiguous and native
    flat = (
        array.reshape(-1) if in_place else np.array(array, dtype=array.dtype.newbyteorder("="), order="C").reshape(-1)
    )

    def write_back() -> None:
        source = flat if name != "bfloat16" else flat.view(array.dtype)
        array[...] = source.reshape(array.shape)

    if name == "bfloat16":
        flat = flat.view(np.uint16)
    return HostTensor(flat, name, array, None if in_place else write_back)


def _from_torch(tensor: Any) -> HostTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"the tensor is on {tensor.device}; the agent reads host memory: pass tensor.cpu(), or use netsum.host_agent.torch"
        )
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(f"the tensor's layout is {tensor.layout}; pass a dense one")
    _check_dtype(name)
    tensor = tensor.detach()
    _check_strides(tuple(tensor.shape), tuple(tensor.stride()))
    in_place = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    dense = tensor if in_place else tensor.reshape(-1).resolve_conj().resolve_neg().clone()
    flat = _memory(dense.data_ptr(), dense.numel() * dense.element_size(), "uint16" if name == "bfloat16" else name)

    def write_back() -> None:
        tensor.copy_(dense.reshape(tensor.shape))

    return HostTensor(flat, name, (tensor, dense), None if in_place else write_back)


def _memory(pointer: int, nbytes: int, dtype_name: str) -> NDArray[Any]:
    if nbytes == 0:
        return np.empty(0, dtype_name)
    buffer = memoryview((ctypes.c_uint8 * nbytes).from_address(pointer))
    flat: NDArray[Any] = np.frombuffer(buffer, np.dtype(dtype_name))
    return flat


def _check_dtype(name: str) -> None:
    if name not in DTYPE_NAMES:
        raise UnsupportedError(f"dtype {name} is not carried; known are {', '.join(DTYPE_NAMES)}")


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if 0 not in shape and any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise UsageError("elements of the tensor share memory (an expanded dimension); pass a copy")
