"""Asking a server: what is tried again, what is given up on, and what never leaves."""

from __future__ import annotations

import asyncio
import email.utils
import json
import ssl
import time
from typing import Any

import pytest

from midflight.engines.base import EngineGaveUp
from midflight.engines.http import Client, Limits, Malformed, NotThere, Patience, PromptRefused, Transient
from midflight.engines.http.client import MOST_SAID, parsed, retry_after, written
from midflight.redacting import is_secret, redact, redact_all
from midflight.server.wire import Answer
from tests.engines.serving import Served, error, ok, served, whole

FAST = Limits(backoff=0.001, attempt_seconds=0.3, total_seconds=2.0, retries=3)
KEY = "sk-very-secret-0123456789"


def client(server: Served, limits: Limits = FAST, key: str | None = None, **clocks: Any) -> Client:
    return Client(server.base_url, Patience(limits, **clocks), key=key)


async def asked(server: Served, limits: Limits = FAST) -> Any:
    return await client(server, limits).ask("/x", {}, lambda answer: answer)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "failure",
    [error(status) for status in (408, 409, 425, 429, 500, 502, 503, 504, 520, 524, 529, 530)]
    + [b"", whole(b'{"a": ', b"Content-Length: 6"), Answer(200, b"<html>"), None],
)
async def test_what_may_pass_is_tried_again(failure: Any) -> None:
    async with served(failure, failure, ok({"a": 1})) as server:
        assert await asked(server) == {"a": 1}
        assert len(server.requests) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("failure", [error(status) for status in (400, 401, 402, 403, 404, 413, 422, 501, 505)])
async def test_what_will_not_pass_is_asked_once(failure: Answer) -> None:
    async with served(failure, ok({})) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await asked(server)
        assert f"HTTP {failure.status}: no" in str(caught.value)
        assert isinstance(caught.value, PromptRefused) == (failure.status in (400, 413, 422))
        assert len(server.requests) == 1


@pytest.mark.asyncio
async def test_what_a_server_says_beside_an_empty_error_is_shown() -> None:
    async with served(Answer(400, b'{"error": null, "message": "the model is loading"}')) as server:
        with pytest.raises(EngineGaveUp, match="HTTP 400: the model is loading"):
            await asked(server)


@pytest.mark.asyncio
async def test_a_spent_quota_is_not_waited_for() -> None:
    async with served(error(429, "pay", "insufficient_quota"), ok({})) as server:
        with pytest.raises(EngineGaveUp, match="HTTP 429: pay"):
            await asked(server)


@pytest.mark.asyncio
async def test_a_server_that_never_works_is_given_up_on_with_its_last_words() -> None:
    async with served(error(503, "over\nloaded")) as server:
        with pytest.raises(EngineGaveUp) as caught:
            await asked(server)
        assert "HTTP 503: over loaded (4 attempts in" in str(caught.value) and str(caught.value).endswith(
            " s; retries = 3)"
        )
        assert len(server.requests) == 4


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds
        await asyncio.sleep(0)


async def slept(*answers: Any, limits: Limits, requests: int = 1, tokens: int = 0) -> list[float]:
    clock = Clock()
    async with served(*answers) as server:
        asking = client(server, limits, clock=clock, sleep=clock.sleep, jitter=lambda: 1.0)
        for _ in range(requests):
            await asking.ask("/x", {}, lambda answer: answer, tokens=tokens)
    return clock.slept


@pytest.mark.asyncio
async def test_waits_double_up_to_a_bound_and_never_undercut_the_servers() -> None:
    limits = Limits(backoff=1.0, most_backoff=3.0, retries=5, total_seconds=500)
    failures = [error(500), error(500), error(500), error(429, **{"Retry-After": "40"})]
    assert await slept(*failures, ok({}), limits=limits) == [1.0, 2.0, 3.0, 41.0]


@pytest.mark.asyncio
async def test_no_wait_goes_beyond_the_total_time() -> None:
    clock = Clock()
    async with served(error(429, **{"Retry-After": "60"}), ok({})) as server:
        limits = Limits(total_seconds=50, attempt_seconds=50)
        asking = client(server, limits, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)
        late = "would come after total_seconds = 50; set total_seconds above 61, and agent.max_seconds above that"
        with pytest.raises(EngineGaveUp) as caught:
            await asking.ask("/x", {}, lambda answer: answer)
        assert str(caught.value) == f"engine: {server.base_url}: HTTP 429: no (1 attempts; another {late})"
        assert clock.slept == [] and len(server.requests) == 1
        with pytest.raises(EngineGaveUp) as caught:
            await asking.ask("/x", {}, lambda answer: answer)  # of the same engine
        assert str(caught.value) == f"engine: its turn, by the server's Retry-After, {late}"
        assert clock.slept == [] and len(server.requests) == 1
        clock.now += 20
        await asking.ask("/x", {}, lambda answer: answer)  # it waits as the server said
        assert clock.slept == [40.25]


