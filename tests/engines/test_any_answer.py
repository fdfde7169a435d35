"""Whatever JSON a server answers, an engine gives a generation or gives up; nothing else comes out."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import EngineGaveUp, GenerateRequest, Generation, Message, Sampling
from midflight.engines.http import Client, Limits, Patience, Prices
from midflight.engines.http.reading import Reply
from midflight.engines.openai import Endpoint, OpenAIEngine
from tests.engines.serving import chat
from tests.training.tiny import make_byte_model

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    10**400,
    -(10**400),
    float("nan"),
    -float("inf"),
    "",
    "stop",
    "x" * 50,
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    [1, 2],
    "\ud800",
]
REQUEST = GenerateRequest((Message("user", ("b",)),), Sampling(max_tokens=3))


def spoilt(answer: Any, draw: random.Random) -> Any:
    """The answer with one to three of its values, at any depth, replaced or removed."""
    answer = copy.deepcopy(answer)
    for _ in range(draw.randint(1, 3)):
        places: list[tuple[Any, Any]] = []
        waiting = [answer]
        while waiting:
            node = waiting.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
            for key in keys:
                places.append((node, key))
                waiting.append(node[key])
        if not places:
            return draw.choice(ODD)
        node, key = draw.choice(places)
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = copy.deepcopy(draw.choice(ODD))
    return answer


class Answering:
    """In the place of a connection pool."""

    body = b""

    async def ask(self, *_: Any) -> Reply:
        return Reply(200, {}, self.body)


def outcomes(engine: Any, answer: Any, count: int) -> tuple[int, int]:
    """How many spoilt answers became a generation, and how many did not."""
    pool = engine.client.pool = Answering()
    draw = random.Random(0)

    async def all_of_it() -> tuple[int, int]:
        taken = refused = 0
        for number in range(count):
            pool.body = json.dumps(spoilt(answer, draw) if number else answer).encode()
            try:
                drawn = await engine.generate(REQUEST)
            except EngineGaveUp:
                refused += 1
            else:
                assert isinstance(drawn, Generation) and isinstance(drawn.text, str)
                assert len(drawn.ids) == len(drawn.logprobs) == len(drawn.forced)
                taken += 1
        return taken, refused

    return asyncio.run(all_of_it())


def client() -> Client:
    return Client("http://127.0.0.1:1/v1", Patience(Limits(retries=0)))


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_text_engines(api: Any) -> None:
    plain = {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}
    engine = OpenAIEngine("e", client(), Endpoint("m", api=api), prices=Prices(1.0, 1.0))
    taken, refused = outcomes(engine, chat() if api == "chat" else plain, 3000)
    assert taken > 300 and refused > 300
    total = engine.ledger.total
    assert total.requests == taken and 0 <= total.money < 1 and total.tokens < 20 * taken


@pytest.mark.model
def test_the_engine_with_ids(tmp_path: Path) -> None:
    from midflight.engines.vllm import VllmEngine, load_tokenizer

    tokenizer = load_tokenizer(str(make_byte_model(tmp_path / "m")), "e")
    engine = VllmEngine("e", client(), Endpoint("m", api="completions"), tokenizer)
    choice = {"token_ids": [98, 99], "logprobs": {"token_logprobs": [-0.5, -1]}, "finish_reason": "stop"}
    taken, refused = outcomes(engine, {"model": "m", "choices": [choice]}, 5000)
    assert taken > 30 and refused > 1000


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff", b"", b"null", b'"x"'])
def test_answers_that_are_hardly_json(body: bytes) -> None:
    engine = OpenAIEngine("e", client(), Endpoint("m"))
    engine.client.pool = Answering()  # type: ignore[assignment]
    engine.client.pool.body = body  # type: ignore[attr-defined]
    with pytest.raises(EngineGaveUp):
        asyncio.run(engine.generate(REQUEST))
