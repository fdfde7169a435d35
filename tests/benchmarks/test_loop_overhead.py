"""The benchmark of the loop, and that nothing in the loop blocks."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midflight import looping

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_it_measures_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    import loop_overhead

    sys.argv = ["loop_overhead.py", "--json", "--trajectories", "32", "--turns", "2"]
    loop_overhead.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["trajectories"], found["turns"], found["ideal_seconds"]) == (32, 2, 0.4)
    assert found["seconds"] == pytest.approx(found["ratio_to_ideal"] * 0.4, abs=0.001) and found["seconds"] > 0.4
    assert found["thread_pool_seconds"] >= 0.8  # two rounds of 16
    assert found["ratio_to_thread_pool"] == pytest.approx(found["thread_pool_seconds"] / found["seconds"], rel=0.1)
    assert found["overhead_ms_per_turn"] > 0 and found["kb_per_trajectory"] >= 0
    assert found["event_loop"] == looping.loop_name()


def test_the_stub_answers_whole_requests_in_time_and_says_what_it_took() -> None:
    import loop_overhead

    with loop_overhead.stub(0.05) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for size in (0, 10, 100_000):
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", b"x" * size)
            answer = json.loads(connection.getresponse().read())
            assert time.perf_counter() - began >= 0.05
            assert answer["choices"][0]["message"]["content"] == loop_overhead.ACTION
        connection.close()
        other = http.client.HTTPConnection("127.0.0.1", server.port)
        other.request("POST", "/v1/chat/completions", b"{}")
        assert other.getresponse().status == 200
        assert 0 <= server.seconds() < 5


WATCHED = """
import asyncio, itertools, sys, threading, time
from pathlib import Path
from midflight.agent import AgentFlow, DirectExecutor, LLMGenerator, LLMPlanner, LLMVerifier, Query
from midflight.engines.http import Client, Limits, Patience, ResponseCache
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.tools import tool
from midflight.tools.base import Toolset
from tests.engines.serving import chat, error, ok, served

@tool
def slow(x: str) -> str:
    "Takes its time."
    time.sleep(0.01)
    open(sys.argv[1]).close()
    return x

def answer(request):
    if next(answers) % 7 == 6:
        return error(500)
    if b"verdict" in request.body and b"four lines" in request.body:
        return ok(chat("Result: valid\\nMemory: insufficient\\nContradictions: none\\nReason: more"))
    if b"final answer" in request.body:
        return ok(chat("Answer: x [turn 1]"))
    return ok(chat("Sub-goal: s\\nTool: slow\\nContext: x"))

BLOCKING = {"open", "time.sleep", "sqlite3.connect", "subprocess.Popen", "socket.getaddrinfo", "os.listdir", "os.mkdir"}
watching, blocked, loop_thread = False, [], threading.get_ident()
answers = itertools.count()

def hook(event, arguments):
    if watching and event in BLOCKING and threading.get_ident() == loop_thread:
        blocked.append(event)

async def main():
    global watching
    async with served(answer) as double:
        cache = ResponseCache(Path(sys.argv[1]).with_name("cache.sqlite")) if "cache" in sys.argv else None
        client = Client(double.base_url, Patience(Limits(backoff=0.001, concurrency=20)))
        engine = OpenAIEngine("e", client, Endpoint("m"), cache=cache)
        modules = (LLMPlanner(engine), DirectExecutor(), LLMVerifier(engine), LLMGenerator(engine))
        flow = AgentFlow(*modules, Toolset([slow]), max_turns=3, memory_tokens=2000)
        watching = True  # from the very first: what is read or imported at first use would be read on the loop
        if "blocking" in sys.argv:
            time.sleep(0)
            open(sys.argv[1]).close()
        made = await asyncio.gather(*(flow.run(Query(f"q{n}", seed=n)) for n in range(40)))
        watching = False
        wrong = [one for one in made if len(one.turns) != 3 or one.answer is None or one.answer.text != "x"]
        assert not wrong, (len(wrong), wrong[0].stop_reason, wrong[0].error, wrong[0])
        if cache is not None:
            cache.close()

def sleep(seconds, really=time.sleep):  # Python 3.11 has no audit event for it
    hook("time.sleep", ())
    really(seconds)

time.sleep = sleep
sys.addaudithook(hook)
asyncio.run(main())
print(sorted(set(blocked)))
"""


@pytest.mark.parametrize(("mode", "found"), [("plain", []), ("cache", []), ("blocking", ["open", "time.sleep"])])
def test_no_call_on_the_event_loop_blocks(tmp_path: Path, mode: str, found: list[str]) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "file"), mode]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(found)
