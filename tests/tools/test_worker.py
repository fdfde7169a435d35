"""The killable worker process: results and errors come back, and what is stopped stops."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midflight.errors import GivenUp
from midflight.tools import (
    ErrorKind,
    InfrastructureError,
    ToolError,
    ToolResult,
    TransientError,
    make_toolset,
    tool,
    worker,
)
from midflight.tools.worker import run_in_worker
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


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    def inner() -> int:
        """One."""
        return 1

    with pytest.raises(TypeError, match="top of a module"):
        tool(process=True)(inner)


@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_the_process_that_started_them(busy: bool, tmp_path: Path) -> None:
    file = str(tmp_path / "late")
    code = (
        "import asyncio, os, signal\n"
        "from midflight.tools.worker import run_in_worker\nfrom tests.tools import in_worker\n"
        "async def work():\n"
        "    print(await run_in_worker(in_worker.process_id), flush=True)\n"
        f"    task = asyncio.create_task(run_in_worker(in_worker.late, {file!r}, 600)) if {busy} else None\n"
        f"    while task and not os.path.exists({file + '.started'!r}):\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(work())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    worker = int(done.stdout)
    end = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
