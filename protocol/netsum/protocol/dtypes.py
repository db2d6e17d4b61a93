"""Element types and operations, and their codes (SPEC.md section 3)."""

from __future__ import annotations

from enum import IntEnum


class DType(IntEnum):
    """Element types that the switch path carries."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT32 = 4

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2 if self in (DType.FLOAT16, DType.BFLOAT16) else 4

    @property
    def is_float(self) -> bool:
        return self is not DType.INT32


class OpCode(IntEnum):
    SUM = 1
    AVG = 2


#: Operations by the name that callers use.
OP_BY_NAME = {"sum": OpCode.SUM, "avg": OpCode.AVG}
