"""What a client asks for, out of the JSON it sends.

Invariant: what this server does not do is refused with its name, never left out in silence; null is as good as absent.
"""

from __future__ import annotations

import json
import math
from typing import Any

from midflight.engines.base import Message, Sampling

_ANY = object()
_COMMON: dict[str, Any] = {
    **dict.fromkeys(("model", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens"), _ANY),
    **dict.fromkeys(("stop", "seed", "structured_outputs", "response_format"), _ANY),
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "skip_special_tokens": False,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
COMPLETION = {**_COMMON, "prompt": _ANY, "return_token_ids": _ANY, "logprobs": 0, "prompt_logprobs": 0}
CHAT = {**_COMMON, "messages": _ANY, "logprobs": False}
ADAPTER = {"lora_name": _ANY, "lora_path": _ANY}
"""What a request may have: any value, or the one that is what is done anyway."""
_ROLES = ("system", "user", "assistant")
_MOST_SEED = 2**64 - 1


class Refused(Exception):
    """The request cannot be served as it is."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_object(body: bytes) -> dict[str, Any]:
    """The object that a body is, without what is null.

    Raises:
        Refused: as all functions here, with 400.
    """
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body is not an object")
    return {name: value for name, value in given.items() if value is not None}


def check_fields(body: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuse what is not among `known`."""
    for name, value in body.items():
        if name not in known:
            raise Refused(400, f"{_shown(name)}: not a field of this server; it has {', '.join(sorted(known))}")
        if known[name] is not _ANY and value != known[name]:
            raise Refused(400, f"{name} = {_shown(value)}: {json.dumps(known[name])} is all there is; leave it out")


def read_text(body: dict[str, Any], name: str) -> str:
    return _text(body.get(name), name)


def read_flag(body: dict[str, Any], name: str) -> bool:
    """False where it is absent."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise Refused(400, f"{name} = {_shown(value)}: must be true or false")
    return value


def read_messages(body: dict[str, Any]) -> tuple[Message, ...]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages: must be a list of {role, content}")
    found = []
    for place, one in enumerate(given):
        if not isinstance(one, dict) or set(one) != {"role", "content"} or one["role"] not in _ROLES:
            raise Refused(400, f"messages[{place}]: must be {{role, content}} with a role of {', '.join(_ROLES)}")
        found.append(Message(one["role"], (_text(one["content"], f"messages[{place}].content"),)))
    return tuple(found)


def read_sampling(body: dict[str, Any]) -> Sampling:
    most = body.get("max_completion_tokens", body.get("max_tokens", 16))
    top_p = _number(body.get("top_p", 1.0), "top_p", 1)
    if top_p == 0:
        raise Refused(400, "top_p = 0: must be above 0")
    stop = body.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(_text(one, "stop") for one in stop):
        raise Refused(400, "stop: must be a text or a list of texts, none of them empty")
    top_k = body.get("top_k", 0)
    return Sampling(
        temperature=_number(body.get("temperature", 1.0), "temperature", 1e6),
        top_p=top_p,
        top_k=0 if top_k == -1 else _whole(top_k, "top_k", 0, 2**31),
        max_tokens=_whole(most, "max_tokens", 1, 2**31),
        stop=tuple(stop),
        seed=_whole(body["seed"], "seed", 0, _MOST_SEED) if "seed" in body else None,
    )


def read_grammar(body: dict[str, Any]) -> str | None:
    """What the text must obey, as a Lark grammar."""
    if "structured_outputs" in body and "response_format" in body:
        raise Refused(400, "structured_outputs: does not go with response_format; leave one of them out")
    if "structured_outputs" in body:
        wanted = body["structured_outputs"]
        if not isinstance(wanted, dict) or len(wanted) != 1 or not set(wanted) <= {"grammar", "json"}:
            raise Refused(400, "structured_outputs: must be an object with either grammar or json")
        if "grammar" in wanted:
            return _text(wanted["grammar"], "structured_outputs.grammar")
        return _of_schema(wanted["json"], "structured_outputs.json")
    if "response_format" not in body:
        return None
    wanted = body["response_format"]
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _of_schema(wanted.get("schema", {"type": "object"}), "response_format.schema")
    if kind != "json_schema":
        raise Refused(400, "response_format: must be an object with the type text, json_object or json_schema")
    named = wanted.get("json_schema")
    return _of_schema(named.get("schema") if isinstance(named, dict) else None, "response_format.json_schema.schema")


def _of_schema(schema: Any, name: str) -> str:
    if not isinstance(schema, dict):
        raise Refused(400, f"{name}: must be a JSON schema, an object")
    return f"start: %json {json.dumps(schema)}\n"


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise Refused(400, f"{name}: must be a text")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Refused(400, f"{name}: has half of a surrogate pair, which no text has")
    return value


def _number(value: Any, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or math.isnan(value):
        raise Refused(400, f"{name} = {_shown(value)}: must be a number from 0 to {most:g}")
    return float(value)


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Refused(400, f"{name} = {_shown(value)}: must be a whole number from {least} to {most}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:60]
