"""The protocol's machines in both forms, Python and native, behind one interface, so that every simulation can run either."""

from __future__ import annotations

from typing import Any, Protocol

from netsum.native import _native
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.operation import Tensor
from netsum.protocol.switch_machine import Address, Output, SwitchJobConfig, SwitchMachine
from netsum.protocol.worker_machine import Completion, WorkerConfig, WorkerMachine


class Switch(Protocol):
    """What :class:`netsum.protocol.switch_machine.SwitchMachine` offers; see there."""

    @property
    def counters(self) -> dict[str, int]: ...
    def open_job(self, config: SwitchJobConfig) -> None: ...
    def close_job(self, job_number: int) -> None: ...
    def handle(self, datagram: bytes, source: Address) -> list[Output]: ...
    def slots_in_use(self, job_number: int) -> int: ...
    def awaited_ranks(self, job_number: int) -> Any: ...


class Worker(Protocol):
    """What :class:`netsum.protocol.worker_machine.WorkerMachine` offers; see there."""

    @property
    def counters(self) -> dict[str, int]: ...
    def submit(self, tensor: Tensor, dtype: DType, op: OpCode, now_us: int) -> int: ...
    def handle(self, datagram: bytes, now_us: int) -> None: ...
    def poll(self, now_us: int) -> list[bytes]: ...
    def next_deadline_us(self) -> int | None: ...
    def take_completion(self) -> Completion | None: ...
    def abort(self, detail: str) -> None: ...


class NativeSwitchForm:
    """The C++ switch machine with the Python one's interface."""

    def __init__(self) -> None:
        self._machine = _native.SwitchMachine()

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._machine.counters())

    def open_job(self, config: SwitchJobConfig) -> None:
        self._machine.open_job(
            job_number=config.job_number,
            epoch=config.epoch,
            slot_base=config.slot_base,
            slots=config.slots,
            chunk_elems=config.chunk_elems,
            workers=[tuple(a) for a in config.workers],
        )

    def close_job(self, job_number: int) -> None:
        self._machine.close_job(job_number)

    def handle(self, datagram: bytes, source: Address) -> list[Output]:
        outputs = []
        for kind, first, port, body in self._machine.handle(datagram, source.ip, source.port):
            if kind in ("result", "probe_all"):
                outputs.append(Output(kind, first, None, body))
            else:
                outputs.append(Output(kind, datagram[1], Address(first, port), body))
        return outputs

    def slots_in_use(self, job_number: int) -> int:
        return int(self._machine.slots_in_use(job_number))

    def awaited_ranks(self, job_number: int) -> list[int]:
        return list(self._machine.awaited_ranks(job_number))


class NativeWorkerForm:
    """The C++ worker machine with the Python one's interface."""

    def __init__(self, config: WorkerConfig) -> None:
        fields = {name: getattr(config, name) for name in WorkerConfig.__dataclass_fields__}
        self._machine = _native.WorkerMachine(**fields)

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._machine.counters())

    def submit(self, tensor: Tensor, dtype: DType, op: OpCode, now_us: int) -> int:
        return int(self._machine.submit(tensor, int(dtype), int(op), now_us))

    def handle(self, datagram: bytes, now_us: int) -> None:
        self._machine.handle(datagram, now_us)

    def poll(self, now_us: int) -> list[bytes]:
        return list(self._machine.poll(now_us))

    def next_deadline_us(self) -> int | None:
        deadline_us: int | None = self._machine.next_deadline_us()
        return deadline_us

    def take_completion(self) -> Completion | None:
        taken = self._machine.take_completion()
        if taken is None:
            return None
        operation, error, missing_ranks, detail = taken
        return Completion(operation, error, tuple(missing_ranks), detail)

    def abort(self, detail: str) -> None:
        self._machine.abort(detail)


def available_forms() -> tuple[str, ...]:
    """ "python", and "native" where the extension carries the machines."""
    return ("python", "native") if hasattr(_native, "WorkerMachine") else ("python",)


def make_switch(form: str) -> Switch:
    """``form``: "python" or "native"."""
    return NativeSwitchForm() if form == "native" else SwitchMachine()


def make_worker(form: str, config: WorkerConfig) -> Worker:
    """``form``: "python" or "native"."""
    return NativeWorkerForm(config) if form == "native" else WorkerMachine(config)