@pytest.mark.asyncio
async def test_what_waited_for_a_slot_asks_no_earlier_than_the_server_said_meanwhile() -> None:
    times: list[float] = []

    async def attempt() -> None:
        times.append(time.monotonic())
        await asyncio.sleep(0.01)
        if len(times) == 1:
            raise Transient("busy", 0.3)

    patience = Patience(Limits(concurrency=1, backoff=0.01))
    await asyncio.gather(*(patience.run(attempt) for _ in range(3)))
    assert len(times) == 4 and all(one >= times[0] + 0.3 for one in times[1:])


@pytest.mark.asyncio
async def test_a_wait_for_a_slot_does_not_use_up_the_total_time() -> None:
    async def slow() -> None:
        await asyncio.sleep(0.1)

    patience = Patience(Limits(concurrency=1, total_seconds=0.25))
    assert await asyncio.gather(*(patience.run(slow) for _ in range(4))) == [None] * 4


@pytest.mark.asyncio
async def test_the_first_wait_is_between_half_and_all_of_backoff_by_chance() -> None:
    for chance, waited in ((0.0, 0.5), (0.5, 0.75), (1.0, 1.0)):
        clock = Clock()
        async with served(error(500), ok({})) as server:
            asking = client(server, Limits(backoff=1.0), clock=clock, sleep=clock.sleep, jitter=lambda c=chance: c)
            await asking.ask("/x", {}, lambda answer: answer)
        assert clock.slept == [waited]


@pytest.mark.asyncio
async def test_what_is_not_there_is_named_whole() -> None:
    async with served(error(404, "nothing")) as server:
        base = server.base_url
        for path, asked in (("/x", f"{base}/x"), ("//x", f"{base.removesuffix('/v1')}/x")):
            with pytest.raises(NotThere) as caught:
                await client(server).ask(path, {}, lambda answer: answer)
            said = f"{base}: HTTP 404: nothing; {asked} was asked for, base_url often ends in /v1"
            assert str(caught.value) == said


@pytest.mark.asyncio
async def test_a_certificate_that_is_refused_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    async def refused(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)
    told = r"self-signed certificate\S*; check base_url, or name its authority's file in SSL_CERT_FILE$"
    with pytest.raises(EngineGaveUp, match=told):
        await Client("https://127.0.0.1:1/v1", Patience(Limits())).ask("/x", {}, lambda answer: answer)
    assert len(tries) == 1


@pytest.mark.asyncio
async def test_an_attempt_ends_at_its_own_limit_or_with_the_total_time() -> None:
    async def forever() -> None:
        await asyncio.sleep(3600)

    for limits, message in (
        (Limits(attempt_seconds=0.1, total_seconds=50, retries=0), r"no answer within 0.1 s \(1 attempts"),
        (Limits(attempt_seconds=50, total_seconds=0.2, retries=0), r"no answer by total_seconds = 0.2 \(1 attempts"),
    ):
        async with asyncio.timeout(10):
            with pytest.raises(EngineGaveUp, match=message):
                await Patience(limits, clock=Clock()).run(forever)
    clock = Clock()
    limits = Limits(backoff=0.0, attempt_seconds=50, total_seconds=50, retries=1)

    async def long_and_then_forever() -> None:
        if clock.now == 1000:
            clock.now += 49.8
            raise Transient("busy")
        await forever()

    async with asyncio.timeout(10):
        with pytest.raises(EngineGaveUp, match=r"no answer by total_seconds = 50 \(2 attempts"):
            await Patience(limits, clock=clock, sleep=clock.sleep).run(long_and_then_forever)


@pytest.mark.asyncio
async def test_rates_space_requests_and_tokens() -> None:
    assert await slept(ok({}), limits=Limits(requests_per_minute=60), requests=4) == [1.0, 1.0]
    assert await slept(ok({}), limits=Limits(tokens_per_minute=600), requests=3, tokens=50) == [4.0, 5.0]


@pytest.mark.asyncio
async def test_no_more_than_so_many_requests_are_under_way() -> None:
    async with served(ok({}), delay=0.01) as server:
        asking = client(server, Limits(concurrency=3))
        await asyncio.gather(*(asking.ask("/x", {}, lambda answer: answer) for _ in range(12)))
        assert (server.most_at_once, len(server.requests)) == (3, 12)


