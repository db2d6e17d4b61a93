"""How fast is netsum next to gloo, on this machine, now? Ratios of algorithm bandwidth, never a bare time.

Worker processes run ``torch.distributed`` (gloo) and netsum's native agents in turns, A B A B, on the same tensor; the switch runs in the
parent. Of each repetition the slowest rank counts, of the repetitions the median.

    python -m netsum.experiments.loopback_ratio --slots 64 128 256 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from netsum.native import NativeAgent, NativeSwitch
from netsum.protocol.dtypes import DType, OpCode

HOST = "127.0.0.1"
GROUP_HOST = "239.255.77.30"
OPERATION_TIMEOUT_US = 60_000_000
COUNTERS_SHOWN = ("socket_syscalls_in", "socket_syscalls_out", "fast_retransmits", "timer_retransmits")


@dataclass(frozen=True)
class Settings:
    """One comparison. All fields but ``slots`` are the same in a run of the script."""

    world_size: int
    numel: int
    chunk_elems: int
    repetitions: int
    receive_buffer_bytes: int
    multicast_port: int  # 0: results by unicast
    slots: int


@dataclass(frozen=True)
class Row:
    """Medians in gigabytes of tensor a second, their ratio, and what netsum's rank 0 counted per allreduce."""

    slots: int
    gloo_gigabytes_per_s: float
    netsum_gigabytes_per_s: float
    ratio: float
    per_allreduce: dict[str, float]


def timed(dist: Any, torch: Any, body: Callable[[], None]) -> float:
    """Seconds of ``body`` on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    body()
    seconds = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


def start_agent(rank: int, settings: Settings, control: Connection) -> NativeAgent:
    """A probed and started agent; the parent opens the job when it has all addresses."""
    agent = NativeAgent(HOST, 0, settings.receive_buffer_bytes)
    control.send(agent.address)
    switch_host, switch_port = control.recv()
    group = (GROUP_HOST, settings.multicast_port) if settings.multicast_port else None
    answers = agent.probe(
        switch_host=switch_host,
        switch_port=switch_port,
        multicast=group,
        job_number=1,
        chunk_elems=settings.chunk_elems,
        timeout_us=5_000_000,
    )
    if answers != (True, group is not None):
        raise RuntimeError(f"rank {rank}: the switch at {switch_host}:{switch_port} answers probes with {answers}")
    agent.start(
        switch_host=switch_host,
        switch_port=switch_port,
        multicast=group is not None,
        rank=rank,
        world_size=settings.world_size,
        job_number=1,
        epoch=1,
        slot_base=0,
        slots=settings.slots,
        chunk_elems=settings.chunk_elems,
        short_exponents=True,
        network_timeout_us=OPERATION_TIMEOUT_US,
        straggler_timeout_us=OPERATION_TIMEOUT_US,
    )
    return agent


def work(rank: int, settings: Settings, store_path: str, control: Connection) -> None:
    """A worker process: sends (gloo seconds, netsum seconds, netsum counters), each second a list by repetition."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=settings.world_size)
    agent = start_agent(rank, settings, control)
    tensor = torch.full((settings.numel,), float(rank + 1))
    expected = settings.world_size * (settings.world_size + 1) / 2

    def by_gloo() -> None:
        dist.all_reduce(tensor)

    def by_netsum() -> None:
        agent.submit(tensor.data_ptr(), tensor.numel(), DType.FLOAT32, OpCode.SUM)
        completion = agent.next_completion(OPERATION_TIMEOUT_US)
        if completion is None or completion[1] != "none":
            raise RuntimeError(f"rank {rank}: {completion}")

    seconds: dict[str, list[float]] = {"gloo": [], "netsum": []}
    for _ in range(settings.repetitions + 1):  # the first warms up
        for name, body in (("gloo", by_gloo), ("netsum", by_netsum)):
            tensor.fill_(float(rank + 1))
            seconds[name].append(timed(dist, torch, body))
            if not bool((tensor == expected).all()):
                raise RuntimeError(f"rank {rank}: {name} gives a wrong sum")
    counters = agent.counters()
    agent.close()
    counters["retransmits"] = counters["fast_retransmits"] + counters["timer_retransmits"]
    control.send((seconds["gloo"][1:], seconds["netsum"][1:], counters))
    dist.destroy_process_group()


def receive(control: Connection, process: Any) -> Any:
    """The worker's next message. Raises RuntimeError when it ends or is silent for too long."""
    if not control.poll(600):
        raise RuntimeError(f"{process.name} is silent")
    try:
        return control.recv()
    except EOFError:
        process.join(5)
        raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}") from None


def compare(settings: Settings) -> Row:
    """Runs the processes of one comparison."""
    context = multiprocessing.get_context("spawn")
    switch = NativeSwitch(HOST, 0, settings.receive_buffer_bytes)
    processes: list[Any] = []
    controls: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(settings.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=work, args=(rank, settings, f"{folder}/store", theirs), name=f"rank {rank}", daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                controls.append(ours)
            workers = [receive(c, p) for c, p in zip(controls, processes, strict=True)]
            switch.open_job(
                job_number=1,
                epoch=1,
                slot_base=0,
                slots=settings.slots,
                chunk_elems=settings.chunk_elems,
                workers=workers,
                multicast=(GROUP_HOST, settings.multicast_port) if settings.multicast_port else None,
            )
            switch.set_results(1, settings.multicast_port != 0)
            for control in controls:
                control.send(switch.address)
            answers = [receive(c, p) for c, p in zip(controls, processes, strict=True)]
            gloo, netsum, counters = answers[0]
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
            switch.close()
    gigabytes = 4 * settings.numel / 1e9
    rates = [gigabytes / statistics.median(seconds) for seconds in (gloo, netsum)]
    counters["switch_receive_overflows"] = switch.counters()["socket_receive_overflows"]
    shown = {
        name: counters[name] / (settings.repetitions + 1) for name in (*COUNTERS_SHOWN, "switch_receive_overflows")
    }
    return Row(settings.slots, rates[0], rates[1], rates[1] / rates[0], shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--numel", type=int, default=10_000_000, help="float32 elements of the tensor")
    parser.add_argument("--chunk-elems", type=int, default=2048)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--receive-buffer-bytes", type=int, default=4 << 20)
    parser.add_argument("--multicast-port", type=int, default=48830, help="0: results by unicast")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    common = {name: value for name, value in vars(options).items() if name not in ("slots", "json")}
    rows = [compare(Settings(**common, slots=slots)) for slots in options.slots]
    if options.json:
        print(json.dumps({**common, "rows": [asdict(row) for row in rows]}))
        return
    print("slots  gloo GB/s  netsum GB/s  ratio  per allreduce, rank 0")
    for row in rows:
        counts = ", ".join(f"{name} {count:.1f}" for name, count in row.per_allreduce.items())
        print(
            f"{row.slots:5d}  {row.gloo_gigabytes_per_s:9.2f}  {row.netsum_gigabytes_per_s:11.2f}  {row.ratio:5.2f}  {counts}"
        )


if __name__ == "__main__":
    main()
