"""The engine over LiteLLM, with a stand-in for the package: what it is given, and what its failures mean."""

from __future__ import annotations

import email.utils
import sys
import time
import types
from typing import Any

import pytest

from midflight.engines.base import EngineGaveUp, GenerateRequest, Message, PromptTooLong, Sampling
from midflight.engines.config import EngineConfig
from midflight.engines.http import Ledger, Patience
from midflight.engines.remote import remote_engine
from midflight.errors import UserError
from tests.engines.serving import chat, error, ok, served

ASKED = GenerateRequest((Message("user", ("<s>hi",)),), Sampling(0.0, max_tokens=9))
KEY = "sk-very-secret-0123456789"


class TooLong(Exception):
    pass


class Failure(Exception):
    def __init__(self, status_code: int, said: str = "", body: dict[str, str] | None = None, **headers: str) -> None:
        super().__init__(f"status {status_code} for {KEY} {said}")
        self.body = body
        self.status_code = status_code
        self.response = types.SimpleNamespace(headers=headers)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `acompletion` was given; `answers` on the module are what it does, in order."""
    seen: list[dict[str, Any]] = []
    module: Any = types.ModuleType("litellm")
    module.exceptions = types.SimpleNamespace(ContextWindowExceededError=TooLong)
    module.answers = []

    async def acompletion(**given: Any) -> Any:
        seen.append(given)
        answer = module.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(model_dump=lambda: answer)

    module.acompletion = acompletion
    monkeypatch.setitem(sys.modules, "litellm", module)
    monkeypatch.setenv("LITE_KEY", KEY)
    return seen


async def text(*answers: Any) -> str:
    sys.modules["litellm"].answers[:] = answers  # type: ignore[attr-defined]
    settings = EngineConfig(provider="litellm", model="anthropic/x", key_variable="LITE_KEY", retries=1)
    engine, _ = remote_engine("other", settings, Ledger())
    return (await engine.generate(ASKED)).text


@pytest.mark.asyncio
async def test_it_asks_once_and_tries_again_itself(asked: list[dict[str, Any]]) -> None:
    assert await text(Failure(529), chat("hello")) == "hello"
    assert (
        asked[0]
        == asked[1]
        == {
            "model": "anthropic/x",
            "messages": [{"role": "user", "content": "< s>hi"}],
            "temperature": 0.0,
            "max_tokens": 9,
            "api_key": KEY,
            "base_url": None,
            "num_retries": 0,
            "drop_params": False,
        }
    )
    assert await text({"choices": []}, chat("again")) == "again"
    assert await text(chat(f"It is {KEY}.")) == "It is [key]."


@pytest.mark.asyncio
async def test_what_will_not_pass_is_final_and_does_not_show_the_key(asked: list[dict[str, Any]]) -> None:
    for failure in (Failure(401), RuntimeError(KEY)):
        with pytest.raises(EngineGaveUp) as caught:
            await text(failure, chat())
        assert KEY not in str(caught.value) and "[key]" in str(caught.value)
    assert len(asked) == 2
    with pytest.raises(PromptTooLong, match="too many"):
        await text(TooLong("too many"), chat())


@pytest.mark.asyncio
async def test_a_spent_quota_is_not_waited_for_and_a_time_that_is_named_is(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for spent in (Failure(429, '{"code": "insufficient_quota"}'), Failure(429, body={"code": "insufficient_quota"})):
        asked.clear()
        with pytest.raises(EngineGaveUp, match="status 429 for"):
            await text(spent, chat())
        assert len(asked) == 1
    asked.clear()
    waits: list[float] = []
    monkeypatch.setattr(Patience, "_wait", lambda self, count, retry_after: waits.append(retry_after) or 0.0)
    until = email.utils.formatdate(time.time() + 30, usegmt=True)
    for failure in (Failure(429, **{"retry-after": "7"}), Failure(503, **{"retry-after": until}), Failure(500)):
        assert await text(failure, chat("hello")) == "hello"
    assert waits == [7.0, pytest.approx(30, abs=5), 0.0]


@pytest.mark.asyncio
async def test_the_package_itself_hides_a_spent_quota_and_the_time_to_wait_behind_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one as it is imported
    pytest.importorskip("litellm")
    waits: list[float] = []
    monkeypatch.setattr(Patience, "_wait", lambda self, count, retry_after: waits.append(retry_after) or 0.0)
    busy = error(429, "slow down", "rate_limit_exceeded", **{"Retry-After": "7"})
    monkeypatch.setenv("LITE_KEY", KEY)
    async with served(busy, ok(chat("hello")), error(429, "pay", "insufficient_quota")) as server:
        settings = EngineConfig(
            provider="litellm", model="openai/x", base_url=server.base_url, key_variable="LITE_KEY", retries=1
        )
        engine, _ = remote_engine("other", settings, Ledger())
        assert (await engine.generate(ASKED)).text == "hello"
        with pytest.raises(EngineGaveUp, match="pay"):
            await engine.generate(ASKED)
        assert waits == [7.0] and len(server.requests) == 3


@pytest.mark.asyncio
async def test_an_answer_that_is_refused_is_paid_for(asked: list[dict[str, Any]]) -> None:
    ledger = Ledger()
    sys.modules["litellm"].answers[:] = [{**chat(usage=(60, 40)), "choices": []}, chat(usage=(7, 3))]  # type: ignore[attr-defined]
    settings = EngineConfig(provider="litellm", model="anthropic/x", retries=1)
    engine, _ = remote_engine("other", settings, ledger)
    await engine.generate(ASKED)
    assert (ledger.total.requests, ledger.total.retries, ledger.total.tokens) == (1, 1, 110)


@pytest.mark.asyncio
async def test_no_part_of_the_key_is_left_where_an_error_is_cut(asked: list[dict[str, Any]]) -> None:
    for before in range(260, 302):
        with pytest.raises(EngineGaveUp) as caught:
            await text(RuntimeError("x" * before + KEY))
        assert KEY[:2] not in str(caught.value)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(UserError, match=r"engines.other.provider = litellm: not installed; run pip install"):
        remote_engine("other", EngineConfig(provider="litellm", model="x"), Ledger())