@pytest.mark.asyncio
async def test_a_slot_is_free_while_its_request_waits_for_another_attempt() -> None:
    async with served(error(500), ok({})) as server:
        asking = client(server, Limits(concurrency=1, backoff=0.2))
        tasks = [asyncio.create_task(asking.ask("/x", {"n": n}, lambda answer: answer)) for n in range(2)]
        await asyncio.gather(*tasks)
        assert [body["n"] for body in server.bodies] == [0, 1, 0]


@pytest.mark.asyncio
async def test_a_wrong_schema_is_tried_again() -> None:
    def read(answer: Any) -> Any:
        if "b" not in answer:
            raise Malformed("no b")
        return answer["b"]

    async with served(ok({"a": 1}), ok({"b": 2})) as server:
        assert await client(server).ask("/x", {}, read) == 2
        assert len(server.requests) == 2
    async with served(ok({"a": 1})) as server:
        with pytest.raises(EngineGaveUp, match="the answer has no b"):
            await client(server).ask("/x", {}, read)


@pytest.mark.asyncio
async def test_what_fails_in_reading_an_answer_is_no_bad_json() -> None:
    async with served(ok({"a": 1})) as server:
        for failure in (ValueError, RecursionError, KeyError):

            def read(answer: Any, failure: type[Exception] = failure) -> Any:
                raise failure("a fault of ours")

            with pytest.raises(failure, match="a fault of ours"):
                await client(server).ask("/x", {}, read)
        assert len(server.requests) == 3


@pytest.mark.asyncio
async def test_a_retry_after_may_be_a_date() -> None:
    until = email.utils.formatdate(time.time() + 30, usegmt=True)
    (waited,) = await slept(error(503, **{"Retry-After": until}), ok({}), limits=Limits(backoff=0.001))
    assert 25 < waited <= 30.001


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_a_date_without_a_zone_is_in_utc(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert 25 < retry_after(time.asctime(time.gmtime(time.time() + 30))) <= 30
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("said", ["1e9", "inf", "Thu, 01 Jan 2099 00:00:00 GMT"])
def test_no_retry_after_is_longer_than_a_day(said: str) -> None:
    assert retry_after(said) == 86_400.0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "said", ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 -0000", "nan", "-5"]
)
async def test_a_retry_after_that_is_no_time_is_none(said: str) -> None:
    async with served(error(503, **{"Retry-After": said}), ok({"a": 1})) as server:
        assert await asked(server) == {"a": 1}


@pytest.mark.asyncio
async def test_nobody_at_the_address_is_given_up_on() -> None:
    async with served(ok({})) as server:
        pass
    with pytest.raises(EngineGaveUp, match="4 attempts"):
        await asked(server)


@pytest.mark.asyncio
async def test_the_key_is_sent_and_taken_out_of_all_that_comes_back() -> None:
    echo = f"wrong key: {KEY}"
    async with served(error(500, echo), ok({"text": echo})) as server:
        assert await client(server, key=KEY).ask("/x", {}, json.dumps) == '{"text": "wrong key: [key]"}'
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    for answer in (error(401, echo), error(500, echo)):
        async with served(answer) as server:
            asking = client(server, key=KEY)
            with pytest.raises(EngineGaveUp) as caught:
                await asking.ask("/x", {}, lambda answer: answer)
            shown = [str(caught.value), repr(caught.value), repr(asking), str(caught.value.__cause__)]
            assert "wrong key: [key]" in shown[0]
            assert not any(KEY in text for text in shown)


@pytest.mark.asyncio
@pytest.mark.parametrize("before", range(MOST_SAID - len(KEY) - 12, MOST_SAID + 2))
async def test_no_part_of_the_key_is_left_where_an_error_is_cut(before: int) -> None:
    said = "x" * before + KEY
    spelt = Answer(401, error(401, said).body.replace(b"sk-", b"\\u0073k-"))
    for answer in (error(401, said), spelt, f"{said}\r\n\r\n".encode()):
        async with served(answer) as server:
            with pytest.raises(EngineGaveUp) as caught:
                await client(server, Limits(retries=0), key=KEY).ask("/x", {}, lambda answer: answer)
        assert KEY[:2] not in str(caught.value).partition("xxx")[2]


@pytest.mark.asyncio
async def test_a_key_is_taken_out_of_texts_however_json_spells_it_and_out_of_nothing_else() -> None:
    key = 'choices":/3'
    spelt = [json.dumps(key).encode(), json.dumps(key).replace("/", "\\/").replace("c", "\\u0063").encode()]
    for one in spelt:
        body = b'{"choices": 3, "a": [{%s: %s}]}' % (one, one)
        async with served(Answer(200, body)) as server:
            answer = await client(server, key=key).ask("/x", {}, lambda answer: answer)
        assert answer == {"choices": 3, "a": [{"[key]": "[key]"}]}
        async with served(Answer(401, b'{"error": {"message": {"a": [%s]}}}' % one)) as server:
            with pytest.raises(EngineGaveUp) as caught:
                await client(server, key=key).ask("/x", {}, lambda answer: answer)
        assert "HTTP 401: {'a': ['[key]']};" in str(caught.value)


