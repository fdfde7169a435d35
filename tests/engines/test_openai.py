"""The engine on OpenAI's protocol: what it asks for, what it reads, what it counts."""

from __future__ import annotations

import asyncio
import gzip
import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midflight.engines.base import (
    BudgetSpent,
    EngineGaveUp,
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    PromptTooLong,
    Sampling,
    structure_of,
)
from midflight.engines.http import Client, Ledger, Limits, Patience, Prices, ResponseCache, Usage
from midflight.engines.http.usage import MOST_TOKENS, said_tokens
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.engines.plain import defused
from midflight.server.wire import Answer
from tests.engines.serving import Served, chat, error, ok, served

ASKED = GenerateRequest((Message("system", ("a", "b")), Message("user", ("c",))), Sampling(0.0, max_tokens=9))


def engine(server: Served, limits: Limits | None = None, ledger: Ledger | None = None, **settings: Any) -> OpenAIEngine:
    shared = {name: settings.pop(name) for name in ("prices", "cache") if name in settings}
    patience = Patience(limits or Limits(backoff=0.001, retries=1, attempt_seconds=0.5))
    return OpenAIEngine(
        "judge", Client(server.base_url, patience), Endpoint("m", **settings), ledger=ledger or Ledger(), **shared
    )


def refused(message: str, **fields: Any) -> Answer:
    return Answer(400, json.dumps({"error": {"message": message, **fields}}).encode())


@pytest.mark.asyncio
async def test_a_chat_request_has_what_was_asked_for_and_nothing_else() -> None:
    async with served(ok(chat("Peru\n"))) as server:
        asking = engine(server)
        drawn = await asking.generate(ASKED)
        assert drawn == Generation("Peru\n", FinishReason.STOP, sampling=ASKED.sampling)
        sampling = Sampling(0.7, top_p=0.9, max_tokens=5, stop=("\n",), seed=2**40 + 3)
        await asking.generate(GenerateRequest(ASKED.messages, sampling))
        messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
        assert server.requests[0].path == "/v1/chat/completions"
        assert server.bodies == [
            {"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 9},
            {
                "model": "m",
                "messages": messages,
                "temperature": 0.7,
                "max_tokens": 5,
                "top_p": 0.9,
                "stop": ["\n"],
                "seed": 3,
            },
        ]


@pytest.mark.asyncio
async def test_completions_continue_plain_text() -> None:
    answer = {"choices": [{"text": " Lima", "finish_reason": "length"}]}
    async with served(ok(answer)) as server:
        asking = engine(server, api="completions", max_tokens_field="max_completion_tokens")
        drawn = await asking.generate(ASKED)
        assert (drawn.text, drawn.finish_reason) == (" Lima", FinishReason.LENGTH)
        assert server.requests[0].path == "/v1/completions"
        wanted = {"model": "m", "prompt": "ab\nc", "temperature": 0.0, "max_completion_tokens": 9}
        assert server.bodies == [wanted]


@pytest.mark.asyncio
async def test_what_holds_a_text_is_asked_for_where_the_server_has_it() -> None:
    grammar = GenerateRequest(ASKED.messages, ASKED.sampling, grammar='start: "x"')
    schema = GenerateRequest(ASKED.messages, ASKED.sampling, json_schema='{"type": "object"}')
    strict = replace(schema, json_schema='{"type": "object", "properties": {}, "additionalProperties": false}')
    async with served(ok(chat())) as server:
        structures = {"none": "text", "json_schema": "json", "json_object": "json", "grammar": "grammar"}
        for structured, structure in structures.items():
            assert structure_of(engine(server, structured=structured)) == structure
        with pytest.raises(EngineGaveUp, match="takes no grammars"):
            await engine(server, structured="json_schema").generate(grammar)
        with pytest.raises(EngineGaveUp, match="takes no JSON schemas"):
            await engine(server).generate(schema)
        assert server.requests == []
        await engine(server, structured="grammar").generate(grammar)
        await engine(server, structured="grammar").generate(schema)
        await engine(server, structured="json_schema").generate(schema)
        await engine(server, structured="json_object").generate(schema)
        assert server.bodies[-1]["response_format"] == {"type": "json_object", "schema": {"type": "object"}}
        await engine(server, structured="json_schema").generate(strict)
        wanted = {"name": "answer", "strict": False, "schema": {"type": "object"}}
        assert server.bodies[-1]["response_format"]["json_schema"]["strict"] is True
        assert [body.get("structured_outputs") or body["response_format"] for body in server.bodies[:-2]] == [
            {"grammar": '%llguidance {}\nstart: "x"'},
            {"json": {"type": "object"}},
            {"type": "json_schema", "json_schema": wanted},
        ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "broken",
    [
        [],
        {},
        {"choices": []},
        {"choices": [{}, {}]},
        {"choices": ["x"]},
        {"choices": [{"message": {}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "x"}}]},
    ],
)
async def test_an_answer_of_another_schema_is_a_failure_of_the_server(broken: Any) -> None:
    async with served(ok(broken), ok(chat("fine"))) as server:
        assert (await engine(server).generate(ASKED)).text == "fine"
    async with served(ok(broken)) as server:
        with pytest.raises(EngineGaveUp, match=r"the answer has no .* \(2 attempts"):
            await engine(server).generate(ASKED)


