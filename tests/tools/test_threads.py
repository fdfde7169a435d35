"""Blocking calls in threads of their own: as many as said, and what hangs holds up nothing else."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from midflight.tools import InfrastructureError, ToolResult, tool
from midflight.tools.threads import Threads


def test_at_most_so_many_run_and_one_whose_call_was_cancelled_counts_until_it_ends() -> None:
    release = threading.Event()
    threads = Threads("test", 2)
    began: list[int] = []

    def hang(number: int) -> int:
        began.append(number)
        release.wait(30)
        return number

    async def three() -> list[int]:
        first, second = (asyncio.create_task(threads.run(partial(hang, number))) for number in (1, 2))
        while len(began) < 2:
            await asyncio.sleep(0.001)
        first.cancel()
        third = asyncio.create_task(threads.run(lambda: hang(3)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert first.cancelled() and sorted(began) == [1, 2]
        release.set()
        return [await second, await third]

    assert asyncio.run(three()) == [2, 3]
    assert sorted(began) == [1, 2, 3]


def test_where_no_thread_can_be_started_no_room_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads("test", 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def twice() -> int:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(InfrastructureError, match="^no thread can be started for test: can't"):
                await threads.run(lambda: 1)
        return await threads.run(lambda: 2)

    assert asyncio.run(twice()) == 2


def test_a_tool_without_a_thread_is_no_fault_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @tool
    def one() -> int:
        """One."""
        return 1

    assert asyncio.run(one.call({}, 5.0)) == ToolResult("1")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(InfrastructureError, match="no thread can be started for tool-one"):
        asyncio.run(one.call({}, 5.0))
