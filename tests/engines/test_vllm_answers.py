"""What the vLLM engine makes of an answer: its end, its text, and the masks that its grammar had."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import EngineGaveUp, FinishReason, GenerateRequest, Message, Sampling
from midflight.engines.http import Ledger, Usage
from tests.engines.serving import ok, remote, served
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

MESSAGES = (Message("system", ("abc",)), Message("user", ("<end>d",)))
GOOD = {"token_ids": [65, 67], "logprobs": {"token_logprobs": [0.0, -1]}, "finish_reason": "length"}
"""`ac`: 65 is `a`, 0 the end."""
LETTERS = 'start: "a" /[cd]/\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


def test_a_grammar_that_the_server_alone_reads_is_asked_for_once_and_paid_for(model: Path) -> None:
    async def all_of_it() -> None:
        answer = {"model": "tiny", "choices": [GOOD], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
        ledger = Ledger()
        async with served(ok(answer)) as double:
            engine = remote(double.base_url, model, retries=3, ledger=ledger)
            request = GenerateRequest(MESSAGES, Sampling(max_tokens=3), "start: nonsense")
            told = "^sampler: the server took a grammar that cannot be read here: grammar does not compile: "
            with pytest.raises(EngineGaveUp, match=told):
                await engine.generate(request)
            assert len(double.requests) == 1
        assert ledger.total == Usage(prompt_tokens=9, completion_tokens=2)

    asyncio.run(all_of_it())


@pytest.mark.parametrize(
    ("ids", "finish", "stop_reason", "text"),  # 65 is a, 66 is b, 0 the end
    [
        ([65, 66], "stop", 66, "a"),  # another end token than the tokenizer's, as generation_config.json may have
        ([65, 0], "stop", None, "a"),
        ([65, 66], "stop", None, "ab"),
        ([65, 66], "stop", "b", "ab"),  # a stop string
        ([65, 66], "stop", [66], "ab"),
        ([65, 66], "length", 66, "ab"),
    ],
)
def test_the_end_token_that_the_server_stopped_at_is_not_in_the_text(
    model: Path, ids: list[int], finish: str, stop_reason: Any, text: str
) -> None:
    async def all_of_it() -> None:
        choice = {**GOOD, "token_ids": ids, "finish_reason": finish, "stop_reason": stop_reason}
        async with served(ok({"model": "tiny", "choices": [choice]})) as double:
            drawn = await remote(double.base_url, model).generate(GenerateRequest(MESSAGES, Sampling(max_tokens=3)))
        assert (drawn.text, list(drawn.ids)) == (text, ids)

    asyncio.run(all_of_it())


@pytest.mark.parametrize(
    ("ids", "said", "kept", "finish"),
    [
        ([65, 67], "length", 2, FinishReason.STOP),  # whole, with no room for the end token
        ([65, 67, 0], "stop", 2, FinishReason.STOP),
        ([65, 67, 0], "length", 2, FinishReason.STOP),
        ([65], "length", 1, FinishReason.LENGTH),
    ],
)
def test_what_comes_to_the_end_of_its_grammar_is_whole_whatever_the_server_says(
    model: Path, ids: list[int], said: str, kept: int, finish: FinishReason
) -> None:
    async def all_of_it() -> None:
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}, "finish_reason": said}
        ledger = Ledger()
        async with served(ok({"model": "tiny", "choices": [choice]})) as double:
            request = GenerateRequest(MESSAGES, Sampling(max_tokens=len(ids)), LETTERS)
            drawn = await remote(double.base_url, model, ledger=ledger).generate(request)
        assert (drawn.finish_reason, list(drawn.ids), drawn.text) == (finish, ids[:kept], "ac"[:kept])
        assert ledger.total == Usage(1, prompt_tokens=len(drawn.prompt_ids), completion_tokens=len(ids))

    asyncio.run(all_of_it())


@pytest.mark.parametrize(("said", "counted"), [(7, 7), (2, 3), (0, 3), (None, 3)])
def test_what_was_drawn_is_what_the_server_says_but_no_less_than_it_sent(
    model: Path, said: int | None, counted: int
) -> None:
    async def all_of_it() -> None:
        choice = {"token_ids": [65, 67, 0], "logprobs": {"token_logprobs": [0.0] * 3}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": said}
        ledger = Ledger()
        async with served(ok({"model": "tiny", "choices": [choice], "usage": usage})) as double:
            engine = remote(double.base_url, model, ledger=ledger)
            drawn = await engine.generate(GenerateRequest(MESSAGES, Sampling(max_tokens=3), LETTERS))
        assert (drawn.text, ledger.total.completion_tokens, engine.generated_tokens) == ("ac", counted, 2)

    asyncio.run(all_of_it())


def test_masks_are_made_off_the_event_loop_and_what_is_cancelled_meanwhile_is_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_of_it() -> None:
        begun, go_on, threads = asyncio.Event(), threading.Event(), set()
        loop, ledger = asyncio.get_running_loop(), Ledger()
        answer = {"model": "tiny", "choices": [GOOD], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
        async with served(ok(answer)) as double:
            engine = remote(double.base_url, model, ledger=ledger)
            allowed = engine._masks.allowed

            def slow(matcher: Any) -> Any:
                threads.add(threading.get_ident())
                loop.call_soon_threadsafe(begun.set)
                assert go_on.wait(10)
                return allowed(matcher)

            monkeypatch.setattr(engine._masks, "allowed", slow)
            request = GenerateRequest(MESSAGES, Sampling(max_tokens=3), LETTERS)
            under_way = asyncio.create_task(engine.generate(request))
            await begun.wait()
            under_way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await under_way
            assert ledger.total == Usage(prompt_tokens=9, completion_tokens=2)
            go_on.set()
            drawn = await engine.generate(request)
        assert (drawn.text, drawn.forced) == ("ac", (True, False))
        assert (ledger.total.requests, ledger.total.completion_tokens) == (1, 4)
        assert threading.get_ident() not in threads

    asyncio.run(all_of_it())