@pytest.mark.asyncio
async def test_thinking_that_leaves_no_text_is_an_empty_text_and_a_filter_is_final() -> None:
    messages = [{"content": None}, {"role": "assistant"}]
    empty = [{"choices": [{"message": message, "finish_reason": "length"}]} for message in messages]
    async with served(*map(ok, empty), ok(chat(finish="content_filter"))) as server:
        for _ in empty:
            drawn = await engine(server).generate(ASKED)
            assert (drawn.text, drawn.finish_reason) == ("", FinishReason.LENGTH)
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server).generate(ASKED)
        said = "the server ended the answer for the reason 'content_filter'"
        assert str(caught.value) == f"judge: {server.base_url}: {said}"
        assert len(server.requests) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("said", "finish"),
    [("eos_token", FinishReason.STOP), ("STOP", FinishReason.STOP), ("end_turn", FinishReason.STOP)]
    + [("stop_sequence", FinishReason.STOP), ("MAX_TOKENS", FinishReason.LENGTH)],
)
async def test_the_ends_of_a_text_are_known_by_the_names_that_servers_give_them(
    said: str, finish: FinishReason
) -> None:
    async with served(ok(chat(finish=said))) as server:
        assert (await engine(server).generate(ASKED)).finish_reason is finish


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [201, 203])
async def test_an_answer_may_have_another_status_than_200(status: int) -> None:
    async with served(Answer(status, json.dumps(chat("fine")).encode())) as server:
        assert (await engine(server).generate(ASKED)).text == "fine"
        assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.asyncio
async def test_a_refusal_is_no_text_and_a_text_in_parts_is_one() -> None:
    parts = [
        {"type": "thinking", "thinking": []},
        {"type": "text", "text": "4"},
        {"type": "reasoning", "text": "so"},
        {"type": "text", "text": "2"},
    ]
    refusals: list[dict[str, Any]] = [
        {"content": None, "refusal": "I cannot."},
        {"content": "", "refusal": "I cannot."},
        {"refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ]
    answers = [{"choices": [{"message": message, "finish_reason": "stop"}]} for message in refusals]
    whole = {"choices": [{"message": {"content": parts, "refusal": None}, "finish_reason": "stop"}]}
    async with served(*map(ok, answers), ok(whole)) as server:
        for _ in refusals:
            with pytest.raises(EngineGaveUp, match="the server's model refuses to answer: 'I cannot.'"):
                await engine(server).generate(ASKED)
        assert (await engine(server).generate(ASKED)).text == "42"
        assert len(server.requests) == 5


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ({"type": "output_text", "text": "2"}, "'output_text'"),
        ({"type": ["text"], "text": "2"}, "a list"),
        ({"type": "text", "text": None}, "'text'"),
        ("2", "none"),
    ],
)
async def test_a_part_of_a_text_that_is_not_known_is_not_left_out(part: Any, shown: str) -> None:
    content = [{"type": "text", "text": "4"}, part]
    answer = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
    async with served(ok(answer)) as server:
        with pytest.raises(EngineGaveUp, match=f"the answer has a part in its content that is no text: {shown} [(]2"):
            await engine(server).generate(ASKED)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "said", "times"),
    [
        ({"error": {"message": "Rate limit", "code": 429}}, "HTTP 200: Rate limit (2 attempts in", 2),
        ({"object": "error", "message": "not loaded", "code": 40303}, "HTTP 200: not loaded (2 attempts in", 2),
        ({"error": {"message": "who", "code": 401}}, "HTTP 200: who; check key_variable and what its key may do", 1),
        ({"error": {"message": "pay", "code": 429, "type": "insufficient_quota"}}, "HTTP 200: pay", 1),
        ({"error": {"message": "who", "code": 401}, "choices": []}, "HTTP 200: who; check key_variable", 1),
        ({"error": {"message": "who", "code": 401}, "choices": None}, "HTTP 200: who; check key_variable", 1),
        ({"error": {"message": "who", "code": 401}, "data": None}, "HTTP 200: who; check key_variable", 1),
        ({"error": None, "choices": []}, "the answer has no list of one choice (2 attempts in", 2),
        ({"choices": [{}, {}]}, "the answer has no list of one choice but 2 (2 attempts in", 2),
        (
            {
                "choices": [
                    {"error": {"message": "died", "code": 502}, "message": {"content": ""}, "finish_reason": "error"}
                ]
            },
            "the answer has an error in its choice: 'died' (2 attempts in",
            2,
        ),
    ],
)
async def test_an_error_in_place_of_an_answer_is_read_as_one(answer: Any, said: str, times: int) -> None:
    async with served(ok(answer)) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server).generate(ASKED)
        assert said in str(caught.value) and len(server.requests) == times


