"""Look-ups of names: one that nobody answers holds up nothing else."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from midflight.tools.web.addresses import system_resolve


def test_names_that_nobody_answers_hold_up_no_other_and_not_the_threads_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, real = threading.Event(), socket.getaddrinfo

    def hanging(host: str, *arguments: Any, **named: Any) -> Any:
        if host.startswith("dead"):
            release.wait(30)
        return real("127.0.0.1", *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)

    async def beside() -> tuple[list[str], int]:
        dead = [asyncio.create_task(system_resolve(f"dead{number}.example", 80)) for number in range(100)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                return await system_resolve("alive.example", 80), await asyncio.to_thread(lambda: 1)
        finally:
            release.set()
            await asyncio.gather(*dead)

    assert asyncio.run(beside()) == (["127.0.0.1"], 1)
