"""A server that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from midflight.engines.http import Client, Limits, Patience
from midflight.server.wire import Answer, Request, serving

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
"""Both event loops that a run may have."""


def chat(text: str = "hello", *, finish: str = "stop", usage: tuple[int, int] | None = (7, 3)) -> dict[str, Any]:
    """A chat completion as servers give it."""
    answer: dict[str, Any] = {
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
    }
    if usage is not None:
        answer["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return answer


def ok(answer: Any) -> Answer:
    return Answer(200, json.dumps(answer).encode())


def error(status: int, message: str = "no", code: str = "", **headers: str) -> Answer:
    body = {"error": {"message": message, "code": code}}
    return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})


def whole(body: bytes, head: bytes) -> bytes:
    """An answer as bytes."""
    return b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body


class Served:
    """The n-th request gets the n-th answer, the last one again; bytes are written as they are, None never answers."""

    def __init__(self, *answers: Answer | bytes | None | Callable[[Request], Answer]) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.cancelled = 0
        self.at_once = 0
        self.most_at_once = 0
        self.delay = 0.0
        self.base_url = ""

    @property
    def bodies(self) -> list[Any]:
        """Of those requests that have one."""
        return [json.loads(request.body) for request in self.requests if request.body]

    async def handle(self, request: Request) -> Answer | None:
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay)
            if answer is None:
                await asyncio.sleep(3600)
            if isinstance(answer, bytes):
                request.transport.write(answer)
                request.transport.close()
                return None
            return answer(request) if callable(answer) else answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1


@asynccontextmanager
async def served(*answers: Any, delay: float = 0.0) -> AsyncIterator[Served]:
    server = Served(*answers)
    server.delay = delay
    async with serving(server.handle) as port:
        server.base_url = f"http://127.0.0.1:{port}/v1"
        yield server


def remote(url: str, model: Path, **settings: Any) -> Any:
    """A vLLM engine of a server's model `tiny`."""
    from midflight.engines.openai import Endpoint
    from midflight.engines.vllm import VllmEngine, load_tokenizer

    limits = Limits(retries=settings.pop("retries", 0), backoff=0.001, attempt_seconds=20)
    endpoint = Endpoint("tiny", api="completions", context_length=settings.pop("context_length", 500))
    client = Client(url, Patience(limits, name="sampler"), key="k1")
    return VllmEngine("sampler", client, endpoint, load_tokenizer(str(model), "sampler"), **settings)