@pytest.mark.asyncio
async def test_an_answer_from_elsewhere_or_in_another_coding_says_so() -> None:
    moved = Answer(308, b"", {"Location": "https://elsewhere/v1/chat/completions"})
    async with served(moved) as server:
        with pytest.raises(
            EngineGaveUp, match="HTTP 308; it names https://elsewhere/v1/chat/completions, and base_url"
        ):
            await engine(server).generate(ASKED)
    async with served(Answer(200, gzip.compress(b"{}"), {"Content-Encoding": "gzip"})) as server:
        with pytest.raises(EngineGaveUp, match="not JSON, but gzip, for which it was not asked"):
            await engine(server).generate(ASKED)


@pytest.mark.asyncio
async def test_a_prompt_that_is_too_long_by_our_estimate_or_the_servers_word() -> None:
    async with served(error(400, "This model's maximum context length is 100 tokens")) as server:
        with pytest.raises(PromptTooLong, match="about 3 prompt tokens [+] max_tokens 9 exceed context_length 11"):
            await engine(server, context_length=11).generate(ASKED)
        assert server.requests == []
        with pytest.raises(PromptTooLong, match="maximum context length is 100"):
            await engine(server, context_length=12).generate(ASKED)
    full = "the request exceeds the available context size"
    for refusal in (
        Answer(400, json.dumps({"error": {"code": 400, "message": full}}).encode()),
        Answer(
            500, json.dumps({"error": {"code": 500, "message": "no", "type": "exceed_context_size_error"}}).encode()
        ),
        Answer(200, json.dumps({"error": {"message": "no", "code": "context_length_exceeded"}}).encode()),
        error(400, "no", "context_length_exceeded"),
        error(400, "The prompt (length 8357) is longer than the maximum model length of 8192"),
        error(400, "Please reduce the length of the messages or completion."),
        error(400, "The input token count (40000) exceeds the maximum number of tokens allowed (32768)."),
        error(422, "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000"),
        refused("maximum context length is 65536 tokens", code="invalid_request_error", param=None),  # DeepSeek
        refused("maximum context length is 9 tokens", code=400, param="input_tokens"),  # vLLM
        refused("'max_tokens' is too large: this model's maximum context length is 9", code=400, param="max_tokens"),
        refused("maximum context length is 9 tokens", param="messages.[2].content"),
        refused("9 tokens (3 in the schemas). Please reduce the length of the messages or schemas.", param="messages"),
        refused("no", code="context_length_exceeded", param="response_format"),
    ):
        async with served(refusal) as server:
            with pytest.raises(PromptTooLong):
                await engine(server).generate(ASKED)
            assert len(server.requests) == 1
    async with served(error(400, "bad")) as server:
        with pytest.raises(EngineGaveUp, match="HTTP 400: bad"):
            await engine(server).generate(ASKED)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("Invalid schema for response_format 'answer': 'context window' is not a type", {"param": "response_format"}),
        ("Invalid schema for response_format 'answer': 'context window' is not a type", {}),
        ("no 'context size' there", {"code": "invalid_json_schema"}),
        ("Unknown parameter: 'x'; the model's maximum context length is 9", {"param": "x"}),
        ('JSON schema conversion failed: Unrecognized schema: "context window"', {"code": 400, "param": None}),
        ("Failed to parse grammar: 'context size'", {"type": "invalid_request_error"}),
    ],
)
async def test_a_request_that_is_refused_for_another_reason_is_not_too_long(message: str, fields: Any) -> None:
    async with served(refused(message, **fields)) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server).generate(ASKED)
        assert not isinstance(caught.value, PromptTooLong) and f"HTTP 400: {message}" in str(caught.value)
        assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_use_is_counted_by_module_and_adds_up() -> None:
    ledger = Ledger()
    async with served(error(500), ok(chat(usage=(100, 20))), ok(chat("abcdef", usage=None))) as server:
        asking = engine(server, ledger=ledger, prices=Prices(1000.0, 10_000.0))
        await asking.for_module("planner").generate(ASKED)
        await asking.for_module("verifier").generate(ASKED)
        assert ledger.of == {
            ("planner", "judge"): Usage(1, 1, 0, 100, 20, pytest.approx(0.3)),
            ("verifier", "judge"): Usage(1, 0, 0, 3, 2, pytest.approx(0.023)),  # by estimate
        }
        assert ledger.total == Usage(2, 1, 0, 103, 22, pytest.approx(0.323))
        assert ledger.lines()[0] == (
            "planner on judge: 1 requests, 100 prompt + 20 completion tokens, 1 retries, cost 0.3000"
        )
        assert ledger.to_json()["total"]["prompt_tokens"] == 103


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [10**400, 10**30, MOST_TOKENS + 1, 0, -1, True, 5.0, "5", None])
async def test_a_count_that_is_none_is_estimated_and_money_stays_a_number(said: Any) -> None:
    ledger = Ledger(money=5.0)
    answer = {**chat("abcdef"), "usage": {"prompt_tokens": said, "completion_tokens": said}}
    async with served(ok(answer)) as server:
        await engine(server, ledger=ledger, prices=Prices(1e12, 1e12)).generate(ASKED)
    assert ledger.total == Usage(1, 0, 0, 3, 2, 5e6)
    answer["usage"] = {"prompt_tokens": MOST_TOKENS, "completion_tokens": 0}
    ledger = Ledger()
    async with served(ok(answer)) as server:
        await engine(server, ledger=ledger, prices=Prices(1e12, 1e12)).generate(ASKED)
    assert ledger.total == Usage(1, 0, 0, 10**9, 0, 1e15)


