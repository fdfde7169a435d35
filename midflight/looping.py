"""The event loop that a run has: uvloop where it is installed (the extra `fast`), else asyncio's own.

Invariant: both do the same. What differs is the processor time a request takes, which is what limits how many
trajectories a process can hold; `midflight doctor` says which of them it is.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

YOUNG_OBJECTS = 200_000
"""Made, less freed, between two collections of the youngest. A thousand trajectories of five turns keep 130,000 until
they end, and then free them without it: with Python's 700 they are looked through 200 times, to find nothing, and with
50,000 twice, which took a tenth of the processor time."""

STARTED_AT_ONCE = 8
"""Trajectories that begin in one round of the loop: the first requests are under way while the next are made ready."""
STARTED_WHEN_BUSY = 32
"""The same after a round of more than `BUSY` seconds, in which answers of those under way were read: who begins last
has the longest way to go, and is not to wait for all of them (docs/engines.md)."""
BUSY = 0.01


def loop_name() -> str:
    """`uvloop` or `asyncio`."""
    return "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on the loop that `loop_name` says."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        with asyncio.Runner(loop_factory=_factory()) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*before)


async def start(group: asyncio.TaskGroup, work: Iterable[Coroutine[Any, Any, T]]) -> list[asyncio.Task[T]]:
    """A task for each, a few in a round of the loop; `work` makes them as they are asked for."""
    tasks, left, began = [], STARTED_AT_ONCE, time.perf_counter()
    for one in work:
        tasks.append(group.create_task(one))
        left -= 1
        if left == 0:
            await asyncio.sleep(0)
            before, began = began, time.perf_counter()
            left = STARTED_WHEN_BUSY if began - before > BUSY else STARTED_AT_ONCE
    return tasks


def _factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if loop_name() == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
