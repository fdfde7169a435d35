"""The engine of embeddings: what it asks for, what it takes for vectors, what it counts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from midflight.engines.base import BudgetSpent, Embedder, EngineGaveUp, GenerateRequest, Message, PromptTooLong
from midflight.engines.embeddings import EmbeddingEngine
from midflight.engines.http import Client, Ledger, Limits, Patience, Prices, Usage
from midflight.engines.openai import Endpoint
from midflight.server.wire import Answer, Request
from tests.engines.serving import Served, error, ok, served


def engine(server: Served, ledger: Ledger | None = None, key: str | None = None, **settings: Any) -> EmbeddingEngine:
    patience = Patience(Limits(backoff=0.001, retries=1, attempt_seconds=0.3), name="near")
    made = EmbeddingEngine(
        "near",
        Client(server.base_url, patience, key=key),
        Endpoint("m", api="embeddings", **settings),
        ledger=ledger or Ledger(),
        prices=Prices(prompt=2.0),
    )
    return made.for_module("tools")


def vectors(*rows: Any, usage: int | None = 5) -> dict[str, Any]:
    """An answer as the protocol has it."""
    data = [{"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(rows)]
    said = {} if usage is None else {"usage": {"prompt_tokens": usage, "total_tokens": usage}}
    return {"object": "list", "model": "m", "data": data, **said}


@pytest.mark.asyncio
async def test_texts_become_vectors_of_length_one_in_their_order() -> None:
    answer = vectors([3, 4.0], [0.0, 2])
    answer["data"].reverse()  # the index says which is which
    async with served(ok(answer)) as server:
        asking = engine(server)
        found = await asking.embed(["a", "b"])
        assert isinstance(asking, Embedder) and asking.vectors == f"{server.base_url} m"
        assert found.dtype == np.float32 and found.tolist() == np.float32([[0.6, 0.8], [0.0, 1.0]]).tolist()
        assert server.requests[0].path == "/v1/embeddings"
        assert server.bodies == [{"model": "m", "input": ["a", "b"], "encoding_format": "float"}]
        assert asking.ledger.of == {("tools", "near"): Usage(requests=1, prompt_tokens=5, money=1e-5)}


@pytest.mark.asyncio
async def test_many_texts_are_asked_for_32_at_a_time() -> None:
    def echo(request: Request) -> Answer:
        return ok(vectors(*([1, float(text)] for text in json.loads(request.body)["input"]), usage=None))

    async with served(echo) as server:
        asking = engine(server)
        found = await asking.embed([str(number) for number in range(70)])
        assert [round(float(row[1] / row[0])) for row in found] == list(range(70))
        assert sorted(len(body["input"]) for body in server.bodies) == [6, 32, 32]
        assert asking.ledger.total == Usage(requests=3, prompt_tokens=70, money=70 * 2.0 / 1e6)  # by estimate


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [10**400, -1, True])
async def test_a_count_that_is_none_is_estimated(said: int) -> None:
    async with served(ok(vectors([1, 1], usage=said))) as server:
        asking = engine(server)
        await asking.embed(["abc"])
        assert asking.ledger.total == Usage(requests=1, prompt_tokens=1, money=2e-6)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "no list of vectors"),
        ([], "no list of vectors"),
        ({"data": {"0": [1]}}, "no list of vectors"),
        ({"data": [[1, 2], [3, 4]]}, "no list of vectors"),
        (vectors([1, 2]), "1 vectors for 2 texts"),
        (vectors([1, 2], [3, 4], [5, 6]), "3 vectors for 2 texts"),
        (
            {"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]},
            "no vector with the index of each",
        ),
        (
            {"data": [{"index": 1, "embedding": [1]}, {"index": 2, "embedding": [1]}]},
            "no vector with the index of each",
        ),
        ({"data": [{"embedding": [1]}, {"embedding": [1]}]}, "no vector with the index of each text"),
        ({"data": [{"index": False, "embedding": [1]}, {"index": True, "embedding": [1]}]}, "the index of each text"),
        (vectors([1, 2], [3]), "vectors of 2 and of 1 numbers"),
        (vectors([], []), "a vector that is no list of numbers"),
        (vectors([1, 2], None), "a vector that is no list of numbers"),
        (vectors([1, 2], "AACAPw=="), "a vector that is no list of numbers"),
        (vectors([1, 2], ["1", "2"]), "a vector that is no list of numbers"),
        (vectors([1, 2], [True, False]), "a vector that is no list of numbers"),
        (vectors([1, 2], [0, 0.0]), "a vector without direction"),
        (vectors([1, 2], [float("nan"), 1]), "a vector without direction"),
        (vectors([1, 2], [float("inf"), 1]), "a vector without direction"),
        (vectors([1, 2], [1e300, 1e300]), "a vector without direction"),
        (vectors([1, 2], [10**400, 1]), "a number out of range in a vector"),
    ],
)
@pytest.mark.asyncio
async def test_what_are_no_vectors_is_asked_for_again_and_then_given_up(answer: Any, reason: str) -> None:
    async with served(ok(answer)) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server).embed(["a", "b"])
        assert f"near: {server.base_url}: the answer has " in str(caught.value) and reason in str(caught.value)
        assert len(server.requests) == 2
    async with served(ok(answer), ok(vectors([1, 0], [0, 1]))) as server:
        asking = engine(server)
        assert (await asking.embed(["a", "b"])).tolist() == [[1.0, 0.0], [0.0, 1.0]]
        refused = 5 if isinstance(answer, dict) and "usage" in answer else 0  # paid for too
        assert asking.ledger.total == Usage(1, 1, 0, 5 + refused, 0, pytest.approx(2e-6 * (5 + refused)))


@pytest.mark.parametrize(
    ("answer", "attempts", "reason"),
    [
        (Answer(200, b"<html>"), 2, "the answer is not JSON (6 bytes)"),
        (Answer(200, b'{"data": [{"index": 0, "embe'), 2, "the answer is not JSON (28 bytes)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{", 2, "(2 attempts in "),
        (None, 2, "no answer within 0.3 s"),
        (error(401, "bad key sk-0123456789"), 1, "HTTP 401: bad key [key]; check key_variable and what its key may do"),
        (error(429, "slow down", **{"Retry-After": "0.01"}), 2, "HTTP 429: slow down (2 attempts"),
        (error(429, "quota", "insufficient_quota"), 1, "HTTP 429: quota"),
        (error(404, "no such model"), 1, "HTTP 404: no such model"),
        (error(400, "this model does not embed"), 1, "HTTP 400: this model does not embed"),
        (error(503, "loading"), 2, "HTTP 503: loading (2 attempts"),
    ],
)
@pytest.mark.asyncio
async def test_a_server_that_fails_is_given_up(answer: Any, attempts: int, reason: str) -> None:
    async with served(answer) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server, key="sk-0123456789").embed(["a"])
        assert reason in str(caught.value)
        assert len(server.requests) == attempts


@pytest.mark.asyncio
async def test_a_text_that_is_too_long_is_told_apart() -> None:
    async with served(error(400, "maximum context length is 512 tokens")) as server:
        with pytest.raises(PromptTooLong, match="maximum context length is 512"):
            await engine(server).embed(["a"])
        with pytest.raises(PromptTooLong, match="near: about 65 tokens exceed context_length 64"):
            await engine(server, context_length=64).embed(["a", "b" * 195])
        assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_dimensions_that_change_between_requests_are_refused() -> None:
    answers = [ok(vectors(*[[1.0] * width] * count)) for width, count in ((2, 32), (3, 1))]
    async with served(lambda request: answers[b'"32"' in request.body]) as server:
        with pytest.raises(EngineGaveUp, match="near: vectors of 2 and of 3 numbers"):
            await engine(server).embed([str(number) for number in range(33)])


@pytest.mark.asyncio
async def test_a_spent_budget_asks_nothing_and_no_text_is_written() -> None:
    async with served(ok(vectors([1.0]))) as server:
        ledger = Ledger(tokens=5)
        asking = engine(server, ledger)
        await asking.embed(["a"])
        with pytest.raises(BudgetSpent, match=r"budget.tokens = 5: spent, with 5 tokens"):
            await asking.embed(["a"])
        with pytest.raises(EngineGaveUp, match="near: an embedding model writes no text"):
            await asking.generate(GenerateRequest((Message("user", ("x",)),)))
        assert len(server.requests) == 1