@pytest.mark.parametrize(
    ("total", "drew"), [(5110, 5010), (110, 10), (100, 10), (0, 10), (None, 10), ("5110", 10), (True, 10)]
)
def test_tokens_that_are_in_the_total_alone_were_drawn(total: Any, drew: int) -> None:
    said = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": total}
    assert said_tokens({"usage": said}) == (100, drew)
    assert said_tokens({"usage": {**said, "completion_tokens": None}}) == (100, None)


@pytest.mark.asyncio
async def test_a_budget_lets_what_is_under_way_end_and_nothing_new_begin() -> None:
    for budget in ({"tokens": 250}, {"money": 0.025}):
        ledger = Ledger(**budget)  # type: ignore[arg-type]
        async with served(ok(chat(usage=(90, 10))), delay=0.005) as server:
            limits = Limits(concurrency=2)
            asking = engine(server, limits, ledger, prices=Prices(100.0, 100.0))
            done = await asyncio.gather(*(asking.generate(ASKED) for _ in range(20)), return_exceptions=True)
        assert len(server.requests) == 4
        assert sum(isinstance(one, BudgetSpent) for one in done) == 16
        assert ledger.total.tokens == 400


@pytest.mark.asyncio
async def test_what_is_spent_to_the_last_is_spent() -> None:
    for budget in ({"tokens": 100}, {"money": 0.01}):
        async with served(ok(chat(usage=(90, 10)))) as server:
            asking = engine(server, ledger=Ledger(**budget), prices=Prices(100.0, 100.0))  # type: ignore[arg-type]
            await asking.generate(ASKED)
            with pytest.raises(BudgetSpent):
                await asking.generate(ASKED)
            assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_a_retry_is_counted_when_given_up() -> None:
    ledger = Ledger()
    async with served(error(500)) as server:
        with pytest.raises(EngineGaveUp):
            await engine(server, ledger=ledger).for_module("planner").generate(ASKED)
    assert ledger.total == Usage(requests=0, retries=1)


