"""What the agent's loop costs beside engine and tool, and how close a thousand trajectories come to the ideal time.

A planner in the full format asks a stub server (a process of its own) that answers after 200 ms; the tool answers at
once. Every trajectory takes all its turns, and all of them are under way from the start. Measured:

- overhead_ms_per_turn: processor time of this process a turn, all of it: prompts, JSON, HTTP, parsing, memory;
- stub_ms_per_request: the server's own, on another core; well below that, or the server is what is measured;
- ratio_to_ideal: wall time over the ideal, turns x 200 ms: every trajectory has a request of its own under way, and
  everything but the server is free. With 1,000 trajectories that leaves a turn 200 us of processor time;
- ratio_with_bound: the same with at most --concurrency requests under way (256, what a vLLM server decodes at once by
  default), over the ideal for as many;
- kb_per_trajectory: resident memory that is added until all trajectories are in their last turn, over their number,
  with all at once;
- ratio_to_thread_pool: the wall time of the same work in 16 threads that wait for each answer, over ours;
- ratios, ms_per_turn, stolen_seconds: of each repeat, the ratio to the ideal, the overhead, and the processor time that
  the host of a virtual machine gave to others meanwhile, all cores together. Client and server wait for the last: what
  a repeat with 0.1 s and more of it shows is the host. The overhead is of the same work each time, so where it changes
  from repeat to repeat the processor does, as one that is shared with others.

All but the thread pool is done --repeats times in a row; a figure is the median, kb_per_trajectory the largest (later
repeats find memory that earlier ones have left).

Usage: python benchmarks/loop_overhead.py [--json] [--trajectories 1000] [--turns 5] [--concurrency 256] [--repeats 5]
           [--no-pool]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from midflight import looping
from midflight.agent import AgentFlow, DirectExecutor, LastResultGenerator, LLMPlanner, Query, RuleVerifier, StopReason
from midflight.agent.types import Trajectory
from midflight.engines.base import Engine, FinishReason, GenerateRequest, Generation, Sampling
from midflight.engines.http import Client, Limits, Patience
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.tools.base import ToolResult, Toolset

ACTION = "Sub-goal: find how many people live there\nTool: population\nContext: Peru"
LATENCY = 0.2
WORKERS = 16
MODEL = Endpoint("stub", context_length=100_000)


class Population:
    """A tool that answers at once."""

    name = "population"
    description = "How many people live in a country."
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"country": {"type": "string"}},
        "required": ["country"],
        "additionalProperties": False,
    }

    async def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolResult:
        return ToolResult("32933835")


class BlockingEngine(OpenAIEngine):
    """The same requests over one connection that is waited for."""

    def __init__(self, port: int) -> None:
        super().__init__("stub", Client(f"http://127.0.0.1:{port}/v1", Patience(Limits())), MODEL)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    async def generate(self, request: GenerateRequest) -> Generation:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(self.body(request)).encode(), headers)
        answer = json.loads(self._connection.getresponse().read())
        return Generation(answer["choices"][0]["message"]["content"], FinishReason.STOP, sampling=request.sampling)


def flow_on(engine: Engine, turns: int) -> AgentFlow:
    planner = LLMPlanner(engine, direct=True, sampling=Sampling(temperature=0.7, max_tokens=200))
    rules = (DirectExecutor(), RuleVerifier(), LastResultGenerator())
    return AgentFlow(planner, *rules, Toolset([Population()]), max_turns=turns, max_seconds=600, memory_tokens=2000)


def query(number: int) -> Query:
    return Query(f"How many people live in Peru, asked for the {number}th time?", str(number), number)


def checked(trajectories: list[Trajectory], turns: int) -> None:
    for one in trajectories:
        assert one.stop_reason is StopReason.MAX_TURNS and len(one.turns) == turns, one


class Stub(NamedTuple):
    port: int
    process: int

    def seconds(self) -> float:
        """Processor time that it took so far, in steps of 10 ms."""
        user, system = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stub(seconds: float) -> Iterator[Stub]:
    """A stub server that runs."""
    command = [sys.executable, str(Path(__file__).with_name("stub_server.py")), ACTION, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Stub(int(process.stdout.readline()), process.pid)
    finally:
        process.terminate()
        process.wait()


def stolen() -> float:
    """Seconds of processor time that the host of a virtual machine gave to others, since it began."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def live(port: int, count: int, turns: int, at_once: int) -> tuple[list[Trajectory], float, float, int]:
    """Trajectories, wall and processor seconds, and bytes added when the last one came to its last turn."""
    limits = Limits(concurrency=at_once, attempt_seconds=60)
    engine = OpenAIEngine("stub", Client(f"http://127.0.0.1:{port}/v1", Patience(limits)), MODEL)
    flow, before, most = flow_on(engine, turns), resident(), 0

    def seen(turn: Any) -> None:
        nonlocal most
        if turn.index == turns - 1:
            ahead[0] += 1
            if ahead[0] == count:
                most = resident()

    ahead = [0]
    began, worked = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as running:
        jobs = await looping.start(running, (flow.run(query(number), seen) for number in range(count)))
    made = [job.result() for job in jobs]
    return made, time.perf_counter() - began, time.process_time() - worked, most - before


