"""Any server that speaks OpenAI's protocol: chat or completions, over text.

Invariant: it gives no token ids, so nothing it draws can train. What a text must obey is asked of the server where the
recipe says that the server has it (`structured`); modules parse strictly either way.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from midflight.engines.base import EngineGaveUp, FinishReason, GenerateRequest, Generation, PromptTooLong, Structure
from midflight.engines.http import (
    Client,
    Ledger,
    Malformed,
    Patience,
    Prices,
    PromptRefused,
    ResponseCache,
    said_tokens,
)
from midflight.engines.http.cache import cache_key
from midflight.engines.plain import as_chat, as_text
from midflight.engines.served import GUIDANCE, Endpoint, ServedEngine, Structured
from midflight.engines.vllm_answers import shown

__all__ = ["Endpoint", "OpenAIEngine", "Structured", "TextEngine"]

_STRUCTURES: dict[Structured, Structure] = {
    "none": "text",
    "json_schema": "json",
    "json_object": "json",
    "grammar": "grammar",
}
_Taken = tuple[Any, str, FinishReason]
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Parts of a content that are no part of the answer."""
_BYTES_A_TOKEN = 3
"""Of text in general a token has more; code and numbers come close."""


def estimated_tokens(text: str) -> int:
    """Tokens that `text` takes, rather too many than too few: the server's tokenizer is not known here."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // _BYTES_A_TOKEN)


class TextEngine(ServedEngine):
    """An engine on a server that takes and gives text. A subclass says how one request is asked."""

    def __init__(
        self,
        name: str,
        patience: Patience,
        endpoint: Endpoint,
        *,
        ledger: Ledger | None = None,
        prices: Prices | None = None,
        cache: ResponseCache | None = None,
        where: str = "",
    ) -> None:
        super().__init__(name, endpoint, _STRUCTURES[endpoint.structured], ledger, prices)
        self._patience = patience
        self._where = where
        self._cache = cache

    def count_tokens(self, text: str) -> int:
        """An estimate; see `estimated_tokens`."""
        return estimated_tokens(text)

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Without ids and log-probs."""
        if request.grammar is not None and self.structure != "grammar":
            raise EngineGaveUp(f"{self._name}: this server takes no grammars")
        if request.json_schema is not None and self.structure == "text":
            raise EngineGaveUp(f"{self._name}: this server takes no JSON schemas")
        body = self.body(request)
        prompt = self._prompt_tokens(request)
        if prompt + request.sampling.max_tokens > self.endpoint.context_length:
            raise PromptTooLong(
                f"{self._name}: about {prompt} prompt tokens + max_tokens {request.sampling.max_tokens} exceed "
                f"context_length {self.endpoint.context_length}"
            )
        key = cache_key(f"{self._where} {self.endpoint.api}", body) if self._cache is not None else None
        answer, waited = None, 0.0
        if self._cache is not None and key is not None:
            began = time.monotonic()
            answer = await self._cache.get(key, self._patience.limits.total_seconds)
            waited = time.monotonic() - began
        if answer is not None:
            self._count(cached=1)
            try:
                text, finish = read_choice(answer, self.endpoint.api)
            except Malformed as error:
                said = f"{self._name}: the cache of answers has one with {error}; delete its file"
                raise EngineGaveUp(said) from None
        else:
            read = partial(self._taken, prompt)
            try:
                answer, text, finish = await self._asked(body, prompt + request.sampling.max_tokens, read, waited)
            except PromptRefused as error:
                if error.too_long:
                    raise PromptTooLong(str(error)) from None
                raise
            if self._cache is not None and key is not None:
                await self._cache.put(key, answer)
        return Generation(text, finish, sampling=request.sampling, grammar=request.grammar)

    @abstractmethod
    def _asked(
        self, body: dict[str, Any], tokens: int, read: Callable[[Any], _Taken], waited: float
    ) -> Awaitable[_Taken]:
        """What `read` takes of the server's JSON answer to `body`; an attempt begins with `_before`.

        `tokens`, `waited`: see `Patience.run`.
        """

    def body(self, request: GenerateRequest) -> dict[str, Any]:
        """The request as JSON."""
        sampling = request.sampling
        body: dict[str, Any] = {"model": self.endpoint.model}
        if self.endpoint.api == "chat":
            body["messages"] = as_chat(request.messages)
        else:
            body["prompt"] = as_text(request.messages)
        body["temperature"] = sampling.temperature
        body[self.endpoint.max_tokens_field] = sampling.max_tokens
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k and self.endpoint.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed & 0x7FFF_FFFF  # the range that all servers take
        if request.grammar is not None:
            body["structured_outputs"] = {"grammar": GUIDANCE + request.grammar}
        if request.json_schema is not None:
            schema = json.loads(request.json_schema)
            if self.structure == "grammar":
                body["structured_outputs"] = {"json": schema}
            elif self.endpoint.structured == "json_object":
                body["response_format"] = {"type": "json_object", "schema": schema}
            else:
                wanted = {"name": "answer", "strict": _is_strict(schema), "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body

    def _prompt_tokens(self, request: GenerateRequest) -> int:
        total = 0
        for message in request.messages:
            for part in message.parts:
                total += estimated_tokens(part)
        return total

    def _taken(self, prompt: int, answer: Any) -> _Taken:
        """`answer`, its text and finish reason, checked and counted: what it says that it took even where it is
        refused, else by estimate.

        Raises: as `read_choice`.
        """
        took, drew = said_tokens(answer)
        try:
            text, finish = read_choice(answer, self.endpoint.api)
        except (Malformed, EngineGaveUp) as error:
            self._count(took or 0, drew or 0)
            if isinstance(error, EngineGaveUp):
                raise EngineGaveUp(f"{self._name}: {self._where}: {error}") from None
            raise
        self._count(prompt if took is None else took, self.count_tokens(text) if drew is None else drew, requests=1)
        return answer, text, finish


class OpenAIEngine(TextEngine):
    """`TextEngine` over HTTP."""

    def __init__(self, name: str, client: Client, endpoint: Endpoint, **shared: Any) -> None:
        super().__init__(name, client.patience, endpoint, where=client.base_url, **shared)
        self.client = client

    def _asked(
        self, body: dict[str, Any], tokens: int, read: Callable[[Any], _Taken], waited: float
    ) -> Awaitable[_Taken]:
        path = "/chat/completions" if self.endpoint.api == "chat" else "/completions"
        return self.client.ask(path, body, read, tokens=tokens, before=self._before, waited=waited)


_STOPPED = {"stop", "eos", "eos_token", "end_turn", "stop_sequence"}
_CUT_OFF = {"length", "max_tokens"}
"""What servers call the two ends of a text; the first of each is OpenAI's."""


def read_choice(answer: Any, api: str) -> tuple[str, FinishReason]:
    """Text and finish reason of the only choice.

    Raises:
        Malformed: the answer has no such thing.
        EngineGaveUp: the server ended the text for another reason, such as a filter.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        several = f" but {len(choices)}" if isinstance(choices, list) and len(choices) > 1 else ""
        raise Malformed(f"no list of one choice{several}")
    choice = choices[0]
    if error := choice.get("error"):
        raise Malformed(f"an error in its choice: {shown(error.get('message') if isinstance(error, dict) else error)}")
    text = _chat_text(choice.get("message")) if api == "chat" else choice.get("text")
    if not isinstance(text, str):
        raise Malformed("no text in its choice")
    reason = choice.get("finish_reason")
    if isinstance(reason, str):
        if reason.lower() in _STOPPED:
            return text, FinishReason.STOP
        if reason.lower() in _CUT_OFF:
            return text, FinishReason.LENGTH
        raise EngineGaveUp(f"the server ended the answer for the reason {reason[:40]!r}")
    raise Malformed("no finish_reason in its choice")


def _chat_text(message: Any) -> Any:
    """A message's content, one in parts as one text; None: it has none.

    Raises:
        Malformed: a part is neither text nor thinking.
        EngineGaveUp: it is a refusal.
    """
    if not isinstance(message, dict):
        return None
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    for place in (message, *parts):
        if isinstance(place, dict) and isinstance(refusal := place.get("refusal"), str) and refusal:
            raise EngineGaveUp(f"the server's model refuses to answer: {shown(refusal)}")
    if content is None and message.keys() & {"content", "role"}:
        return ""  # a model that spent all its tokens on thinking; some servers leave out what is empty
    return "".join(map(_part_text, parts)) if isinstance(content, list) else content


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _THOUGHTS:
        return ""
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise Malformed(f"a part in its content that is no text: {shown(kind)}")
    return text


def _is_strict(schema: Any) -> bool:
    """Whether every object in a schema has all its properties and no others, which is what OpenAI holds texts to."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or properties is not None:
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(properties or ()):
            return False
    return all(map(_is_strict, schema.values()))