@pytest.mark.asyncio
async def test_an_answer_that_is_refused_is_paid_for_as_far_as_it_says_and_a_retry_finds_the_budget_spent() -> None:
    malformed = {"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 40}}
    for answer in (malformed, chat(finish="content_filter", usage=(60, 40))):
        ledger = Ledger(tokens=200)
        async with served(ok(answer)) as server:
            asking = engine(server, Limits(backoff=0.001, retries=5), ledger, prices=Prices(1e4, 1e4))
            for _ in range(3):
                with pytest.raises((EngineGaveUp, BudgetSpent)):
                    await asking.generate(ASKED)
            assert len(server.requests) == 2
        retries = 1 if answer is malformed else 0
        assert ledger.total == Usage(0, retries, 0, 120, 80, pytest.approx(2.0))
    ledger = Ledger()
    async with served(ok({"choices": []}), ok({**malformed, "usage": {"prompt_tokens": -1}}), ok([])) as server:
        with pytest.raises(EngineGaveUp):
            await engine(server, Limits(backoff=0.001, retries=2), ledger).generate(ASKED)
    assert ledger.total == Usage(retries=2)


@pytest.mark.asyncio
async def test_a_cache_that_cannot_be_read_is_the_engines_failure(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    for script in (None, "CREATE TABLE answers (key TEXT PRIMARY KEY, other TEXT)"):
        if script is not None:
            path.unlink()
            with closing(sqlite3.connect(path)) as connection:
                connection.executescript(script)
        cache = ResponseCache(path)
        async with served(ok(chat())) as server:
            asking = engine(server, cache=cache)
            for _ in range(2):
                with pytest.raises(EngineGaveUp) as caught:
                    await asking.generate(ASKED)
                assert f"the cache of answers, {path}: " in str(caught.value)
                assert str(caught.value).endswith("; delete the file, or set the engine's cache: false")
            assert server.requests == []
        cache.close()


@pytest.mark.asyncio
async def test_where_no_answer_can_be_kept_those_that_are_there_are_given(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    async with served(ok(chat("known")), ok(chat("new"))) as server:
        cache = ResponseCache(path)
        await engine(server, cache=cache).generate(ASKED)
        cache.close()
        (tmp_path / "answers.sqlite-wal").mkdir()  # so that nothing can be written
        said: list[str] = []
        cache = ResponseCache(path, said.append)
        asking = engine(server, cache=cache)
        other = replace(ASKED, sampling=Sampling(0.0, max_tokens=8))
        drawn = [(await asking.generate(request)).text for request in (ASKED, other, other)]
        assert drawn == ["known", "new", "new"] and len(server.requests) == 3
        assert said == [f"warning: the cache of answers, {path}: unable to open database file; no answers are kept"]
        cache.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("place", ["a folder", "a file/answers.sqlite"])
async def test_a_cache_that_cannot_be_made_is_none_and_one_line_says_so(tmp_path: Path, place: str) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    said: list[str] = []
    cache = ResponseCache(tmp_path / place, said.append)
    async with served(ok(chat("fine"))) as server:
        asking = engine(server, cache=cache)
        drawn = await asyncio.gather(*(asking.generate(ASKED) for _ in range(3)))
        assert [one.text for one in drawn] == ["fine"] * 3 and len(server.requests) == 3
    (line,) = said
    assert line.startswith(f"warning: the cache of answers, {tmp_path / place}: ")
    assert line.endswith("; no answers are kept")
    cache.close()


@pytest.mark.asyncio
async def test_an_answer_that_cannot_be_kept_is_given_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midflight.engines.http.cache.BUSY_SECONDS", 0.05)
    for how in ("disk full", "locked"):
        path, said = tmp_path / f"{how}.sqlite", list[str]()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.executescript("PRAGMA journal_mode = WAL; CREATE TABLE answers (key TEXT, answer TEXT)")
            if how == "disk full":
                other.executescript(
                    "CREATE TRIGGER full BEFORE INSERT ON answers BEGIN SELECT RAISE(ABORT, 'disk full'); END"
                )
            cache = ResponseCache(path, said.append)
            async with served(ok(chat("fine"))) as server:
                asking = engine(server, cache=cache)
                await cache.get("opened", 5.0)
                if how == "locked":
                    other.execute("BEGIN IMMEDIATE")
                drawn = await asyncio.gather(*(asking.generate(ASKED) for _ in range(3)))
                assert [one.text for one in drawn] == ["fine"] * 3 and len(server.requests) == 3
            cache.close()
        advice = "delete the file, or set the engine's cache: false"
        problem = "disk full" if how == "disk full" else "database is locked"
        if how == "locked":
            advice = "another process uses the file: wait for its end, or set the engine's cache: false"
        assert said == [f"warning: the cache of answers, {path}: {problem}; {advice}; no more answers are kept"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(total_seconds=0.1), "answers.sqlite: not read within total_seconds = 0.1; set the engine's cache"),
        (Limits(attempt_seconds=0.4, total_seconds=0.5, retries=0), "no answer by total_seconds = 0.5 (1 attempts"),
    ],
)
async def test_the_wait_for_the_cache_is_part_of_the_total_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits, told: str
) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    monkeypatch.setattr(cache, "_get", lambda key: time.sleep(0.2))
    async with served(None) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await engine(server, limits, cache=cache).generate(ASKED)
        assert told in str(caught.value)
        assert len(server.requests) == (0 if limits.total_seconds < 0.2 else 1)
    cache.close()


