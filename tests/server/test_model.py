"""The server in the box: it does what it is asked, or says in one line that it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from midflight.engines.base import FinishReason, GenerateRequest, Message, Sampling
from midflight.engines.http import Client, Limits, Patience
from midflight.engines.local import LocalEngine, load
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.server.model import ModelServer
from midflight.server.wire import Request, serving
from tests.training.tiny import make_byte_model

pytestmark = pytest.mark.model

LINES = {"grammar": 'start: "one\\ntwo"\n'}
SCHEMA = {"enum": ["x"]}
PROMPT = {"prompt": "Say: "}
CHAT = {"messages": [{"role": "user", "content": "Say: "}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    engine = LocalEngine(load(str(make_byte_model(tmp_path_factory.mktemp("bytes")))), chat_template=False)
    made = ModelServer("tiny", engine, lambda _: engine)
    yield made
    made.close()


async def asked(server: ModelServer, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await server.handle(Request(method, path, {}, sent, cast(asyncio.Transport, None)))
    return answer.status, json.loads(answer.body)


def ask(server: ModelServer, body: Any, **more: Any) -> tuple[int, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return asyncio.run(asked(server, path, {**body, **more}))


def text_of(answer: Any) -> str:
    (choice,) = answer["choices"]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("body", [PROMPT, CHAT])
@pytest.mark.parametrize("stop", ["\n", ["xx", "\ntw", "\n"]])
def test_a_text_is_cut_at_a_stop_string(server: ModelServer, body: Any, stop: Any) -> None:
    status, answer = ask(server, body, stop=stop, structured_outputs=LINES)
    assert (status, text_of(answer)) == (200, "one")
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 4
    status, answer = ask(server, body, stop=stop, structured_outputs=LINES, max_tokens=3)
    assert text_of(answer) == "one" and answer["choices"][0]["finish_reason"] == "length"


def test_the_ids_are_those_that_were_drawn_to_the_stop_strings_end(server: ModelServer) -> None:
    _, answer = ask(server, PROMPT, structured_outputs=LINES, logprobs=0, return_token_ids=True)
    _, cut = ask(server, PROMPT, structured_outputs=LINES, logprobs=0, return_token_ids=True, stop="\n")
    (whole,), (choice,) = answer["choices"], cut["choices"]
    assert len(whole["token_ids"]) == 7 and choice["token_ids"] == whole["token_ids"][:4]
    assert choice["logprobs"]["token_logprobs"] == [0.0] * 4


@pytest.mark.parametrize(
    "held",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"grammar": f"start: %json {json.dumps(SCHEMA)}\n"}},
    ],
)
@pytest.mark.parametrize("body", [PROMPT, CHAT])
def test_a_text_is_held_to_a_schema_in_every_spelling(server: ModelServer, body: Any, held: Any) -> None:
    status, answer = ask(server, body, **held)
    assert (status, text_of(answer)) == (200, '"x"')


def test_json_object_without_a_schema_is_any_object_and_text_is_free(server: ModelServer) -> None:
    free = ask(server, CHAT, seed=1)
    assert ask(server, CHAT, seed=1, response_format={"type": "text"}) == free
    assert text_of(ask(server, CHAT, seed=1, response_format={"type": "json_object"})[1]).startswith("{")


def test_null_and_what_is_done_anyway_are_taken(server: ModelServer) -> None:
    anyway = {"n": 1, "stream": False, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "top_k": -1}
    more = {"stop": None, "seed": 1, "response_format": None, "max_tokens": None, "user": None}
    assert ask(server, CHAT, **anyway, **more, logprobs=False) == ask(server, CHAT, seed=1)


JSON_SCHEMA = "response_format.json_schema.schema: must be a JSON schema, an object"
HELD = "structured_outputs: must be an object with either grammar or json"
FORMAT = "response_format: must be an object with the type text, json_object or json_schema"
STOP = "stop: must be a text or a list of texts, none of them empty"


@pytest.mark.parametrize(
    ("body", "more", "message"),
    [
        (CHAT, {"n": 2}, "n = 2: 1 is all there is; leave it out"),
        (CHAT, {"stream": True}, "stream = True: false is all there is; leave it out"),
        (CHAT, {"logprobs": True}, "logprobs = True: false is all there is; leave it out"),
        (PROMPT, {"logprobs": 5}, "logprobs = 5: 0 is all there is; leave it out"),
        (PROMPT, {"min_p": 0.1}, "min_p = 0.1: 0 is all there is; leave it out"),
        (PROMPT, {"repetition_penalty": 1.1}, "repetition_penalty = 1.1: 1 is all there is; leave it out"),
        (CHAT, {"tools": []}, "'tools': not a field of this server; it has best_of, "),
        (CHAT, {"prompt_logprobs": 0}, "'prompt_logprobs': not a field of this server; it has best_of, "),
        (PROMPT, {"stop": 3}, STOP),
        (PROMPT, {"stop": ["a", ""]}, STOP),
        (PROMPT, {"stop": [1]}, "stop: must be a text"),
        (PROMPT, {"max_tokens": 0}, "max_tokens = 0: must be a whole number from 1 to 2147483648"),
        (PROMPT, {"max_tokens": 1e400}, "max_tokens = inf: must be a whole number from 1 to 2147483648"),
        (PROMPT, {"temperature": float("nan")}, "temperature = nan: must be a number from 0 to 1e+06"),
        (PROMPT, {"top_p": 0}, "top_p = 0: must be above 0"),
        (PROMPT, {"seed": -1}, "seed = -1: must be a whole number from 0 to 18446744073709551615"),
        (PROMPT, {"seed": "a"}, "seed = 'a': must be a whole number from 0 to 18446744073709551615"),
        (PROMPT, {"return_token_ids": "no"}, "return_token_ids = 'no': must be true or false"),
        (PROMPT, {"prompt": "a\ud800"}, "prompt: has half of a surrogate pair, which no text has"),
        (PROMPT, {"model": ["tiny"]}, "model: must be a text"),
        (CHAT, {"response_format": {"type": "json_schema"}}, JSON_SCHEMA),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": "x"}}, JSON_SCHEMA),
        (CHAT, {"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema: must be a JSON"),
        (CHAT, {"response_format": {"type": "grammar"}}, FORMAT),
        (CHAT, {"response_format": "text"}, FORMAT),
        (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "wrong"}}}, "grammar does not compile"),
        (CHAT, {"structured_outputs": {}}, HELD),
        (CHAT, {"structured_outputs": {"regex": "a"}}, HELD),
        (CHAT, {"structured_outputs": {"json": "{}"}}, "structured_outputs.json: must be a JSON schema, an object"),
        (CHAT, {"structured_outputs": LINES, "response_format": {"type": "text"}}, "structured_outputs: does not go"),
        (CHAT, {"messages": []}, "messages: must be a list of {role, content}"),
        (CHAT, {"messages": [{"role": "a", "content": "b"}]}, "messages[0]: must be {role, content} with a role of"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content: must be a text"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(server: ModelServer, body: Any, more: Any, message: str) -> None:
    status, answer = ask(server, body, **more)
    assert status == 400 and answer["error"]["message"].startswith(message)


@pytest.mark.parametrize(("body", "message"), [(b"[" * 100_000, "is not JSON"), (b"[]", "is not an object")])
def test_a_body_that_is_no_object_is_refused(server: ModelServer, body: bytes, message: str) -> None:
    status, answer = asyncio.run(asked(server, "/v1/completions", body))
    assert (status, answer["error"]["message"]) == (400, f"the body {message}")


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("structured", ["none", "json_schema", "json_object", "grammar"])
def test_midflights_own_engine_is_served(server: ModelServer, api: Any, structured: Any) -> None:
    async def drawn() -> Any:
        async with serving(server.handle) as port:
            client = Client(f"http://127.0.0.1:{port}/v1", Patience(Limits(retries=0), name="e"))
            engine = OpenAIEngine("e", client, Endpoint("tiny", api=api, structured=structured, top_k=True))
            schema = None if structured == "none" else json.dumps(SCHEMA)
            sampling = Sampling(0.7, top_p=0.9, top_k=3, max_tokens=9, stop=("x",), seed=2**62)
            return await engine.generate(GenerateRequest((Message("user", ("Say",)),), sampling, json_schema=schema))

    found = asyncio.run(drawn())
    if structured != "none":
        assert (found.text, found.finish_reason) == ('"', FinishReason.STOP)
    assert "x" not in found.text
