"""`midflight tools` and `doctor`: what there is on this machine to work with."""

from __future__ import annotations

import resource
from typing import Annotated

import typer

from midflight.cli.ending import fail
from midflight.errors import UserError


def allow_files(count: int) -> None:
    """Let this process and its children hold `count` files open, or as many as the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def list_tools(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Option(help="List its tools instead, those of its MCP servers, which are started, as well.")
    ] = None,
) -> None:
    """List the tools that a recipe can name, with what is missing to use each; or run one."""
    if context.invoked_subcommand is None:
        from midflight.cli.trying import listing

        print(listing(recipe))
    elif recipe is not None:
        raise UserError(f"--recipe {recipe}: write it after {context.invoked_subcommand}")


def run_tool(
    name: Annotated[str, typer.Argument(help="Of a tool, or file.py:attribute for one of your own.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to call it with.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="Of the tool; can be given again.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose options, own tools, MCP servers, sandbox and engines to use.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time limit, where the tool has no own.")] = 60.0,
) -> None:
    """Call one tool once and print its result; exit code 1 and the kind of error where it is one."""
    from midflight.cli.trying import shown, try_tool

    result = try_tool(name, arguments or [], option or [], recipe, seconds)
    if result.error is not None:
        raise typer.Exit(fail(f"{result.error.value}: {shown(result)}", 1))
    print(shown(result))


def doctor() -> None:
    """Check that this machine has what training needs."""
    from midflight.cli.doctor import diagnose, healthy

    checks = diagnose()
    for check in checks:
        print(check.line())
    if not healthy(checks):
        raise typer.Exit(1)
