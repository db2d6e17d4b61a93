"""``netsum demo``: a small training through the switch and with gloo, side by side."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Annotated

import typer


def demo_command(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 4,
    epochs: Annotated[int, typer.Option(help="Passes over the 4,000 training digits.")] = 10,
    loss: Annotated[
        str, typer.Option(help="Drop this share of the packets, each way, by a seeded choice.", metavar="1%")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of parameters, order of images, and lost packets.")] = 1,
    datapath: Annotated[str, typer.Option(help="The switch's: native or python (slow).", metavar="NAME")] = "native",
    json_output: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train a small network on 5,000 real digits through a switch, and with plain gloo on the same seeds; compare.

    Starts its own switch on loopback. Exit status 1 when the path was not the switch, when ranks end with different parameters, or when
    the accuracies differ by more than chance explains. Needs the extra `demo` (torch, mlxtend).

    Example: netsum demo --loss 1%
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    from netsum.experiments.demo.report import Comparison, table
    from netsum.experiments.demo.runner import DemoOptions, run_demo

    options = DemoOptions(workers=workers, epochs=epochs, seed=seed, loss=loss, datapath=datapath)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console(stderr=True)
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        tasks = {
            "switch": progress.add_task("through the switch", total=epochs),
            "gloo": progress.add_task("with plain gloo", total=epochs),
        }
        runs = run_demo(options, lambda run, epoch: progress.update(tasks[run], completed=epoch))
    comparison = Comparison.of(runs)
    if json_output:
        typer.echo(json.dumps(comparison.as_dict(), indent=2))
    else:
        Console().print(table(comparison))
        for problem in comparison.problems:
            typer.echo(f"FAILED: {problem}")
        if comparison.passed:
            typer.echo("Passed: through the switch, all ranks bit-identical, accuracy as with gloo.")
    if not comparison.passed:
        raise typer.Exit(1)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # so that the contexts that own processes are left