def pooled(port: int, count: int, turns: int) -> float:
    """Wall seconds of the same work in threads."""

    def one(number: int) -> Trajectory:
        return asyncio.run(flow_on(BlockingEngine(port), turns).run(query(number)))

    began = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        made = list(pool.map(one, range(count)))
    seconds = time.perf_counter() - began
    checked(made, turns)
    return seconds


class Repeat(NamedTuple):
    """Seconds, but for `added`, bytes."""

    wall: float
    worked: float
    served: float
    stolen: float
    wall_bound: float
    added: int


def repeat(server: Stub, count: int, turns: int, at_once: int) -> Repeat:
    served, away = server.seconds(), stolen()
    made, wall, worked, added = looping.run(live(server.port, count, turns, count))
    served, away = server.seconds() - served, stolen() - away
    checked(made, turns)
    bound, wall_bound, *_ = looping.run(live(server.port, count, turns, at_once))
    checked(bound, turns)
    return Repeat(wall, worked, served, away, wall_bound, added)


def measure(count: int, turns: int, at_once: int, repeats: int, pool: bool) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    load = os.getloadavg()[0]
    with stub(LATENCY) as server:
        warm, *_ = looping.run(live(server.port, 4, turns, 4))  # imports and caches
        checked(warm, turns)
        runs = [repeat(server, count, turns, at_once) for _ in range(repeats)]
        in_pool = pooled(server.port, count, turns) if pool else None
    ideal = turns * LATENCY
    wall = median(run.wall for run in runs)
    return {
        "overhead_ms_per_turn": round(1000 * median(run.worked for run in runs) / (count * turns), 3),
        "trajectories": count,
        "ratio_to_ideal": round(wall / ideal, 3),
        "kb_per_trajectory": round(max(run.added for run in runs) / count / 1024, 1),
        "ratio_to_thread_pool": None if in_pool is None else round(in_pool / wall, 1),
        "ratio_with_bound": round(median(run.wall_bound for run in runs) / (ideal * max(count / at_once, 1.0)), 3),
        "ratios": [round(run.wall / ideal, 3) for run in runs],
        "ms_per_turn": [round(1000 * run.worked / (count * turns), 3) for run in runs],
        "stolen_seconds": [round(run.stolen, 2) for run in runs],
        "turns": turns,
        "concurrency": at_once,
        "event_loop": looping.loop_name(),
        "stub_ms_per_request": round(1000 * median(run.served for run in runs) / (count * turns), 3),
        "load_average": round(load, 1),
        "latency_ms": 1000 * LATENCY,
        "seconds": round(wall, 3),
        "ideal_seconds": round(ideal, 3),
        "thread_pool_seconds": None if in_pool is None else round(in_pool, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the agent's loop costs.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=256, help="requests under way at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-pool", action="store_true", help="leave the thread pool out: it takes a minute")
    given = parser.parse_args()
    found = measure(given.trajectories, given.turns, given.concurrency, given.repeats, not given.no_pool)
    print(json.dumps(found) if given.json else "\n".join(f"{name:<24}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
