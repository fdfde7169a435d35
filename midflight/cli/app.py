"""The commands, by their names."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from midflight import __version__
from midflight.cli.asking import credit, evaluate, solve
from midflight.cli.ending import fail, interrupted
from midflight.cli.machine import allow_files, doctor, list_tools, run_tool
from midflight.cli.training import report, sft, train

OPEN_FILES = 10_000
"""What a thousand trajectories at once may hold: a connection, a sandbox's session, a file or two each."""


def _version(show: bool) -> None:
    if show:
        print(f"midflight {__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""
    allow_files(OPEN_FILES)


class _Commands(TyperGroup):
    """Says which signal ended a command: typer would end it without a word, with 130 whichever it was."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(fail(*interrupted())) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A tool-using agent of four modules, and Flow-GRPO, which trains its planner while it plans.",
)
app.callback()(common)
app.command()(solve)
app.command()(train)
app.command()(sft)
app.command(name="eval")(evaluate)
app.command()(credit)
tools_app = typer.Typer(help="The tools that a recipe can name.", invoke_without_command=True)
tools_app.callback()(list_tools)
tools_app.command(name="run")(run_tool)
app.add_typer(tools_app, name="tools")
app.command()(doctor)
app.command()(report)
