"""Trajectories against a server of which a share of requests breaks: what becomes of them, and of their rewards.

Planner (token ids) and generator (chat) ask the same server, a process of its own that answers 429 and 500, resets,
stalls, drips, truncates, sends wrong schemas, wrong token counts and answers of stale weights. Every trajectory has a
known reward: 1 for even numbers, 0 for odd ones. Counted:

- lost: trajectories that were asked for and did not come back with a stop reason; lost_to is what they raised;
- unearned_rewards: rewards that are not the known one, or were given although a failure ended the trajectory;
- key_shown: whether trajectories or the ledger have the key, which the server repeats in some errors; key_taken_out is
  how often a trajectory has what stands in its place;
- adds_up: stop reasons are as many as trajectories, trajectories without a reward are those a failure ended, and the
  requests the server saw are those the client counted.

Usage: python benchmarks/chaos.py [--json] [--trajectories 500] [--share 0.2] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midflight import looping
from midflight.agent import AgentFlow, DirectExecutor, LLMGenerator, LLMPlanner, RuleVerifier, StopReason
from midflight.engines.base import Sampling
from midflight.engines.http import Client, Ledger, Limits, Patience
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.engines.vllm import VllmEngine
from midflight.rewards import score
from midflight.seeds import derive
from midflight.tasks.base import Task
from midflight.tools import tool
from midflight.tools.base import Toolset
from midflight.training.rollouts import Group, collect

KEY = "sk-chaos-0123456789"
GROUP = 5


@tool(blocking=False)
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def byte_tokenizer() -> Any:
    """Ids are bytes plus one; 0 ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = bytes_to_letters()
    vocabulary = {"<end>": 0, **{letter: byte + 1 for byte, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def bytes_to_letters() -> Sequence[str]:
    """The letter of each byte in the byte-level alphabet: printable ones stand for themselves."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


@contextmanager
def chaos(share: float, seed: int) -> Iterator[str]:
    """The address of a chaos server."""
    command = [sys.executable, str(Path(__file__).with_name("chaos_server.py")), str(share), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def agent(address: str, ledger: Ledger) -> tuple[AgentFlow, list[Client]]:
    limits = Limits(concurrency=100, retries=2, backoff=0.01, attempt_seconds=1.5, total_seconds=20)

    clients = [Client(f"{address}/v1", Patience(limits, name=name), key=KEY) for name in ("planner", "generator")]

    planner = VllmEngine("planner", clients[0], Endpoint("m", api="completions"), byte_tokenizer(), ledger=ledger)
    generator = OpenAIEngine("generator", clients[1], Endpoint("m"), ledger=ledger)
    flow = AgentFlow(
        LLMPlanner(
            planner.for_module("planner"),
            grammar=False,
            direct=True,
            sampling=Sampling(temperature=0.7, max_tokens=200),
        ),
        DirectExecutor(),
        RuleVerifier(),
        LLMGenerator(generator.for_module("generator")),
        Toolset([double]),
        max_turns=3,
        max_seconds=120,
    )
    return flow, clients


def judged(asked: int, found: Sequence[Group | BaseException]) -> dict[str, Any]:
    """Stop reasons, what was lost of so many trajectories, and what of the rewards is not as it has to be."""
    reasons: Counter[str] = Counter()
    unearned = failed = unscored = 0
    for group in (one for one in found if isinstance(one, Group)):
        earned = 1.0 if int(group.task.id) % 2 == 0 else 0.0
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            if not isinstance(trajectory.stop_reason, StopReason):
                continue
            reasons[trajectory.stop_reason.value] += 1
            failed += trajectory.stop_reason.lost
            unscored += reward is None
            unearned += reward is not None and (trajectory.stop_reason.lost or reward != earned)
    return {
        "lost": asked - reasons.total(),
        "lost_to": dict(Counter(repr(one) for one in found if isinstance(one, BaseException))),
        "stop_reasons": dict(reasons),
        "unearned": unearned,
        "failed": failed,
        "unscored": unscored,
    }


async def run(
    address: str, tasks: Sequence[Task], ledger: Ledger, seed: int
) -> tuple[list[Group | BaseException], dict[str, int], int]:
    """What became of each trajectory, each collected by itself, so that one that raises takes none with it; the
    requests that the server counted, by what it did to them, and those that were sent twice.
    """
    flow, clients = agent(address, ledger)
    asked = [
        collect(flow, [task], 1, score, derive(seed, number, member))
        for number, task in enumerate(tasks)
        for member in range(GROUP)
    ]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    found = [one if isinstance(one, BaseException) else one[0] for one in ended]
    counting = Client(address, Patience(Limits()))
    seen = await counting.ask("/count", None, dict, method="GET")
    return found, seen, sum(client.pool.replaced for client in clients)


def measure(trajectories: int, share: float, seed: int) -> dict[str, Any]:
    tasks = [
        Task(str(number), f"What is twice the number {number}?", str(2 * number), "numeric")
        for number in range(-(-trajectories // GROUP))
    ]
    ledger = Ledger()
    began = time.perf_counter()
    with chaos(share, seed) as address:
        ended, seen, twice = looping.run(run(address, tasks, ledger, seed))
    seconds = time.perf_counter() - began
    count = len(tasks) * GROUP
    found = judged(count, ended)
    kept = repr(ended) + json.dumps(ledger.to_json())
    attempts = ledger.total.requests + ledger.total.retries + found["failed"] + twice
    return {
        "trajectories": count,
        "lost": found["lost"],
        "lost_to": found["lost_to"],
        "unearned_rewards": found["unearned"],
        "stop_reasons": found["stop_reasons"],
        "adds_up": not found["lost"] and found["unscored"] == found["failed"] and attempts == sum(seen.values()),
        "broken_requests": {name: number for name, number in sorted(seen.items()) if not name.endswith(": good")},
        "good_requests": sum(number for name, number in seen.items() if name.endswith(": good")),
        "retries": ledger.total.retries,
        "sent_twice": twice,
        "key_shown": KEY in kept,
        "key_taken_out": kept.count("[key]"),
        "event_loop": looping.loop_name(),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Trajectories against a server that breaks.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trajectories", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = measure(given.trajectories, given.share, given.seed)
    print(json.dumps(found) if given.json else "\n".join(f"{name:<18}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
