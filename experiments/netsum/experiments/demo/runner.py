"""Starts the switch and the two trainings, one after the other, and collects what the workers report."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from netsum.experiments.demo.processes import Child, ChildError
from netsum.experiments.demo.result import WorkerResult
from netsum.host_agent.settings import parse_faults
from netsum.protocol.errors import UsageError

MAX_WORKERS = 32
_READY_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 120.0  # importing torch in every worker, on a busy machine
_EPOCH_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DemoOptions:
    workers: int = 4
    epochs: int = 10
    seed: int = 1
    loss: str = ""  # packet loss each way, "1%"; "": none
    datapath: str = "native"

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= MAX_WORKERS:
            raise UsageError(f"--workers {self.workers}: from 2 to {MAX_WORKERS} are possible")
        if self.epochs < 1:
            raise UsageError(f"--epochs {self.epochs}: at least 1")
        parse_faults(self.faults)
        if self.datapath not in ("native", "python"):
            raise UsageError(f"--datapath {self.datapath}: native or python")

    @property
    def faults(self) -> str:
        """For NETSUM_FAULTS."""
        return f"loss={self.loss},seed={self.seed}" if self.loss else ""


@dataclass(frozen=True)
class DemoRuns:
    """Results by rank."""

    switch: list[WorkerResult]
    gloo: list[WorkerResult]


def run_demo(options: DemoOptions, on_epoch: Callable[[str, int], None]) -> DemoRuns:
    """Trains through a switch of its own, then with plain gloo. ``on_epoch("switch" or "gloo", epochs done)`` tells of progress.

    Raises :class:`ChildError` when a process fails or takes too long. Whatever happens, no process is left.
    """
    with tempfile.TemporaryDirectory(prefix="netsum-demo-") as folder:
        logs = Path(folder)
        with Child("netsum switch", _switch_command(options), {}, logs / "switch.log") as switch:
            environment = {"NETSUM_SWITCH": _wait_ready(switch), "NETSUM_FAULTS": options.faults}
            through_switch = _train(options, "netsum", environment, logs, lambda epoch: on_epoch("switch", epoch))
        gloo = _train(options, "none", {}, logs, lambda epoch: on_epoch("gloo", epoch))
        return DemoRuns(through_switch, gloo)


def _switch_command(options: DemoOptions) -> list[str]:
    program = [
        sys.executable,
        "-c",
        "from netsum.cli.main import main; main()",
    ]  # by the same Python, wherever `netsum` is
    ports = ["--control", "tcp://127.0.0.1:0", "--data", "127.0.0.1:0"]
    return [*program, "switch", *ports, "--datapath", options.datapath, "--json"]


def _wait_ready(switch: Child) -> str:
    line = switch.read_line(time.monotonic() + _READY_TIMEOUT_S)
    if line is None:
        switch.expect_success(time.monotonic() + _READY_TIMEOUT_S)
        raise ChildError("netsum switch ended without becoming ready")
    return str(json.loads(line)["control"])


def _train(
    options: DemoOptions, hook: str, environment: dict[str, str], logs: Path, on_epoch: Callable[[int], None]
) -> list[WorkerResult]:
    results = logs / f"results-{hook}"
    results.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.workers}"),
        *("--module", "netsum.experiments.demo.train", f"--hook={hook}"),
        *(f"--epochs={options.epochs}", f"--seed={options.seed}", f"--results={results}"),
    ]
    environment = {"OMP_NUM_THREADS": "1", **environment}
    with Child(f"training ({hook})", command, environment, logs / f"train-{hook}.log") as training:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (line := training.read_line(deadline_s)) is not None:
            if line.startswith("{"):
                on_epoch(int(json.loads(line)["epoch"]))
                deadline_s = time.monotonic() + _EPOCH_TIMEOUT_S
        training.expect_success(deadline_s)
    return [
        msgspec.json.decode((results / f"rank{rank}.json").read_bytes(), type=WorkerResult)
        for rank in range(options.workers)
    ]
