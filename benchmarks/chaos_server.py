"""A server that breaks a share of what it is asked, in every way servers break, and otherwise plays a planned game.

It speaks the completions of vLLM (token ids, one a byte) for a planner in the full format, and chat for a generator.
What it says to 429 and 500 repeats the headers it was sent, the key among them.
The first line it prints is its port; `GET /count` says how many requests of each kind it saw. Which request breaks how
depends on the seed and the order of arrival.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from typing import Any

from midflight.server.wire import Answer, Request, serving

FAULTS = ("429", "500", "reset", "stall", "drip", "truncated", "wrong schema", "wrong token count", "stale weights")
NUMBER = re.compile(r"number (\d+)")


def planned(prompt: str) -> str:
    """What the planner says: look the number up, then finish."""
    number = NUMBER.findall(prompt)[0]
    if "Turn 2." in prompt:
        return "Sub-goal: answer\nTool: finish\n"
    return f"Sub-goal: look it up\nTool: double\nContext: {number}\n"


def answered(prompt: str) -> str:
    """What the generator says: right for even numbers, wrong for odd ones."""
    number = int(NUMBER.findall(prompt)[0])
    return f"Answer: {2 * number + number % 2} [turn 1]\n"


class Chaos:
    """Breaks each request with probability `share`."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._draw = random.Random(seed)
        self.count: Counter[str] = Counter()

    async def handle(self, request: Request) -> Answer | None:
        if request.path == "/count":
            return Answer(200, json.dumps(self.count).encode())
        broken = self._draw.choice(FAULTS) if self._draw.random() < self._share else ""
        in_text = request.path.endswith("/chat/completions")
        self.count[f"{'text' if in_text else 'tokens'}: {broken or 'good'}"] += 1
        body = json.loads(request.body)
        answer = chat(body) if in_text else completion(body)
        return await spoilt(broken, answer, request)


def completion(body: Any) -> dict[str, Any]:
    ids = list(planned(bytes(token - 1 for token in body["prompt"]).decode()).encode())
    choice = {
        "token_ids": [token + 1 for token in ids],
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        "finish_reason": "stop",
    }
    return {"model": body["model"], "choices": [choice]}


def chat(body: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": answered(body["messages"][-1]["content"])}
    return {"model": body["model"], "choices": [{"message": message, "finish_reason": "stop"}]}


async def spoilt(fault: str, answer: dict[str, Any], request: Request) -> Answer | None:
    """The answer, broken in the way of `fault`."""
    choice = answer["choices"][0]
    if fault == "429":
        said = {"error": {"message": f"slow down, {request.headers['authorization']}"}}
        return Answer(429, json.dumps(said).encode(), {"Retry-After": "0.05"})
    if fault == "500":
        return Answer(500, f"<html>Internal Server Error: {request.headers}</html>".encode())
    if fault == "reset":
        request.transport.abort()
        return None
    if fault == "stall":
        await asyncio.sleep(3600)
    if fault == "wrong schema":
        answer["choices"] = {"0": choice}
    if fault == "wrong token count":
        if "token_ids" in choice:
            choice["token_ids"].pop()
        else:
            answer["choices"] = [choice, choice]
    if fault == "stale weights":
        answer["model"] = "an-older-version"
        choice.pop("message", None)  # chat has no versions to check: here it is an answer without a text
    whole = Answer(200, json.dumps(answer).encode())
    if fault == "truncated":
        return Answer(200, whole.body[: len(whole.body) // 2])
    if fault == "drip":
        for at in whole.encoded():
            request.transport.write(bytes([at]))
            await asyncio.sleep(0.02)
        return None
    return whole


async def main(share: float, seed: int) -> None:
    async with serving(Chaos(share, seed).handle) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2])))
