"""The killable worker process: results and errors come back, and what is stopped stops."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import GivenUp
from midflight.tools import (
    FINISH,
    ErrorKind,
    InfrastructureError,
    ToolError,
    ToolResult,
    TransientError,
    make_toolset,
    tool,
    worker,
)
from midflight.tools.worker import run_in_worker, wait_in_worker
from tests.tools import in_worker


def test_a_worker_is_another_process_and_is_used_again() -> None:
    async def three() -> list[int]:
        return [await run_in_worker(in_worker.process_id) for _ in range(3)]

    first = asyncio.run(three())
    assert len(set(first)) == 1 and first[0] != os.getpid()
    assert asyncio.run(three())[0] == first[0]  # also from another event loop


def test_no_key_reaches_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "secret")

    async def fresh() -> list[dict[str, str]]:
        return await asyncio.gather(*(run_in_worker(in_worker.environment) for _ in range(3)))

    for seen in asyncio.run(fresh()):
        assert "PATH" in seen and "secret" not in "".join(seen.values())


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("tool", ToolError, "^why$"),
        ("own", ToolError, "^why$"),
        ("service", InfrastructureError, "^why$"),
        ("ended", GivenUp, "^why$"),
        ("value", ToolError, "^ValueError: why$"),
    ],
)
def test_errors_come_back_as_they_are(kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(run_in_worker(in_worker.fails, kind))


def test_what_a_transient_failure_says_comes_back_with_it() -> None:
    with pytest.raises(TransientError, match="^why$") as caught:
        asyncio.run(run_in_worker(in_worker.fails, "busy"))
    assert (caught.value.retry_after, caught.value.infrastructure, caught.value.so_far) == (1.5, False, "what")


def test_memory_is_bounded_and_a_death_is_an_error_after_which_calls_go_on() -> None:
    with pytest.raises(ToolError, match="MemoryError"):
        asyncio.run(run_in_worker(in_worker.eats_memory))
    with pytest.raises(ToolError, match="died"):
        asyncio.run(run_in_worker(in_worker.dies))
    with pytest.raises(ToolError, match="not JSON serializable"):
        asyncio.run(run_in_worker(in_worker.not_json))
    assert asyncio.run(run_in_worker(in_worker.process_id)) > 0


async def written(file: Path) -> str:
    while not file.exists():
        await asyncio.sleep(0.005)
    return file.read_text()


async def gone(process: int) -> None:
    """Wait until a process has ended, whether or not anyone asked how."""
    stat = Path(f"/proc/{process}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        await asyncio.sleep(0.01)


def test_what_is_cancelled_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "late"

    async def cancelled() -> None:
        task = asyncio.create_task(run_in_worker(in_worker.late, str(file), 1.0))
        while not Path(f"{file}.started").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    time.sleep(1.2)
    assert not file.exists()


def test_a_function_tool_in_a_process_is_interrupted_at_its_limit() -> None:
    doubled = in_worker.slow_double
    assert asyncio.run(doubled.call({"number": 4}, 20.0)) == ToolResult("8")
    started = time.monotonic()
    assert asyncio.run(doubled.call({"number": 4, "seconds": 60}, 0.5)) == ToolResult(
        "slow_double took longer than 0.5 seconds", ErrorKind.TOOL_TIMEOUT
    )
    assert time.monotonic() - started < 5


def test_own_tools_of_a_file_run_in_a_process_as_well(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom midflight.tools import tool\n\n@tool(process=True)\ndef where() -> int:\n"
        '    """Which process."""\n    return os.getpid()\n'
    )
    where = make_toolset([f"{tmp_path}/mine.py:where"]).get("where")
    assert where is not None
    assert asyncio.run(where.call({}, 20.0)).text not in ("", str(os.getpid()))


def test_as_many_calls_run_at_once_as_there_are_cores_and_none_is_lost() -> None:
    many = 3 * worker.AT_ONCE

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(run_in_worker(in_worker.process_id) for _ in range(many)))

    processes = asyncio.run(all_of_them())
    assert len(processes) == many and 1 <= len(set(processes)) <= worker.AT_ONCE


def test_what_waits_for_others_keeps_nothing_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "AT_ONCE", 1)
    monkeypatch.setattr(worker, "WAITING", 2)

    async def beside() -> None:
        places = [tmp_path / name for name in "ab"]
        for place in places:
            place.mkdir()
        calls = [asyncio.create_task(wait_in_worker(in_worker.holds, str(places[0]))) for _ in range(3)]
        calls.append(asyncio.create_task(in_worker.held.call({"folder": str(places[1])}, 60.0)))
        while [len(list(place.iterdir())) for place in places] != [2, 1]:
            await asyncio.sleep(0.005)
        assert await run_in_worker(in_worker.process_id) > 0 and await wait_in_worker(in_worker.process_id) > 0
        assert [len(list(place.iterdir())) for place in places] == [2, 1]  # the third of one function has no turn
        for place in places:
            (place / "go").touch()
        assert all(await asyncio.gather(*calls))

    asyncio.run(asyncio.wait_for(beside(), 30))


def test_waiting_for_a_turn_is_not_the_calls_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "AT_ONCE", 1)

    async def queued() -> tuple[ToolResult, float]:
        assert await asyncio.gather(*(wait_in_worker(in_worker.process_id) for _ in range(2)))  # two workers are warm
        before = asyncio.create_task(run_in_worker(in_worker.holds, str(tmp_path)))
        while not list(tmp_path.iterdir()):
            await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        began = loop.time()
        call = asyncio.create_task(in_worker.identified.call({}, 0.5))
        await asyncio.sleep(0.7)
        (tmp_path / "go").touch()
        result, process = await asyncio.gather(call, before)
        assert result == ToolResult(str(process))
        return result, loop.time() - began

    assert asyncio.run(queued())[1] > 0.7


def test_what_a_call_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "child"

    async def cancelled() -> None:
        call = asyncio.create_task(run_in_worker(in_worker.starts, str(file)))
        child = int(await written(file))
        call.cancel()
        await gone(child)

    asyncio.run(asyncio.wait_for(cancelled(), 10))


def test_nothing_of_a_worker_is_waited_for_on_the_event_loop_and_its_pipes_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Watched] = []
    threads: list[threading.Thread] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            threads.append(threading.current_thread())
            made.append(self)
            super().__init__(*arguments, **named)

        def wait(self, timeout: float | None = None) -> int:
            threads.append(threading.current_thread())
            return super().wait(timeout)

    worker._POOL.close()
    monkeypatch.setattr(worker.subprocess, "Popen", Watched)

    async def two() -> None:
        call = asyncio.create_task(run_in_worker(in_worker.late, str(tmp_path / "late"), 60.0))
        await written(tmp_path / "late.started")
        call.cancel()
        with pytest.raises(ToolError, match="died"):
            await run_in_worker(in_worker.dies)
        while not all(pipe.closed for one in made for pipe in (one.stdin, one.stdout)):  # type: ignore[union-attr]
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(two(), 20))
    assert [one.returncode for one in made] == [-signal.SIGKILL, 3]
    assert len(threads) == 4 and threading.main_thread() not in threads


def test_a_worker_that_cannot_be_started_is_the_infrastructures_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    worker._POOL.close()
    monkeypatch.setattr(worker.subprocess, "Popen", refuse)
    with pytest.raises(InfrastructureError, match=r"^no worker process can be started: \[Errno 24\] Too many"):
        asyncio.run(in_worker.identified.call({}, 5.0))


def test_arguments_of_an_own_files_types_reach_its_process(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "import enum, os\nfrom pydantic import BaseModel\nfrom midflight.tools import tool\n\n"
        "class Colour(enum.Enum):\n    RED = 'red'\n\nclass Point(BaseModel):\n    x: int\n\n"
        "def _paint(function: Colour, at: Point = Point(x=1)) -> Point:\n    'paints'\n"
        f"    assert function is Colour.RED and os.getpid() != {os.getpid()}\n    return at\n\n"
        "paint = tool(process=True)(_paint)\ndraw = tool(process=True, name='draw')(_paint)\n\n"
        "@tool(process=True)\ndef move(function: Colour, at: Point) -> Point:\n"
        "    'moves'\n    return _paint(function, at)\n"
    )
    tools = make_toolset([f"{tmp_path}/shapes.py:{name}" for name in ("paint", "draw", "move")])

    async def all_of_them() -> list[ToolResult]:
        arguments = {"function": "red", "at": {"x": 3}}
        return [await one.call(arguments, 20.0) for one in tools if one.name != FINISH]

    assert asyncio.run(all_of_them()) == [ToolResult('{"x": 3}')] * 3


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    def inner() -> int:
        """One."""
        return 1

    with pytest.raises(TypeError, match="top of a module"):
        tool(process=True)(inner)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_the_process_that_started_them(busy: bool, tmp_path: Path) -> None:
    file = tmp_path / "child"
    code = (
        "import asyncio, os, signal\n"
        "from midflight.tools.worker import run_in_worker\nfrom tests.tools import in_worker\n"
        "async def work():\n"
        "    print(await run_in_worker(in_worker.process_id), flush=True)\n"
        f"    task = asyncio.create_task(run_in_worker(in_worker.starts, {str(file)!r})) if {busy} else None\n"
        f"    while task and not os.path.exists({str(file)!r}):\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(work())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    asyncio.run(asyncio.wait_for(gone(int(done.stdout)), 5))
    if busy:
        asyncio.run(asyncio.wait_for(gone(int(file.read_text())), 5))
