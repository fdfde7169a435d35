"""A local model behind the protocol of vLLM, as far as Midflight speaks it: what trains against this trains there.

Token ids or text in, ids and log-probs of the drawn distribution out, Lark grammars and JSON schemas, adapters that
are loaded while it runs, the prefix cache. Invariant: each adapter is a model of its own, and a request names one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from midflight.engines.base import EngineError, GenerateRequest, Generation, Message, PromptTooLong, Sampling
from midflight.engines.local import LocalEngine
from midflight.errors import UserError
from midflight.server.wire import Answer, Request


class Refused(Exception):
    """The request cannot be served as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelServer:
    """Serves `engine` as `name`. `load` makes the engine of an adapter's folder, in a thread.

    With a `key` every request has to bring it as a bearer token.
    """

    def __init__(
        self, name: str, engine: LocalEngine, load: Callable[[Path], LocalEngine], *, key: str | None = None
    ) -> None:
        self._name = name
        self._engines = {name: engine}
        self._load = load
        self._key = key
        self._routes: dict[tuple[str, str], Callable[[Any], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("POST", "/reset_prefix_cache"): self._reset,
        }

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    async def handle(self, request: Request) -> Answer:
        """See `server.wire.Handler`."""
        try:
            if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
                raise Refused(401, "wrong or missing key")
            route = self._routes.get((request.method, request.path.partition("?")[0]))
            if route is None:
                raise Refused(404, f"no {request.method} {request.path}")
            try:
                body = json.loads(request.body) if request.body else {}
            except ValueError:
                raise Refused(400, "the body is not JSON") from None
            if not isinstance(body, dict):
                raise Refused(400, "the body is not an object")
            return Answer(200, json.dumps(await route(body)).encode())
        except Refused as error:
            return _error(error.status, str(error))

    async def _health(self, body: Any) -> Any:
        return {}

    async def _models(self, body: Any) -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self._engines]}

    async def _completions(self, body: Any) -> Any:
        engine, prompt = self._engine(body), body.get("prompt")
        if isinstance(prompt, str):
            prompt = engine.encode_text(prompt)
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise Refused(400, "prompt: must be a text or a list of token ids")
        vocabulary = int(engine.model.config.vocab_size)
        if not all(0 <= token < vocabulary for token in prompt):
            raise Refused(400, f"prompt: an id is not within the vocabulary of {vocabulary}")
        drawn = await _generate(engine, _request(body, (), tuple(prompt)))
        choice: dict[str, Any] = {"index": 0, "text": drawn.text, "finish_reason": drawn.finish_reason.value}
        if body.get("logprobs") is not None:
            names = [f"token_id:{token}" for token in drawn.ids]
            choice["logprobs"] = {"tokens": names, "token_logprobs": list(drawn.logprobs)}
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(drawn.ids), "prompt_token_ids": list(prompt)}
        if body.get("prompt_logprobs") is not None:
            scores = (await asyncio.to_thread(engine.probe, prompt)).tolist()
            scored = [{str(token): {"logprob": score}} for token, score in zip(prompt[1:], scores, strict=True)]
            choice["prompt_logprobs"] = [None, *scored]
        return _completion("text_completion", body, choice, drawn)

    async def _chat(self, body: Any) -> Any:
        engine, given = self._engine(body), body.get("messages")
        try:
            messages = tuple(Message(str(one["role"]), (str(one["content"]),)) for one in given)
        except (TypeError, KeyError):
            raise Refused(400, "messages: must be a list of {role, content}") from None
        drawn = await _generate(engine, _request(body, messages, ()))
        message = {"role": "assistant", "content": drawn.text}
        choice = {"index": 0, "message": message, "finish_reason": drawn.finish_reason.value}
        return _completion("chat.completion", body, choice, drawn)

    async def _load_adapter(self, body: Any) -> Any:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not name or not path:
            raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._engines:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").is_file():
            raise Refused(404, f"lora_path {path}: no adapter there")
        try:
            self._engines[name] = await asyncio.to_thread(self._load, Path(path))
        except UserError as error:
            raise Refused(400, str(error)) from None
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload_adapter(self, body: Any) -> Any:
        name = body.get("lora_name")
        if name == self._name or name not in self._engines:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        self._engines.pop(name).close()
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _reset(self, body: Any) -> Any:
        for engine in self._engines.values():
            await asyncio.to_thread(engine.forget)
        return {"success": True}

    def _engine(self, body: Any) -> LocalEngine:
        engine = self._engines.get(body.get("model", self._name))
        if engine is None:
            raise Refused(404, f"The model `{body.get('model')}` does not exist.")
        return engine


async def _generate(engine: LocalEngine, request: GenerateRequest) -> Generation:
    try:
        return await engine.generate(request)
    except PromptTooLong as error:
        raise Refused(400, f"maximum context length exceeded: {error}") from None
    except EngineError as error:
        raise Refused(400, str(error)) from None


def _request(body: Any, messages: tuple[Message, ...], prompt: tuple[int, ...]) -> GenerateRequest:
    stop = body.get("stop") or ()
    try:
        sampling = Sampling(
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            top_k=int(body.get("top_k", 0)),
            max_tokens=int(body.get("max_tokens") or body.get("max_completion_tokens") or 16),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=body.get("seed"),
        )
    except (TypeError, ValueError) as error:
        raise Refused(400, f"sampling: {error}") from None
    if sampling.max_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise Refused(400, "max_tokens must be at least 1, temperature at least 0, top_p above 0 and at most 1")
    return GenerateRequest(messages, sampling, _grammar(body), prompt_ids=prompt)


def _grammar(body: Any) -> str | None:
    """What the text must obey, as a Lark grammar."""
    wanted = body.get("structured_outputs") or {}
    if "grammar" in wanted:
        return str(wanted["grammar"])
    schema = wanted.get("json")
    formatted = body.get("response_format") or {}
    if formatted.get("type") == "json_schema":
        schema = formatted["json_schema"]["schema"]
    return None if schema is None else f"start: %json {json.dumps(schema)}\n"


def _completion(kind: str, body: Any, choice: Any, drawn: Generation) -> dict[str, Any]:
    used = {"prompt_tokens": len(drawn.prompt_ids), "completion_tokens": len(drawn.ids)}
    return {"object": kind, "model": body.get("model"), "choices": [choice], "usage": used}


def _error(status: int, message: str) -> Answer:
    said = {"message": message, "type": "invalid_request", "code": status}
    return Answer(status, json.dumps({"error": said}).encode())
