"""The command ``netsum``: registers the subcommands, turns netsum's errors into a line and an exit status."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from netsum.cli.demo_command import demo_command
from netsum.cli.status_command import status_command
from netsum.cli.switch_command import switch_command
from netsum.protocol.errors import NetsumError, UsageError

app = typer.Typer(
    name="netsum",
    help="In-network aggregation of gradients: a software switch, host agents, an emulator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"netsum {version('netsum')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the subcommand."""


# A subcommand is a module <name>_command.py with one function. What it needs beyond the standard library, typer and netsum.protocol it
# imports when it runs: `netsum --help` must be quick, and must work without torch.
app.command("switch")(switch_command)
app.command("status")(status_command)
app.command("demo")(demo_command)


def main() -> None:
    """Exit status: 0 done, 1 failed, 2 wrong usage."""
    try:
        app()
    except NetsumError as error:
        print(f"netsum: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
