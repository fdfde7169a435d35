"""A local model behind the protocol of vLLM, as far as Midflight speaks it: what trains against this trains there.

Token ids or text in, ids and log-probs of the drawn distribution out, Lark grammars and JSON schemas, adapters that
are loaded while it runs, the prefix cache. Invariant: each adapter is a model of its own, and a request names one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from midflight.engines.base import EngineError, EngineGaveUp, GenerateRequest, Generation, Message, PromptTooLong
from midflight.engines.local import LocalEngine
from midflight.errors import UserError
from midflight.server import fields
from midflight.server.fields import Refused
from midflight.server.wire import Answer, Request


class ModelServer:
    """Serves `engine` as `name`. `load` makes the engine of an adapter's folder, in a thread.

    With a `key` every request has to bring it as a bearer token. Engines come and go one change at a time.
    """

    def __init__(
        self, name: str, engine: LocalEngine, load: Callable[[Path], LocalEngine], *, key: str | None = None
    ) -> None:
        self._name = name
        self._engines = {name: engine}
        self._load = load
        self._key = key
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
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
            return Answer(200, json.dumps(await route(fields.read_object(request.body))).encode())
        except Refused as error:
            return _error(error.status, str(error))

    async def _health(self, body: Any) -> Any:
        return {}

    async def _models(self, body: Any) -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in self._engines]}

    async def _completions(self, body: Any) -> Any:
        fields.check_fields(body, fields.COMPLETION)
        engine, prompt = self._engine(body), body.get("prompt")
        if isinstance(prompt, str):
            prompt = engine.encode_text(fields.read_text(body, "prompt"))
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise Refused(400, "prompt: must be a text or a list of token ids")
        vocabulary = int(engine.model.config.vocab_size)
        if not all(0 <= token < vocabulary for token in prompt):
            raise Refused(400, f"prompt: an id is not within the vocabulary of {vocabulary}")
        with_ids = fields.read_flag(body, "return_token_ids")
        drawn = await _generate(engine, body, prompt_ids=tuple(prompt))
        choice: dict[str, Any] = {"index": 0, "text": drawn.text, "finish_reason": drawn.finish_reason.value}
        if "logprobs" in body:
            names = [f"token_id:{token}" for token in drawn.ids]
            choice["logprobs"] = {"tokens": names, "token_logprobs": list(drawn.logprobs)}
        if with_ids:
            choice |= {"token_ids": list(drawn.ids), "prompt_token_ids": list(prompt)}
        if "prompt_logprobs" in body:
            scores = (await asyncio.to_thread(engine.probe, prompt)).tolist()
            scored = [{str(token): {"logprob": score}} for token, score in zip(prompt[1:], scores, strict=True)]
            choice["prompt_logprobs"] = [None, *scored]
        return _completion("text_completion", body, choice, drawn)

    async def _chat(self, body: Any) -> Any:
        fields.check_fields(body, fields.CHAT)
        engine, messages = self._engine(body), fields.read_messages(body)
        try:
            engine.encode(messages)
        except ValueError as error:
            raise Refused(400, f"messages: {error}") from None
        drawn = await _generate(engine, body, messages)
        message = {"role": "assistant", "content": drawn.text}
        choice = {"index": 0, "message": message, "finish_reason": drawn.finish_reason.value}
        return _completion("chat.completion", body, choice, drawn)

    async def _load_adapter(self, body: Any) -> Any:
        fields.check_fields(body, fields.ADAPTER)
        if not body.get("lora_name") or not body.get("lora_path"):
            raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.")
        name, path = fields.read_text(body, "lora_name"), Path(fields.read_text(body, "lora_path"))

        async def load() -> str:
            if name in self._engines:
                raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
            if not os.path.isfile(path / "adapter_config.json"):  # Path's own raises for a name that is too long
                raise Refused(404, f"lora_path {path}: no adapter there")
            try:
                self._engines[name] = await asyncio.to_thread(self._load, path)
            except UserError as error:
                raise Refused(400, str(error)) from None
            return f"Success: LoRA adapter '{name}' added successfully."

        return await self._change(load)

    async def _unload_adapter(self, body: Any) -> Any:
        fields.check_fields(body, fields.ADAPTER)
        name = fields.read_text(body, "lora_name")

        async def unload() -> str:
            if name == self._name or name not in self._engines:
                raise Refused(404, f"The lora adapter '{name}' cannot be found.")
            self._engines.pop(name).close()
            return f"Success: LoRA adapter '{name}' removed successfully."

        return await self._change(unload)

    async def _reset(self, body: Any) -> Any:
        async def reset() -> dict[str, bool]:
            for engine in self._engines.values():
                await asyncio.to_thread(engine.forget)
            return {"success": True}

        return await self._change(reset)

    async def _change(self, change: Callable[[], Awaitable[Any]]) -> Any:
        """Make a change, or go through all engines, while no other does.

        It is made to its end also where the client goes away: what is then loaded has its name, and can be unloaded.
        """

        async def alone() -> Any:
            async with self._changing:
                return await change()

        task = asyncio.get_running_loop().create_task(alone())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def _engine(self, body: Any) -> LocalEngine:
        name = fields.read_text(body, "model") if "model" in body else self._name
        if name not in self._engines:
            raise Refused(404, f"The model `{name}` does not exist.")
        return self._engines[name]


async def _generate(
    engine: LocalEngine, body: Any, messages: tuple[Message, ...] = (), prompt_ids: tuple[int, ...] = ()
) -> Generation:
    sampling, grammar = fields.read_sampling(body), fields.read_grammar(body)
    request = GenerateRequest(messages, sampling, grammar, prompt_ids=prompt_ids)
    try:
        return await engine.generate(request)
    except PromptTooLong as error:
        raise Refused(400, f"maximum context length exceeded: {error}") from None
    except EngineGaveUp as error:
        raise Refused(400, str(error)) from None
    except EngineError as error:  # its own failure, which the same request may not meet again
        raise Refused(500, str(error)) from None


def _completion(kind: str, body: Any, choice: Any, drawn: Generation) -> dict[str, Any]:
    used = {"prompt_tokens": len(drawn.prompt_ids), "completion_tokens": len(drawn.ids)}
    return {"object": kind, "model": body.get("model"), "choices": [choice], "usage": used}


def _error(status: int, message: str) -> Answer:
    said = {"message": message, "type": "invalid_request", "code": status}
    return Answer(status, json.dumps({"error": said}).encode())
