"""What one worker of the demo runs: ``torchrun … -m netsum.experiments.demo.train``.

Rank 0 prints a JSON line after each epoch, for the progress bar; every rank writes ``rank<r>.json``, a :class:`WorkerResult`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from netsum.experiments.demo.data import load_digits
from netsum.experiments.demo.model import digit_network
from netsum.experiments.demo.result import WorkerResult
from netsum.host_agent.torch import HookState, allreduce_hook

BATCH_IMAGES = 32  # of each worker
LEARNING_RATE = 0.02
MOMENTUM = 0.9
BUCKET_MB = 0.1  # so that this small model has several buckets, and their allreduces overlap with backward
IP_UDP_HEADER_BYTES = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hook", choices=("netsum", "none"), required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--results", type=Path, required=True, help="folder for rank<r>.json")
    arguments = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout_s))
    rank = dist.get_rank()
    model = DistributedDataParallel(digit_network(arguments.seed), bucket_cap_mb=BUCKET_MB)
    state = None
    if arguments.hook == "netsum":
        state = HookState(timeout_s=arguments.timeout_s)  # the switch is in NETSUM_SWITCH
        model.register_comm_hook(state, allreduce_hook)
    result = train(model, state, arguments.epochs, arguments.seed)
    (arguments.results / f"rank{rank}.json").write_bytes(msgspec.json.encode(result))
    dist.barrier()  # nobody leaves while others still wait for results
    if state is not None:
        state.close()
    dist.destroy_process_group()


def train(model: DistributedDataParallel, state: HookState | None, epochs: int, seed: int) -> WorkerResult:
    """Plain SGD for ``epochs`` over this rank's quarter (or nth) of the digits; the same order of images for the same ``seed``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load_digits()
    steps_per_epoch = len(images) // (BATCH_IMAGES * world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    loss = torch.zeros(())
    dist.barrier()
    started = time.monotonic()
    for epoch in range(epochs):
        for batch in shard(len(images), steps_per_epoch, rank, world_size, seed * 1000 + epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if rank == 0:
            print(json.dumps({"epoch": epoch + 1, "loss": loss.item()}), flush=True)
    seconds = time.monotonic() - started
    status = state.status() if state is not None else None
    counters = status.counters if status is not None else {}
    return WorkerResult(
        rank=rank,
        pid=os.getpid(),
        steps=epochs * steps_per_epoch,
        seconds=seconds,
        loss=loss.item(),
        accuracy=accuracy(model.module, test_images, test_labels),
        parameters_sha256=parameters_sha256(model.module),
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        path=status.path if status is not None else "gloo",
        path_reason=status.reason if status is not None else "DDP's own allreduce",
        wire_bytes=counters.get("bytes_out", 0) + IP_UDP_HEADER_BYTES * counters.get("packets_out", 0),
        packets=counters.get("packets_out", 0),
        pendings=counters.get("pendings", 0),
        retransmissions=counters.get("fast_retransmits", 0) + counters.get("timer_retransmits", 0),
    )


def shard(images: int, steps: int, rank: int, world_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Index batches of this rank: one permutation for all ranks, dealt out without overlap; what does not fill a step is left out."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed))
    mine = order[: steps * BATCH_IMAGES * world_size].reshape(steps, world_size, BATCH_IMAGES)[:, rank]
    yield from mine


@torch.no_grad()
def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The fraction of ``images`` classified right."""
    return float((module(images).argmax(dim=1) == labels).float().mean())


def parameters_sha256(module: nn.Module) -> str:
    """Of the bytes of all parameters in order: equal exactly when every bit is."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
