import asyncio
import time

import pytest

from midflight.engines.base import (
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    PromptTooLong,
    Sampling,
)
from midflight.engines.scripted import ScriptedEngine

REQUEST = GenerateRequest((Message("user", ("abcd", "ef")),), Sampling(max_tokens=3, seed=5), grammar="start: /a/")


def test_a_list_answers_in_order_and_then_fails() -> None:
    whole = Generation("cut", FinishReason.LENGTH, ids=(1,), logprobs=(-0.5,))
    engine = ScriptedEngine(["one", whole, EngineError("down")])
    first = asyncio.run(engine.generate(REQUEST))
    assert first == Generation("one", FinishReason.STOP, sampling=REQUEST.sampling, grammar="start: /a/")
    assert asyncio.run(engine.generate(REQUEST)) is whole
    with pytest.raises(EngineError, match="down"):
        asyncio.run(engine.generate(REQUEST))
    with pytest.raises(EngineError, match="no more answers"):
        asyncio.run(engine.generate(REQUEST))
    assert engine.requests == [REQUEST] * 4


def test_a_function_answers_from_the_request() -> None:
    engine = ScriptedEngine(lambda request: request.messages[0].parts[1].upper(), name="upper")
    assert asyncio.run(engine.generate(REQUEST)).text == "EF"
    assert isinstance(engine, Engine) and engine.name == "upper"


def test_context_length_counts_prompt_and_new_tokens() -> None:
    assert [ScriptedEngine([]).count_tokens(text) for text in ("", "a", "abcd", "abcde")] == [0, 1, 1, 2]
    assert asyncio.run(ScriptedEngine(["x"], context_length=5).generate(REQUEST)).text == "x"
    with pytest.raises(PromptTooLong, match="2 prompt tokens \\+ 3 new exceed 4"):
        asyncio.run(ScriptedEngine(["x"], context_length=4).generate(REQUEST))


def test_delays_overlap() -> None:
    engine = ScriptedEngine(lambda request: "x", delay=0.05)

    async def many() -> None:
        await asyncio.gather(*(engine.generate(REQUEST) for _ in range(50)))

    started = time.monotonic()
    asyncio.run(many())
    assert 0.05 <= time.monotonic() - started < 1.5