@pytest.mark.parametrize(
    "value", ["", "1", "sk-1234", "EMPTY", "None", "TEST", "not-needed", "Token-ABC123", "password"]
)
def test_a_short_value_and_a_placeholder_are_no_secrets(value: str) -> None:
    text = f"{value} a {value}"
    assert not is_secret(value) and redact(text, [value]) == text and redact_all([text], [value]) == [text]


def test_a_key_is_taken_out_however_a_text_quotes_it() -> None:
    key = 'sk/1+2"3\\4&5'
    for spelt in (
        key,
        "sk%2F1%2B2%223%5C4%265",
        "sk%2f1%2b2%223%5c4%265",
        "sk/1%2B2%223%5C4%265",
        "sk/1+2&quot;3\\4&amp;5",
        'sk/1+2"3\\4&amp;5',
        'sk/1+2\\"3\\\\4&5',
        'sk\\/1+2\\"3\\\\4&5',
        repr(key)[1:-1],
    ):
        assert redact(f"a {spelt} b", [key]) == "a [key] b" and redact_all([spelt], [key]) == ["[key]"]
    key = "sk/1+2=3456"
    for spelt in (
        "sk%2F1+2=3456",
        "sk/1%2b2=3456",
        "sk/1+2%3D3456",
        "sk&#47;1&#43;2&#61;3456",
        "sk&#x2f;1&#x2b;2&#x3d;3456",
        "sk&#x2F;1&#x2B;2&#x3D;3456",
    ):
        assert redact(f"a {spelt} b", [key]) == "a [key] b"


@pytest.mark.asyncio
async def test_a_key_that_the_wire_quotes_and_that_of_another_server_are_taken_out() -> None:
    async with served(b"HTTP/1.1 sk-wi\\th-backslash\r\n\r\n", ok({"a": "sk-of-another"})) as server:
        asking = Client(
            server.base_url, Patience(Limits(retries=0)), key="sk-wi\\th-backslash", others=["sk-of-another"]
        )
        with pytest.raises(EngineGaveUp, match=r"not HTTP: 'HTTP/1.1 \[key\]'"):
            await asking.ask("/x", {}, lambda answer: answer)
        assert await asking.ask("/x", {}, lambda answer: answer) == {"a": "[key]"}


def test_keys_are_taken_out_the_longest_first() -> None:
    assert redact("a k-345678 k-3456789 b", ["k-345678", "", None, "k-3456789"]) == "a [key] [key] b"


@pytest.mark.parametrize(
    "value", [{"a": [1, 0.7, None, True, "é\u2028\x00"], "b": {}}, "half \ud83d of a pair", 10**30, "x" * 5000, []]
)
def test_what_is_sent_is_the_json_of_the_value(value: Any) -> None:
    assert json.loads(written(value)) == value == parsed(written(value)) == parsed(json.dumps(value).encode())


WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")


@pytest.mark.asyncio
@pytest.mark.parametrize("encoding", WIDE)
async def test_a_key_is_not_shown_in_an_encoding_that_json_in_bytes_may_have(encoding: str) -> None:
    for status in (200, 401):
        async with served(Answer(status, f'{{"error": {{"message": "{KEY}"}}}}'.encode(encoding))) as server:
            with pytest.raises(EngineGaveUp) as caught:
                await client(server, Limits(retries=0), key=KEY).ask("/x", {}, lambda answer: answer)
        said = str(caught.value)
        assert KEY not in said.replace("\0", "")
        assert ("the answer is not JSON" if status == 200 else "[key]") in said


def test_what_json_reads_is_read_and_what_it_refuses_is_refused() -> None:
    assert parsed(b'"\\ud800"') == "\ud800"
    assert parsed(b'{"a": 1, "a": 2}') == {"a": 2} and parsed(b"-Infinity") == -float("inf")
    assert parsed(b'\xef\xbb\xbf{"a": 1}') == {"a": 1} and parsed(b'"\xed\xa0\x80"') == "\ud800"
    for text in (b"", b"[1,]", b"{'a': 1}", b'"\xff"', b"[1] 2", b'"\x01"', b"nul", *map("[1]".encode, WIDE)):
        with pytest.raises(ValueError):
            parsed(text)
    with pytest.raises(RecursionError):
        parsed(b"[" * 100_000)
