"""What the two trainings showed: a table for people, a dictionary for programs, and a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from netsum.experiments.demo.result import WorkerResult
from netsum.experiments.demo.runner import DemoRuns

# Test accuracy of plain gloo runs with the seeds 1 to 10 (4 workers, 10 epochs; netsum.experiments.demo.train --hook none):
# mean 0.966, standard deviation 0.0037. The difference of two runs that have nothing but the task in common then has 0.0052; three
# times that is what chance may do. Runs of equal seeds start from equal parameters and images, and differ far less.
ACCURACY_TOLERANCE = 0.0155


@dataclass(frozen=True)
class Side:
    """One training: what is the same on all ranks, and the largest of what is not."""

    accuracy: float
    path: str
    path_reason: str
    seconds: float
    ranks_identical: bool
    wire_bytes_per_worker: int
    packets_per_worker: int
    retransmissions: int  # of all workers together
    pendings: int  # how many of these the switch answered with "another rank is late"

    @staticmethod
    def of(results: list[WorkerResult]) -> Side:
        off_path = next((r for r in results if r.path != "switch"), results[0])
        return Side(
            accuracy=results[0].accuracy,
            path=off_path.path,
            path_reason=off_path.path_reason,
            seconds=max(r.seconds for r in results),
            ranks_identical=len({r.parameters_sha256 for r in results}) == 1,
            wire_bytes_per_worker=max(r.wire_bytes for r in results),
            packets_per_worker=max(r.packets for r in results),
            retransmissions=sum(r.retransmissions for r in results),
            pendings=sum(r.pendings for r in results),
        )


@dataclass(frozen=True)
class Comparison:
    workers: int
    steps: int
    gradient_bytes: int  # of one step
    ring_bytes_per_worker: int  # 2(n-1)/n of all gradients: what any ring allreduce sends, without its headers
    switch: Side
    gloo: Side
    problems: list[str]

    @staticmethod
    def of(runs: DemoRuns) -> Comparison:
        first, workers = runs.switch[0], len(runs.switch)
        switch, gloo = Side.of(runs.switch), Side.of(runs.gloo)
        return Comparison(
            workers=workers,
            steps=first.steps,
            gradient_bytes=first.gradient_bytes,
            ring_bytes_per_worker=2 * (workers - 1) * first.gradient_bytes * first.steps // workers,
            switch=switch,
            gloo=gloo,
            problems=_problems(switch, gloo),
        )

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def _problems(switch: Side, gloo: Side) -> list[str]:
    problems = []
    if switch.path != "switch":
        problems.append(f"the path was {switch.path}, not the switch: {switch.path_reason}")
    problems += [
        f"the ranks' parameters differ after the run through {name}"
        for name, side in (("the switch", switch), ("gloo", gloo))
        if not side.ranks_identical
    ]
    difference = abs(switch.accuracy - gloo.accuracy)
    if difference > ACCURACY_TOLERANCE:
        problems.append(
            f"the accuracies differ by {difference:.4f}, more than {ACCURACY_TOLERANCE}, which chance explains"
        )
    return problems


def table(comparison: Comparison) -> Table:
    """Two columns of results, the switch's and gloo's."""
    switch, gloo = comparison.switch, comparison.gloo
    share = switch.wire_bytes_per_worker / comparison.ring_bytes_per_worker
    rows = Table(
        title=f"{comparison.workers} workers, {comparison.steps} steps, {comparison.gradient_bytes:,} gradient bytes a step"
    )
    rows.add_column("")
    rows.add_column("netsum", justify="right")
    rows.add_column("gloo DDP", justify="right")
    rows.add_row("test accuracy", f"{switch.accuracy:.2%}", f"{gloo.accuracy:.2%}")
    rows.add_row("path", switch.path, gloo.path)
    rows.add_row(
        "bytes sent per worker",
        f"{switch.wire_bytes_per_worker / 1e6:.1f} MB ({share:.0%} of the ring's)",
        f"{comparison.ring_bytes_per_worker / 1e6:.1f} MB (computed for a ring)",
    )
    rows.add_row("packets sent per worker", f"{switch.packets_per_worker:,}", "")
    rows.add_row("retransmissions", f"{switch.retransmissions:,} ({switch.pendings:,} while a rank was late)", "")
    rows.add_row("training time", f"{switch.seconds:.1f} s", f"{gloo.seconds:.1f} s")
    rows.add_row("ranks bit-identical", _yes_no(switch.ranks_identical), _yes_no(gloo.ranks_identical))
    return rows


def _yes_no(value: bool) -> str:
    return "yes" if value else "NO"