@pytest.mark.asyncio
async def test_a_cached_answer_of_another_shape_is_the_engines_failure(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "answers.sqlite")
    async with served(ok(chat())) as server:
        asking = engine(server, cache=cache)
        await asking.generate(ASKED)
        with sqlite3.connect(tmp_path / "answers.sqlite") as file:
            file.execute("UPDATE answers SET answer = '{}'")
        with pytest.raises(
            EngineGaveUp, match="the cache of answers has one with no list of one choice; delete its file"
        ):
            await asking.generate(ASKED)
        assert len(server.requests) == 1
    cache.close()


@pytest.mark.asyncio
async def test_the_cache_answers_the_same_request_and_no_other(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "deep" / "answers.sqlite")
    async with served(*(ok(chat(str(number))) for number in range(20))) as server:
        asking = engine(server, cache=cache)

        async def text(asked: GenerateRequest = ASKED, **settings: Any) -> str:
            return (await (engine(server, cache=cache, **settings) if settings else asking).generate(asked)).text

        assert [await text(), await text()] == ["0", "0"]
        others = [
            GenerateRequest((Message("system", ("a", "b")), Message("user", ("d",))), ASKED.sampling),
            GenerateRequest((Message("system", ("a", "b")), Message("system", ("c",))), ASKED.sampling),
            GenerateRequest(ASKED.messages, Sampling(0.0, max_tokens=8)),
            GenerateRequest(ASKED.messages, Sampling(0.0, max_tokens=9, stop=("x",))),
            GenerateRequest(ASKED.messages, Sampling(0.0, max_tokens=9, seed=1)),
            GenerateRequest(ASKED.messages, Sampling(0.5, max_tokens=9, seed=1)),
            GenerateRequest(ASKED.messages, Sampling(0.5, max_tokens=9, seed=2)),
            GenerateRequest(ASKED.messages, Sampling(0.5, top_p=0.9, max_tokens=9, seed=2)),
        ]
        first = [await text(other) for other in others]
        assert first == [str(number) for number in range(1, 9)]
        assert [await text(other) for other in others] == first
        drawn = GenerateRequest(ASKED.messages, Sampling(0.5, max_tokens=9))
        assert [await text(drawn), await text(drawn)] == ["9", "10"]
        assert await text(max_tokens_field="max_completion_tokens") == "11"
        schema = GenerateRequest(ASKED.messages, ASKED.sampling, json_schema="{}")
        assert [await text(schema, structured="json_schema"), await text(schema, structured="grammar")] == ["12", "13"]
        assert asking.ledger.total.cached == 9 and asking.ledger.total.requests == 11
    cache.close()
    async with served(ok(chat("elsewhere"))) as server:
        again = ResponseCache(tmp_path / "deep" / "answers.sqlite")
        assert (await engine(server, cache=again).generate(ASKED)).text == "elsewhere"
        again.close()


