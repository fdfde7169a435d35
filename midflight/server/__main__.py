"""`python -m midflight.server`: a local model with vLLM's protocol, for this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from midflight import signals
from midflight.building import local_engine
from midflight.engines.local import LocalEngine
from midflight.errors import UserError
from midflight.loading import load_trained
from midflight.recipe import load_recipe
from midflight.server.model import ModelServer
from midflight.server.wire import serving
from midflight.slips import variable


def main(
    model: Annotated[str, typer.Option(help="smollm2-135m, a run folder, a model folder or a Hub name.")],
    name: Annotated[str | None, typer.Option(help="What clients call it. Default: the model.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    context_length: Annotated[int, typer.Option(help="Most tokens of prompt and answer.")] = 2048,
    chat_template: Annotated[bool, typer.Option(help="Apply the model's, to chat requests.")] = True,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    key_variable: Annotated[str | None, typer.Option(help="Environment variable with the key clients bring.")] = None,
) -> None:
    """Serve until interrupted. The first line on standard output is the base URL."""
    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise UserError(f"--key-variable {variable(key_variable)}: not set in the environment")
    settings = [f"model.dtype={dtype}", f"model.context_length={context_length}", "training.max_drift=0.05"]
    template = f"model.chat_template={str(chat_template).lower()}"
    recipe = load_recipe("quickstart", [f"model.name={model}", *settings, template], tasks=False, training=False)

    def load(folder: Path) -> LocalEngine:
        return local_engine(recipe, load_trained(recipe, str(folder), lambda line: print(line, file=sys.stderr))[0])

    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family):  # to fail before a model is loaded
            pass
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; name another") from None
    server = ModelServer(name or model, load(Path(recipe.model.name)), load, key=key)
    try:
        asyncio.run(_serve(server, host, port))
    except OSError as error:  # taken meanwhile
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; name another") from None
    except KeyboardInterrupt:  # here, for typer would end with 130 whichever the signal
        os._exit(128 + signals.interrupted_by())  # the engine's thread may be in the middle of a batch


def base_url(host: str, port: int) -> str:
    """Where clients find the server; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


async def _serve(server: ModelServer, host: str, port: int) -> None:
    try:
        async with serving(server.handle, host, port) as taken:
            print(base_url(host, taken), flush=True)
            await asyncio.Event().wait()
    finally:
        server.close()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(main)

if __name__ == "__main__":
    signals.catch()
    try:
        app()
    except UserError as error:
        print(f"midflight.server: {error}", file=sys.stderr)
        sys.exit(2)
