"""A job in virtual time, for tests: builds machines of either form, runs tensors through them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from netsum.emulator.faults import LinkFaults
from netsum.emulator.machines import available_forms, make_switch, make_worker
from netsum.emulator.virtual_network import VirtualNetwork
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.operation import Tensor
from netsum.protocol.switch_machine import Address, SwitchJobConfig
from netsum.protocol.worker_machine import WorkerConfig

FORMS = available_forms()
NO_FAULTS = LinkFaults()


def addresses(world_size: int) -> list[Address]:
    return [Address(0x0A000001 + rank, 4000) for rank in range(world_size)]


def make_job(
    form: str,
    world_size: int,
    *,
    slots: int = 8,
    chunk_elems: int = 256,
    up: LinkFaults = NO_FAULTS,
    down: LinkFaults = NO_FAULTS,
    seed: int = 0,
    slot_base: int = 16,
    switch_form: str | None = None,
    **worker_settings: int | bool,
) -> VirtualNetwork:
    """One job with number 3, epoch 5 on a fresh switch."""
    switch = make_switch(switch_form or form)
    where = addresses(world_size)
    switch.open_job(SwitchJobConfig(3, 5, slot_base, slots, chunk_elems, tuple(where)))
    workers = [
        make_worker(
            form,
            WorkerConfig(
                rank=rank,
                world_size=world_size,
                job_number=3,
                epoch=5,
                slot_base=slot_base,
                slots=slots,
                chunk_elems=chunk_elems,
                **worker_settings,  # type: ignore[arg-type]
            ),
        )
        for rank in range(world_size)
    ]
    return VirtualNetwork(switch, workers, where, up=up, down=down, seed=seed)


def submit_all(network: VirtualNetwork, tensors: Sequence[Tensor], dtype: DType, op: OpCode = OpCode.SUM) -> None:
    """Each rank submits its tensor now."""
    for rank, tensor in enumerate(tensors):
        network.workers[rank].submit(tensor, dtype, op, network.now_us)
        network.kick(rank)


def random_tensors(rng: np.random.Generator, world_size: int, numel: int, dtype: DType) -> list[Tensor]:
    """Normal values over many magnitudes, blocks of zeros among them; int32 over its whole range."""
    tensors: list[Tensor] = []
    for _ in range(world_size):
        if dtype is DType.INT32:
            tensors.append(rng.integers(-(2**31), 2**31, numel, dtype=np.int64).astype(np.int32))
            continue
        x = rng.standard_normal(numel).astype(np.float32)
        for start in range(0, numel, 256):
            x[start : start + 256] *= np.float32(2.0 ** rng.integers(-12, 8)) * rng.integers(0, 4)
        if dtype is DType.FLOAT16:
            tensors.append(x.astype(np.float16))
        elif dtype is DType.BFLOAT16:
            tensors.append((x.view(np.uint32) >> 16).astype(np.uint16))
        else:
            tensors.append(x)
    return tensors