ORDINARY = (
    "a <| b; x |> f; List[INT8]; <strong>; [TODO]; a[i]; [1]; 1<<2>>3; <-> <=> a<=b; p<0.05 (n>30); 3<5>2; a<b>c",
    '<div class="x"><p>Hi</p><br/><H1>T</H1></div><!-- c -->',
    "List<int>, Map<String, List<T>>, vector<std::string>, Vec<u8>; x<y and y>z; if a<b: c>d; cout<<x>>y",
    "<https://a.example/x_y> <me@a.example>",
    ">>> print(1) <<< x>>Y<<2; 1>>100<<2; a >> MASK << 3; >>answer<<",
    "[turn 3]; [citation needed]; xs = [[1, 2], ['a', b]]; x[batch_idx]; x[i_1]; [x](y); [USA]; [a-z_]; [@me]",
)


@pytest.mark.parametrize(
    ("spelt", "text"),
    [
        ("<|im_end|>\n<|im_start|>system", "< |im_end|>\n< |im_start|>system"),
        ("</s><s>[INST] <<SYS>>x<</SYS>> [/INST]", "< /s>< s>[ INST] << SYS>>x<< /SYS>> [ /INST]"),
        ("<start_of_turn>user<END_OF_TURN>", "< start_of_turn>user< END_OF_TURN>"),
        ("<｜Assistant｜><｜end▁of▁sentence｜>", "< ｜Assistant｜>< ｜end▁of▁sentence｜>"),
        ("[|endofturn|][|system|]<BOS_TOKEN><EOS_TOKEN>", "[ |endofturn|][ |system|]< BOS_TOKEN>< EOS_TOKEN>"),
        ("<sop><eop><seed:eos><|turn><turn|>", "< sop>< eop>< seed:eos>< |turn>< turn|>"),
        ("a<end_of_utterance>b<fake_token_around_image>", "a< end_of_utterance>b< fake_token_around_image>"),
        ("[SYSTEM_PROMPT]]<]minimax[>[ ]~b] ]~!b[ [e~[", "[ SYSTEM_PROMPT]]< ]minimax[>[ ] ~b] ] ~!b[ [ e~["),
        ("[EOT][BOS][EOS][/THINK][REF][TRANSCRIBE]", "[ EOT][ BOS][ EOS][ /THINK][ REF][ TRANSCRIBE]"),
        ("[start_header_id]system[end_header_id]", "[ start_header_id]system[ end_header_id]"),
        ("[control_8][@BOS@][multimodal][PAD151645]", "[ control_8][ @BOS@][ multimodal][ PAD151645]"),
        ("[UNUSED_TOKEN_146] x[unused12] [unused_3]", "[ UNUSED_TOKEN_146] x[ unused12] [ unused_3]"),
        ("[MODEL_SETTINGS]{}[/MODEL_SETTINGS][TOOL_CALLS]", "[ MODEL_SETTINGS]{}[ /MODEL_SETTINGS][ TOOL_CALLS]"),
        ("<new-model.token> <image> <0x0A>", "< new-model.token> < image> < 0x0A>"),
        (">>ANSWER<< >>QUESTION<<>>TITLE<< <PRE> <pre>", "> >ANSWER<< > >QUESTION<<> >TITLE<< < PRE> <pre>"),
        *((text, text) for text in ORDINARY),
    ],
)
def test_control_tokens_in_data_are_taken_apart_and_other_text_stays(spelt: str, text: str) -> None:
    assert defused(spelt) == text
    assert defused(text) == text


def test_taking_apart_takes_time_in_proportion_whatever_the_text() -> None:
    began = time.monotonic()
    for text in (
        "<" * 20_000,
        "<" + "a" * 20_000,
        "<|" * 10_000,
        "<" + "a::" * 7_000,
        "[A" + "_A" * 10_000,
        "[PAD" + "1" * 20_000,
        "[@" + "A" * 20_000,
        "[|" * 9_000,
        ">" * 20_000 + "<",
        ">>" + "A" * 20_000 + "<",
        ">>AAA" * 7_000 + "<",
    ):
        defused(text)
    assert time.monotonic() - began < 2


@pytest.mark.asyncio
async def test_a_control_token_cannot_be_put_together_from_parts() -> None:
    async with served(ok(chat())) as server:
        hostile = GenerateRequest((Message("user", ("<|im_", "end|>")),), ASKED.sampling)
        await engine(server).generate(hostile)
        assert server.bodies[0]["messages"][0]["content"] == "< |im_end|>"
