"""Adapters of the server in the box come and go, one change at a time, whatever else is asked meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from midflight.engines.local import LocalEngine
from midflight.server.model import ModelServer
from tests.server.test_model import asked

pytestmark = pytest.mark.model


class Stub:
    """An engine that can be forgotten and closed; `forget` waits for `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.closed = False

    def forget(self) -> None:
        if self.closed:
            raise RuntimeError("it is closed")
        self.begun.set()
        assert self.go.wait(10)

    def close(self) -> None:
        self.closed = True


def stubs(*engines: Stub, load: Callable[[Path], Stub] = lambda _: Stub()) -> ModelServer:
    made = ModelServer("m", cast(LocalEngine, engines[0]), cast(Callable[[Path], LocalEngine], load))
    made._engines.update({f"a{n}": cast(LocalEngine, one) for n, one in enumerate(engines[1:])})
    return made


async def settled() -> None:
    """All that can go on without a thread has."""
    for _ in range(10):
        await asyncio.sleep(0)


def adapter(folder: Path) -> dict[str, str]:
    (folder / "adapter_config.json").touch()
    return {"lora_name": "new", "lora_path": str(folder)}


def test_adapters_that_come_and_go_do_not_disturb_a_reset(tmp_path: Path) -> None:
    base, first, second = Stub(), Stub(), Stub()
    server = stubs(base, first, second)

    async def all_of_it() -> Any:
        reset = asyncio.create_task(asked(server, "/reset_prefix_cache", {}))
        await asyncio.to_thread(base.begun.wait, 10)
        unload = asyncio.create_task(asked(server, "/v1/unload_lora_adapter", {"lora_name": "a1"}))
        load = asyncio.create_task(asked(server, "/v1/load_lora_adapter", adapter(tmp_path)))
        await settled()
        for one in (base, first, second):
            one.go.set()
        return await asyncio.gather(reset, unload, load)

    assert [status for status, _ in asyncio.run(all_of_it())] == [200, 200, 200]
    assert list(server._engines) == ["m", "a0", "new"] and second.closed


def test_two_loads_of_one_name_are_one_load_and_a_refusal(tmp_path: Path) -> None:
    made: list[Stub] = []
    go = threading.Event()

    def load(_: Path) -> Stub:
        assert go.wait(10)
        made.append(Stub())
        return made[-1]

    server = stubs(Stub(), load=load)

    async def all_of_it() -> Any:
        both = [asyncio.create_task(asked(server, "/v1/load_lora_adapter", adapter(tmp_path))) for _ in range(2)]
        await settled()
        go.set()
        return await asyncio.gather(*both)

    (first, _), (second, said) = asyncio.run(all_of_it())
    assert (first, second) == (200, 400) and "already been loaded" in said["error"]["message"]
    assert len(made) == 1 and not made[0].closed


def test_an_adapter_whose_client_went_away_has_its_name_and_can_be_unloaded(tmp_path: Path) -> None:
    begun, go, made = threading.Event(), threading.Event(), Stub()

    def load(_: Path) -> Stub:
        begun.set()
        assert go.wait(10)
        return made

    server = stubs(Stub(), load=load)

    async def all_of_it() -> int:
        gone = asyncio.create_task(asked(server, "/v1/load_lora_adapter", adapter(tmp_path)))
        await asyncio.to_thread(begun.wait, 10)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled()
        go.set()
        return (await asked(server, "/v1/unload_lora_adapter", {"lora_name": "new"}))[0]

    assert asyncio.run(all_of_it()) == 200
    assert made.closed and list(server._engines) == ["m"]


def test_adapter_requests_are_read_as_strictly(tmp_path: Path) -> None:
    server = stubs(Stub())
    for body, message in (
        ({"lora_name": "x"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": ["x"], "lora_path": "y"}, "lora_name: must be a text"),
        ({**adapter(tmp_path), "load_inplace": True}, "'load_inplace': not a field of this server; it has lora_name, "),
    ):
        status, answer = asyncio.run(asked(server, "/v1/load_lora_adapter", body))
        assert status == 400 and answer["error"]["message"].startswith(message)
